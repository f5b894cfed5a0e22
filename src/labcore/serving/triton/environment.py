"""The Triton Inference Server's environment: NVIDIA's server from a wheel, with its own Python.

It is separate because the server's python backend needs an older numpy than labcore does.

The wheel `nvidia-pytriton` 0.7.0 contains the server 2.51, its python backend, and a stub process
for each of several Python versions. A stub runs only with its version and loads that libpython.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "SERVER_VERSION", "Environment", "install", "interpreter", "load", "missing"]

SERVER_VERSION = "2.51.0"
# The server and what its stub imports; the wheel's own Python library would need 40 more packages.
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
DOWNLOAD_MB = 366
PYTHONS = ("3.12", "3.11", "3.10", "3.9")  # with a stub in the wheel, and wheels of that numpy
# Fails in a Python that can't make environments or lacks the library that the stub loads; prints
# that library's folder, nothing if the system's loader finds it by itself.
PROBE = """
import ctypes, ensurepip, os, sys, sysconfig, venv
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
folders = [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib"]
found = [folder for folder in folders if os.path.exists(os.path.join(folder, name))] + [""]
ctypes.CDLL(os.path.join(found[0], name))
print(found[0])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An installed server.

    folder: that of its virtual environment. binary: its executable. backends: its backend
    directory. libraries: the folders of its libraries, separated by colons.
    """

    folder: Path
    binary: Path
    backends: Path
    libraries: str

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the server's environment variables, based on those of this process.

        Variables that would point its Python elsewhere are dropped.
        """
        kept = {k: v for k, v in inherited.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        path = f"{self.folder / 'bin'}:{inherited.get('PATH', '')}"
        return {**kept, "LD_LIBRARY_PATH": self.libraries, "PATH": path}


def load(folder: Path) -> Environment:
    """Load the environment that `install` made in `folder`. Raises RuntimeError without one."""
    _check_machine()
    folder = folder.absolute()
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((folder / "labcore.json").read_text("utf-8"))
        site = folder / "lib" / f"python{told['version']}" / "site-packages"
        root = site / "pytriton" / "tritonserver"
        binary, backends = root / "bin" / "tritonserver", root / "backends"
        stub = Path("python_backend_stubs", told["version"], "triton_python_backend_stub")
        if told["packages"] == list(PACKAGES) and binary.exists() and (root / stub).exists():
            with suppress(FileExistsError):  # the python backend looks for its stub there
                (backends / "python" / stub.name).symlink_to(Path("../..", stub))
            libraries = ":".join(filter(None, [told["libpython"], f"{site}/nvidia_pytriton.libs"]))
            return Environment(folder=folder, binary=binary, backends=backends, libraries=libraries)
    raise RuntimeError(
        f"the Triton Inference Server is not installed in {folder}, or not completely; run `make "
        "server` or `python -m labcore.serving.triton.server install`"
    )


def missing(folder: Path) -> str:
    """Return a sentence on what is missing from the environment in `folder`; "" if nothing is."""
    try:
        load(folder)
    except RuntimeError as error:
        return str(error)
    return ""


def interpreter() -> tuple[str, str, str]:
    """Find a Python that the server's stub runs with: the running one, or one on the PATH.

    Returns its path, its version, and the folder of its library as in `Environment`. Raises
    RuntimeError that lists the suitable versions and what is wrong with each Python found.
    """
    here = ".".join(platform.python_version_tuple()[:2])
    found = [(version, shutil.which(f"python{version}")) for version in PYTHONS]
    lacks = []
    for version, path in [(here, sys.executable), *found]:
        if version not in PYTHONS:
            lacks.append(f"{path} is {version}")
        elif path:
            done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True)
            if done.returncode == 0:
                return path, version, done.stdout.strip()
            lacks.append(f"{path}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    raise RuntimeError(
        f"the server's python backend needs Python {', '.join(PYTHONS)} with its library and venv, "
        f"got {'; '.join(lacks)}; on Debian, `apt install python3-venv libpython3.11` installs both"
    )


def install(folder: Path) -> Environment:
    """Return the environment in `folder`; make it if it is missing or incomplete.

    Raises RuntimeError with the reason if the machine, the folder, the Python or a command doesn't
    fit.
    """
    _check_machine()
    with suppress(RuntimeError):
        return load(folder)
    own = (folder / "pyvenv.cfg").exists() and folder.resolve() != Path(sys.prefix).resolve()
    if folder.exists() and any(folder.iterdir()) and not own:
        raise RuntimeError(
            f"folder must be empty or the server's own environment, got {folder} with other files; "
            "choose another one"
        )
    python, version, libpython = interpreter()
    sys.stdout.write(
        f"installing the Triton Inference Server {SERVER_VERSION} for Python {version} in "
        f"{folder}: {DOWNLOAD_MB} MB to download, once\n"
    )
    sys.stdout.flush()
    _run(python, "-m", "venv", "--clear", str(folder))
    pip = [f"{folder}/bin/python", "-m", "pip"]
    _run(*pip, "install", "--no-input", "--quiet", "--no-deps", *PACKAGES)
    # Written last: without this file the environment counts as incomplete.
    stamp = {"packages": PACKAGES, "version": version, "libpython": libpython}
    (folder / "labcore.json").write_text(json.dumps(stamp), "utf-8")
    return load(folder)


def _check_machine() -> None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"the wheel of the Triton Inference Server needs Linux on x86_64, but this is {system} "
            f"on {machine}; use NVIDIA's container instead"
        )


def _run(*command: str) -> None:
    if subprocess.run(command).returncode:  # it says itself what is wrong
        raise RuntimeError(f"`{shlex.join(command)}` failed; fix the cause and install again")
