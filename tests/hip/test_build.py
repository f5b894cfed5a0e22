"""Libraries of kernels: built once, kept under all that goes into them, and errors in sentences."""

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from labcore.hip import Program, build, load

DOUBLE = """
#include "portable.h"
__global__ void twice(Global<float> y) { y[threadIdx.x] *= 2.0f; }
ENTRY(twice_, twice)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "labcore" / "hip"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What would have been compiled, in order; the library is an empty file."""
    asked: list[Path] = []

    def pretend(text: str, flags: list[str], target: Path) -> None:
        asked.append(target)
        target.parent.mkdir(parents=True)
        target.touch()

    monkeypatch.setattr(build, "_compile", pretend)
    return asked


def test_a_library_is_built_once_and_runs(cache: Path, generator) -> None:
    path = build.library(DOUBLE)
    first = path.stat().st_mtime_ns
    assert build.library(DOUBLE) == path and path.stat().st_mtime_ns == first
    assert [p.name for p in path.parent.iterdir()] == ["kernel.so"]  # nothing is left beside it
    assert path.is_relative_to(cache)
    x = torch.randn(64, generator=generator)
    y = x.clone()
    load(DOUBLE).launch("twice_", grid=1, block=64, arguments={"y": y})
    assert torch.equal(y, 2 * x)


def test_two_may_build_one_library_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(build.library, [DOUBLE] * 2))
    assert paths[0] == paths[1] and ctypes.CDLL(str(paths[0])).twice_
    assert [p.name for p in paths[0].parent.iterdir()] == ["kernel.so"]


def test_all_that_goes_into_a_library_is_in_its_name(
    cache, compiled, tmp_path, monkeypatch
) -> None:
    def changed(**how) -> bool:
        before = len(compiled)
        build.library(DOUBLE, **how)
        return len(compiled) > before

    assert changed() and not changed()
    assert changed(checked=False) and not changed(checked=False)
    assert changed(wave=32) and not changed(wave=32)
    copied = shutil.copytree(build.SOURCE, tmp_path / "source")
    monkeypatch.setattr(build, "SOURCE", copied)
    assert not changed()
    for header in ("portable.h", "cpu_check.h", "emulated/hip/hip_runtime.h"):
        (copied / header).write_text((copied / header).read_text() + "// changed\n")
        assert changed() and not changed()
    monkeypatch.setattr(build, "_identity", lambda command: "#define __VERSION__ another")
    assert changed() and not changed()


def test_every_step_is_a_file_that_ships() -> None:
    for step, name in build.STEPS.items():
        assert build.step_source(step).name == f"{name}.hip"
    with pytest.raises(ValueError, match="step must be one of 1, 2, 3, 4, got 0"):
        build.step_source(0)
    sources = {build.step_source(step) for step in build.STEPS}
    sources |= {build.SOURCE / "step0_cuda.cu", build.SOURCE / "portable.h", build.DECODE}
    assert sources <= set(build.SOURCE.iterdir())


def test_without_a_compiler_a_sentence_says_what_to_install(cache, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+17 compiler, got none .* install one"):
        build.library(DOUBLE)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(RuntimeError, match="CXX must name .* got 'no-such-compiler'"):
        build.library(DOUBLE)


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="must be writable, got .* set XDG_CACHE_HOME"):
        build.library(DOUBLE)


def test_the_compilers_own_words_carry_the_line(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"does not compile: [\s\S]*kernel:3:[\s\S]*yy"):
        build.library(DOUBLE.replace("y[thread", "yy[thread"))
    assert not list(cache.rglob("*.so"))
    source = cache / "mine.hip"
    source.write_text("#error wrong\n")
    with pytest.raises(RuntimeError, match=r"mine\.hip:1:"):
        build.library(source)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        # One function would run past the end of its fiber's stack.
        (
            "float a[100000]; for (int i = 0; i < 100000; ++i) a[i] = y[0]; y[0] = a[int(y[0])];",
            "fra",
        ),
        ("float a[int(y[0])]; a[0] = y[0]; y[0] = a[int(y[0])];", "vla"),
        # It would be read where it is used.
        ("auto e = y[0]; y[0] = 1.0f; y[1] = e;", "deleted"),
        (
            "auto e = y[0]; y[0] = 1.0f; float f = e; y[1] = f;",
            "discards qualifiers|cannot convert",
        ),
    ],
    ids=["frame", "vla", "auto", "auto to float"],
)
def test_what_would_go_wrong_unseen_does_not_compile(cache, body: str, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=rf"does not compile: [\s\S]*({sentence})"):
        build.library(DOUBLE.replace("y[threadIdx.x] *= 2.0f;", body))


def test_fibers_live_under_a_compiler_that_fortifies(cache: Path, monkeypatch) -> None:
    # As Ubuntu's does unasked. A broken launch would end the process.
    monkeypatch.setenv("CXX", f"{' '.join(build.compiler())} -D_FORTIFY_SOURCE=2")
    y = torch.ones(128)
    path = build.library(DOUBLE.replace("2.0f;", "2.0f; __syncthreads();"))
    assert b"longjmp_chk" not in path.read_bytes()
    Program(path, name="kernel", checked=True).launch(
        "twice_", grid=1, block=128, arguments={"y": y}
    )
    assert (y == 2).all()


@pytest.mark.long
def test_clang_builds_it_too(cache: Path, monkeypatch) -> None:
    name = "clang++-19"
    if shutil.which(name) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has no {name}: install it")
        pytest.skip(f"no {name} here: install it")
    monkeypatch.setenv("CXX", name)
    assert build.compiler() == [name]
    y = torch.ones(64)
    load(DOUBLE).launch("twice_", grid=1, block=64, arguments={"y": y})
    assert (y == 2).all()
    with pytest.raises(RuntimeError, match="outside"):
        load(DOUBLE).launch("twice_", grid=1, block=65, arguments={"y": y})


@pytest.mark.long
def test_the_sources_compile_without_a_warning() -> None:
    for source in (*map(build.step_source, build.STEPS), build.DECODE):
        for form in ([], ["-DCHECKED"]):
            command = [*build.compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra"]
            command += [*form, "-x", "c++", str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
