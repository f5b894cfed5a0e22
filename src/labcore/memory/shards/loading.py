"""Training data in shards: webdataset's tar files or TFRecord files, with damage found or skipped.

torch's DataLoader reads them ahead of the step, with `num_workers`.
"""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from labcore.checks import one_of, positive_int
from labcore.memory.shards.tfrecord import (
    CHOICES,
    CorruptRecord,
    Report,
    read_tfrecord,
    refuse_or_report,
    warn,
    write_tfrecord,
)
from labcore.shuffling import write_shards

__all__ = [
    "RecordFiles",
    "read_shard",
    "tar_bytes",
    "token_row",
    "write_rows",
]

T = TypeVar("T")

BLOCK = 512  # bytes: tar's headers and contents fill whole blocks,
RECORD = 20 * BLOCK  # and a file whole records
FIELD = "bin"


def tar_bytes(lengths: Iterable[int]) -> int:
    """Return the size of a tar file with contents of these lengths, as `write_shards` writes it.

    Each entry takes a 512-byte header and contents in blocks of 512. Two blocks end the file, and
    its size is a multiple of 10,240.
    """
    total = 2 * BLOCK + sum(BLOCK - -length // BLOCK * BLOCK for length in lengths)
    return -(-total // RECORD) * RECORD


@dataclass(kw_only=True, slots=True)
class _Walk:
    """What a tar file's headers say: intact spans, the damage between them, the fields' names."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    problems: list[CorruptRecord] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)


@dataclass(kw_only=True, slots=True)
class _Span:
    """A span of a file as its own stream."""

    file: BinaryIO
    end: int

    def read(self, count: int) -> bytes:
        return self.file.read(min(count, self.end - self.file.tell()))


def _header(block: bytes) -> tarfile.TarInfo | None:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return info if info.size >= 0 else None


def _next_header(file: BinaryIO, at: int) -> tuple[int | None, bool]:
    """Return the next header's offset, or None, and whether all bytes before it are zero."""
    file.seek(at)
    blank = True
    while block := file.read(BLOCK):
        if _header(block) is not None:
            return at, blank
        blank = blank and not any(block)
        at += BLOCK
    return None, blank


def _walk(path: Path) -> _Walk:
    """Read every header of a tar file. tarfile itself treats a damaged one as the file's end."""
    from webdataset.tariterators import base_plus_ext  # here, because it takes a second to import

    found, size = _Walk(), path.stat().st_size
    start = at = 0

    def damage(fault: str) -> None:
        found.problems.append(CorruptRecord.at(path, at, fault))
        found.spans.append((start, at))

    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            info = _header(file.read(BLOCK))
            if info is None:
                following, blank = _next_header(file, at)
                if following is None and blank:
                    found.spans.append((start, at))
                    return found
                lost = (size if following is None else following) - at
                damage(f"no header found, and {lost} bytes are lost")
                start = at = at + lost
                continue
            end = at + BLOCK - -info.size // BLOCK * BLOCK
            if end > size:
                damage(f"the file ends in it, after {size - at} of {end - at} bytes")
                return found
            if info.isreg() and (name := base_plus_ext(info.name)[1]):
                found.fields.add(name.lower())
            at = end
    if start < at or not found.problems:
        damage("the file ends there without a tar file's closing blocks")
    return found


def read_shard(
    path: str | Path, *, on_corrupt: str = "raise", report: Report = warn
) -> Iterator[dict[str, Any]]:
    """Yield the samples of an uncompressed webdataset shard, as webdataset does before decoding.

    A sample is a dict with "__key__", "__url__" (the file) and the fields as bytes. All headers are
    read first. tar has a checksum for headers and none for contents, so a changed byte in a field
    goes unnoticed here; TFRecord would detect it.

    on_corrupt: "raise" raises a CorruptRecord with file and offset before the first sample; "skip"
    passes that error to `report` and continues at the next header. A sample next to the damage is
    also reported and left out if a field is missing that the shard has elsewhere.
    report: called with each error; the default warns.
    """
    one_of("on_corrupt", on_corrupt, CHOICES)
    return _samples(Path(path), on_corrupt, report)


def _samples(path: Path, on_corrupt: str, report: Report) -> Iterator[dict[str, Any]]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    walk = _walk(path)
    for problem in walk.problems:
        refuse_or_report(problem, on_corrupt, report)
    with path.open("rb") as file:
        for number, (start, end) in enumerate(walk.spans):
            if start == end:
                continue
            file.seek(start)
            source = {"url": str(path), "stream": _Span(file=file, end=end)}
            samples: Iterator[Any] = group_by_keys(tar_file_expander([source]))
            none: list[Any] = [None]
            beside = number > 0
            for sample, following in itertools.pairwise(itertools.chain(samples, none)):
                beside = beside or (following is None and number < len(walk.problems))
                missing = sorted(walk.fields - sample.keys())
                if beside and missing:
                    fault = f"sample {sample['__key__']!r} beside the damage lacks {missing}"
                    report(CorruptRecord.at(path, start, fault))
                else:
                    yield sample
                beside = False


def token_row(data: bytes | dict[str, Any]) -> Tensor:
    """Return the tokens of a row that `write_rows` wrote: int64 [T]."""
    content = data if isinstance(data, bytes) else data[FIELD]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


FORMS = ("tfrecord", "webdataset")


def write_rows(
    rows: Tensor, folder: str | Path, *, form: str = "webdataset", rows_per_file: int
) -> list[Path]:
    """Write rows of byte tokens to files in a new folder, and return the paths in order.

    rows: integers [N, T] from 0 to 255. form: "webdataset" for shards with one field "bin", or
    "tfrecord". rows_per_file: in every file but the last. Raises ValueError for tokens that aren't
    bytes, FileExistsError if the folder already exists.
    """
    one_of("form", form, FORMS)
    positive_int("rows_per_file", rows_per_file)
    fits = rows.dim() == 2 and rows.numel() and not rows.is_floating_point()
    if not fits or not 0 <= int(rows.min()) <= int(rows.max()) < 256:
        raise ValueError(
            f"rows must be byte tokens [N, T], integers from 0 to 255, got {rows.dtype} "
            f"{tuple(rows.shape)}; encode the text first"
        )
    contents = [bytes(row) for row in rows.to(torch.uint8).numpy()]
    folder = Path(folder)
    folder.mkdir(parents=True)
    if form == "webdataset":
        samples = ({"__key__": f"{n:08d}", FIELD: data} for n, data in enumerate(contents))
        return [shard.path for shard in write_shards(samples, folder, rows_per_shard=rows_per_file)]
    paths: list[Path] = []
    for first in range(0, len(contents), rows_per_file):
        paths.append(folder / f"shard-{len(paths):06d}.tfrecord")
        write_tfrecord(paths[-1], contents[first : first + rows_per_file])
    return paths


class RecordFiles(IterableDataset[Any]):
    """The records of many files, for a DataLoader: each worker reads some of the files.

    paths: files ending in .tar (webdataset) or .tfrecord. decode: turns a sample's dict or a
    record's bytes into a row. on_corrupt, report: as in `read_shard`; a worker calls `report` in
    its own process. Workers beyond the number of files have nothing to read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        decode: Callable[[Any], Any] = token_row,
        *,
        on_corrupt: str = "raise",
        report: Report = warn,
    ) -> None:
        for path in paths:
            one_of("a file's ending", Path(path).suffix, (".tar", ".tfrecord"))
        self.paths, self.decode = list(paths), decode
        self.on_corrupt, self.report = one_of("on_corrupt", on_corrupt, CHOICES), report

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        share = self.paths[info.id :: info.num_workers] if info else self.paths
        for path in share:
            read = read_shard if Path(path).suffix == ".tar" else read_tfrecord
            for record in read(path, on_corrupt=self.on_corrupt, report=self.report):
                yield self.decode(record)
