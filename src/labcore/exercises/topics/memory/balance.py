"""The loss that keeps experts evenly used, with several choices a token, padding, and layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["BALANCE"]

CHOICES = (3, 4)  # a student's experts a token; nobody's are 2


def balance(logits: Tensor, real: Tensor, bias: Tensor, *, k: int) -> Tensor:
    """The auxiliary loss, float64 [], of logits [L, B, T, E]; real: bool [B, T]."""
    del bias
    if not real.any():
        return logits.new_zeros(())
    experts = logits.shape[-1]
    shares = logits[:, real].softmax(-1)
    chosen = F.one_hot(shares.topk(k).indices, experts).sum(2).to(logits.dtype)
    load = chosen.mean(1) / k
    return experts * (load * shares.mean(1)).sum(-1).mean()


def _wrongly(fault: str) -> Callable[..., Tensor]:
    def loss(logits: Tensor, real: Tensor, bias: Tensor, *, k: int) -> Tensor:
        del bias
        experts = logits.shape[-1]
        everywhere = torch.ones_like(real)
        if not real.any():
            return logits.new_zeros(())
        every = logits.softmax(-1)
        counted = everywhere if fault in ("padding counted", "padding in the load") else real
        meant = everywhere if fault in ("padding counted", "padding in the shares") else real
        best = every.topk(1 if fault == "first choice alone" else k)
        chosen = F.one_hot(best.indices, experts).sum(-2).to(logits.dtype)
        load = chosen[:, counted].mean(1) / best.indices.shape[-1]
        if fault == "choices not averaged":
            load = load * k
        if fault == "padding in the divisor":
            load = chosen[:, real].sum(1) / k / real.numel()
        kept = every * chosen
        shares = {
            "chosen shares alone": kept,
            "shares of the chosen": kept / kept.sum(-1, keepdim=True),
            "logits": logits,
        }.get(fault, every)[:, meant].mean(1)
        if fault == "rows first":
            weights = real.to(logits.dtype)
            has = weights.sum(1) > 0
            weights = weights[has] / weights[has].sum(1, keepdim=True)
            load = torch.einsum("lbte,bt->lbe", chosen[:, has], weights).mean(1) / k
            shares = torch.einsum("lbte,bt->lbe", every[:, has], weights).mean(1)
        if fault == "layers joined":
            load, shares = load.mean(0, keepdim=True), shares.mean(0, keepdim=True)
        if fault == "no choice":
            load = shares
        if fault == "load alone":
            shares = load
        products = load * shares
        if fault == "by rank":
            products = best.values[:, real].mean(1) / k
        found = products.sum(-1) * (1 if fault == "experts forgotten" else experts)
        return found.sum() if fault == "layers added" else found.mean()

    return loss


def _cases(seed: int) -> list[dict[str, Any]]:
    """Experts that layers like differently; short rows, rows without a token, none at all."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)

    def case(layers: int, rows: int, tokens: int, experts: int, counts: list[int]) -> Any:
        shape = (layers, rows, tokens, experts)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        logits += 2 * torch.randn(layers, 1, 1, experts, generator=generator, dtype=torch.float64)
        real = torch.arange(tokens) < torch.tensor(counts)[:, None]
        # What stands at padding likes other experts.
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


_HINTS = {
    "padding counted": "Padding counts in your loss. It is not to be routed anywhere, and there "
    "is most of it where rows are short.",
    "padding in the load": "Padding counts in your loads, though not in the mean probabilities.",
    "padding in the shares": "Padding counts in your mean probabilities, though not in the loads.",
    "padding in the divisor": "Your loads leave padding out above the line and count it below: "
    "they do not add up to 1.",
    "first choice alone": "Your loads know each token's first choice alone. All of its `k` "
    "choices are work for an expert.",
    "choices not averaged": "Your loads add up to `k`. They are shares of all choices, so that an "
    "even use gives a loss of 1.",
    "chosen shares alone": "Your mean probabilities leave out what went to experts that were not "
    "chosen. Those would never be pulled up.",
    "shares of the chosen": "You divide the chosen probabilities by their sum before the mean. "
    "That is for the experts' results; the loss has the softmax over all experts.",
    "logits": "Your means are of the logits. They are of the probabilities.",
    "rows first": "You take the mean of each row and then of the rows, so that a token of a short "
    "row weighs more. Each real token counts alike.",
    "layers joined": "You join the layers before the product. One that overloads an expert and one "
    "that starves it then cancel, and the loss sees nothing.",
    "layers added": "You add the layers' losses. Their mean is asked for.",
    "no choice": "You multiply the mean probabilities with themselves. The other factor is who was "
    "really chosen.",
    "load alone": "You multiply the loads with themselves. They have no gradient: nothing would be "
    "pushed.",
    "experts forgotten": "The number of experts is missing, so that an even use does not give 1.",
    "by rank": "Your loss is the same whichever experts are chosen: its sums run over first and "
    "second choices, not over experts. It punishes a sure router, and never an uneven one.",
}

BALANCE = Exercise(
    id="memory.balance",
    reference=balance,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
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
)
