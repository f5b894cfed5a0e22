"""Declare and run cases: `@case(...)` on a function that returns its measurements."""

from __future__ import annotations

import contextlib
import datetime
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from labcore.checks import one_of
from labcore.device import gpu_visible, hardware, triton_problem, versions
from labcore.records import Record, hashes

__all__ = ["Case", "Measurement", "case", "cases_of", "exact", "ratios", "run", "seen", "slugs"]

FOLDER = Path(__file__).resolve().parent
_NOT_SLUGS = {"__init__", "__main__", "confirm", "page", "runner"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measured quantity, with a sample per repeat or seed; likewise for each peer."""

    quantity: str
    unit: str
    samples: Sequence[float]
    mode: str = "measured"
    peers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


def seen(
    quantity: str,
    unit: str,
    samples: Iterable[float],
    *,
    mode: str = "measured",
    peers: Mapping[str, Sequence[float]] | None = None,
    **details: Any,
) -> Measurement:
    """Return a measurement with a sample per seed or repetition."""
    return Measurement(
        quantity=quantity,
        unit=unit,
        samples=list(samples),
        mode=mode,
        peers=peers or {},
        details=details,
    )


def exact(
    quantity: str,
    unit: str,
    value: float,
    *,
    mode: str = "measured",
    predicted: float | None = None,
    **details: Any,
) -> Measurement:
    """Return a number that is counted or computed, so it has no spread."""
    peers = None if predicted is None else {"predicted": [predicted]}
    return seen(quantity, unit, [value], mode=mode, peers=peers, exact=True, **details)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Divide two systems' samples, round by round."""
    return [one / other for one, other in zip(above, below, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A named function that measures something.

    minutes: an estimate, which orders the cases. needs: the hardware that it needs. lacks: returns
    a sentence on what must be installed before it can run here, or "". function: its only argument
    is its sizes, by default those of a record; tests pass smaller ones.
    """

    slug: str
    name: str
    minutes: float
    needs: Literal["any", "cpu", "gpu"]
    function: Callable[..., list[Measurement]]
    lacks: Callable[[], str] = str

    def runs_here(self) -> bool:
        """Return whether this machine has the hardware that the case needs."""
        return self.needs == "any" or (self.needs == "gpu") == gpu_visible()


_CASES: dict[tuple[str, str], Case] = {}


def case(
    name: str,
    *,
    minutes: float,
    needs: Literal["any", "cpu", "gpu"] = "any",
    lacks: Callable[[], str] = str,
) -> Callable[[Callable[..., list[Measurement]]], Callable[..., list[Measurement]]]:
    """Declare the decorated function as the case `name` of its file's slug."""
    one_of("needs", needs, ("any", "cpu", "gpu"))

    def declare(function: Callable[..., list[Measurement]]) -> Callable[..., list[Measurement]]:
        slug = function.__module__.rsplit(".", 1)[-1]
        if (slug, name) in _CASES:
            raise ValueError(f"the case {name!r} of {slug} is declared twice; rename one")
        _CASES[slug, name] = Case(
            slug=slug, name=name, minutes=minutes, needs=needs, function=function, lacks=lacks
        )
        return function

    return declare


def slugs() -> list[str]:
    """Return the slugs that have a file here."""
    return sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in _NOT_SLUGS)


def cases_of(slug: str) -> list[Case]:
    """Return the cases of a slug, shortest first. Raises ValueError if the slug has no file."""
    one_of("slug", slug, slugs())
    importlib.import_module(f"benchmarks.{slug}")
    return sorted(
        (case for (owner, _), case in _CASES.items() if owner == slug),
        key=lambda case: (case.minutes, case.name),
    )


def run(case: Case) -> list[Record]:
    """Run a case on one thread and return its records.

    Raises RuntimeError if it returns no measurement or, on a CPU, launches a Triton kernel.
    """
    machine = hardware()
    gpu = machine.kind != "cpu"
    with contextlib.nullcontext() if gpu else _no_interpreter():
        measurements = _on_one_thread(case.function)
    if not measurements:
        raise RuntimeError(f"{case.slug}/{case.name} returned no measurement")
    declared = case.function.__qualname__.split(".")[0]
    code = hashes.describe(FOLDER / f"{case.slug}.py", declared, gpu=gpu)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [
        Record(
            slug=case.slug,
            case=case.name,
            quantity=item.quantity,
            unit=item.unit,
            samples=tuple(item.samples),
            hardware=asdict(machine),
            versions=versions(),
            date=now,
            source=code,
            mode=item.mode,
            peers={name: tuple(xs) for name, xs in item.peers.items()},
            details={"threads": 1, **item.details},
        )
        for item in measurements
    ]


@contextlib.contextmanager
def _no_interpreter() -> Iterator[None]:
    """Refuse launches: kernels don't count as code that a CPU's record depends on."""
    if triton_problem():
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    refused = RuntimeError("Triton's interpreter is never recorded; measure on a GPU")
    with mock.patch.object(GridExecutor, "__call__", side_effect=refused):
        yield


def _on_one_thread(function: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Use one thread: machines differ in cores, and shared machines in how many are free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function()
    finally:
        torch.set_num_threads(before)
