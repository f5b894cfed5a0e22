"""Training Medusa heads on a frozen backbone, whose states are computed once.

Letters: B rows, T tokens, C hidden_size, V vocabulary, K heads, R ranks, A tokens kept ahead.
Source: Cai et al., Medusa, 2024, arXiv 2401.10774: Medusa-1, section 2.2.1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from labcore.checks import positive_int
from labcore.decoding.medusa.heads import MedusaHeads
from labcore.models import Llama
from labcore.models.states import HiddenStates, hidden_states, live_states, rows_of_step
from labcore.optim import AdamW

__all__ = [
    "HeadsCurve",
    "HiddenStates",
    "fit",
    "head_accuracies",
    "hidden_states",
    "label_ranks",
    "live_states",
    "medusa_loss",
    "output_ranks",
    "train_heads",
    "training_bytes",
]

_AT_ONCE = 32  # rows whose ranks are found together


def medusa_loss(
    logits: Tensor | Iterable[Tensor], tokens: Tensor, *, decay: float = 0.8
) -> tuple[Tensor, Tensor]:
    """Return the sum over heads i of decay^i times its mean cross entropy, and those means [K].

    logits: [K, B, T, V], or the heads' [B, T, V] one by one. tokens: integers [B, T + A] with A at
    least K + 1: the label of head i at position t is tokens[:, t + 2 + i]. The softmax is in fp32.
    Raises ValueError for too few tokens.
    """
    means = []
    for i, one in enumerate(logits):
        labels = tokens[:, 2 + i : 2 + i + one.shape[1]]
        if labels.shape != one.shape[:2]:
            raise ValueError(
                f"tokens must extend {i + 2} positions beyond the {one.shape[1]} states for head "
                f"{i}, got {tokens.shape[1]} tokens; make the states with ahead={i + 2} or more"
            )
        means.append(F.cross_entropy(one.flatten(0, 1).float(), labels.flatten()))
    each = torch.stack(means)
    weights = decay ** torch.arange(len(means), dtype=torch.float32, device=each.device)
    return (weights * each).sum(), each.detach()


@dataclass(kw_only=True, slots=True)
class HeadsCurve:
    """One entry per step. losses: the weighted sum; per_head: each head's mean nats per token."""

    losses: list[float] = field(default_factory=list)
    per_head: list[list[float]] = field(default_factory=list)


