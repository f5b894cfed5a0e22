"""Makes `.venv`, with what the course needs; `make course` and `make test` call it.

    python3 scripts/setup.py [--port PORT [--host HOST]]

It first checks for whatever would stop it later and reports each problem in one sentence. A second
call does nothing until pyproject.toml, constraints.txt, TORCH or TORCH_INDEX changes. After an
interruption, call it again. TORCH=<version> chooses another release of torch,
TORCH_INDEX=<address> another build of it, PYTHON=<path> another Python.

pip installs torch, first and alone. uv installs the rest if this machine has it; otherwise, pip
does. Both use the versions in constraints.txt, which names neither torch nor triton.

This file needs only the standard library and must parse on Python 3.6, so that it can say that
the Python is too old.
"""

import argparse
import collections
import contextlib
import csv
import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 14))
WANTED = "Python 3.11, 3.12, 3.13 or 3.14"
TORCH = "2.13.0"
# The triton that each release of torch was built with; torch's CPU builds do not ask for it.
TRITON = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}
# Where a release of torch needs another version than constraints.txt has: torch before 2.13 asks
# for setuptools<82, and triton 3.6's interpreter fails with numpy 2.4 and later.
OLDER = {"2.11": ("numpy==2.3.5", "setuptools==81.0.0"), "2.12": ("setuptools==81.0.0",)}
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "git make g++ python3-venv python3-dev"
NO_ADDRESS = "HOST={} is no address of this machine: leave it out, or name one."
GIB = 1024**3
# The environment takes 3 GiB with torch's CPU build; pip unpacks some of it twice.
DISK_GIB = 3.5
# A kernel on a GPU is compiled with a small C program around it.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


class Lack(Exception):
    """One sentence that says what is missing and what to do."""


def require_python(version, chosen, find=shutil.which):
    """Returns None when this Python will do, else the path of one that does."""
    if tuple(version[:2]) in VERSIONS:
        return None
    here = "{}.{}.{}".format(*version[:3])
    if not chosen:
        names = [find("python{}.{}".format(*minor)) for minor in VERSIONS]
        for path in [str(Environment(ROOT).python), *names]:
            if path and runs(path):
                return path
    raise Lack(
        f"{WANTED} is needed, this is {here}: install one of them and run "
        "`make course PYTHON=<its path>`."
    )


def runs(python):
    """Whether this program starts, has a supported version and can make environments."""
    code = f"import sys, ensurepip; sys.exit(tuple(sys.version_info[:2]) not in {VERSIONS!r})"
    with contextlib.suppress(OSError):
        done = subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL)
        return done.returncode == 0
    return False


def require_torch(release):
    """Refuses a misspelt release, which would fail only after the environment is made."""
    if release.rpartition(".")[0] not in TRITON:
        raise Lack(
            f"TORCH={release} is not a release of torch that the course supports: leave it out for "
            f"{TORCH}, or name one of {', '.join(TRITON)} with its last number, such as {TORCH}."
        )


def require_venv():
    """Debian ships Python without the part that fills an environment."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise Lack(
            "Python's venv is missing: run `apt install python3-venv` (as root), then this again."
        ) from None


def require_disk(folder, gib=DISK_GIB, usage=shutil.disk_usage):
    """Refuses a disk that would fill up half way and leave a broken environment."""
    free = usage(str(folder)).free / GIB
    if free < gib:
        raise Lack(
            f"{gib:.1f} GiB of free disk are needed in {folder}, {free:.1f} GiB are free: make "
            "room, or put the checkout on a larger disk."
        )


def require_port(host, port):
    """Refuses a port or host that the server could not use after all the work."""
    try:
        family = socket.getaddrinfo(host, None)[0][0]
    except socket.gaierror:
        raise Lack(NO_ADDRESS.format(host)) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # there it would share a port that is in use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise Lack(
                f"port {port} is for root alone: choose one above 1023, such as "
                "`make course PORT=8889`."
            ) from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise Lack(NO_ADDRESS.format(host)) from None
            raise Lack(
                f"port {port} of {host} is in use, perhaps by this course in another window: "
                f"stop that program, or run `make course PORT={port + 1}`."
            ) from None


def compiler_lack(find=shutil.which, include=None):
    """None, or what is missing to compile what runs beside a GPU kernel or torch.compile."""
    header = Path(include or sysconfig.get_path("include")) / "Python.h"
    lacks = [] if any(map(find, ("g++", "c++", "clang++"))) else ["a C++ compiler (g++)"]
    lacks += [] if header.is_file() else ["Python's headers (python3-dev)"]
    return " and ".join(lacks) or None


def notes(find=shutil.which, devices=GPU_DEVICES):
    """One sentence for each optional tool that is missing; raises Lack for a compiler on a GPU."""
    lack = compiler_lack(find)
    if lack and any(map(os.path.exists, devices)):
        raise Lack(
            f"{lack} missing, which the GPU's kernels need: run `apt install {PACKAGES}` (as "
            "root), then this again."
        )
    if lack:
        yield (
            f"{lack} missing: torch.compile and the chapter and lab on AMD's GPUs need it, "
            f"the rest of the course does not; on Debian `apt install {PACKAGES}` (as root) "
            "installs it."
        )
    if not find("git"):
        yield (
            "git is missing: the pages cannot say which commit they show; on Debian "
            "`apt install git` (as root) installs it."
        )


def stamp(root, python_version, torch, index):
    """What the environment was made from; if any of it changes, the set-up runs again."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return {"files": digest.hexdigest(), "python": python_version, "torch": torch, "index": index}


