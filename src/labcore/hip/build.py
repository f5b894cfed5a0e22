"""Build a kernel's C++ source into a library for the CPU, and keep it in the user's cache.

The sources are in `SOURCE` and ship with the package. A library's name is a hash of everything that
affects it, so a different source, compiler or processor gets a different library.
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

__all__ = [
    "DECODE",
    "SOURCE",
    "STEPS",
    "cache_folder",
    "compiler",
    "library",
    "source_name",
    "step_source",
]

SOURCE = Path(__file__).resolve().parent / "source"
# The file of each step, named after what it adds.
STEPS = {1: "step1_straight", 2: "step2_lds", 3: "step3_mfma", 4: "step4_tuned"}
DECODE = SOURCE / "step5_decode.hip"  # other kernels, with other arguments
# Ubuntu's compilers turn on _FORTIFY_SOURCE, and a fortified longjmp mistakes a switch of fibers
# for a corrupt stack and aborts. A function's frame is limited to half a fiber's stack.
FLAGS = (
    *("-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE"),
    *("-Werror=frame-larger-than=131072", "-Werror=vla"),
)
# `1u << 40` shifts by 40 % 32 on a GPU. So does a CPU, unless gcc 16 turns it into BMI2's BZHI.
NATIVE = (("-march=native", "-mno-bmi2"), ("-march=native",), ("-mcpu=native",))


def step_source(step: int) -> Path:
    """Return a step's file; raises ValueError for a step that isn't in `STEPS`."""
    return SOURCE / f"{STEPS[one_of('step', step, STEPS)]}.hip"


def compiler() -> list[str]:
    """Return the C++ compiler's command: $CXX, or else the first of g++, c++ and clang++ found.

    Raises RuntimeError if there is none.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise RuntimeError(
                f"CXX must name a C++ compiler, got {asked[0]!r}, which is not on this machine's "
                "PATH; correct or unset it"
            )
        return asked
    found = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if found is None:
        raise RuntimeError(
            "the emulator needs a C++17 compiler, got none of g++, c++ and clang++ on this "
            "machine's PATH; install one (Debian, Ubuntu, Colab: apt install g++) or set CXX"
        )
    return [found]


def cache_folder() -> Path:
    """Return the folder for built libraries: labcore/hip in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "labcore" / "hip"


def library(source: Path | str, *, checked: bool = True, wave: int = 64) -> Path:
    """Return the shared library of `source`, building it if it isn't in the cache (2-20 s).

    source: a file, or the text of a kernel that includes "portable.h".
    checked: check bounds and count every memory access; False is much faster.
    wave: lanes per wavefront, 64 or 32.
    Raises RuntimeError if there is no compiler, if the cache isn't writable, or, with the
    compiler's message, if the source doesn't compile.
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
    """Return the name for a source in messages: its file's name, or "kernel" for a text."""
    return source.name if isinstance(source, Path) else "kernel"


def _headers() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.h"))]


@functools.cache
def _identity(command: tuple[str, ...]) -> str:
    """Return all macros that the compiler defines, which reflect its version and the processor."""
    probe = [*command, *_flags(command), "-x", "c++", "-dM", "-E", os.devnull]
    return subprocess.run(probe, capture_output=True, text=True, check=False).stdout


@functools.cache
def _flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return `FLAGS`, plus flags for this processor's instructions if the compiler has them."""
    for native in NATIVE:
        probe = [*command, *native, "-x", "c++", "-fsyntax-only", os.devnull]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return (*FLAGS, *native)
    return FLAGS


def _compile(text: str, flags: list[str], target: Path) -> None:
    """Compile next to `target`, then move the file, since two processes may build at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        raise RuntimeError(
            f"the folder for built kernels must be writable, got {target.parent} ({error}); "
            "set XDG_CACHE_HOME to a folder that you can write to"
        ) from error
    with scratch as folder:
        built = Path(folder) / target.name
        # `emulated` replaces the folder of HIP's headers.
        command = [*compiler(), *flags, f"-I{SOURCE}", f"-I{SOURCE / 'emulated'}"]
        command += ["-shared", "-x", "c++", "-", "-o", str(built)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the kernel does not compile: {done.stderr.strip()[:4000]}")
        os.replace(built, target)
