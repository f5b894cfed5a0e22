"""Diagnose five broken forms of tiled attention from their errors at every number of keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labcore.exercises.clinic import Clinic, Fault

__all__ = ["CLINIC", "Stream"]

TILE = 8
KEYS = range(TILE, 9 * TILE + 1)  # the lengths that the curves show
SLOPE = 0.08  # difference between the scores of neighboring keys
DIGITS = 10  # decimals kept, so that the curves do not show rounding errors


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Attention of one query, tile by tile.

    total_rescaled, sums_rescaled: whether a new largest score rescales the earlier sum.
    empty_counted: whether the empty places of the last tile count as keys; their scores and values
    are 0.
    short_tile: whether a last tile that is not full is computed.
    """

    total_rescaled: bool = True
    sums_rescaled: bool = True
    empty_counted: bool = False
    short_tile: bool = True

    def attend(self, scores: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
        """Return the output and the log-sum-exp."""
        top, total, sums = -math.inf, 0.0, 0.0
        for first in range(0, len(scores), TILE):
            tile = list(zip(scores, values, strict=True))[first : first + TILE]
            if len(tile) < TILE and not self.short_tile:
                break
            if self.empty_counted:
                tile += [(0.0, 0.0)] * (TILE - len(tile))
            new_top = max(top, *(score for score, _ in tile))
            rescale = math.exp(top - new_top)
            weights = [math.exp(score - new_top) for score, _ in tile]
            total = total * (rescale if self.total_rescaled else 1) + sum(weights)
            sums = sums * (rescale if self.sums_rescaled else 1)
            sums += sum(w * value for w, (_, value) in zip(weights, tile, strict=True))
            top = new_top
        return sums / total, top + math.log(total)


def _exact(scores: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    row = torch.tensor(scores, dtype=torch.float64)
    out = row.softmax(0) @ torch.tensor(values, dtype=torch.float64)
    return out.item(), row.logsumexp(0).item()


def _observe(stream: Stream) -> dict[str, list[float]]:
    """Attend over the first n keys, for each n of KEYS."""
    longest = max(KEYS)
    rising = [SLOPE * key for key in range(longest)]
    falling = [-score for score in rising]
    places = [key / longest for key in range(longest)]
    curves: dict[str, list[float]] = {
        "rising scores: output": [],
        "rising scores: error of the log-sum-exp": [],
        "falling scores: error of the output": [],
    }
    for n in KEYS:
        out, lse = stream.attend(rising[:n], [1.0] * n)
        _, right_lse = _exact(rising[:n], [1.0] * n)
        late, _ = stream.attend(falling[:n], places[:n])
        right_late, _ = _exact(falling[:n], places[:n])
        found = (out, lse - right_lse, late - right_late)
        for curve, value in zip(curves.values(), found, strict=True):
            curve.append(round(value, DIGITS) + 0.0)  # no -0
    return curves


CLINIC = Clinic(
    id="attention.clinic",
    points=5,
    healthy=Stream,
    faults={
        "nothing is rescaled": Fault(
            make=functools.partial(Stream, total_rescaled=False, sums_rescaled=False),
            symptom="with rising scores the log-sum-exp is too large, by more with every tile, "
            "since the weights of earlier tiles never shrink; the output for values of 1 is 1 all "
            "the same, because sums and total err alike. With falling scores nothing is wrong: the "
            "first tile has the largest score.",
        ),
        "the sums are not rescaled": Fault(
            make=functools.partial(Stream, sums_rescaled=False),
            symptom="with rising scores the output grows far beyond 1, which no weighted mean of "
            "ones can do; the log-sum-exp, made of the total alone, is right. With falling scores "
            "nothing is wrong.",
        ),
        "the total is not rescaled": Fault(
            make=functools.partial(Stream, total_rescaled=False),
            symptom="with rising scores the output falls far below 1 and the log-sum-exp is too "
            "large, both by the same total. With falling scores nothing is wrong.",
        ),
        "empty places are counted": Fault(
            make=functools.partial(Stream, empty_counted=True),
            symptom="saw teeth: nothing is wrong at the multiples of the tile, and most right "
            "behind them, where the last tile is nearly empty. A score of 0 is one of the largest "
            "where scores fall, and the harm stays; where they rise it is one of the smallest, "
            "and the harm goes away as keys are added.",
        ),
        "a short last tile is left out": Fault(
            make=functools.partial(Stream, short_tile=False),
            symptom="saw teeth: nothing is wrong at the multiples of the tile, and most right "
            "before the next one, where seven keys are missing. The log-sum-exp is too small, and "
            "with rising scores, where the last keys weigh most, it stays so.",
        ),
    },
    observe=_observe,
    axis=KEYS,
    unit="number of keys",
    explanation="Three of the patients are well as long as the first tile holds the largest score: "
    "a test whose scores fall, or that has one tile only, passes them all. Two are well at every "
    "multiple of the tile, which are the lengths one tries first. Weights that sum to 1 prove "
    "nothing either: where nothing is rescaled they do, and belong to the wrong keys. So a test "
    "needs scores that rise over several tiles, lengths that no tile divides, values that are not "
    "all alike, and a look at the log-sum-exp, which the backward pass uses.",
)
