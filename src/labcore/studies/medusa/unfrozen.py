"""Training the backbone together with its heads, which Medusa's authors call Medusa-2."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from labcore.decoding.medusa import HiddenStates, MedusaHeads, medusa_loss
from labcore.models import Llama
from labcore.optim import AdamW

__all__ = ["Trained", "train_both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A backbone with the heads that were trained on it, and the sum of losses at each step."""

    backbone: Llama
    heads: MedusaHeads
    losses: list[float]


def train_both(
    backbone: Llama,
    heads: MedusaHeads,
    states: HiddenStates,
    *,
    steps: int,
    batch: int,
    rate: float,
    slower: float | None,
    share: float = 0.2,
    seed: int = 0,
) -> Trained:
    """Train copies of the heads and of the backbone on the tokens of `states`.

    slower: the backbone's learning rate over the heads'; None keeps the backbone frozen, which
    is the comparison. share: the weight of the heads' loss beside the backbone's own. Step s reads
    rows that depend only on seed and s, so both forms see the same batches.
    Source: Cai et al., Medusa, 2024, arXiv 2401.10774, whose recipe weighs the losses so and trains
    the backbone more slowly; it also warms the heads up first, and the heads here are trained ones.
    """
    base = copy.deepcopy(backbone).train(slower is not None)
    own = MedusaHeads(
        base,
        heads=heads.heads,
        layers=heads.layers,
        projection=heads.projection,
        rank=heads.rank,
    )
    own.load_state_dict(heads.state_dict())
    groups = [{"params": [*own.parameters()], "lr": rate}]
    if slower is not None:
        groups.append({"params": [*base.parameters()], "lr": slower * rate})
    optimizer = AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        rows = torch.randint(len(states.tokens), (batch,), generator=generator)
        tokens = states.tokens[rows]
        with torch.set_grad_enabled(slower is not None):
            out = base(tokens[:, : -states.ahead])
        with torch.enable_grad():
            guessing, _ = medusa_loss((own.head(i, out.hidden) for i in range(own.heads)), tokens)
            loss = share * guessing
            if slower is not None:
                labels = tokens[:, 1 : 1 + out.logits.shape[1]]
                loss = loss + F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(backbone=base.eval(), heads=own.eval(), losses=losses)
