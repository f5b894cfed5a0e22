"""Training Medusa heads on a frozen backbone, whose states are computed once.

Letters: B rows, T tokens, C hidden_size, V vocabulary, K heads, R ranks, A tokens kept ahead.
Source: Cai et al., Medusa, 2024, arXiv 2401.10774: Medusa-1, section 2.2.1.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
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

_ROWS = 32  # rows of one forward of the backbone
_STORED = torch.bfloat16


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A text in rows, and the backbone's state at each of its tokens.

    tokens: int64 [rows, T + A]; the last A are only labels. hidden: bf16 [rows, T, C], in memory or
    mapped from a file; None if the backbone reads the rows on demand.
    """

    tokens: Tensor
    hidden: Tensor | None
    ahead: int
    backbone: Llama | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden [B, T, C] and tokens [B, T + A] of some rows; index: int64 [B]."""
        tokens = self.tokens[index]
        if self.hidden is not None:
            return self.hidden[index], tokens
        if self.backbone is None:
            raise ValueError(
                "states must be stored or have a backbone to compute them, got neither"
            )
        return _read(self.backbone, tokens[:, : -self.ahead]), tokens


def live_states(
    backbone: Llama, tokens: Sequence[int] | Tensor, *, length: int = 256, ahead: int = 5
) -> HiddenStates:
    """Like `hidden_states`, but nothing is stored: the backbone reads each batch on demand."""
    return HiddenStates(_in_rows(tokens, length, ahead), None, ahead, backbone)


def hidden_states(
    backbone: Llama,
    tokens: Sequence[int] | Tensor,
    *,
    length: int = 256,
    ahead: int = 5,
    path: str | Path | None = None,
    progress: bool = False,
) -> HiddenStates:
    """Read a text once with the backbone and keep its states, in bf16.

    tokens: integers [N], which are cut into rows of `length` tokens to read, each a separate
    context; the rest after the last whole row is dropped. Or [rows, length + ahead], texts that are
    rows already. ahead: tokens after a row that are only labels, at least K + 1 for K heads.
    path: a file of 2 * rows * length * C bytes, mapped into memory. If it holds the states of the
    same tokens by the same weights, nothing is computed; an interrupted file is written again.
    Raises ValueError for a text shorter than a row, OSError if the file doesn't fit on the disk;
    `live_states` needs no space.
    """
    rows = _in_rows(tokens, length, ahead)
    size = (len(rows), length, backbone.config.hidden_size)
    if path is None:
        stored = torch.empty(size, dtype=_STORED)
        _fill(stored, backbone, rows, ahead, progress)
        return HiddenStates(rows, stored, ahead)
    path = Path(path)
    told = {"of": _fingerprint(backbone, rows), "size": list(size), "ahead": ahead}
    note = path.with_name(f"{path.name}.json")
    if path.is_file() and note.is_file() and json.loads(note.read_text("utf-8")) == told:
        return HiddenStates(rows, _mapped(path, size), ahead)
    note.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = 2 * math.prod(size), shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            f"the states need {needed:,} bytes for {path.name}, got {free:,} free; use fewer "
            "tokens, another disk, or live_states, which stores nothing"
        )
    stored = _mapped(path, size)
    _fill(stored, backbone, rows, ahead, progress)
    note.write_text(json.dumps(told) + "\n", encoding="utf-8")  # last: marks the file as complete
    return HiddenStates(rows, stored, ahead)


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
            hidden, tokens = states.rows(_rows_of(step, batch, len(states), seed))
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
    for index in torch.arange(len(states)).split(_ROWS):
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


def _in_rows(tokens: Sequence[int] | Tensor, length: int, ahead: int) -> Tensor:
    """Cut integers [N] into int64 [rows, length + ahead]; rows share the label-only tokens.

    Tokens that already have that shape aren't cut.
    """
    positive_int("length", length)
    positive_int("ahead", ahead)
    text = torch.as_tensor(tokens, dtype=torch.int64)
    if text.dim() == 2 and len(text) and text.shape[1] == length + ahead:
        return text
    if text.dim() != 1 or text.numel() < length + ahead:
        raise ValueError(
            f"tokens must be one row of at least {length} + {ahead} tokens, or rows of exactly as "
            f"many, got {tuple(text.shape)}"
        )
    return text.unfold(0, length + ahead, length)


@torch.no_grad()
def _read(backbone: Llama, tokens: Tensor) -> Tensor:
    device = backbone.norm.weight.device
    return backbone(tokens.to(device)).hidden.cpu().to(_STORED)


def _fill(stored: Tensor, backbone: Llama, rows: Tensor, ahead: int, progress: bool) -> None:
    parts = torch.arange(len(rows)).split(_ROWS)
    for index in tqdm(parts, disable=not progress, unit="batch"):
        stored[index[0] : index[-1] + 1] = _read(backbone, rows[index, :-ahead])


def _mapped(path: Path, size: tuple[int, int, int]) -> Tensor:
    return torch.from_file(str(path), shared=True, size=math.prod(size), dtype=_STORED).view(size)


def _fingerprint(backbone: Llama, rows: Tensor) -> str:
    """Return the SHA-256 of the tokens and the backbone's weights."""
    found = hashlib.sha256(rows.contiguous().numpy().tobytes())
    for name, tensor in sorted(backbone.state_dict().items()):
        found.update(name.encode("utf-8"))
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _rows_of(step: int, batch: int, rows: int, seed: int) -> Tensor:
    """Return the rows of a step: consecutive steps go through permutations of all rows."""
    places = torch.arange(step * batch, (step + 1) * batch)
    found = torch.empty(batch, dtype=torch.int64)
    for turn in (places // rows).unique().tolist():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
        order = torch.randperm(rows, generator=generator)
        here = places // rows == turn
        found[here] = order[places[here] % rows]
    return found


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
