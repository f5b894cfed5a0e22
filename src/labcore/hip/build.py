"""Build a kernel's C++ source into a library for the CPU, once, and keep it in the user's cache.

The sources lie in `SOURCE` and ship with the package. A library's name is a hash of all that goes
into it, so a changed source, compiler or processor gets a library of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from labcore.checks import one_of

__all__ = ["SOURCE", "STEPS", "cache_folder", "compiler", "library", "source_name", "step_source"]

SOURCE = Path(__file__).resolve().parent / "source"
# What each step adds to the one before it.
STEPS = {1: "step1_straight", 2: "step2_lds", 3: "step3_mfma", 4: "step4_tuned"}
# Ubuntu's compilers fortify by themselves, and a fortified longjmp takes a change of fibers for a
# broken stack and ends the process. Half a fiber's stack is the most that one function may take.
FLAGS = (
    *("-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE"),
    *("-Werror=frame-larger-than=131072", "-Werror=vla"),
)
# `1u << 40` shifts by 40 % 32 on a GPU, and on a CPU unless gcc 16 makes BMI2's BZHI of it.
NATIVE = (("-march=native", "-mno-bmi2"), ("-march=native",), ("-mcpu=native",))


def step_source(step: int) -> Path:
    """The file of one step; ValueError for a step that is not in `STEPS`."""
    return SOURCE / f"{STEPS[one_of('step', step, STEPS)]}.hip"


def compiler() -> list[str]:
    """The C++ compiler's command: what $CXX says, else the first of g++, c++ and clang++.

    Raises RuntimeError where there is none.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise RuntimeError(
                f"CXX must name a C++ compiler, got {asked[0]!r}, which is not on this machine's "
                "path; correct it or unset it"
            )
        return asked
    found = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if found is None:
        raise RuntimeError(
            "the emulator needs a C++17 compiler, got none of g++, c++ and clang++ on this "
            "machine's path; install one (Debian, Ubuntu, Colab: apt install g++) or set CXX"
        )
    return [found]


def cache_folder() -> Path:
    """Where libraries are kept: labcore/hip in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "labcore" / "hip"


def library(source: Path | str, *, checked: bool = True, wave: int = 64) -> Path:
    """The shared library of `source`, built if the cache does not have it yet (2-20 s).

    source: a file, or the text of a kernel that includes "portable.h".
    checked: with bounds and counters on every access of memory; without them it is much faster.
    wave: lanes of a wavefront, 64 or 32.
    Raises RuntimeError without a compiler, without a cache to write to, or with the compiler's own
    words where the source does not compile.
    """
    one_of("wave", wave, (64, 32))
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    text = f'#line 1 "{source_name(source)}"\n{text}'
    flags = [*_flags(tuple(compiler())), f"-DWAVE_LANES={wave}"]
    flags += ["-O2", "-DCHECKED"] if checked else ["-O3"]
    key = hashlib.sha256()
    for part in (_identity(tuple(compiler())), *flags, text, *_headers()):
        key.update(part.encode() + b"\0")
    target = cache_folder() / key.hexdigest()[:32] / "kernel.so"
    if not target.exists():
        _compile(text, flags, target)
    return target


def source_name(source: Path | str) -> str:
    """What messages call a source: its file's name, or "kernel" for a text."""
    return source.name if isinstance(source, Path) else "kernel"


def _headers() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.h"))]


@functools.cache
def _identity(command: tuple[str, ...]) -> str:
    """All macros that the compiler defines: its version, the processor and what -march turns on."""
    probe = [*command, *_flags(command), "-x", "c++", "-dM", "-E", os.devnull]
    return subprocess.run(probe, capture_output=True, text=True, check=False).stdout


@functools.cache
def _flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """`FLAGS`, and this processor's instructions where the compiler knows how to ask for them."""
    for native in NATIVE:
        probe = [*command, *native, "-x", "c++", "-fsyntax-only", os.devnull]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return (*FLAGS, *native)
    return FLAGS


def _compile(text: str, flags: list[str], target: Path) -> None:
    """Compile beside `target` and move it there: two processes may build at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        raise RuntimeError(
            f"the folder for built kernels must be writable, got {target.parent} ({error}); "
            "set XDG_CACHE_HOME to a folder of yours"
        ) from error
    with scratch as folder:
        built = Path(folder) / target.name
        # `emulated` stands in for the folder of HIP's own headers.
        command = [*compiler(), *flags, f"-I{SOURCE}", f"-I{SOURCE / 'emulated'}"]
        command += ["-shared", "-x", "c++", "-", "-o", str(built)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the kernel does not compile: {done.stderr.strip()[:4000]}")
        os.replace(built, target)
