"""Split a linear layer by rows of its transposed weight: forward, bias and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["NOBODYS", "RANKS", "ROW", "drawn"]

NOBODYS = 2
RANKS = (3, 4, 6, 8)  # for numbered students
UNIT = 24  # every number of ranks divides it
_Lists = tuple[list[Tensor], ...]


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor, scattered: bool, *, ranks: int
) -> _Lists:
    """Return per rank: summands [B, C], outputs [B, C], gradients [B, F / N], [C, F / N], [C]."""
    del scattered
    inputs, weights = x.chunk(ranks, 1), weight.chunk(ranks, 1)
    summands = [one @ part.T for one, part in zip(inputs, weights, strict=True)]
    output = torch.stack(summands).sum(0) + bias
    return (
        summands,
        [output] * ranks,
        [upstream @ part for part in weights],
        [upstream.T @ one for one in inputs],
        [upstream.sum(0)] * ranks,
    )


def _columns(x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor, ranks: int) -> _Lists:
    """Split the layer by columns: each rank has its own outputs."""
    weights, biases = weight.tensor_split(ranks), bias.tensor_split(ranks)
    above = upstream.tensor_split(ranks, 1)
    outputs = [x @ one.T + b for one, b in zip(weights, biases, strict=True)]
    return (
        outputs,
        [torch.cat(outputs, 1)] * ranks,
        [up @ one for up, one in zip(above, weights, strict=True)],
        [up.T @ x for up in above],
        [up.sum(0) for up in above],
    )


def _bias_gradients(fault: str, upstream: Tensor, ranks: int) -> list[Tensor]:
    whole = upstream.sum(0)
    if fault == "bias gradient of the mean":
        whole = upstream.mean(0)
    if fault in ("bias gradients summed", "backward sums again"):
        whole = whole * ranks
    if fault in ("bias gradient shared out", "gradients averaged"):
        whole = whole / ranks
    if fault == "bias gradient on one rank":
        return [whole, *[torch.zeros_like(whole)] * (ranks - 1)]
    return [whole] * ranks


def _wrongly(fault: str) -> Callable[..., _Lists]:
    def answer(
        x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor, scattered: bool, *, ranks: int
    ) -> _Lists:
        del scattered
        if fault == "column where row":
            return _columns(x, weight, bias, upstream, ranks)
        inputs, weights = [*x.chunk(ranks, 1)], [*weight.chunk(ranks, 1)]
        if fault == "every N-th feature":
            inputs = [x[:, rank::ranks] for rank in range(ranks)]
            weights = [weight[:, rank::ranks] for rank in range(ranks)]
        if fault == "parts that do not belong":
            inputs.reverse()
        summands = [one @ part.T for one, part in zip(inputs, weights, strict=True)]
        if fault == "bias on every rank":
            summands = [one + bias for one in summands]
        if fault == "bias in one summand":
            summands[0] = summands[0] + bias
        total = torch.stack(summands).sum(0)
        if fault == "mean":
            total = total / ranks
        if not fault.startswith("bias ") or fault.startswith("bias gradient"):
            total = total + bias
        outputs = [total] * ranks
        if fault == "not summed":
            outputs = [one + bias for one in summands]
        if fault == "side by side":
            outputs = [torch.cat(summands, 1) + bias.repeat(ranks)] * ranks
        times = {
            "backward sums again": ranks,
            "upstream summed": ranks,
            "gradients averaged": 1 / ranks,
        }.get(fault, 1)
        x_parts = [times * upstream @ part for part in weights]
        if fault == "whole gradient of x":
            x_parts = [upstream @ weight] * ranks
        w_parts = [times * upstream.T @ one for one in inputs]
        if fault == "gradient transposed":
            w_parts = [one.T for one in w_parts]
        return summands, outputs, x_parts, w_parts, _bias_gradients(fault, upstream, ranks)

    return answer


def drawn(draw: torch.Generator, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Draw the tensors of a layer in float64."""

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return {
        "x": some(rows, inputs),
        "weight": some(outputs, inputs),
        "bias": 3 + some(outputs),
        "upstream": some(rows, outputs),
        "scattered": False,
    }


