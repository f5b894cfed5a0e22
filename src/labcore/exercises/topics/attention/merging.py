"""Attention over parts of the keys made into attention over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["MERGE_PARTS"]

FAR = 5000.0  # a log-sum-exp whose power of 2 overflows in float64


def merge_parts(out: Tensor, lse: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """out [R, D] and lse [R] from out [K, R, D] and lse [K, R] of K parts that count once each."""
    del count
    top = lse.amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)  # -inf less -inf would be NaN
    weights = torch.exp2(lse - top)
    total = weights.sum(0)
    known = out.masked_fill((lse == -torch.inf)[..., None], 0.0)  # 0 times NaN would be NaN
    sums = (weights[..., None] * known).sum(0)
    return sums / total.masked_fill(total == 0, 1.0)[:, None], top + total.log2()


def _one_by_one(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Part after part, where the log-sum-exp carried on is the larger of the two."""
    so_far, so_far_lse = torch.zeros_like(out[0]), torch.full_like(lse[0], -torch.inf)
    for part, part_lse in zip(out, lse, strict=True):
        pair = torch.stack((so_far, part)), torch.stack((so_far_lse, part_lse))
        so_far, _ = merge_parts(*pair, torch.ones(2))
        so_far_lse = torch.maximum(so_far_lse, part_lse)
    return so_far, so_far_lse


def _wrongly(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def merged(out: Tensor, lse: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        del count
        if fault == "larger one carried on":
            return _one_by_one(out, lse)
        empty = lse == -torch.inf
        top = lse.amax(0)
        if fault == "one top for all rows":
            top = lse.max().expand_as(top)
        if fault not in ("infinity less infinity", "nothing guarded"):
            top = top.masked_fill(top == -torch.inf, 0.0)
        if fault == "no shift":
            top = torch.zeros_like(top)
        weights = (lse - top).exp() if fault == "natural base" else torch.exp2(lse - top)
        if fault == "empty parts weighed":
            weights = weights.masked_fill(empty, 1.0)
        if fault == "logarithms as weights":
            weights = lse.masked_fill(empty, 0.0)
        total = weights.sum(0)
        shares = weights
        if fault == "parts as equals":
            shares = (~empty).to(weights.dtype)
        divisor = shares.sum(0)
        if fault not in ("zero by zero", "infinity less infinity"):
            divisor = divisor.masked_fill(divisor == 0, 1.0)
        known = out.masked_fill(empty[..., None], 0.0)
        if fault in ("zero times NaN", "nothing guarded"):
            known = out
        sums = (shares[..., None] * known).sum(0)
        if fault == "not divided":
            return sums, top + total.log2()
        new_lse = {
            "largest returned": top.masked_fill(total == 0, -torch.inf),
            "logarithm of base e": top + total.log(),
            "natural base": top + total.log(),
            "logarithms as weights": total.masked_fill(empty.all(0), -torch.inf),
        }.get(fault, top + total.log2())
        return sums / divisor[:, None], new_lse

    return merged


def _cases(seed: int) -> list[dict[str, Any]]:
    """Two parts and more, then parts without keys, and log-sum-exps far from zero.

    Where a part is empty its output is NaN, as memory may be that nobody wrote to. One part's keys
    are few, so that not all weigh the same.
    """
    draw = torch.Generator().manual_seed(seed)
    cases = []
    for parts, rows, width in ((2, 3, 2), (3, 2, 1), (5, 4, 3), (4, 3, 2), (3, 6, 2), (3, 4, 2)):
        out = torch.randn(parts, rows, width, generator=draw, dtype=torch.float64) + 1
        lse = 2 + 1.5 * torch.randn(parts, rows, generator=draw, dtype=torch.float64)
        cases.append({"out": out, "lse": lse, "count": torch.ones(parts, dtype=torch.float64)})
    *_, one_empty, empties, far = cases
    # A part without keys; then rows with none, one and two such parts, and with nothing else.
    gaps = torch.zeros(4, 3, dtype=torch.bool)
    gaps[1] = True
    _empty(one_empty, gaps)
    _empty(empties, torch.tensor([[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]]) > 0)
    # All parts far from zero together, then far from each other.
    far["lse"] += FAR * torch.tensor([[1, -1, 1, -1], [1, -1, -1, 1], [1, -1, 1, -1]]).double()
    return cases


def _empty(case: dict[str, Any], where: Tensor) -> None:
    case["lse"][where] = -torch.inf
    case["out"][where] = torch.nan


_HINTS = {
    "parts as equals": "Each part counts as much as any other. One that saw the keys with the "
    "large scores has most of the weight: its log-sum-exp says how much.",
    "natural base": "You take powers and logarithms of e. The log-sum-exp here is to base 2.",
    "logarithm of base e": "Your output is right. Of the log-sum-exp, the part that the largest "
    "one leaves is a natural logarithm; it is to base 2 as well.",
    "largest returned": "Your output is right, but your log-sum-exp is the largest of the parts'. "
    "Two parts that weigh the same weigh twice as much together.",
    "larger one carried on": "You merge part after part and carry the larger log-sum-exp on. What "
    "is carried on must weigh as much as all parts so far, or a later part gets too much.",
    "logarithms as weights": "The log-sum-exps themselves are your weights. They are logarithms of "
    "weights, and may be negative.",
    "not divided": "Your output is a sum of weighted outputs. Weights that are relative to the "
    "largest one do not add up to 1.",
    "no shift": "You take 2 to the power of the log-sum-exps as they are, and 2 to the power of "
    "5000 overflows, to the power of -5000 it is 0. Only their differences matter.",
    "one top for all rows": "One largest log-sum-exp is taken from all rows. Where the rows stand "
    "far apart all weights of the lower ones become 0.",
    "empty parts weighed": "A part that has no keys still has a weight. Its log-sum-exp is -inf, "
    "which is the logarithm of 0.",
    "zero times NaN": "What an empty part's output holds reaches your result. A weight of 0 does "
    "not help: 0 times NaN is NaN.",
    "nothing guarded": "Parts and queries without keys become NaN in two ways: a weight of 0 does "
    "not help against a NaN in an empty part's output, for 0 times NaN is NaN, and where no part "
    "has keys -inf less -inf is NaN.",
    "infinity less infinity": "Where no part has keys your result is NaN: -inf less -inf. It is to "
    "be 0, with the log-sum-exp -inf.",
    "zero by zero": "Where no part has keys your output is 0/0, which is NaN. It is to be 0.",
}

MERGE_PARTS = Exercise(
    id="attention.merge_parts",
    reference=merge_parts,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("out", "lse"),
    rtol=1e-9,
    atol=1e-12,
    explanation="2 to the power of a part's log-sum-exp is the sum of its weights, so a part's "
    "output counts with that weight, and the weights' sum is that of all keys. Only differences of "
    "the logarithms are raised to a power, row by row, so nothing overflows, and the largest part "
    "of a row has the weight 1. An empty part has the weight 0 and its output must be replaced, "
    "since 0 * NaN is NaN. This reference takes all counts as 1. With others, ask what a count "
    "multiplies, a logarithm or that of which it is the logarithm, and which parts have a say in "
    "the largest one.",
)
