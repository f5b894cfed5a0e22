"""Training a backbone with its heads: Medusa-2 or, from scratch, multi-token prediction."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.decoding.medusa import HiddenStates, MedusaHeads, medusa_loss, train_heads
from labcore.models import Llama, train
from labcore.models.recipes import ModelRecipe
from labcore.models.states import hidden_states, rows_of_step
from labcore.optim import AdamW
from labcore.studies.language.bench import OPTIMIZERS, clip_to

__all__ = ["Trained", "train_both", "train_new"]


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


def train_new(rows: Tensor, recipe: ModelRecipe, *, heads: int, joint: bool, seed: int) -> Trained:
    """Train a new model of a recipe on rows of a text, and K heads with it or after it.

    rows: int64 [rows, length + K + 1]. joint: the loss is the sum of the model's and each head's.
    Otherwise the model is trained alone, and then the heads on its frozen states for as many steps.
    The first weights and each step's rows depend only on seed, so both forms have the same.
    Source: Gloeckle et al., 2024, arXiv 2404.19737, whose heads are transformer layers that share
    the model's projection. These are Medusa's, with their own.
    """
    model = Llama(recipe.config, generator=torch.Generator().manual_seed(seed))
    own, ahead = MedusaHeads(model, heads=heads), heads + 1
    optimizer = OPTIMIZERS["AdamW"](model, lr=recipe.rate, decay=recipe.decay)
    if joint:
        optimizer.add_param_group({"params": [*own.parameters()], "weight_decay": 0.0})

    def loss(model: Llama, tokens: Tensor, _: Tensor | None) -> tuple[Tensor, int]:
        out = model(tokens[:, :-ahead])
        guesses = [own.head(i, out.hidden) for i in range(heads if joint else 0)]
        # One more token in front makes the model itself the first head.
        total = medusa_loss([out.logits, *guesses], F.pad(tokens, (1, 0)), decay=1.0)[0]
        count = tokens[:, 1:].numel()  # `train` divides by it
        return total * count, count

    curve = train(
        model, lambda n: (rows[rows_of_step(n, recipe.batch, len(rows), seed)], None), optimizer,
        steps=recipe.steps, loss=loss, clip=clip_to(recipe.clip), schedule=recipe.schedule,
        progress=False,
    )  # fmt: skip
    if not joint:
        own = MedusaHeads(model, heads=heads)
        states = hidden_states(model, rows, length=recipe.length, ahead=ahead)
        train_heads(
            own, states, steps=recipe.steps, batch=recipe.batch, rate=recipe.rate,
            warmup=recipe.warmup, decay=1.0, seed=seed, progress=False,
        )  # fmt: skip
    return Trained(backbone=model.eval(), heads=own.eval(), losses=curve.losses)
