"""Recorded measurements: what was measured, on which hardware, with which code.

The package ships one file per kind of hardware (`cpu.jsonl`, `nvidia-h200.jsonl`), with one JSON
line per record. `python -m benchmarks` writes them; chapters show them with their provenance.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from labcore.checks import one_of
from labcore.device import Hardware, hardware
from labcore.records import hashes
from labcore.timing import quantiles

__all__ = ["FOLDER", "Record", "find", "is_stale", "load", "merge", "provenance", "read", "save"]

FOLDER = Path(__file__).resolve().parent

MODES = ("measured", "compiled", "simulated")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured quantity.

    slug, case, quantity: what was measured. With the kind of hardware, they are the record's key.
    unit: the unit of `samples`, which has one number per repeat or seed. p20, p50, p80 and n are
    computed from them.
    hardware, versions, date (ISO): where, with what and when it was measured.
    source: the hashes of the code (`hashes.describe`).
    mode: "measured", "compiled" or "simulated". Interpreter times are never recorded.
    peers: the same quantity for others in the same run. details: settings, curves, free form.
    """

    slug: str
    case: str
    quantity: str
    unit: str
    samples: tuple[float, ...]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    source: Mapping[str, Any]
    mode: str = "measured"
    peers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    p20: float = field(init=False)
    p50: float = field(init=False)
    p80: float = field(init=False)

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        object.__setattr__(self, "samples", tuple(float(x) for x in self.samples))
        peers = {name: tuple(float(x) for x in xs) for name, xs in self.peers.items()}
        object.__setattr__(self, "peers", peers)
        Hardware(**self.hardware)
        if not {"function", "benchmark", "labcore", "names"} <= set(self.source):
            raise ValueError(f"source must be what hashes.describe returns, got {self.source!r}")
        for name, value in zip(("p20", "p50", "p80"), quantiles([*self.samples]), strict=True):
            object.__setattr__(self, name, value)

    @property
    def n(self) -> int:
        """The number of repeats or seeds."""
        return len(self.samples)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Slug, case, quantity, kind of hardware. A newer record with the same key replaces it."""
        return self.slug, self.case, self.quantity, self.hardware["kind"]

    def to_json(self) -> str:
        """Return one line of JSON. It includes n and the percentiles for readers of the file.

        Raises ValueError if a number is NaN or infinite, which JSON cannot represent.
        """
        line = {**asdict(self), "n": self.n}
        try:
            return json.dumps(line, ensure_ascii=False, sort_keys=True, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                "a record must hold finite numbers, got NaN or infinity in "
                f"{self.slug}: {self.case} · {self.quantity}; measure a quantity that stays "
                "finite, or describe it in words"
            ) from error


_DERIVED = {"p20", "p50", "p80", "n"}
_FIELDS = {item.name for item in fields(Record)} - _DERIVED


def _parse(line: str, where: str) -> Record:
    remedy = "delete the line, or restore the file with git checkout"
    try:
        raw = json.loads(line)
        unknown = set(raw) - _FIELDS - _DERIVED
        if unknown:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        return Record(**{name: raw[name] for name in raw if name in _FIELDS})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where} is not a record ({error}); {remedy}") from error


@functools.lru_cache(maxsize=4)
def _records(file: Path, state: tuple[int, int]) -> tuple[Record, ...]:  # noqa: ARG001
    """Parse a file once: a chapter may read it forty times. `state` changes with the file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(_parse(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip())


def read(file: Path) -> list[Record]:
    """Read the records of a file. For a damaged line, raises ValueError with file and line."""
    state = file.stat()
    return list(_records(file, (state.st_mtime_ns, state.st_size)))


def load(
    slug: str | None = None, *, kind: str | None = None, folder: Path = FOLDER
) -> list[Record]:
    """Load all records, or those of one slug or one kind of hardware, in the files' order."""
    found = [record for file in sorted(folder.glob("*.jsonl")) for record in read(file)]
    return [
        record
        for record in found
        if slug in (None, record.slug) and kind in (None, record.hardware["kind"])
    ]


def find(slug: str, case: str, quantity: str, *, kind: str | None = None) -> Record:
    """Find the record of a quantity. Without `kind`, prefer this machine's kind over others.

    Raises KeyError that lists the quantities of the case, or the cases if there is no such case.
    """
    among = load(slug)
    hits = [r for r in among if (r.case, r.quantity) == (case, quantity)]
    if kind is not None:
        hits = [record for record in hits if record.hardware["kind"] == kind]
    if not hits:
        near = [r for r in among if r.case == case]
        have = sorted(
            {f"{r.quantity} ({r.hardware['kind']})" for r in near} or {r.case for r in among}
        )
        raise KeyError(
            f"no record of {slug}: {case} · {quantity}"
            f"{f' on {kind}' if kind else ''}; available{f' for {case}' if near else ''}: "
            f"{', '.join(have) or 'none'}; "
            f"run python -m benchmarks {slug} --save to measure it here"
        )
    here = hardware().kind
    return min(hits, key=lambda record: record.hardware["kind"] != here)


def _write(file: Path, records: Iterable[Record]) -> None:
    """Replace `file` atomically, so an interrupted run loses nothing."""
    partial = file.with_suffix(".partial")
    partial.write_text("".join(r.to_json() + "\n" for r in records), encoding="utf-8")
    os.replace(partial, file)


def save(records: Iterable[Record], folder: Path = FOLDER) -> None:
    """Write `records` into the folder's files. A record replaces an older one with its key."""
    folder.mkdir(parents=True, exist_ok=True)
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.hardware["kind"], []).append(record)
    for kind, new in by_kind.items():
        file = folder / f"{kind}.jsonl"
        kept = {record.key: record for record in (read(file) if file.exists() else [])}
        kept.update({record.key: record for record in new})
        _write(file, sorted(kept.values(), key=lambda record: record.key))


