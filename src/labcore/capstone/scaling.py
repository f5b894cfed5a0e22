"""The loss that a plan should reach, by a formula fitted to recorded runs.

L(N, D) = E + A / N^0.35 + B / D^0.37 for N weights and D tokens. Source: the form is that of
Hoffmann et al., 2022, arXiv 2203.15556, the exponents those of Besiroglu et al., 2024,
arXiv 2404.10102; E, A and B are fitted to our runs on Python's library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from labcore import records

__all__ = ["Recorded", "ScalingLaw", "recorded_runs", "scaling_law"]

ALPHA, BETA = 0.35, 0.37


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recorded run: its weights, the tokens that it read, and bits per byte of held-out text."""

    weights: int
    tokens: int
    bits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """The fitted formula. All numbers are in bits per byte.

    floor: E. by_weights, by_tokens: A and B. worst: the largest error among the runs of the fit.
    """

    floor: float
    by_weights: float
    by_tokens: float
    worst: float

    @classmethod
    def fitted(cls, runs: Iterable[Recorded]) -> ScalingLaw:
        """Fit it by least squares. Raises ValueError for fewer than four runs."""
        runs = list(runs)
        if len(runs) < 4:
            raise ValueError(f"runs must be at least four, got {len(runs)}; record more")
        terms = np.array([[1.0, one.weights**-ALPHA, one.tokens**-BETA] for one in runs])
        bits = np.array([one.bits for one in runs])
        found = np.linalg.lstsq(terms, bits, rcond=None)[0]
        floor, by_weights, by_tokens = map(float, found)
        worst = float(np.abs(terms @ found - bits).max())
        return cls(floor=floor, by_weights=by_weights, by_tokens=by_tokens, worst=worst)

    def __call__(self, weights: float, tokens: float) -> float:
        """Return the predicted bits per byte of held-out text."""
        return self.floor + self.by_weights * weights**-ALPHA + self.by_tokens * tokens**-BETA


def recorded_runs() -> list[Recorded]:
    """Return the runs that `python -m benchmarks capstone` recorded, for the formula."""
    return [
        Recorded(weights=one.details["weights"], tokens=one.details["tokens"], bits=one.p50)
        for one in records.load("capstone")
        if one.case.startswith("scaling/")
    ]


@functools.cache
def scaling_law() -> ScalingLaw:
    """Return the formula fitted to all recorded runs."""
    return ScalingLaw.fitted(recorded_runs())
