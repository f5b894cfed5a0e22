"""TFRecord files: length-prefixed records with checksums that detect a changed bit.

A record is its length (uint64), that number's masked CRC-32C (uint32), the bytes, and their masked
CRC-32C (uint32), all little-endian. The format is TensorFlow's; this module reads its uncompressed
files. What the bytes mean is up to the caller.
"""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from labcore.checks import one_of

__all__ = [
    "CorruptRecord",
    "crc32c",
    "masked_crc32c",
    "read_tfrecord",
    "tfrecord_bytes",
    "warn",
    "write_tfrecord",
]

POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
AT_ONCE = 1024  # bytes per step of the checksum
LENGTH, CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
HEADER = LENGTH.size + CHECKSUM.size
CHOICES = ("raise", "skip")


class CorruptRecord(ValueError):
    """A record that isn't what was written.

    path: the file. offset: bytes from its start to the record (in a tar file, to the record's
    header). A DataLoader worker passes on only the message, which names both.
    """

    def __init__(self, message: str, *, path: Path | None = None, offset: int = -1) -> None:
        super().__init__(message)
        self.path, self.offset = path, offset

    @classmethod
    def at(cls, path: Path, offset: int, fault: str) -> CorruptRecord:
        """Return the error for a fault in a file."""
        return cls(
            f"{path}, record at byte {offset}: {fault}; rewrite the file, or read with "
            'on_corrupt="skip"',
            path=path,
            offset=offset,
        )


Report = Callable[[CorruptRecord], object]


def warn(problem: CorruptRecord) -> None:
    """Report a skipped record as a RuntimeWarning."""
    warnings.warn(f"skipped {problem}", RuntimeWarning, stacklevel=2)


def refuse_or_report(problem: CorruptRecord, on_corrupt: str, report: Report) -> None:
    """Raise the problem, or report it if corrupt records are to be skipped."""
    if on_corrupt == "raise":
        raise problem
    report(problem)


@functools.cache
def _tables() -> NDArray[np.uint32]:
    """How a byte changes the checksum if n bytes follow it in its step: uint32 [n, 256].

    A checksum is linear over XOR, so a step can look up all its bytes at once and combine them.
    """
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, first >> 1 ^ POLYNOMIAL, first >> 1).astype(np.uint32)
    tables = [first]
    for _ in range(AT_ONCE - 1):
        tables.append(first[tables[-1] & 255] ^ tables[-1] >> 8)
    return np.stack(tables)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, as in RFC 3720, appendix B.4; 0 for no bytes."""
    tables = _tables()
    state, count = 0xFFFFFFFF, len(data) - len(data) % 4
    codes = np.frombuffer(data, np.uint8)
    for start in range(0, count, AT_ONCE):
        piece = codes[start : min(start + AT_ONCE, count)].copy()
        piece[:4] ^= np.frombuffer(CHECKSUM.pack(state), np.uint8)
        behind = np.arange(len(piece) - 1, -1, -1)
        state = int(np.bitwise_xor.reduce(tables[behind, piece]))
    for byte in data[count:]:
        state = int(tables[0, (state ^ byte) & 255]) ^ state >> 8
    return state ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the checksum as TFRecord stores it: rotated by 15 bits, plus a constant.

    A plain checksum of bytes that contain their own checksum is weak; the mask prevents that.
    """
    plain = crc32c(data)
    return ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord_bytes(lengths: Iterable[int]) -> int:
    """Return the size of a file with records of these lengths: 16 more bytes per record."""
    return sum(length + HEADER + CHECKSUM.size for length in lengths)


def write_tfrecord(path: str | Path, records: Iterable[bytes]) -> int:
    """Write records to a new file and return their number. FileExistsError if the file exists."""
    count = 0
    with Path(path).open("xb") as file:
        for data in records:
            told = masked_crc32c(data)  # first: if data isn't bytes, nothing is half written
            length = LENGTH.pack(len(data))
            file.write(length + CHECKSUM.pack(masked_crc32c(length)))
            file.write(data)
            file.write(CHECKSUM.pack(told))
            count += 1
    return count


def read_tfrecord(
    path: str | Path, *, on_corrupt: str = "raise", report: Report = warn
) -> Iterator[bytes]:
    """Yield the records of a file one by one, keeping none of the earlier ones.

    on_corrupt: "raise" raises a CorruptRecord with file and offset when reading reaches it; "skip"
    passes that error to `report` and leaves the record out. Damaged bytes cost only their own
    record. After a damaged length, or in a truncated file, no other record can be found: the rest
    of the file is skipped, and the report says how many bytes.
    report: called with each skipped record's error; the default warns.
    """
    one_of("on_corrupt", on_corrupt, CHOICES)
    path = Path(path)
    return _records(path, on_corrupt, report)


def _records(path: Path, on_corrupt: str, report: Report) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        while (offset := file.tell()) < size:
            fault, data = _record(file, size)
            if fault:
                problem = CorruptRecord.at(path, offset, fault)
                refuse_or_report(problem, on_corrupt, report)
            if data is None:
                return
            if not fault:
                yield data


def _record(file: BinaryIO, size: int) -> tuple[str, bytes | None]:
    """Return a fault or "", and the record's bytes; None if the next record can't be located."""
    rest = size - file.tell()
    header = file.read(HEADER)
    if len(header) < HEADER:
        return f"the file ends in its header, after {rest} of {HEADER} bytes", None
    number, told = header[: LENGTH.size], header[LENGTH.size :]
    if masked_crc32c(number) != CHECKSUM.unpack(told)[0]:
        return f"its length fails its checksum, so the last {rest} bytes cannot be read", None
    (length,) = LENGTH.unpack(number)
    whole = tfrecord_bytes([length])
    if whole > rest:
        return f"the file ends in it, after {rest} of {whole} bytes", None
    data = file.read(length)
    if masked_crc32c(data) != CHECKSUM.unpack(file.read(CHECKSUM.size))[0]:
        return f"its {length} bytes fail their checksum", data
    return "", data
