"""Notebooks out of git repositories, read as blobs of bare clones.

Nothing is checked out, so no filter, attribute, hook, link or submodule of a repository is ever
followed. The list has a line `student,address` or `student,address,branch` a repository; a first
line with the columns' names (`student`, `url` or `address`, `branch`) may give another order, and
lines that begin with # are left out. Semicolons may stand for the commas.
"""

from __future__ import annotations

import csv
import errno
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from labcore.grading.intake.files import MAX_ENTRIES, Entry, Refused
from labcore.grading.intake.forms import Place

__all__ = ["Row", "cloned", "read_list"]

PROTOCOLS = ("https", "ssh")
SECONDS = 120
REPOSITORY_BYTES = 500_000_000
LINE_SIGNS = 2_000
LISTING_BYTES = 20_000_000
MEMORY_BYTES = 4_000_000_000
LOCAL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?!-)[^\s]+")
SCP = re.compile(r"(?!-)[\w.-]+@[\w.-]+:(?!:)[^\s]+")
CREDENTIALS = re.compile(r"://[^/\s']*@")
# What git ends with, whatever the reason was.
ADVICE = (
    "fatal: Could not read from remote repository.",
    "Please make sure you have the correct access rights",
    "and the repository exists.",
)
BRANCH = re.compile(r"(?!-)[\w./+-]+")
# The limits are set by a shell, for a function between fork and exec is not safe among threads.
# With the signal for a file that grows too large ignored, git says of itself what was wrong.
LIMITED = 'trap "" XFSZ; ulimit -f "$1"; ulimit -v "$2" 2>/dev/null; shift 2; exec "$@"'
ULIMIT_BLOCK = 512
CONFIG = (
    "core.hooksPath=/dev/null",
    "core.symlinks=false",
    "core.bigFileThreshold=20m",
    "log.showSignature=false",
    "safe.bareRepository=all",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One repository of the list. branch: "" is the one that the repository shows first."""

    student: str
    address: str
    branch: str = ""


def read_list(path: Path) -> list[Row]:
    """The repositories in a list. Raises ValueError naming the line that is none."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8; save it so") from error
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if long := [number for number, line in lines if len(line) > LINE_SIGNS]:
        raise ValueError(f"line {long[0]} of {path} is longer than {LINE_SIGNS} signs")
    separator = ";" if lines and ";" in lines[0][1] and "," not in lines[0][1] else ","
    cells = [
        (number, [cell.strip() for cell in next(csv.reader([line], delimiter=separator))])
        for number, line in lines
    ]
    columns = ["student", "address", "branch"]
    first = [cell.lower().replace("url", "address") for cell in cells[0][1]] if cells else []
    if {"student", "address"} <= set(first):
        columns, cells = first, cells[1:]
    rows = []
    for number, row in cells:
        named = dict(zip(columns, row, strict=False))
        if not named.get("student") or not named.get("address"):
            raise ValueError(f"line {number} of {path} is not <student>{separator}<address>")
        rows.append(
            Row(student=named["student"], address=named["address"], branch=named.get("branch", ""))
        )
    if not rows:
        raise ValueError(f"{path} names no repository; put a line <student>,<address> for each")
    return rows


def _checked(row: Row) -> None:
    """Raises Refused for what must not be handed to git."""
    found = LOCAL.fullmatch(row.address)
    protocol = found["protocol"] if found else "ssh" if SCP.fullmatch(row.address) else ""
    if protocol not in PROTOCOLS:
        raise Refused("its address must begin with https:// or ssh://")
    if row.branch and not BRANCH.fullmatch(row.branch):
        raise Refused(f"{row.branch!a} is no name of a branch")