def _cases(seed: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((3, UNIT, 5), (1, 2 * UNIT, 9), (7, UNIT, 2 * UNIT))  # B, F, C
    return [drawn(draw, *shape) for shape in shapes]


def _own_ranks(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"tensor_parallel.row:{student}")
    return {"ranks": chance.choice(RANKS) if student else NOBODYS}


_HINTS = {
    "bias on every rank": "Each of your ranks adds the bias to its summand, and their sum has it N "
    "times.",
    "bias forgotten": "Your outputs lack the bias.",
    "bias in one summand": "Your outputs are right. In your summands the bias stands already, in "
    "that of rank 0; the text has it added to the sum, by each rank.",
    "mean": "Your outputs have the mean of the summands. Each of them is a part of the sum over "
    "the inputs, and none of them an estimate of it.",
    "not summed": "Each of your outputs has the rank's own summand only.",
    "side by side": "You put the summands side by side. That is what ranks do that have different "
    "outputs; here they have parts of the same.",
    "column where row": "Your ranks divide the outputs, with all inputs on each rank. Asked for is "
    "the other split.",
    "every N-th feature": "Your rank r has every N-th input. Its part is one piece, so that it "
    "fits the outputs of a layer split by columns.",
    "parts that do not belong": "Your ranks multiply parts of the input with parts of the weight "
    "that belong to other inputs.",
    "backward sums again": "Your gradients are too large by the number of ranks. All ranks have "
    "the whole output, so the gradient that comes back is whole on each of them already.",
    "upstream summed": "You add up the ranks' upstream gradients before you use them for x and "
    "the weight. All ranks compute the same loss, so each has the whole gradient already.",
    "gradients averaged": "You divide gradients by the number of ranks. Each rank's are those of "
    "its own weights, and nobody else has others for the same.",
    "bias gradients summed": "The gradient of your bias is that of all ranks together. Each rank "
    "has the whole of it, and all of them take the same step.",
    "bias gradient shared out": "Each of your ranks has an N-th of the gradient of the bias, and "
    "nobody adds them up afterwards.",
    "bias gradient on one rank": "On one of your ranks the bias learns and on the others it does "
    "not. They would soon have different ones.",
    "bias gradient of the mean": "Your gradient of the bias is a mean over the rows. What the loss "
    "divides by is in the upstream gradient.",
    "whole gradient of x": "Each of your ranks has the gradient of all inputs. It knows only the "
    "weights of its own.",
    "gradient transposed": "Your gradient of the weight has not the weight's shape.",
}

ROW = Exercise(
    id="tensor_parallel.row",
    points=5,
    beyond=2,
    reference=row_parallel,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_ranks,
    returns=(
        "summands",
        "outputs",
        "gradients of x",
        "gradients of the weight",
        "gradients of the bias",
    ),
    rtol=1e-8,
    atol=1e-10,
    explanation="y = Σ x_r W_rᵀ + b over the ranks: one all-reduce, and the bias behind it. In the "
    "backward pass y depends on each summand with factor 1, so the gradient of the output is the "
    "gradient of every summand: the all-reduce of the forward is an identity in the backward, and "
    "the other way round in the layer by columns before it. Frameworks that write the backward of "
    "an all-reduce as an all-reduce assume that the loss is the sum of the ranks' losses; here all "
    "ranks compute one and the same loss. Rank 0 adding the bias to its summand gives the same "
    "sum, but then in half precision the bias is rounded with one summand, and rank 0 runs another "
    "program than the others. This reference leaves the outputs whole on every rank.",
    hints=(
        "Write the output 16 of the example as a sum of three numbers. Then ask for each of the "
        "five results whether a rank has only its own part or the whole.",
        "Add up the summands, then add the bias once. Each summand enters the output with factor "
        "1, so each rank uses the whole `upstream` for its own parts, and nothing is summed over "
        "ranks or divided by their number in the backward pass. The gradient of the bias sums "
        "`upstream` over the rows and is the same on all ranks.",
        "`upstream.T @ x_r` is the gradient of a rank's part of the weight, where `x_r` is one of "
        "the pieces `x.chunk(ranks, 1)`. `upstream @ w_r` is the gradient of its part of x, with "
        "the matching piece `w_r` of `weight.chunk(ranks, 1)`.",
    ),
)
