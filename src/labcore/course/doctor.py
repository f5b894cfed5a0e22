"""`python -m labcore doctor`: checks what this machine has and says how to fix what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from packaging.requirements import Requirement

from labcore import claims, device, records
from labcore.grading import sandbox

__all__ = ["Finding", "browser", "examine"]

GIB = 1024**3
MEMORY_GIB = 4.0
DISK_GIB = 1.0
SET_UP = "run `make course` (or: pip install -c constraints.txt -e '.[all]')"
NOTEBOOK_PACKAGES = ("ipykernel", "ipywidgets", "anywidget", "plotly")
LAB_EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report. fine: nothing required is missing. mend: how to fix it, if needed."""

    name: str
    text: str
    fine: bool = True
    mend: str | None = None

    def __str__(self) -> str:
        """The line: "ok", "note" (something optional) or "LACK" (missing), and how to fix it."""
        mark = "LACK" if not self.fine else "note" if self.mend else "ok"
        return f"{mark:4}  {self.name}: {self.text}" + (f"; {self.mend}" if self.mend else "")


def examine(root: Path) -> list[Finding]:
    """All findings for this process and the checkout at root, which need not be a checkout."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _gpu,
        _triton,
        _compiler,
        lambda: _machine(root),
        _notebooks,
        _tools,
        _sandbox,
        lambda: _versions(root / "constraints.txt"),
        lambda: _corners(root / "scripts" / "corners.json"),
        _data,
    )
    return [finding for look in looks for finding in look()]


def _python() -> Iterator[Finding]:
    fine = (3, 11) <= sys.version_info[:2] <= (3, 14)
    mend = None if fine else "install Python 3.11 to 3.14 and run `make course PYTHON=<its path>`"
    yield Finding(
        name="Python",
        text=f"{platform.python_version()} on {platform.system()}",
        fine=fine,
        mend=mend,
    )


def _torch() -> Iterator[Finding]:
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    else:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    yield Finding(name="torch", text=f"{torch.__version__}, built {build}")


def _gpu() -> Iterator[Finding]:
    if device.gpu_visible():
        here = device.default_device()
        runs = (
            "kernels run on it"
            if device.kernels_compile_for(here)
            else "kernels need sm_80 or CDNA"
        )
        yield Finding(name="GPU", text=f"{torch.cuda.get_device_name(here)}; {runs}")
    elif any(map(os.path.exists, GPU_DEVICES)):
        yield Finding(
            name="GPU",
            text="this machine has one, but torch does not see it",
            mend="`make course TORCH_INDEX=<address>` installs the torch build for its driver",
        )
    else:
        yield Finding(name="GPU", text="none; every chapter runs on the CPU, at smaller sizes")


def _triton() -> Iterator[Finding]:
    problem = device.triton_problem()
    if problem:
        fine = sys.platform != "linux"
        yield Finding(name="Triton", text=problem, fine=fine, mend=None if fine else SET_UP)
        return
    version = importlib.metadata.version("triton")
    if device.interpreting():
        mode = "kernels run in the interpreter, as requested; its times do not measure speed"
    elif device.gpu_visible():
        mode = "kernels are compiled for the GPU"
    else:
        mode = f"kernels cannot run here: the interpreter is off ({device.INTERPRET} is not 1)"
    yield Finding(name="Triton", text=f"{version}; {mode}")


def _compiler() -> Iterator[Finding]:
    lacks = [] if any(map(shutil.which, ("g++", "c++", "clang++"))) else ["g++"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        lacks.append("python3-dev")
    if not lacks:
        yield Finding(name="compiler", text="a C++ compiler and Python's headers are installed")
        return
    yield Finding(
        name="compiler",
        text=f"missing: {', '.join(lacks)} (for GPU kernels, torch.compile and the AMD chapter)",
        fine=not device.gpu_visible(),
        mend=f"run `apt install {' '.join(lacks)}` as root",
    )


def _machine(root: Path) -> Iterator[Finding]:
    memory = psutil.virtual_memory().total / GIB
    small = memory < MEMORY_GIB
    yield Finding(
        name="memory",
        text=f"{memory:.1f} GiB, {os.cpu_count()} cores",
        fine=not small,
        mend=f"the chapters need {MEMORY_GIB:.0f} GiB, so close programs or add memory"
        if small
        else None,
    )
    free = shutil.disk_usage(root).free / GIB
    full = free < DISK_GIB
    yield Finding(
        name="disk",
        text=f"{free:.1f} GiB free in {root}",
        fine=not full,
        mend=f"free some space; the book and its cache need {DISK_GIB:.0f} GiB" if full else None,
    )


def _notebooks() -> Iterator[Finding]:
    missing = [name for name in NOTEBOOK_PACKAGES if importlib.util.find_spec(name) is None]
    folders = [Path(sys.prefix, "share", "jupyter", "labextensions", x) for x in LAB_EXTENSIONS]
    lab = importlib.util.find_spec("jupyterlab") is not None
    missing += [
        f"JupyterLab's part of {f.name}"
        for f in folders
        if lab and not (f / "package.json").is_file()
    ]
    there = "live widgets and figures are installed" + (
        "" if lab else ", but JupyterLab itself is not"
    )
    yield Finding(
        name="notebooks",
        text=f"missing: {', '.join(missing)}" if missing else there,
        fine=not missing,
        mend=SET_UP if missing or not lab else None,
    )


def browser() -> str:
    """The system's Chromium: what $CHROMIUM names, or else the first on the PATH; "" if none."""
    asked = os.environ.get("CHROMIUM")
    return next(filter(None, map(shutil.which, [asked] if asked else BROWSERS)), "")