def _environment() -> dict[str, str]:
    """Without what a hook or a shell around this tells git, certificates excepted."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_SSL_")
    }
    return kept | {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
        "GIT_ALLOW_PROTOCOL": ":".join(PROTOCOLS),
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }


def _reason(said: str) -> str:
    """git's own last line, as far as it is worth showing, without what logs in."""
    lines = [line for line in said.splitlines() if line.strip() and line not in ADVICE]
    fatal = [line for line in lines if line.startswith(("fatal:", "error:"))]
    last = (fatal or lines or ["it gave no reason"])[-1]
    plain = "".join(sign if sign.isprintable() else " " for sign in last)
    return CREDENTIALS.sub("://", plain)[:300].strip()


def _git(folder: Path, *words: str, limit: int) -> bytes:
    """What git prints, with files of at most so many bytes. Raises Refused with its last line."""
    settings = [word for one in CONFIG for word in ("-c", one)]
    blocks, memory = str(limit // ULIMIT_BLOCK + 1), str(MEMORY_BYTES // 1024)
    command = ["sh", "-c", LIMITED, "sh", blocks, memory, "git", *settings, *words]
    # Files, not pipes: those a helper of git could hold open after git has ended.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=said,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Refused(f"git took longer than {SECONDS} s") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        text = said.read(100_000).decode("utf-8", errors="replace")
        if os.strerror(errno.EFBIG) in text:
            raise Refused(f"it is larger than {limit // 1_000_000} MB")
        if process.returncode:
            raise Refused(f"git: {_reason(text)}")
        out.seek(0)
        return out.read()


def _blob(folder: Path, name: str, size: int, limit: int) -> bytes:
    if size > limit:
        raise Refused(f"the file is larger than {limit // 1_000_000} MB")
    return _git(folder, "cat-file", "blob", name, limit=limit)


def _entries(folder: Path) -> Iterator[Entry]:
    """The notebooks of the commit; links and submodules are marked or left out."""
    listing = _git(folder, "ls-tree", "-r", "-l", "-z", "--full-tree", "HEAD", limit=LISTING_BYTES)
    lines = listing.split(b"\0")
    if len(lines) > MAX_ENTRIES:
        raise Refused(f"it has more than {MAX_ENTRIES} files")
    for line in filter(None, lines):
        head, _, path = line.partition(b"\t")
        mode, kind, name, size = head.decode("ascii").split()
        entry = Entry(
            parts=tuple(path.decode("utf-8", errors="replace").split("/")),
            read=partial(_blob, folder, name, int(size) if kind == "blob" else 0),
            refused="" if mode.startswith("100") else "the file is a link",
        )
        if entry.suffix == ".ipynb" and kind == "blob" and not entry.hidden:
            yield entry


@contextmanager
def cloned(row: Row, work: Path) -> Iterator[list[tuple[Place, Entry]]]:
    """The notebooks in a repository's last commit, readable inside of the with. Raises Refused.

    work: the folder in which the clone lies as long.

    handed_in is the commit's own time, which is what its author's machine said.
    """
    _checked(row)
    with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as made:
        folder = Path(made) / "bare"
        branch = [f"--branch={row.branch}"] if row.branch else []
        _git(
            Path(made),
            *("clone", "--quiet", "--bare", "--depth=1", "--no-tags", "--single-branch"),
            *("--no-local", "--template=", *branch, "--", row.address, str(folder)),
            limit=REPOSITORY_BYTES,
        )
        try:
            said = _git(folder, "log", "-1", "--format=%h %ct", "HEAD", limit=LISTING_BYTES)
        except Refused as error:
            raise Refused("the repository has no commit") from error
        commit, _, seconds = said.decode("ascii", errors="replace").strip().partition(" ")
        moment = None
        with suppress(ValueError, OverflowError, OSError):
            moment = datetime.fromtimestamp(int(seconds), UTC)
        notes = (f"the time is that of commit {commit}, which its author can set",)
        place = Place(student=row.student, file="", handed_in=moment, notes=notes)
        yield [(replace(place, file="/".join(one.parts)), one) for one in _entries(folder)]