def merge(source: Path, folder: Path = FOLDER) -> int:
    """Merge the records of another folder. Of two with the same key, the newer one stays.

    Returns the number of records merged. Raises FileNotFoundError if `source` holds no records.
    """
    files = sorted(source.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{source} must hold records (*.jsonl), got none")
    have = {record.key: record.date for record in load(folder=folder)}
    new = [r for file in files for r in read(file) if r.date >= have.get(r.key, "")]
    save(new, folder)
    return len(new)


@functools.cache
def _today(slug: str, function: str, names: tuple[str, ...], gpu: bool) -> dict[str, str]:
    """Compute today's hashes to compare a record's with, once per process."""
    file = hashes.PACKAGE.parent.parent / "benchmarks" / f"{slug}.py"
    if not file.is_file():
        return {"labcore": hashes.digest_names(names, gpu=gpu)}
    found = hashes.describe(file, function, gpu=gpu)
    return {"benchmark": found["benchmark"], "labcore": found["labcore"]}


def is_stale(record: Record) -> bool:
    """Return whether the code has changed since the record was measured.

    In a checkout, the code is what the record's case uses of its benchmark and of labcore today. In
    an installed package, which has no benchmarks, it is the part of labcore that it used back then.
    """
    source = record.source
    gpu = record.hardware["kind"] != "cpu"
    today = _today(record.slug, source["function"], tuple(source["names"]), gpu)
    return any(source[name] != value for name, value in today.items())


def provenance(*records: Record) -> str:
    """Say in a sentence where, when and with what records were measured, and if they are stale."""
    places = {
        f"{one.mode} on {one.hardware['name']} ({one.hardware['cores']} cores, "
        f"{one.hardware['memory_gib']:g} GiB)"
        for one in records
    }
    versions = {one.versions.get("torch", "?") for one in records}
    text = (
        f"{' and '.join(sorted(places))}, {_span(one.date[:10] for one in records)}, "
        f"torch {' and '.join(sorted(versions))}, n = {_span(one.n for one in records)}"
    )
    stale = [is_stale(one) for one in records]
    if not any(stale):
        return text
    return f"{text}; {'' if all(stale) else 'some of the '}code since changed"


def _span(values: Iterable[Any]) -> str:
    found = sorted(set(values))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"