class Environment:
    """The `.venv` of one checkout."""

    def __init__(self, root):
        self.root = root
        self.folder = root / ".venv"
        self.stamp_file = self.folder / "course-setup.json"
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.python = self.folder / scripts / "python"

    def version(self):
        """The version of the Python inside, or None when it does not start or has no pip."""
        code = "import sys, pip; print('%d.%d.%d' % sys.version_info[:3])"
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [str(self.python), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            text = done.stdout.decode().strip()
            if done.returncode == 0 and tuple(map(int, text.split(".")[:2])) in VERSIONS:
                return text
        return None

    def saved(self):
        """The stamp of the last complete set-up, or {}."""
        try:
            saved = json.loads(self.stamp_file.read_text())
        except (OSError, ValueError):
            return {}
        return saved if set(saved) == {"files", "python", "torch", "index"} else {}

    def ready(self, torch, index, chosen=False):
        """Whether the last set-up is complete and made from today's files."""
        saved = self.saved()
        if not saved or (chosen and not self.fits()):
            return False
        wanted = (torch or saved["torch"], index or saved["index"])
        return saved == stamp(self.root, saved["python"], *wanted)

    def fits(self):
        """Whether the Python inside is of the version that runs this file."""
        return (self.version() or "").split(".")[:2] == [str(n) for n in sys.version_info[:2]]

    def sites(self):
        """The folders that packages are installed in."""
        return [
            *self.folder.glob("lib/python*/site-packages"),
            *self.folder.glob("Lib/site-packages"),
        ]

    def pip(self, *arguments):
        """Runs the environment's pip; raises Lack when it fails."""
        self.run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def run(self, command):
        """Runs a command with one line that moves on a terminal; raises Lack when it fails."""
        last = collections.deque(maxlen=40)
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=str(self.root), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            universal_newlines=True,
        ) as process:  # fmt: skip
            reader = threading.Thread(target=last.extend, args=(process.stdout,))
            reader.start()
            while reader.is_alive():
                reader.join(0.5)
                if sys.stdout.isatty():
                    count = sum(len(list(site.glob("*.dist-info"))) for site in self.sites())
                    line = (last or [""])[-1].strip()[:40]
                    seconds = time.monotonic() - began
                    print(
                        f"\r\033[K     {count} packages, {seconds:.0f} s  {line}",
                        end="",
                        flush=True,
                    )
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
        if process.returncode:
            say("".join(last))
            raise Lack(
                f"`{' '.join(command)[:90]} …` failed, and its last lines above say why "
                "(network, proxy, disk?): fix that and run this again, it continues from here."
            )


def make(environment, torch, index, chosen):
    """Makes or repairs the environment."""
    saved = environment.saved()
    environment.stamp_file.unlink(missing_ok=True)
    if environment.version() is None or (chosen and not environment.fits()):
        saved = {}
        say("1/3  an empty environment in .venv")
        command = [sys.executable, "-m", "venv", "--clear", str(environment.folder)]
        if subprocess.run(command).returncode:
            raise Lack(
                "Python could not make .venv, its lines above say why: fix that, then run this "
                "again (on Debian `apt install python3-venv` as root)."
            )
    else:
        say("1/3  .venv exists: adding what it lacks")
        mend(environment)
    environment.pip("install", "--upgrade", "-c", "constraints.txt", "pip")
    torch = torch or saved.get("torch", TORCH)
    index = index or saved.get("index", "")
    install_torch(environment, torch, index, renew=bool(saved) and saved["index"] != index)
    install_rest(environment, torch)
    fresh = stamp(environment.root, environment.version(), torch, index)
    partial = environment.stamp_file.with_suffix(".partial")
    partial.write_text(json.dumps(fresh))
    partial.replace(environment.stamp_file)


def install_torch(environment, release, index, renew):
    """Torch first and alone: in any other order pip may choose another build of it."""
    options = ["-c", str(fitting(environment.root, release)), "torch==" + release]
    options += ["--index-url", index] if index else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment.pip(
            "install", "--dry-run", "--report", str(report), *options,
            *(["--force-reinstall"] if renew else []),
        )  # fmt: skip
        planned = json.loads(report.read_text())["install"]
    describe_torch(planned, environment.folder)
    if renew:
        environment.pip("install", "--force-reinstall", "--no-deps", *options)
    environment.pip("install", *options)
    if sys.platform == "linux":
        environment.pip("install", "triton==" + TRITON[release.rpartition(".")[0]])


