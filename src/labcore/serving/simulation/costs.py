"""The cost of an engine step: seconds from four coefficients, and their fit to a trace.

A step is one forward. It has a fixed cost (weights read, kernels launched), each token adds work,
and each row reads the keys and values of its context. Chunked prefill bases its budgets on the same
split (Agrawal et al., 2024, Sarathi-Serve, arXiv 2403.02310).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy

from labcore.checks import non_negative, positive
from labcore.serving.engine.plan import Chunk, Decode, StepPlan
from labcore.serving.metrics import StepRecord

__all__ = ["CostFit", "CostModel", "StepWork", "fit_costs", "work"]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The amount of work in a step.

    forwards: 1, or 0 for a step that reads nothing. prefill: tokens of the chunks. decode: tokens
    of the decodes, including drafted ones. context: the tokens in the cache, summed over requests,
    including the step's own. A chunk's context counts once here, though each of its tokens reads
    it: the cost of loading keys, not of the pairs that attention computes.
    """

    forwards: int = 0
    prefill: int = 0
    decode: int = 0
    context: int = 0


def work(chunks: Sequence[Chunk], decodes: Sequence[Decode], *, idle: int = 0) -> StepWork:
    """Return the work of a step with these chunks and decodes.

    idle: rows of ended requests beside the decodes; each counts as one token without context.
    """
    prefill = sum(one.count for one in chunks)
    decode = sum(1 + one.drafted for one in decodes) + idle
    return StepWork(
        forwards=int(bool(prefill or decode)),
        prefill=prefill,
        decode=decode,
        context=sum(one.start for one in chunks)
        + sum(one.start for one in decodes)
        + prefill
        + decode,
    )


_COEFFICIENTS = ("base", "per_prefill_token", "per_decode_row", "per_context_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds per step, linear in its `StepWork`.

    base: seconds per forward, however small. per_prefill_token: seconds per prompt token.
    per_decode_row: seconds per token of a decode, including drafted ones. per_context_token:
    seconds per token of `StepWork.context`.
    Raises ValueError if a time is negative, or if all are 0: time would not advance.
    """

    base: float
    per_prefill_token: float = 0.0
    per_decode_row: float = 0.0
    per_context_token: float = 0.0

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            non_negative(name, getattr(self, name), "pass seconds")
        if not any(getattr(self, name) for name in _COEFFICIENTS):
            raise ValueError("a step must take time, got 0 for all four; pass base in seconds")

    def of(self, done: StepWork) -> float:
        """Return the seconds that this work takes."""
        return (
            self.base * done.forwards
            + self.per_prefill_token * done.prefill
            + self.per_decode_row * done.decode
            + self.per_context_token * done.context
        )

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds that a plan takes; 0 if it reads nothing."""
        return self.of(work(plan.chunks, plan.decodes, idle=plan.rests))


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFit:
    """A cost model fitted to measured steps.

    works, seconds: the steps that were used. residuals: (seconds - fitted) / fitted for each step;
    `simulate` can draw from them to add noise.
    """

    cost: CostModel
    works: tuple[StepWork, ...]
    seconds: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def problem(self) -> str:
        """Why the costs must not be used or published, or "".

        A forward, a prompt token or a decoded token that costs nothing means that the steps don't
        tell the costs apart.
        """
        seen = {
            "a forward": (1, self.cost.base),
            "a prompt token": (max(one.prefill for one in self.works), self.cost.per_prefill_token),
            "a decoded token": (max(one.decode for one in self.works), self.cost.per_decode_row),
        }
        free = [name for name, (count, cost) in seen.items() if count and not cost]
        if not free:
            return ""
        return (
            f"each of a step's parts must cost time, but the fit gives 0 for {' and '.join(free)}: "
            "the steps are too alike to tell their costs apart; fit to a run with more varied "
            "requests"
        )

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
        """The fitted seconds of all steps divided by the measured ones."""
        return math.fsum(map(self.cost.of, self.works)) / math.fsum(self.seconds)


_ROUNDS = 20


def fit_costs(records: Sequence[StepRecord], *, skip: int = 0) -> CostFit:
    """Fit the four non-negative coefficients to an engine's steps by relative least squares.

    skip: number of warmup steps to omit.

    Errors are relative to the fitted time, which is updated over several rounds. If they were
    relative to the measured time, a slow step would count less than a fast one, and the total would
    be too small. (This is the quasi-likelihood for a deviation proportional to the mean:
    Wedderburn, 1974, Biometrika 61.) A coefficient is 0 if its quantity never occurs or if the
    others explain the times better. If noise gives a decoded token's whole cost to its context,
    the context is left out of the fit.
    Raises ValueError if there are fewer than four steps with work, or a time isn't above 0.
    """
    used = [record for record in records[skip:] if record.chunks or record.decodes]
    if len(used) < 4:
        raise ValueError(
            f"fit needs at least four steps with work, one per coefficient, got {len(used)}; "
            "run more requests"
        )
    from scipy.optimize import nnls  # here, because it would double labcore.serving's import time

    works = [work(one.chunks, one.decodes, idle=one.idle) for one in used]
    features = numpy.array([astuple(done) for done in works], dtype=numpy.float64)
    seconds = numpy.array([float(positive("seconds", one.seconds)) for one in used])
    scale = numpy.maximum(features.max(axis=0), 1.0)  # so that no column dwarfs another

    def solve(columns: int) -> dict[str, float]:
        part, weights = features[:, :columns] / scale[:columns], seconds
        for _ in range(_ROUNDS):
            solved, _rest = nnls(part / weights[:, None], seconds / weights)
            # An intermediate fit may be 0 for a step, and no error is relative to 0.
            weights = numpy.maximum(part @ solved, 1e-6 * seconds)
        found = (solved / scale[:columns]).tolist()
        return dict(zip(_COEFFICIENTS, found, strict=False))

    costs = solve(4)
    # Rows and their context grow together. Only the rows' own cost is large enough to be certain.
    if features[:, 2].any() and not costs["per_decode_row"]:
        costs = solve(3)
    cost = CostModel(**costs)
    times = [cost.of(done) for done in works]
    return CostFit(
        cost=cost,
        works=tuple(works),
        seconds=tuple(seconds.tolist()),
        residuals=tuple((took - t) / t for took, t in zip(seconds.tolist(), times, strict=True)),
    )
