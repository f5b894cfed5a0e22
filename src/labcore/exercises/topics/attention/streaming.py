"""Add one tile of keys to an online softmax that keeps a mean instead of a sum."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["ADD_TILE"]

BASES = (1.5, 2.0, 3.0, 4.0, 5.0, 10.0)
FAR = 3000.0  # base**FAR overflows in float64 for each base


def add_tile(
    top: Tensor, total: Tensor, mean: Tensor, scores: Tensor, values: Tensor, *, base: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Update top [R], total [R], mean [R, D] with S more keys: scores [R, S], values [S, D]."""
    new_top = torch.maximum(top, scores.amax(1))
    shift = new_top.masked_fill(new_top == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weights = base ** (scores - shift[:, None])
    kept = total * base ** (top - shift)
    new_total = weights.sum(1) + kept
    sums = kept[:, None] * mean + weights @ values
    return new_top, new_total, sums / new_total.masked_fill(new_total == 0, 1.0)[:, None]


def _state(rows: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Draw rows that have seen some keys and whose largest score is near 0."""
    normal = torch.randn(rows, width + 1, generator=draw, dtype=torch.float64)
    total = 1 + 4 * torch.rand(rows, generator=draw, dtype=torch.float64)
    return {"top": normal[:, 0] / 2, "total": total, "mean": normal[:, 1:] + 1}


def _forget(case: dict[str, Tensor], rows: list[int]) -> None:
    """Make `rows` new, without any key seen."""
    case["top"][rows], case["total"][rows], case["mean"][rows] = -torch.inf, 0.0, 0.0


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw tiles above and below the state, then new rows, hidden keys, and far scores."""
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
    # Row 0 sees nothing new, row 1 still sees nothing, and row 2 sees its first keys.
    _forget(hidden, [1, 2])
    hidden["scores"][:2] = -torch.inf
    hidden["scores"][2:, 1] = -torch.inf
    # State and tile are far from zero together, then far from each other both ways.
    far["top"] += torch.tensor([FAR, -FAR, FAR, -FAR], dtype=torch.float64)
    far["scores"] += torch.tensor([[FAR], [-FAR], [-FAR], [FAR]], dtype=torch.float64)
    return cases


def _own_base(student: int) -> Mapping[str, Any]:
    return {"base": random.Random(f"attention.add_tile:{student}").choice(BASES)}


_MISTAKES = [
    Mistake("nothing rescaled", ("total * base ** (top - shift)", "total"),
            "What was summed before is left as it was. It was summed with another largest score: "
            "where that one grows, all weights so far shrink by the same factor."),
    Mistake("total not rescaled", ("sum(1) + kept", "sum(1) + total"),
            "The weighted values of the earlier keys are rescaled, their sum of weights is not. "
            "Both were made with the old largest score."),
    Mistake("sums not rescaled", ("kept[:, None] * mean", "total[:, None] * mean"),
            "The sum of weights is rescaled, the weighted values of the earlier keys are not. "
            "Where all values are 1 the mean must be 1: try it."),
    Mistake("rescaled the wrong way", ("top - shift", "shift - top"),
            "The earlier keys grow where they should shrink. A new largest score makes each "
            "earlier weight smaller, never larger."),
    Mistake("mean taken for a sum",
            ("kept[:, None] * mean", "(base ** (top - shift))[:, None] * mean"),
            "The mean so far enters like a sum of weighted values. It was divided by the total "
            "already: how much weight does it stand for?"),
    Mistake("sums returned", ("sums / new_total.masked_fill(new_total == 0, 1.0)[:, None]", "sums"),
            "Your third result is the sum of the weighted values. The mean is asked for, after "
            "every tile."),
    Mistake("halves",
            [("sums = kept[:, None] * mean + weights @ values",
              "own = weights.sum(1, keepdim=True)\n"
              "    tile = weights @ values / own.masked_fill(own == 0, 1.0)"),
             ("sums / new_total.masked_fill(new_total == 0, 1.0)[:, None]",
              "torch.where((total == 0)[:, None], tile, (mean + tile) / 2)")],
            "The earlier keys and the tile count half each. A tile of small weights should hardly "
            "move the mean."),
    Mistake("top of the tile", ("torch.maximum(top, scores.amax(1))", "scores.amax(1)"),
            "Your mean is right, but your largest score is that of the tile alone, and your total "
            "belongs to it. The largest score of all keys so far is asked for."),
    Mistake("one top for all rows", ("scores.amax(1)", "scores.max()"),
            "All rows take one largest score, that of the whole tile. Each row has its own; where "
            "the rows stand far apart, all weights of the lower ones become 0."),
    Mistake("no shift",
            [("new_top.masked_fill(new_top == -torch.inf, 0.0)", "torch.zeros_like(new_top)"),
             ("total * base ** (top - shift)", "total")],
            "The weights are powers of the scores themselves. The total is defined with the "
            "largest score taken away, and without that a score of 3000 overflows."),
    Mistake("tile's own reference",
            [("    weights =", "    own, usual = scores.amax(1), shift\n"
              "    shift = torch.where(own == -torch.inf, usual, own)\n    weights ="),
             ("    return", "    back = base ** (shift - usual)\n"
              "    new_total, sums = new_total * back, sums * back[:, None]\n    return")],
            "The weights are taken relative to the largest score of the tile. Where the keys "
            "before it stand thousands above, what they weigh overflows: no exponent may be far "
            "above 0."),
    Mistake("natural base", ("    new_top =", "    base = torch.e\n    new_top ="),
            "The weights are powers of e. They are to be powers of `base`."),
    Mistake("natural rescaling", ("base ** (top", "torch.e ** (top"),
            "The tile's weights are powers of `base`, but the earlier keys are rescaled by a "
            "power of e."),
    Mistake("infinity less infinity",
            ("new_top.masked_fill(new_top == -torch.inf, 0.0)", "new_top"),
            "A row that has not seen any key yet, and sees none in this tile, becomes NaN: its "
            "largest score is -inf, and -inf less -inf is NaN."),
    Mistake("zero by zero", ("new_total.masked_fill(new_total == 0, 1.0)", "new_total"),
            "The mean of a row that has seen no key is 0/0, which is NaN. It is to stay 0."),
]  # fmt: skip

ADD_TILE = Exercise(
    id="attention.add_tile",
    points=4,
    reference=add_tile,
    mistakes=_MISTAKES,
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
    hints=(
        "In the example, the old key has the weight 1 while the top is 3. What is its weight once "
        "the top is 5, and how much does the old mean count beside the new value?",
        "All earlier weights shrink by the same factor, which is `base` to the power of the old "
        "top minus the new top. The old mean enters the new one like a single value whose weight "
        "is the total after this shrinking.",
        "`kept = total * base ** (top - shift)` is the weight of the earlier keys. Here `shift` "
        "is the new top, or 0 where the new top is −inf, and the weights of the tile use the same "
        "`shift`. Where the new total is 0, divide by 1.",
    ),
)
