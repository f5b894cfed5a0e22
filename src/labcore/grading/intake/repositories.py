"""Notebooks from git repositories, read as blobs of bare clones.

Nothing is checked out, so a repository's filters, attributes, hooks, links and submodules have no
effect. The list has one line per repository, `student,address` or `student,address,branch`. A first
line of column names (`student`, `url` or `address`, `branch`) may set another order. Lines that
begin with # are ignored. Semicolons may replace the commas.
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
# git's last lines, whatever the reason was.
ADVICE = (
    "fatal: Could not read from remote repository.",
    "Please make sure you have the correct access rights",
    "and the repository exists.",
)
BRANCH = re.compile(r"(?!-)[\w./+-]+")
# A shell sets the limits, because with threads, running Python between fork and exec is not safe.
# It ignores the signal for a file that grows too large, so that git itself reports the error.
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
    """One repository of the list. branch: "" means the repository's default branch."""

    student: str
    address: str
    branch: str = ""


def read_list(path: Path) -> list[Row]:
    """The repositories in a list. Raises ValueError naming the bad line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8; save it in that encoding") from error
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if long := [number for number, line in lines if len(line) > LINE_SIGNS]:
        raise ValueError(f"line {long[0]} of {path} has more than {LINE_SIGNS} characters")
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
            raise ValueError(f"line {number} of {path} must be <student>{separator}<address>")
        rows.append(
            Row(student=named["student"], address=named["address"], branch=named.get("branch", ""))
        )
    if not rows:
        raise ValueError(f"{path} names no repository; add a line <student>,<address> for each")
    return rows


def _checked(row: Row) -> None:
    """Raises Refused for an address or branch that must not be passed to git."""
    found = LOCAL.fullmatch(row.address)
    protocol = found["protocol"] if found else "ssh" if SCP.fullmatch(row.address) else ""
    if protocol not in PROTOCOLS:
        raise Refused("its address must begin with https:// or ssh://")
    if row.branch and not BRANCH.fullmatch(row.branch):
        raise Refused(f"{row.branch!a} is not a branch name")


def _environment() -> dict[str, str]:
    """The environment without the caller's git variables, except those for certificates."""
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
    """git's last informative line, shortened and without credentials."""
    lines = [line for line in said.splitlines() if line.strip() and line not in ADVICE]
    fatal = [line for line in lines if line.startswith(("fatal:", "error:"))]
    last = (fatal or lines or ["it gave no reason"])[-1]
    plain = "".join(sign if sign.isprintable() else " " for sign in last)
    return CREDENTIALS.sub("://", plain)[:300].strip()


def _git(folder: Path, *words: str, limit: int) -> bytes:
    """git's output, with a limit in bytes on files. Raises Refused with git's last line."""
    settings = [word for one in CONFIG for word in ("-c", one)]
    blocks, memory = str(limit // ULIMIT_BLOCK + 1), str(MEMORY_BYTES // 1024)
    command = ["sh", "-c", LIMITED, "sh", blocks, memory, "git", *settings, *words]
    # Files, not pipes, which a helper of git could hold open after git has ended.
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
    """The notebooks in the commit. Links are marked; submodules are left out."""
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
    """The notebooks in a repository's last commit, readable within the `with`. Raises Refused.

    work: the folder that holds the clone until then.

    handed_in is the commit time, which comes from the author's machine.
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
        notes = (f"the time is from commit {commit}; its author can set it",)
        place = Place(student=row.student, file="", handed_in=moment, notes=notes)
        yield [(replace(place, file="/".join(one.parts)), one) for one in _entries(folder)]
