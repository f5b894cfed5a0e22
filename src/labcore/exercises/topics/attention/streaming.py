"""One step of a softmax that sees its keys tile by tile and keeps a mean, not a sum."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["ADD_TILE"]

BASES = (1.5, 2.0, 3.0, 4.0, 5.0, 10.0)
FAR = 3000.0  # a score whose power of any base overflows in float64


def add_tile(
    top: Tensor, total: Tensor, mean: Tensor, scores: Tensor, values: Tensor, *, base: float
) -> tuple[Tensor, Tensor, Tensor]:
    """top [R], total [R] and mean [R, D] with S more keys: scores [R, S], values [S, D]."""
    new_top = torch.maximum(top, scores.amax(1))
    shift = new_top.masked_fill(new_top == -torch.inf, 0.0)  # -inf less -inf would be NaN
    weights = base ** (scores - shift[:, None])
    kept = total * base ** (top - shift)
    new_total = kept + weights.sum(1)
    sums = kept[:, None] * mean + weights @ values
    return new_top, new_total, sums / new_total.masked_fill(new_total == 0, 1.0)[:, None]


def _faulty_top(top: Tensor, scores: Tensor, fault: str) -> Tensor:
    if fault == "top of the tile":
        return scores.amax(1)
    if fault == "one top for all rows":
        return torch.maximum(top, scores.max())
    return torch.maximum(top, scores.amax(1))


def _faulty_factors(fault: str, base: float) -> tuple[float, float]:
    """The bases of a tile's weights and of the rescaling."""
    weights = math.e if fault == "natural base" else base
    return weights, math.e if fault == "natural rescaling" else weights


