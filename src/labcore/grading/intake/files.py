"""The files of an export, in an archive or a folder, each read within limits.

Nothing is written here, and no entry's name becomes a path. Bytes are counted while unpacking,
because an archive may lie about its sizes.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

__all__ = [
    "MAX_ENTRIES",
    "STUDENT_BYTES",
    "TOTAL_BYTES",
    "Budget",
    "Entry",
    "Refused",
    "folder_entries",
    "nested",
    "opened",
    "zip_entries",
]

TOTAL_BYTES = 2_000_000_000
STUDENT_BYTES = 200_000_000
MAX_ENTRIES = 20_000
# Notebooks compress to a tenth, and their images hardly at all. At a ratio of 200, it is not one.
RATIO = 200
RATIO_FROM = 1_000_000
CHUNK = 1 << 16
# zipfile bounds the size of each read only for these.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
)
DIRECTORY_MARK = re.compile(rb"PK\x01\x02")
UTF8_FLAG, ENCRYPTED_FLAG = 0x800, 0x1
UNICODE_PATH = 0x7075


class Refused(Exception):
    """Why one file is refused; it does not affect the others."""


class Budget:
    """Counts unpacked bytes; raises `problem` once the total exceeds `limit`."""

    def __init__(self, limit: int, problem: Exception) -> None:
        self._left = limit
        self._problem = problem

    def take(self, size: int) -> None:
        """Counts `size` more bytes; 0 only checks the total."""
        self._left -= size
        if self._left < 0:
            raise self._problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file of an export.

    parts: its path. read: returns the content, of at most the given number of bytes, or raises
    Refused. refused: why it must not be read. unsafe: its path leads out of the export, so it does
    not identify a student.
    """

    parts: tuple[str, ...]
    read: Callable[[int], bytes]
    refused: str = ""
    unsafe: bool = False
    notes: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """The file's extension in lowercase."""
        return Path(self.parts[-1]).suffix.lower()

    @property
    def hidden(self) -> bool:
        """Whether a system left it behind: checkpoints, `__MACOSX`, dot files."""
        left = any(part.startswith(".") or part == "__MACOSX" for part in self.parts)
        return left and not self.unsafe


def opened(file: IO[bytes]) -> zipfile.ZipFile:
    """The archive in a file. Raises ValueError if unreadable, empty or with too many entries."""
    try:
        archive = zipfile.ZipFile(file)
    except (*BROKEN, NotImplementedError, ValueError) as error:
        raise ValueError(f"it is not a readable zip archive ({error})") from error
    entries = len(archive.infolist())
    if entries > MAX_ENTRIES:
        archive.close()
        raise ValueError(f"it has {entries} entries, more than {MAX_ENTRIES}")
    if not entries:
        archive.close()
        raise ValueError("the archive is empty")
    return archive


def _unicode_path(info: zipfile.ZipInfo, written: bytes) -> str:
    """The UTF-8 name that some programs write in addition; "" without one."""
    extra = info.extra
    while len(extra) >= 4:
        kind, size = struct.unpack("<HH", extra[:4])
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        fits = len(field) > 5 and field[0] == 1
        if kind == UNICODE_PATH and fits and field[1:5] == struct.pack("<L", zlib.crc32(written)):
            return field[5:].decode("utf-8", errors="replace")
    return ""


def _is_gb2312(sign: str) -> bool:
    try:
        return len(sign.encode("gb2312")) == 2
    except UnicodeEncodeError:
        return False


