"""Runs an untrusted program in bubblewrap, without a network, in a private home and with limits.

The program sees the system's programs, the Python environment and labcore's files, all read-only;
an empty home and an empty /tmp in memory; and only its own processes. If this process is root, the
program runs under an otherwise unused user id, because resource limits do not bind root.
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
FIRST_USER, USERS = 60001, 4000  # ids that Debian does not assign
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
CONFIGURED = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
WATCH_S = 0.25
SAID = 4000
MEMORY, TIME = "memory", "time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one submission may use.

    memory_mib: memory of all its processes together, and the address space of each. cpu_s: CPU time
    per process. processes: concurrent processes, including threads. file_mib: the largest file,
    and the capacity of the home and of /tmp, which are in memory. wall_s: seconds for the whole
    submission. cell_s: seconds per cell.
    """

    memory_mib: int = 6144
    cpu_s: int = 600
    processes: int = 256
    file_mib: int = 256
    wall_s: float = 300.0
    cell_s: float = 60.0


def _system() -> list[str]:
    """bubblewrap's arguments for the system's programs, read-only."""
    words: list[str] = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    return words


def _own() -> list[str]:
    """bubblewrap's arguments for Python and labcore, read-only."""
    words: list[str] = []
    own = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])]
    own.append(str(Path(labcore.__file__).parent))
    shown = [name for name in dict.fromkeys([*CONFIGURED, *own]) if not name.startswith("/usr")]
    above = {str(path) for name in shown for path in Path(name).parents} - {"/"}
    for name in sorted(above):
        # By default bubblewrap makes the folders above a private one inaccessible.
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
    # After the tmpfs mounts: the checkout may be under /tmp.
    words += [*_own(), "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]
    inside = _limited(limits, command)
    if os.geteuid() == 0:
        user = str(FIRST_USER + os.getpid() % USERS)
        # No user namespace: in one, the limits would count as root's.
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
    """Why the sandbox does not work here, "" if it does. Tried once per process."""
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
    """The program's whole environment; it inherits nothing from this process."""
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
    # labcore may be importable only through the path.
    found["PYTHONPATH"] = str(Path(labcore.__file__).parents[1])
    return found


class Process:
    """A running program with `stdin` and `stdout`; a context manager that leaves nothing behind.

    The program is killed when it exceeds its memory or time limit; `ended_by` says which.
    sandboxed: False runs it with this process's privileges, in an empty folder, with limits.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, command: Sequence[str], limits: Limits, *, sandboxed: bool = True) -> None:
        self.ended_by = ""
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # A file, not a pipe, which would have to be drained. The limit on files bounds it.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
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
            raise RuntimeError("a program started without pipes; please report this")
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
        """The end of its standard error."""
        size = os.fstat(self._said.fileno()).st_size
        data = os.pread(self._said.fileno(), SAID, max(0, size - SAID))
        return data.decode("utf-8", errors="replace")

    def end_after(self, seconds: float) -> threading.Timer:
        """Ends the program after `seconds`, unless the timer is canceled first."""

        def late() -> None:
            self.ended_by = self.ended_by or TIME
            self.end()

        timer = threading.Timer(seconds, late)
        timer.daemon = True
        timer.start()
        return timer

    def end(self) -> None:
        """Ends the program and everything it started; does nothing if it has already ended."""
        with contextlib.suppress(ProcessLookupError):
            # bubblewrap's init process dies with it, and all other processes die with that one.
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
    """Bytes of memory of a process and its descendants; shared pages count once."""
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
