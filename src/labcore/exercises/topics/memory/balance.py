"""Compute the loss that balances experts, with several choices per token, padding, and layers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["BALANCE"]

CHOICES = (3, 4)  # a student's experts per token; student 0 has 2


def balance(logits: Tensor, real: Tensor, bias: Tensor, *, k: int) -> Tensor:
    """Return the auxiliary loss, float64 [], of logits [L, B, T, E]; `real` is bool [B, T]."""
    del bias
    if not real.any():
        return logits.new_zeros(())
    experts = logits.shape[-1]
    shares = logits[:, real].softmax(-1)
    chosen = F.one_hot(shares.topk(k).indices, experts).sum(2).to(logits.dtype)
    load = chosen.mean(1) / k
    means = shares.mean(1)
    return experts * (load * means).sum(-1).mean()


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw layers that prefer different experts; some rows are short, and some have no token."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def case(layers: int, rows: int, tokens: int, experts: int, counts: list[int]) -> Any:
        shape = (layers, rows, tokens, experts)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        logits += 2 * torch.randn(layers, 1, 1, experts, generator=generator, dtype=torch.float64)
        real = torch.arange(tokens) < torch.tensor(counts)[:, None]
        # Padding prefers other experts.
        logits[:, ~real] = logits[:, ~real].flip(-1) * 1.5
        return {"logits": logits, "real": real, "bias": torch.zeros(layers, experts)}

    most = [chance.randint(6, 9) for _ in range(3)]
    return [
        case(1, 2, most[0], 7, [most[0], 3]),
        case(3, 4, most[1], 8, [2, most[1], 0, 4]),
        case(4, 3, most[2], 6, [5, 1, 3]),
        case(2, 2, 3, 5, [0, 0]),
    ]


def _own_choices(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"memory.balance:{student}")
    return {"k": chance.choice(CHOICES) if student else 2}


def _row_by_row(logits: Tensor, real: Tensor, bias: Tensor, *, k: int) -> Tensor:
    """The mean of the losses of the rows that have tokens."""
    rows = [row for row in range(len(real)) if real[row].any()]
    losses = [balance(logits[:, [row]], real[[row]], bias, k=k) for row in rows]
    return torch.stack(losses).mean() if losses else logits.new_zeros(())


# The order of product and mean decides the last bits.
_EACH = ("experts * (load * means).sum(-1).mean()", "(experts * (load * means).sum(-1)).mean()")
_MISTAKES = [
    Mistake("padding counted", [_EACH, ("logits[:, real]", "logits.flatten(1, 2)")],
            "Padding counts in your loss. It is not to be routed anywhere, and there is most of it "
            "where rows are short."),
    Mistake("padding in the load", [_EACH, ("shares.topk", "logits.flatten(1, 2).topk")],
            "Padding counts in your loads, though not in the mean probabilities."),
    Mistake("padding in the shares",
            [_EACH, ("shares.mean", "logits.flatten(1, 2).softmax(-1).mean")],
            "Padding counts in your mean probabilities, though not in the loads."),
    Mistake("padding in the divisor",
            [_EACH, ("chosen.mean(1) / k", "chosen.sum(1) / k / real.numel()")],
            "Your loads leave padding out above the line and count it below: they do not add up to "
            "1."),
    Mistake("first choice alone", [_EACH, ("topk(k)", "topk(1)"), (" / k", "")],
            "Your loads know each token's first choice alone. All of its `k` choices are work for "
            "an expert."),
    Mistake("choices not averaged", [_EACH, ("(load * ", "(load * k * ")],
            "Your loads add up to `k`. They are shares of all choices, so that an even use gives a "
            "loss of 1."),
    Mistake("chosen shares alone", [_EACH, ("shares.mean", "(shares * chosen).mean")],
            "Your mean probabilities leave out what went to experts that were not chosen. Those "
            "would never be pulled up."),
    Mistake("shares of the chosen",
            [_EACH, ("    means =", "    shares *= chosen\n    means ="),
             ("shares.mean", "(shares / shares.sum(-1, keepdim=True)).mean")],
            "You divide the chosen probabilities by their sum before the mean. That is for the "
            "experts' results; the loss has the softmax over all experts."),
    Mistake("logits", [_EACH, ("shares.mean", "logits[:, real].mean")],
            "Your means are of the logits. They are of the probabilities."),
    Mistake("rows first",
            [_EACH, ("    return (",
             "    rows = [logits.new_full((n,), 1 / n) for n in real.sum(1).tolist() if n]\n"
             "    load, means = ((torch.block_diag(*rows) @ x).mean(1) for x in (chosen, shares))\n"
             "    load /= k\n    return (")],
            "You take the mean of each row and then of the rows, so that a token of a short row "
            "weighs more. Each real token counts alike."),
    Mistake("row by row", _row_by_row,
            "You compute a loss for each row and average these losses. Experts may be used "
            "unevenly in a row: only their use over the real tokens of all rows has to be even."),
    Mistake("layers joined", ("load * means", "load.mean(0) * means.mean(0)"),
            "You join the layers before the product. One that overloads an expert and one that "
            "starves it then cancel, and the loss sees nothing."),
    Mistake("layers added",
            ("experts * (load * means).sum(-1).mean()", "(experts * (load * means).sum(-1)).sum()"),
            "You add the layers' losses. Their mean is asked for."),
    Mistake("no choice", [_EACH, ("load * means", "means * means")],
            "You multiply the mean probabilities with themselves. The other factor is who was "
            "really chosen."),
    Mistake("load alone", [_EACH, ("load * means", "load * load")],
            "You multiply the loads with themselves. They have no gradient: nothing would be "
            "pushed."),
    Mistake("experts forgotten", ("experts * (load", "(load"),
            "The number of experts is missing, so that an even use does not give 1."),
    Mistake("by rank", [_EACH, ("load * means", "shares.topk(k).values.mean(1) / k")],
            "Your loss is the same whichever experts are chosen: its sums run over first and "
            "second choices, not over experts. It punishes a sure router, and never an uneven "
            "one."),
]  # fmt: skip

BALANCE = Exercise(
    id="memory.balance",
    points=5,
    beyond=2,
    reference=balance,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_choices,
    rtol=1e-9,
    explanation="Load and mean probability must meet expert by expert, layer by layer, before "
    "anything is added: a sum over experts of products is large where much is chosen and much is "
    "likely at the same place. Implementations have gone wrong at just these seams: that of the "
    "transformers library once took its mean probabilities by rank in place of by expert (issue "
    "28255), and counted padding (issue 28505). The tests that find it are short: exchanging two "
    "experts and adding padding change nothing, and a router that uses one expert alone has a "
    "larger loss than an even one. This reference chooses by the probabilities alone.",
    hints=(
        "In the example, count how often each expert is chosen. By what do you divide to get 1/2, "
        "1/4, and 1/4, and which tokens would you count if some places were padding?",
        "Drop the padding first, so that each layer has one list of tokens, and take both the "
        "loads and the mean probabilities over that list. Multiply the two expert by expert "
        "within each layer, and take the mean over the layers last.",
        "`chosen = torch.nn.functional.one_hot(shares.topk(k).indices, logits.shape[-1]).sum(2)` "
        "marks the `k` choices of each token, with `shares = logits[:, real].softmax(-1)`. The "
        "mean of `chosen.double()` over the tokens, divided by `k`, is the load.",
    ),
)
