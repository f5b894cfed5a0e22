"""Shards of rows as tar files in webdataset's format, with the origin of each row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labcore.checks import positive_int

__all__ = ["TarShard", "read_shards", "write_shards"]

INDEX = "index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TarShard:
    """A tar file. Iterating reads it from the start and yields its samples.

    rows: the number of samples. A sample is a dict in webdataset's format: "__key__" and "__url__"
    (the file's path) identify the row, and the fields are bytes. Decode fields after shuffling, so
    that buffers hold only bytes.
    """

    path: Path
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from webdataset.tariterators import group_by_keys, tar_file_expander

        with self.path.open("rb") as stream:
            source = {"url": str(self.path), "stream": stream}
            yield from group_by_keys(tar_file_expander([source]))


def _checked_key(sample: Mapping[str, Any], seen: set[str]) -> str:
    key = sample.get("__key__")
    if not isinstance(key, str) or not key or "." in key.rpartition("/")[2]:
        raise ValueError(
            f"a sample's __key__ must be a name without a dot, got {key!r}; webdataset takes the "
            "part after a dot as the field's name"
        )
    if key in seen:
        raise ValueError(f"a __key__ must be unique, got {key!r} twice; number the rows")
    return key


def write_shards(
    samples: Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    rows_per_shard: int,
    prefix: str = "shard",
) -> list[TarShard]:
    """Write samples in order into <folder>/<prefix>-000000.tar and so on, with an index.

    samples: dicts with "__key__" and fields that webdataset encodes by their names ("txt": str,
    "cls": int, "npy": array, "bin": bytes, ...). rows_per_shard: the rows of every shard except the
    last. The same samples give the same bytes. index.json, next to the shards, holds the number of
    rows of each shard.
    Raises ValueError for no samples, a key with a dot, a repeated key, or a folder that already has
    such shards.
    """
    import webdataset  # here, because it takes a second to import

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    positive_int("rows_per_shard", rows_per_shard)
    if old := sorted(folder.glob(f"{prefix}-*.tar")):
        raise ValueError(f"the folder must not hold {prefix}-*.tar, got {old[0].name}; move it")
    counts: dict[str, int] = {}
    seen: set[str] = set()
    pattern = str(folder / f"{prefix}-%06d.tar").replace("%", "%%").replace("%%06d", "%06d")
    samples = iter(samples)
    first = next(samples, None)
    if first is None:
        raise ValueError("write_shards needs at least one sample, got none")
    # webdataset's default, a fractional time, costs each file 1 kB of header and reading time.
    with webdataset.ShardWriter(
        pattern, maxcount=rows_per_shard, maxsize=float("inf"), verbose=0, mtime=0
    ) as writer:
        for sample in itertools.chain([first], samples):
            seen.add(_checked_key(sample, seen))
            writer.write(dict(sample))
            name = Path(writer.fname).name
            counts[name] = counts.get(name, 0) + 1
    (folder / INDEX).write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return read_shards(folder)


def read_shards(folder: str | Path) -> list[TarShard]:
    """Return the shards that `write_shards` wrote into `folder`, in order."""
    folder = Path(folder)
    index = folder / INDEX
    if not index.is_file():
        raise FileNotFoundError(
            f"the folder must hold {INDEX} with the number of rows of each shard, got none in "
            f"{folder}; write_shards creates it"
        )
    counts = json.loads(index.read_text(encoding="utf-8"))
    return [TarShard(path=folder / name, rows=rows) for name, rows in counts.items()]