def fitting(root, torch):
    """The file of versions that go with this release of torch."""
    lock = root / "constraints.txt"
    older = OLDER.get(torch.rpartition(".")[0], ())
    if not older:
        return lock
    pinned = tuple(line.partition("==")[0] + "==" for line in older)
    lines = [line for line in lock.read_text().splitlines() if not line.startswith(pinned)]
    changed = root / ".cache" / "constraints.txt"
    changed.parent.mkdir(exist_ok=True)
    changed.write_text("\n".join([*lines, *older, ""]))
    return changed


def install_rest(environment, torch, find=shutil.which):
    """Everything but torch and triton, which neither uv nor pip may exchange."""
    uv = find("uv")
    say(f"3/3  the rest: some 220 packages, with {'uv' if uv else 'pip, a few minutes'}")
    rest = ["-c", str(fitting(environment.root, torch)), "-e", ".[all]"]
    if uv:
        # The overrides keep uv from resolving torch and triton: it has no "keep what is installed".
        apart = ["--python", str(environment.python), "--override", "scripts/apart.txt"]
        try:
            # Compile now, as pip does, so that the first import shows no compiler warnings.
            asked = ["--no-progress", "--compile-bytecode"]
            return environment.run([uv, "pip", "install", *asked, *apart, *rest])
        except Lack:
            say("     uv failed, its lines above say why; trying pip, which has its own settings")
    return environment.pip("install", "torch==" + torch, *rest)


def describe_torch(planned, folder):
    """Says which build of torch comes and its size, before the download; checks the disk."""
    build = [item for item in planned if item["metadata"]["name"].lower() == "torch"]
    if not build:
        say("2/3  torch is there")
        return
    sizes = [wheel_size(item["download_info"]["url"]) for item in planned]
    torch_size = sizes[planned.index(build[0])]
    total = sum(size or 0 for size in sizes)
    more = "at least " if None in sizes else ""
    say(
        f"2/3  torch {build[0]['metadata']['version']}: {readable(torch_size)}, with what it "
        f"needs {more}{readable(total)} to download"
    )
    if total > GIB:
        say("     (TORCH_INDEX=<address> chooses another build, such as the smaller one for CPUs)")
        require_disk(folder, DISK_GIB + 3 * total / GIB)


def wheel_size(address):
    """Bytes of a wheel, or None when its server does not say."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def readable(size):
    """A number of bytes for a person."""
    if size is None:
        return "size unknown"
    return f"{size / GIB:.1f} GiB" if size > GIB else f"{size / 1024**2:.0f} MiB"


def mend(environment):
    """Removes packages that an interrupted pip left incomplete and would take for installed."""
    for site in environment.sites():
        for leftover in site.glob("~*"):
            shutil.rmtree(str(leftover), ignore_errors=True)
        for info in site.glob("*.dist-info"):
            if not complete(site, info):
                say(f"     {info.stem} is incomplete and will be installed again")
                shutil.rmtree(str(info))


def complete(site, info):
    """Whether every file that a package's RECORD names is there with its size."""
    try:
        rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
        for name, _, size in rows:
            if not name.endswith(".pyc") and size and (site / name).stat().st_size != int(size):
                return False
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def alone(root):
    """Two set-ups in one folder would spoil each other's work."""
    (root / ".cache").mkdir(exist_ok=True)
    with (root / ".cache" / "setup.lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such lock on Windows
            pass
        except OSError:
            raise Lack("another set-up runs in this folder: wait until it is done.") from None
        yield


def say(line):
    """A line for the person who waits."""
    print(line, flush=True)


def main():
    """Checks, then makes the environment unless it is ready."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    torch, index = os.environ.get("TORCH", ""), os.environ.get("TORCH_INDEX", "")
    chosen = bool(os.environ.get("PYTHON"))
    better = require_python(sys.version_info, chosen)
    if better:
        say(f"python3 is {sys.version.split()[0]}: {better} is used")
        sys.exit(subprocess.call([better, *sys.argv]))
    environment = Environment(ROOT)
    if options.port is not None:
        require_port(options.host, options.port)
    if environment.ready(torch, index, chosen):
        return
    require_torch(torch or TORCH)
    with alone(ROOT):
        require_venv()
        require_disk(ROOT, DISK_GIB if environment.version() is None else 1)
        for note in notes():
            say(f"note: {note}")
        make(environment, torch, index, chosen)


if __name__ == "__main__":
    try:
        main()
    except Lack as lack:
        sys.exit(str(lack))
    except KeyboardInterrupt:
        sys.exit("\nThe set-up was interrupted: the same command goes on from here.")