def _wrongly(fault: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def step(
        top: Tensor, total: Tensor, mean: Tensor, scores: Tensor, values: Tensor, *, base: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        new_top = _faulty_top(top, scores, fault)
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        if fault == "infinity less infinity":
            shift = new_top
        if fault == "no shift":
            shift = torch.zeros_like(new_top)
        if fault == "tile's own reference":
            own = scores.amax(1)
            shift = torch.where(own == -torch.inf, shift, own)
        of_weights, of_rescaling = _faulty_factors(fault, base)
        weights = of_weights ** (scores - shift[:, None])
        rescale = of_rescaling ** (top - shift)
        if fault in ("nothing rescaled", "no shift"):
            rescale = torch.ones_like(rescale)
        if fault == "rescaled the wrong way":
            rescale = of_rescaling ** (shift - top)
        kept = total * rescale
        new_total = weights.sum(1) + (total if fault == "total not rescaled" else kept)
        before = total if fault == "sums not rescaled" else kept
        sums = before[:, None] * mean + weights @ values
        if fault == "tile's own reference":
            rest = base ** (shift - new_top.masked_fill(new_top == -torch.inf, 0.0))
            new_total, sums = new_total * rest, sums * rest[:, None]
        if fault == "mean taken for a sum":
            sums = rescale[:, None] * mean + weights @ values
        divisor = new_total
        if fault not in ("infinity less infinity", "zero by zero"):
            divisor = new_total.masked_fill(new_total == 0, 1.0)
        new_mean = sums if fault == "sums returned" else sums / divisor[:, None]
        if fault == "halves":
            own = weights.sum(1, keepdim=True)
            tile = weights @ values / own.masked_fill(own == 0, 1.0)
            new_mean = torch.where((total == 0)[:, None], tile, (mean + tile) / 2)
        return new_top, new_total, new_mean

    return step


def _state(rows: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Rows that have seen some keys; their largest score is near 0."""
    normal = torch.randn(rows, width + 1, generator=draw, dtype=torch.float64)
    total = 1 + 4 * torch.rand(rows, generator=draw, dtype=torch.float64)
    return {"top": normal[:, 0] / 2, "total": total, "mean": normal[:, 1:] + 1}


def _forget(case: dict[str, Tensor], rows: list[int]) -> None:
    """Makes `rows` new: they have seen no key."""
    case["top"][rows], case["total"][rows], case["mean"][rows] = -torch.inf, 0.0, 0.0


def _cases(seed: int) -> list[dict[str, Any]]:
    """Tiles above and below what was seen, then new rows, hidden keys, and scores far from zero."""
    draw = torch.Generator().manual_seed(seed)
    cases = []
    for rows, keys, width, level in (
        (2, 4, 1, 1.5), (3, 5, 2, -1.5), (5, 3, 3, 0.0), (3, 6, 2, 0.0), (5, 4, 2, 0.0),
        (4, 5, 2, 0.0),
    ):  # fmt: skip
        case = _state(rows, width, draw)
        case["scores"] = level + torch.randn(rows, keys, generator=draw, dtype=torch.float64) / 2
        case["values"] = torch.randn(keys, width, generator=draw, dtype=torch.float64) - 1
        cases.append(case)
    *_, new, hidden, far = cases
    _forget(new, [0, 2])
    # Nothing new for row 0, nothing at all for row 1, a first sight for row 2.
    _forget(hidden, [1, 2])
    hidden["scores"][:2] = -torch.inf
    hidden["scores"][2:, 1] = -torch.inf
    # What was seen and the tile far from zero together, then far from each other both ways.
    far["top"] += torch.tensor([FAR, -FAR, FAR, -FAR], dtype=torch.float64)
    far["scores"] += torch.tensor([[FAR], [-FAR], [-FAR], [FAR]], dtype=torch.float64)
    return cases


def _own_base(student: int) -> Mapping[str, Any]:
    return {"base": random.Random(f"attention.add_tile:{student}").choice(BASES)}


_HINTS = {
    "nothing rescaled": "What was summed before is left as it was. It was summed with another "
    "largest score: where that one grows, all weights so far shrink by the same factor.",
    "total not rescaled": "The weighted values of the earlier keys are rescaled, their sum of "
    "weights is not. Both were made with the old largest score.",
    "sums not rescaled": "The sum of weights is rescaled, the weighted values of the earlier keys "
    "are not. Where all values are 1 the mean must be 1: try it.",
    "rescaled the wrong way": "The earlier keys grow where they should shrink. A new largest score "
    "makes each earlier weight smaller, never larger.",
    "mean taken for a sum": "The mean so far enters like a sum of weighted values. It was divided "
    "by the total already: how much weight does it stand for?",
    "sums returned": "Your third result is the sum of the weighted values. The mean is asked for, "
    "after every tile.",
    "halves": "The earlier keys and the tile count half each. A tile of small weights should "
    "hardly move the mean.",
    "top of the tile": "Your mean is right, but your largest score is that of the tile alone, "
    "and your total belongs to it. The largest score of all keys so far is asked for.",
    "one top for all rows": "All rows take one largest score, that of the whole tile. Each "
    "row has its own; where the rows stand far apart, all weights of the lower ones become 0.",
    "no shift": "The weights are powers of the scores themselves. The total is defined with the "
    "largest score taken away, and without that a score of 3000 overflows.",
    "tile's own reference": "The weights are taken relative to the largest score of the tile. "
    "Where the keys before it stand thousands above, what they weigh overflows: no exponent may be "
    "far above 0.",
    "natural base": "The weights are powers of e. They are to be powers of `base`.",
    "natural rescaling": "The tile's weights are powers of `base`, but the earlier keys are "
    "rescaled by a power of e.",
    "infinity less infinity": "A row that has not seen any key yet, and sees none in this tile, "
    "becomes NaN: its largest score is -inf, and -inf less -inf is NaN.",
    "zero by zero": "The mean of a row that has seen no key is 0/0, which is NaN. It is to stay 0.",
}

ADD_TILE = Exercise(
    id="attention.add_tile",
    reference=add_tile,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_base,
    returns=("top", "total", "mean"),
    rtol=1e-9,
    atol=1e-12,
    explanation="The state stands for weights base**(score - top). A larger top makes each of them "
    "smaller by base**(top - new_top), and so their sum: `kept` is what the earlier keys weigh. "
    "The mean needs no rescaling, a common factor does not move it; it enters the new one with the "
    "weight `kept`. FlashAttention keeps the sum, total * mean, which is rescaled instead and "
    "divided once at the end: one division a row in place of one a tile. A row that has seen "
    "nothing has the top -inf, and any finite number in its place gives weights of 0.",
)
