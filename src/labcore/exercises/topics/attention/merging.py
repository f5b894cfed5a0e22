"""Merge attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["MERGE_PARTS"]

FAR = 5000.0  # 2**FAR overflows in float64


def merge_parts(out: Tensor, lse: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Merge out [K, R, D] and lse [K, R] of K parts, each counted once, into [R, D] and [R]."""
    del count
    empty = lse == -torch.inf
    top = lse.amax(0)
    top = top.masked_fill(empty.all(0), 0.0)  # -inf - -inf would be NaN
    weights = torch.exp2(lse - top)
    total = weights.sum(0)
    known = out.masked_fill(empty[..., None], 0.0)  # 0 * NaN would be NaN
    sums = (weights[..., None] * known).sum(0)
    divisor = total.masked_fill(total == 0, 1.0)
    return sums / divisor[:, None], top + total.log2()


def _one_by_one(out: Tensor, lse: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Merge part after part, but carry the larger of two log-sum-exps on."""
    so_far, so_far_lse = torch.zeros_like(out[0]), torch.full_like(lse[0], -torch.inf)
    for part, part_lse in zip(out, lse, strict=True):
        pair = torch.stack((so_far, part)), torch.stack((so_far_lse, part_lse))
        so_far, _ = merge_parts(*pair, count[:2])
        so_far_lse = torch.maximum(so_far_lse, part_lse)
    return so_far, so_far_lse


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw two or more parts, then parts without keys, and log-sum-exps far from zero.

    The output of an empty part is NaN, as uninitialized memory may be.
    """
    draw = torch.Generator().manual_seed(seed)
    cases = []
    for parts, rows, width in ((2, 3, 2), (3, 2, 1), (5, 4, 3), (4, 3, 2), (3, 6, 2), (3, 4, 2)):
        out = torch.randn(parts, rows, width, generator=draw, dtype=torch.float64) + 1
        lse = 2 + 1.5 * torch.randn(parts, rows, generator=draw, dtype=torch.float64)
        cases.append({"out": out, "lse": lse, "count": torch.ones(parts, dtype=torch.float64)})
    *_, one_empty, empties, far = cases
    # One part without keys; then rows where none, one, two or all of the parts have no keys.
    gaps = torch.zeros(4, 3, dtype=torch.bool)
    gaps[1] = True
    _empty(one_empty, gaps)
    _empty(empties, torch.tensor([[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]]) > 0)
    # All parts of a row far from zero together, or far from each other.
    far["lse"] += FAR * torch.tensor([[1, -1, 1, -1], [1, -1, -1, 1], [1, -1, 1, -1]]).double()
    return cases


def _empty(case: dict[str, Any], where: Tensor) -> None:
    case["lse"][where] = -torch.inf
    case["out"][where] = torch.nan


_MISTAKES = [
    Mistake("parts as equals",
            [("weights[..., None] * known", "known"),
             ("total.masked_fill(total == 0, 1.0)", "(~empty).sum(0).clamp(min=1)")],
            "Each part counts as much as any other. One that saw the keys with the large scores "
            "has most of the weight: its log-sum-exp says how much."),
    Mistake("natural base", [("torch.exp2(lse - top)", "torch.exp(lse - top)"), ("log2", "log")],
            "You take powers and logarithms of e. The log-sum-exp here is to base 2."),
    Mistake("logarithm of base e", ("log2", "log"),
            "Your output is right. Of the log-sum-exp, the part that the largest one leaves is a "
            "natural logarithm; it is to base 2 as well."),
    Mistake("largest returned", ("top + total.log2()", "lse.amax(0)"),
            "Your output is right, but your log-sum-exp is the largest of the parts'. Two parts "
            "that weigh the same weigh twice as much together."),
    Mistake("larger one carried on", _one_by_one,
            "You merge part after part and carry the larger log-sum-exp on. What is carried on "
            "must weigh as much as all parts so far, or a later part gets too much."),
    Mistake("logarithms as weights",
            [("torch.exp2(lse - top)", "lse.masked_fill(empty, 0.0)"),
             ("top + total.log2()", "total.masked_fill(empty.all(0), -torch.inf)")],
            "The log-sum-exps themselves are your weights. They are logarithms of weights, and "
            "may be negative."),
    Mistake("not divided", ("sums / divisor[:, None]", "sums"),
            "Your output is a sum of weighted outputs. Weights that are relative to the largest "
            "one do not add up to 1."),
    Mistake("no shift", ("lse.amax(0)", "torch.zeros_like(lse[0])"),
            "You take 2 to the power of the log-sum-exps as they are, and 2 to the power of 5000 "
            "overflows, to the power of -5000 it is 0. Only their differences matter."),
    Mistake("one top for all rows", ("lse.amax(0)", "lse.max().expand_as(lse[0])"),
            "One largest log-sum-exp is taken from all rows. Where the rows stand far apart all "
            "weights of the lower ones become 0."),
    Mistake("empty parts weighed", ("exp2(lse - top)", "exp2(lse - top).masked_fill(empty, 1.0)"),
            "A part that has no keys still has a weight. Its log-sum-exp is -inf, which is the "
            "logarithm of 0."),
    Mistake("zero times NaN", ("out.masked_fill(empty[..., None], 0.0)", "out"),
            "What an empty part's output holds reaches your result. A weight of 0 does not help: "
            "0 times NaN is NaN."),
    Mistake("zero times NaN, empty queries cleared",
            [("out.masked_fill(empty[..., None], 0.0)", "out"),
             ("sums / divisor[:, None]",
              "(sums / divisor[:, None]).masked_fill(empty.all(0)[:, None], 0.0)")],
            "You clear the output only where a query sees no key in any part. Where it sees keys "
            "in some parts, a NaN from an empty part still reaches your result: 0 times NaN is "
            "NaN."),
    Mistake("nothing guarded",
            [("top.masked_fill(empty.all(0), 0.0)", "top"),
             ("out.masked_fill(empty[..., None], 0.0)", "out")],
            "Parts and queries without keys become NaN in two ways: a weight of 0 does not help "
            "against a NaN in an empty part's output, for 0 times NaN is NaN, and where no part "
            "has keys -inf less -inf is NaN."),
    Mistake("infinity less infinity", ("top.masked_fill(empty.all(0), 0.0)", "top"),
            "Where no part has keys your result is NaN: -inf less -inf. It is to be 0, with the "
            "log-sum-exp -inf."),
    Mistake("zero by zero", ("total.masked_fill(total == 0, 1.0)", "total"),
            "Where no part has keys your output is 0/0, which is NaN. It is to be 0."),
]  # fmt: skip

MERGE_PARTS = Exercise(
    id="attention.merge_parts",
    points=4,
    beyond=2,
    reference=merge_parts,
    mistakes=_MISTAKES,
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
    hints=(
        "In the example, how do the weights 2 and 4 follow from the log-sum-exps 1 and 2? Then "
        "ask what your calculation does if both log-sum-exps are larger by 5,000.",
        "Subtract the largest log-sum-exp of each query before you take powers of 2, and add it "
        "again to the logarithm of the summed weights. Two things must become 0 before you use "
        "them: that largest log-sum-exp where a query sees no key at all, and the output of an "
        "empty part.",
        "`known = out.masked_fill((lse == -torch.inf)[..., None], 0.0)` clears the outputs of "
        "empty parts, since 0 times NaN is NaN. Where the weights of a query add up to 0, divide "
        "by 1.",
    ),
)
