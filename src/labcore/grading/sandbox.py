"""A program that nobody trusts, run by bubblewrap: no network, a private home, limits.

It sees the system's programs, the Python environment and labcore's own files, all read-only, an
empty home and an empty /tmp in memory, and no process but its own. Where this process is root the
program runs under a user id that nothing else has, because limits do not hold root.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import labcore

__all__ = ["INSTALL", "Limits", "Process", "missing"]

INSTALL = "on Debian or Ubuntu: apt-get install bubblewrap"
MIB = 1 << 20
HOME = "/student"
FIRST_USER, USERS = 60001, 4000  # Debian leaves these ids to nobody else
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
CONFIGURED = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
WATCH_S = 0.25
SAID = 4000
MEMORY, TIME = "memory", "time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one submission may use.

    memory_mib: of all its processes together, and what each may reserve. cpu_s: processor time of
    each process. processes: at once, threads counted too. file_mib: the largest file, and what its
    home and its /tmp hold each, in memory. wall_s: seconds for all of it. cell_s: for one cell.
    """

    memory_mib: int = 6144
    cpu_s: int = 600
    processes: int = 256
    file_mib: int = 256
    wall_s: float = 300.0
    cell_s: float = 60.0


def _system() -> list[str]:
    """bubblewrap's words for the system's programs, to read."""
    words: list[str] = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    return words


def _own() -> list[str]:
    """bubblewrap's words for Python and labcore, to read."""
    words: list[str] = []
    own = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])]
    own.append(str(Path(labcore.__file__).parent))
    shown = [name for name in dict.fromkeys([*CONFIGURED, *own]) if not name.startswith("/usr")]
    above = {str(path) for name in shown for path in Path(name).parents} - {"/"}
    for name in sorted(above):
        # bubblewrap would close a folder above a private one to everybody.
        words += ["--perms", "0755", "--dir", name]
    return words + [word for name in shown for word in ("--ro-bind-try", name, name)]


def _limited(limits: Limits, command: Sequence[str]) -> list[str]:
    return [
        "prlimit",
        f"--as={limits.memory_mib * MIB}",
        f"--cpu={limits.cpu_s}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.file_mib * MIB}",
        "--core=0",
        *command,
    ]


def _wrapped(limits: Limits, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in the sandbox."""
    size = str(limits.file_mib * MIB)
    words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net"]
    words += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    words += [*_system(), "--proc", "/proc", "--dev", "/dev"]
    for path in ("/dev/shm", "/tmp", HOME):
        words += ["--perms", "1777", "--size", size, "--tmpfs", path]
    # After them: a checkout may stand below /tmp.
    words += [*_own(), "--remount-ro", "/dev", "--chdir", HOME]
    inside = _limited(limits, command)
    if os.geteuid() == 0:
        user = str(FIRST_USER + os.getpid() % USERS)
        # Not into a namespace of users: there the limits would count as root's.
        words += ["--cap-drop", "ALL"]
        words += [word for name in ("SETUID", "SETGID", "SETPCAP") for word in _cap(name)]
        inside = [
            *("setpriv", "--reuid", user, "--regid", user, "--clear-groups"),
            *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
            *inside,
        ]
    else:
        words += ["--unshare-user", "--disable-userns"]
    return [*words, "--", *inside]


def _cap(name: str) -> tuple[str, str]:
    return "--cap-add", f"CAP_{name}"


@functools.cache
def missing() -> str:
    """Why nothing can be run in a sandbox here; "" where it can. Tried once a process."""
    for program in ("bwrap", "prlimit", "setpriv"):
        if shutil.which(program) is None:
            return f"the program {program} is missing ({INSTALL} util-linux)"
    tried = subprocess.run(
        _wrapped(Limits(), ["true"]), capture_output=True, text=True, errors="replace", check=False
    )
    if tried.returncode == 0:
        return ""
    said = " ".join(tried.stderr.split())[:300]
    return f"bubblewrap does not work on this machine ({said or tried.returncode})"


def _environment(sandboxed: bool, home: str) -> dict[str, str]:
    """The whole environment of the program: nothing of this process's own comes along."""
    path = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    found = {
        "PATH": os.pathsep.join(path),
        "HOME": HOME if sandboxed else home,
        "TMPDIR": "/tmp" if sandboxed else home,
        "USER": "student",
        "LOGNAME": "student",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # Where labcore is not installed but found through the path.
    found["PYTHONPATH"] = str(Path(labcore.__file__).parents[1])
    return found


class Process:
    """A running program with `stdin` and `stdout`; a context manager that leaves nothing of it.

    Ended when it uses more memory than its limit, or more time: `ended_by` says which.
    sandboxed: False runs it with the rights of this process, in an empty folder, with limits.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, command: Sequence[str], limits: Limits, *, sandboxed: bool = True) -> None:
        self.ended_by = ""
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # A file, not a pipe, which somebody would have to empty; its size is limited too.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this
        words = _wrapped(limits, command) if sandboxed else _limited(limits, command)
        self._popen = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=_environment(sandboxed, self._folder.name),
            cwd=self._folder.name,
            start_new_session=True,
        )
        if self._popen.stdin is None or self._popen.stdout is None:
            raise RuntimeError("a program was started without pipes; report this")
        self.stdin, self.stdout = self._popen.stdin, self._popen.stdout
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._hold_to_limits, daemon=True)
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._over.set()
        self.end()
        self._watch.join()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.stdout.close()
        self._said.close()
        self._folder.cleanup()

    @property
    def said(self) -> str:
        """The end of what it wrote to its standard error."""
        size = os.fstat(self._said.fileno()).st_size
        data = os.pread(self._said.fileno(), SAID, max(0, size - SAID))
        return data.decode("utf-8", errors="replace")

    def end_after(self, seconds: float) -> threading.Timer:
        """Ends it in so many seconds, unless the timer is cancelled before."""

        def late() -> None:
            self.ended_by = self.ended_by or TIME
            self.end()

        timer = threading.Timer(seconds, late)
        timer.daemon = True
        timer.start()
        return timer

    def end(self) -> None:
        """Ends the program and all that it started; one that has ended already is fine."""
        with contextlib.suppress(ProcessLookupError):
            # bubblewrap's first process inside dies with it, and with that one all the others.
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def _hold_to_limits(self) -> None:
        rounds = int(self._limits.wall_s / WATCH_S)
        for _ in range(rounds):
            if self._over.wait(WATCH_S):
                return
            if _used(self._popen.pid) > self._limits.memory_mib * MIB:
                self.ended_by = MEMORY
                break
        else:
            self.ended_by = TIME
        self.end()


def _used(root: int) -> int:
    """Bytes that a process and its descendants hold; what they share counts once in all."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path("/proc", name, "stat").read_text(errors="replace")
                parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    return sum(_proportional(pid) for pid in _descendants(root, parents))


def _descendants(root: int, parents: Mapping[int, int]) -> set[int]:
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