def name_of(info: zipfile.ZipInfo) -> tuple[str, tuple[str, ...]]:
    """An entry's name, and a note if its encoding had to be guessed.

    Without the UTF-8 flag a name should be in cp437, but systems write their own encoding: macOS
    UTF-8, Chinese Windows GBK. GBK is chosen only if at least one character is common, because a
    cp437 "ü" and the letter after it form a rare character in GBK.
    """
    name = info.orig_filename.partition("\0")[0]
    if info.flag_bits & UTF8_FLAG or name.isascii():
        return name, ()
    try:
        written = name.encode("cp437")
    except UnicodeEncodeError:
        return name, ()
    if stated := _unicode_path(info, written):
        return stated, ()
    guess, encoding = name, "cp437"
    for other in ("utf-8", "gbk"):
        try:
            decoded = written.decode(other)
        except UnicodeDecodeError:
            continue
        if other == "utf-8" or any(map(_is_gb2312, decoded)):
            guess, encoding = decoded, other
            break
    return guess, (f"the archive does not state the encoding of its names; read as {encoding}",)


def _refusal(info: zipfile.ZipInfo) -> str:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "the file is a link"
    if kind not in (0, stat.S_IFREG):
        return "it is not a regular file"
    if info.flag_bits & ENCRYPTED_FLAG:
        return "the file is encrypted"
    if info.compress_type not in METHODS:
        return "its compression method is not supported; make an ordinary zip"
    return ""


def _leads_out(name: str, parts: tuple[str, ...]) -> bool:
    return name.startswith("/") or "\\" in name or ".." in parts or parts[0][1:2] == ":"


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget, limit: int) -> bytes:
    content = io.BytesIO()
    try:
        with archive.open(info) as file:
            while chunk := file.read(CHUNK):
                budget.take(len(chunk))
                content.write(chunk)
                size = content.tell()
                if size > limit:
                    raise Refused(f"the file is larger than {limit // 1_000_000} MB")
                if size > RATIO_FROM and size > RATIO * info.compress_size:
                    raise Refused(f"the file unpacks to more than {RATIO} times its packed size")
    except BROKEN as error:
        raise Refused("the file is damaged in the archive") from error
    return content.getvalue()


def zip_entries(archive: zipfile.ZipFile, budget: Budget) -> list[Entry]:
    """The files of an archive, without folders; those that must not be read are marked."""
    found: list[tuple[tuple[str, ...], str, zipfile.ZipInfo, tuple[str, ...]]] = []
    for info in archive.infolist():
        name, notes = name_of(info)
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if parts and not name.endswith("/"):
            found.append((parts, name, info, notes))
    times = Counter(parts for parts, *_ in found)
    return [
        Entry(
            parts=parts,
            read=partial(_unpacked, archive, info, budget),
            refused=_refusal(info) or "the archive has this name twice" * (times[parts] > 1),
            unsafe=_leads_out(name, parts),
            notes=notes,
        )
        for parts, name, info, notes in found
    ]


def nested(content: bytes, budget: Budget) -> list[Entry]:
    """The files of an archive inside an archive, from one student. Raises Refused."""
    # Count the marks that begin each entry before zipfile reads them all.
    if len(DIRECTORY_MARK.findall(content)) > MAX_ENTRIES:
        raise Refused(f"it has more than {MAX_ENTRIES} entries")
    try:
        return zip_entries(opened(io.BytesIO(content)), budget)
    except ValueError as error:
        raise Refused(str(error)) from error


def _read_file(path: Path, budget: Budget, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise Refused(f"the file cannot be read ({error.strerror})") from error
    if len(content) > limit:
        raise Refused(f"the file is larger than {limit // 1_000_000} MB")
    budget.take(len(content))
    return content


def folder_entries(folder: Path, budget: Budget) -> list[Entry]:
    """The files under a folder; links are marked, not followed. Raises ValueError for too many."""
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(here) / name for name in sorted([*files, *folders])):
            if path.is_dir() and not path.is_symlink():
                continue
            plain = path.is_file() and not path.is_symlink()
            parts = path.relative_to(folder).parts
            entry = Entry(
                # A student's folder that is a link still gets a row.
                parts=(*parts, *parts) if path.is_dir() and len(parts) == 1 else parts,
                read=partial(_read_file, path, budget),
                refused="" if plain else "it is a link or not a regular file",
            )
            found.append(entry)
        if len(found) > MAX_ENTRIES:
            raise ValueError(f"{folder} has more than {MAX_ENTRIES} files; name the class's folder")
    return found
