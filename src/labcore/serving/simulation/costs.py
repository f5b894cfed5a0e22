"""What a step of an engine costs: seconds by four coefficients, and a fit of them to a trace.

A step runs a plan's prefill chunks as one forward and its decodes as another. Each forward has a
price of its own (weights read, kernels launched), each token adds work, and each row reads the
keys and values of its context. The same split is behind the budgets of chunked prefill (Agrawal et
al., 2024, Sarathi-Serve, arXiv 2403.02310).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy

from labcore.checks import non_negative, positive
from labcore.serving.engine.metrics import StepRecord
from labcore.serving.engine.scheduler import Chunk, Decode, StepPlan

__all__ = ["CostModel", "Fit", "Work", "fit", "work"]


@dataclass(frozen=True, slots=True)
class Work:
    """A step in numbers. forwards: 0, 1 or 2: one for the chunks, one for the decodes.
    prefill: tokens of the chunks. decode: tokens of the decodes, drafted ones included.
    context: tokens of the cache that are read, one time by each row, the step's own among them.
    Where rows are padded, a row counts as many tokens as the longest one of its forward.
    """

    forwards: int = 0
    prefill: int = 0
    decode: int = 0
    context: int = 0


def work(
    chunks: Sequence[Chunk], decodes: Sequence[Decode], *, idle: int = 0, padded: bool = False
) -> Work:
    """The numbers of a step that reads these.

    idle: rows of ended requests beside the decodes; each is computed as one token without context.
    padded: each forward is a rectangle, as wide as its longest row and reaching as far back.
    """
    total = _padded if padded else sum
    read = [one.count for one in chunks]
    said = [1 + one.drafted for one in decodes] + [1] * idle
    reach = [one.start + one.count for one in chunks]
    back = [one.start + 1 + one.drafted for one in decodes] + [1] * idle
    return Work(
        forwards=bool(chunks) + bool(decodes),
        prefill=total(read),
        decode=total(said),
        context=total(reach) + total(back),
    )


def _padded(tokens: Sequence[int]) -> int:
    return len(tokens) * max(tokens, default=0)


_COEFFICIENTS = ("base", "per_prefill_token", "per_decode_row", "per_context_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds of a step, linear in its `Work`.

    base: seconds of a forward, however small; a step with chunks and decodes has two.
    per_prefill_token: of each prompt token. per_decode_row: of each token of a decode, drafted ones
    included. per_context_token: of each cached token that a row reads. padded: whether a row pays
    for the longest one beside it, as where a forward is one rectangle of tokens.
    Raises ValueError for a negative time, and where all are 0: time would stand still.
    """

    base: float
    per_prefill_token: float = 0.0
    per_decode_row: float = 0.0
    per_context_token: float = 0.0
    padded: bool = False

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            non_negative(name, getattr(self, name), "pass seconds")
        if not any(getattr(self, name) for name in _COEFFICIENTS):
            raise ValueError("a step must take time, got 0 for all four; pass seconds for the base")

    def of(self, done: Work) -> float:
        """Seconds of this work."""
        return (
            self.base * done.forwards
            + self.per_prefill_token * done.prefill
            + self.per_decode_row * done.decode
            + self.per_context_token * done.context
        )

    def seconds(self, plan: StepPlan) -> float:
        """Seconds of a plan; 0 where it reads nothing."""
        return self.of(work(plan.chunks, plan.decodes, idle=plan.rests, padded=self.padded))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A cost model fitted to measured steps.

    works, seconds: of the steps that were used. residuals: (seconds - fitted) / fitted of each,
    the model's own noise: `simulate` can draw from them.
    """

    cost: CostModel
    works: tuple[Work, ...]
    seconds: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def typical(self) -> float:
        """The median of the residuals' absolute values."""
        return float(numpy.median(numpy.abs(self.residuals)))

    @property
    def worst(self) -> float:
        """The largest of the residuals' absolute values."""
        return max(map(abs, self.residuals))

    @property
    def total(self) -> float:
        """Fitted seconds of all steps over the measured ones."""
        return math.fsum(map(self.cost.of, self.works)) / math.fsum(self.seconds)


_ROUNDS = 20


def fit(records: Sequence[StepRecord], *, skip: int = 0, padded: bool | None = False) -> Fit:
    """The four coefficients, none negative, by relative least squares over an engine's steps.

    skip: first steps that are left out, for they warm up. padded: as in `CostModel`; None tries
    both and keeps the one whose residuals are smaller in the mean square. An error is taken
    relative to the fitted time, anew in each of some rounds: relative to the measured one a slow
    step would count for less than a fast one, and the sum would come out too small. (That is the
    quasi-likelihood of a deviation proportional to the mean: Wedderburn, 1974, Biometrika 61.) A
    coefficient of what never occurs is 0, as is one that the others explain better.
    Raises ValueError for fewer than four steps with work, or a time that is not above 0.
    """
    used = [record for record in records[skip:] if record.chunks or record.decodes]
    if len(used) < 4:
        raise ValueError(
            f"fit needs at least four steps with work, one a coefficient, got {len(used)}; "
            "run more requests"
        )
    ways = (False, True) if padded is None else (padded,)
    return min((_fit(used, way) for way in ways), key=lambda one: math.hypot(*one.residuals))


def _fit(records: Sequence[StepRecord], padded: bool) -> Fit:
    from scipy.optimize import nnls  # half of the time that importing labcore.serving would take

    works = [work(one.chunks, one.decodes, idle=one.idle, padded=padded) for one in records]
    features = numpy.array([astuple(done) for done in works], dtype=numpy.float64)
    seconds = numpy.array([float(positive("seconds", one.seconds)) for one in records])
    scale = numpy.maximum(features.max(axis=0), 1.0)  # so that no column dwarfs another
    weights = seconds
    for _ in range(_ROUNDS):
        solved, _rest = nnls(features / scale / weights[:, None], seconds / weights)
        # On the way a step may be fitted to 0, where no error is relative to anything.
        weights = numpy.maximum(features / scale @ solved, 1e-6 * seconds)
    found = (float(value) for value in solved / scale)
    cost = CostModel(**dict(zip(_COEFFICIENTS, found, strict=True)), padded=padded)
    times = [cost.of(done) for done in works]
    return Fit(
        cost=cost,
        works=tuple(works),
        seconds=tuple(seconds.tolist()),
        residuals=tuple((took - t) / t for took, t in zip(seconds.tolist(), times, strict=True)),
    )