def _tools() -> Iterator[Finding]:
    found = browser()
    yield Finding(
        name="Chromium",
        text=found or "missing, so `make test` skips the tests that open pages",
        mend=None if found else "run `apt install chromium` as root",
    )
    git = shutil.which("git")
    yield Finding(
        name="git",
        text=git or "missing, so pages cannot say which commit they show",
        mend=None if git else "run `apt install git` as root",
    )


def _sandbox() -> Iterator[Finding]:
    lack = sandbox.missing()
    yield Finding(
        name="sandbox",
        text=f"{lack}, so `make grade` cannot run" if lack else "bubblewrap, for `make grade`",
        mend="see book/teaching/hardware.md" if lack else None,
    )


def _versions(constraints: Path) -> Iterator[Finding]:
    """Compares installed versions with the tested ones, ignoring the build tag after "+"."""
    if not constraints.is_file():
        return
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    apart = []
    for pin in here:
        try:
            found = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.partition("+")[0] not in pin.specifier:
            apart.append(f"{pin.name} {found} (tested: {pin.specifier})")
    yield Finding(
        name="versions",
        text=", ".join(apart) or f"those in constraints.txt ({len(here)} packages)",
        fine=not apart,
        mend=SET_UP if apart else None,
    )


def _corners(runs: Path) -> Iterator[Finding]:
    """The Pythons and torch releases that `make matrix` tested, and how each run ended."""
    if not runs.is_file():
        return
    told = [
        f"Python {run['python']} with torch {run['torch']} "
        f"({run['date']}: make check {run['make check']}, chapters {run['chapters']})"
        for run in json.loads(runs.read_text(encoding="utf-8")).values()
    ]
    yield Finding(name="also run on", text="; ".join(told))


def _data() -> Iterator[Finding]:
    """Whether claims and records load; a damaged file's own message says what to do."""
    for name, load in (("claims", claims.load), ("records", records.load)):
        try:
            count = len(load())
        except ValueError as error:
            yield Finding(name=name, text=str(error), fine=False)
        else:
            yield Finding(name=name, text=f"{count} read")