def train_heads(
    heads: MedusaHeads,
    states: HiddenStates,
    *,
    steps: int,
    batch: int = 16,
    rate: float = 1e-3,
    warmup: int = 50,
    decay: float = 0.8,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    save_every: int = 200,
    progress: bool = True,
) -> HeadsCurve:
    """Train the heads in place until `steps` steps are done; return the curve of all of them.

    The backbone gets no gradient and no optimizer state. Step s reads rows that depend only on seed
    and s, and each row is read once before any repeats. The optimizer is AdamW without weight
    decay; its learning rate rises over `warmup` steps and falls by a cosine to a tenth.
    checkpoint: a file, written every `save_every` steps and at the end, and replaced atomically. If
    it exists, training resumes from it, to the bit as if it had never stopped.
    Raises ValueError for fewer rows than a batch, and for a checkpoint of other heads.
    """

    def loss_of(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        one_by_one = (heads.head(i, hidden) for i in range(heads.heads))
        return medusa_loss(one_by_one, tokens, decay=decay)

    return fit(
        heads, states, loss_of,
        steps=steps, batch=batch, rate=rate, warmup=warmup, seed=seed,
        checkpoint=checkpoint, save_every=save_every, progress=progress,
    )  # fmt: skip


def fit(
    module: nn.Module,
    states: HiddenStates,
    loss_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    steps: int,
    batch: int,
    rate: float,
    warmup: int,
    seed: int,
    checkpoint: str | Path | None,
    save_every: int = 200,
    progress: bool = True,
) -> HeadsCurve:
    """Train a module beside a frozen backbone in place; `train_heads` says how.

    loss_of: maps hidden [B, T, C] in the module's dtype and tokens [B, T + A] to the loss and its
    parts [K], one of which `HeadsCurve.per_head` gets for each step.
    """
    positive_int("steps", steps)
    if positive_int("batch", batch) > len(states):
        raise ValueError(
            f"states must have at least the {batch} rows of a batch, got {len(states)}"
        )
    optimizer = AdamW(module.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    curve, path = HeadsCurve(), None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        curve = _resume(path, module, optimizer)
    module.train()
    done = len(curve.losses)
    first = next(module.parameters())
    with tqdm(total=steps, initial=min(done, steps), disable=not progress, unit="step") as bar:
        for step in range(done, steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * _schedule(step, steps, warmup)
            hidden, tokens = states.rows(rows_of_step(step, batch, len(states), seed))
            hidden, tokens = hidden.to(first.device, first.dtype), tokens.to(first.device)
            optimizer.zero_grad(set_to_none=True)
            loss, each = loss_of(hidden, tokens)
            loss.backward()
            optimizer.step()
            curve.losses.append(float(loss.detach()))
            curve.per_head.append(each.tolist())
            if path is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
                _save(path, module, optimizer, curve)
            bar.set_postfix(loss=f"{curve.losses[-1]:.3f}", refresh=False)
            bar.update()
    module.eval()
    return curve


@torch.inference_mode()
def label_ranks(heads: MedusaHeads, states: HiddenStates, *, top: int = 10) -> Tensor:
    """Return the rank that each head gives to its label: int64 [rows, T, K], from 0 to `top`.

    The label of head i at position t is the row's token t + 2 + i. `top` means that the label isn't
    among the `top` most likely tokens.
    """
    positive_int("top", top)
    weight, found = heads.backbone_projection, []
    for index in torch.arange(len(states)).split(_AT_ONCE):
        hidden, tokens = states.rows(index)
        hidden, tokens = hidden.to(weight.device, weight.dtype), tokens.to(weight.device)
        width, ranks = hidden.shape[1], []
        for i in range(heads.heads):
            ranked = heads.head(i, hidden).topk(top, dim=-1).indices
            hits = ranked == tokens[:, 2 + i : 2 + i + width, None]
            # The first hit's index; a hit after all ranks is for labels that aren't among them.
            ranks.append(F.pad(hits, (0, 1), value=True).int().argmax(-1))
        found.append(torch.stack(ranks, -1).cpu())
    return torch.cat(found)


def head_accuracies(heads: MedusaHeads, states: HiddenStates, *, top: int = 10) -> Tensor:
    """Return the share of positions whose label is head i's token of rank r: fp64 [K, top].

    The sum of a row is the head's accuracy with `top` guesses. Labels are the text's tokens.
    """
    ranks = label_ranks(heads, states, top=top).flatten(0, 1)
    counts = [torch.bincount(row, minlength=top + 1)[:top] for row in ranks.T]
    return torch.stack(counts).double() / len(ranks)


@torch.inference_mode()
def output_ranks(
    heads: MedusaHeads,
    backbone: Llama,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    top: int = 10,
) -> Tensor:
    """Return the `label_ranks` of an output after a prompt: int64 [T, K], for `replay`.

    The first position is the prompt's last token; T is K less than the length of the output.
    Raises ValueError for an empty prompt, and for an output that isn't longer than K.
    """
    ahead = heads.heads + 1
    text = torch.tensor([[*prompt, *output]])
    first, width = len(prompt) - 1, len(output) + 1 - ahead
    if not len(prompt) or width < 1:
        raise ValueError(
            f"prompt must hold a token and output at least {ahead}, got {len(prompt)} and "
            f"{len(output)}"
        )
    hidden = backbone(text.to(backbone.norm.weight.device)).hidden[:, first : first + width]
    return label_ranks(heads, HiddenStates(text[:, first:], hidden, ahead), top=top)[0]


def training_bytes(trained: int, frozen: int = 0, *, width: int = 4) -> dict[str, int]:
    """Return the bytes that training holds besides activations.

    trained: parameters with a gradient and AdamW's two states in fp32; frozen: those that are only
    read. width: bytes of a weight and of a gradient. With cached states, the only frozen ones
    needed are the projection that the heads share.
    """
    return {
        "weights": width * (trained + frozen),
        "gradients": width * trained,
        "optimizer states": 8 * trained,
    }


def _schedule(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


def _save(path: Path, heads: nn.Module, optimizer: AdamW, curve: HeadsCurve) -> None:
    """Write a temporary file and move it: a kill leaves the previous checkpoint or this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    torch.save(
        {"heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "curve": asdict(curve)},
        beside,
    )
    os.replace(beside, path)


def _resume(path: Path, heads: nn.Module, optimizer: AdamW) -> HeadsCurve:
    told = torch.load(path, map_location="cpu", weights_only=True)
    shapes = {name: tensor.shape for name, tensor in heads.state_dict().items()}
    if {name: tensor.shape for name, tensor in told["heads"].items()} != shapes:
        raise ValueError(
            f"{path} must hold these heads, got a checkpoint of others; name another file or use "
            "the same shape of heads"
        )
    heads.load_state_dict(told["heads"])
    optimizer.load_state_dict(told["optimizer"])
    return HeadsCurve(**told["curve"])
