"""The Triton Inference Server's environment: NVIDIA's server from a wheel, with its own Python.

It is separate because the server's python backend needs an older numpy than labcore does.

The wheel `nvidia-pytriton` 0.7.0 contains the server 2.51, its python backend, and a stub process
for each of several Python versions. A stub runs only with its version and loads that libpython.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "SERVER_VERSION", "Environment", "install", "interpreter", "missing"]

SERVER_VERSION = "2.51.0"
# The server and what its stub imports; the wheel's own Python library would need 40 more packages.
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
DOWNLOAD_MB = 366
NEEDS_GB = 1.2
# Python versions with a stub in the wheel, and those of them for which its numpy has wheels.
STUBS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")
FITTING = ("3.9", "3.10", "3.11", "3.12")
# Prints a Python's version and the folder of the library that the stub loads.
PROBE = """
import ctypes, json, os, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
folders = [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib"]
found = [folder for folder in folders if os.path.exists(os.path.join(folder, name))]
try:
    ctypes.CDLL(os.path.join(found[0], name) if found else name)
    libpython = found[0] if found else "system"
except OSError:
    libpython = ""
try:
    import ensurepip, venv
except ImportError:
    venv = None
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "libpython": libpython,
                  "venv": venv is not None}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An installed server: the folder of its virtual environment, and the paths in it.

    version: the version of its Python, such as "3.11". libpython: the folder of that Python's
    library, or "" if the system's loader finds it by itself.
    """

    folder: Path
    version: str
    libpython: str

    @property
    def site(self) -> Path:
        """The environment's site-packages."""
        return self.folder / "lib" / f"python{self.version}" / "site-packages"

    @property
    def root(self) -> Path:
        """The folder of the server's files."""
        return self.site / "pytriton" / "tritonserver"

    @property
    def binary(self) -> Path:
        """The server's executable."""
        return self.root / "bin" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The python backend's stub for this Python."""
        return self.root / "python_backend_stubs" / self.version / "triton_python_backend_stub"

    def write_backends(self, folder: Path) -> Path:
        """Make `folder` a backend directory with links to the python backend and its stub."""
        python = folder / "python"
        shutil.rmtree(folder, ignore_errors=True)
        python.mkdir(parents=True)
        for file in [*sorted((self.root / "backends" / "python").iterdir()), self.stub]:
            if not file.is_dir():
                (python / file.name).symlink_to(file)
        return folder

    def variables(self, inherited: dict[str, str]) -> dict[str, str]:
        """Return the server's environment variables, based on those of this process.

        Variables that would point its Python elsewhere are dropped.
        """
        kept = {k: v for k, v in inherited.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        libraries = [self.libpython, str(self.site / "nvidia_pytriton.libs")]
        kept["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        kept["PATH"] = f"{self.folder / 'bin'}:{kept.get('PATH', '')}"
        return kept


def missing(folder: Path) -> str:
    """Return a sentence on what is missing from the environment in `folder`; "" if nothing is."""
    if lack := _unfit_machine():
        return lack
    try:
        found = load(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return (
            f"the Triton Inference Server is not installed in {folder}; run `make server` or "
            "`python -m labcore.serving.triton.server install`"
        )
    for file in (found.binary, found.stub, found.folder / "bin" / "python"):
        if not file.exists():
            return (
                f"{folder} is damaged: {file.name} is missing; remove the folder and install again"
            )
    return ""


def load(folder: Path) -> Environment:
    """Load the environment that `install` made in `folder`.

    Raises OSError, ValueError or KeyError if there is none.
    """
    told: dict[str, Any] = json.loads((folder / "labcore.json").read_text("utf-8"))
    if tuple(told["packages"]) != PACKAGES:
        raise ValueError(f"{folder} holds {told['packages']}, not {PACKAGES}")
    return Environment(
        folder=folder.absolute(), version=told["version"], libpython=told["libpython"]
    )


def interpreter(candidates: Sequence[str] | None = None) -> tuple[str, dict[str, Any]]:
    """Find a Python that the server's stub runs with; return its path and what it reports.

    candidates: paths to try, in this order; by default the running Python, then the suitable
    versions on the PATH. Raises RuntimeError that lists the suitable versions and what is wrong
    with each Python found.
    """
    if candidates is None:
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        versions = sorted(FITTING, key=lambda v: (v != here, -int(v.partition(".")[2])))
        found = [shutil.which(f"python{version}") for version in versions]
        candidates = [sys.executable, *(path for path in found if path)]
    lacks = []
    for path in dict.fromkeys(candidates):
        told = _ask(path)
        if told is None:
            continue
        lack = _lack(told)
        if not lack:
            return path, told
        lacks.append(f"{path} {lack}")
    raise RuntimeError(
        f"the server's python backend has stubs for Python {', '.join(STUBS)}, and its numpy has "
        f"wheels for {', '.join(FITTING)}; install one of the latter with its library (on Debian "
        f"`apt install python3-venv libpython3.11`); found {'; '.join(lacks) or 'none'}"
    )


def install(
    folder: Path,
    *,
    say: Callable[[str], object] = sys.stdout.write,
    candidates: Sequence[str] | None = None,
) -> Environment:
    """Return the environment in `folder`; make it if it is missing or incomplete.

    say: receives progress messages. Raises RuntimeError with a readable reason if the machine, the
    disk, the Python or the download is the problem.
    """
    if not missing(folder):
        return load(folder)
    if lack := _unfit_machine():
        raise RuntimeError(lack)
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise RuntimeError(f"{folder} must be empty or an environment, got other files; move them")
    if folder.resolve() == Path(sys.prefix).resolve():
        raise RuntimeError(f"the server needs an environment of its own, got {folder}, ours")
    path, told = interpreter(candidates)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < NEEDS_GB:
        raise RuntimeError(
            f"the server needs {NEEDS_GB} GB of free disk in {folder.parent}, got {free:.1f} GB; "
            "make room or choose another folder"
        )
    say(f"installing the Triton Inference Server {SERVER_VERSION} for Python {told['version']} in ")
    say(f"{folder}: {DOWNLOAD_MB} MB to download, once\n")
    _run([path, "-m", "venv", "--clear", str(folder)], "python could not make the environment")
    python = str(folder / "bin" / "python")
    _run(
        [python, "-m", "pip", "install", "--no-input", "--quiet", "--no-deps", *PACKAGES],
        "pip could not install the server (network, proxy, disk?)",
    )
    # Written last: without this file the environment counts as incomplete.
    libpython = "" if told["libpython"] == "system" else told["libpython"]
    stamp = {"packages": PACKAGES, "version": told["version"], "libpython": libpython}
    partial = folder / "labcore.partial"
    partial.write_text(json.dumps(stamp), "utf-8")
    partial.replace(folder / "labcore.json")
    if lack := missing(folder):
        raise RuntimeError(lack)
    return load(folder)


def _unfit_machine() -> str:
    machine = (platform.system(), platform.machine())
    if machine == ("Linux", "x86_64"):
        return ""
    return (
        f"the wheel of the Triton Inference Server needs Linux on x86_64, but this is {machine[0]} "
        f"on {machine[1]}; use NVIDIA's container instead"
    )


def _ask(path: str) -> dict[str, Any] | None:
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60)
        told: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return told


def _lack(told: dict[str, Any]) -> str:
    version = told["version"]
    if version not in STUBS:
        return f"is {version}, which has no stub"
    if version not in FITTING:
        return f"is {version}, for which numpy 1.26 has no wheels"
    if not told["libpython"]:
        return f"lacks libpython{version}.so.1.0"
    return "" if told["venv"] else "cannot make environments (python3-venv)"


def _run(command: list[str], trouble: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        last = (done.stdout + done.stderr).strip()[-800:]
        raise RuntimeError(f"{trouble}; fix the cause and run this again: {last}")
