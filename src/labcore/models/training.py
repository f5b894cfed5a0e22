"""Train a Llama on next tokens, with exact gradient accumulation and bitwise exact resumption."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from labcore.checks import positive_int
from labcore.models.llama import Llama

__all__ = ["Curve", "next_token_loss", "train", "windows"]

Batches = Callable[[int], tuple[Tensor, Tensor | None]]
Clip = Callable[[list[nn.Parameter]], Tensor | float | None]
Loss = Callable[[Llama, Tensor, Tensor | None], tuple[Tensor, int]]


@dataclass(kw_only=True, slots=True)
class Curve:
    """Training curves with one entry per step.

    losses: mean loss in nats per token, before the step.
    tokens: predicted tokens.
    rates: the learning rate of the first parameter group.
    norms: the return value of the clipping hook, which is the norm before clipping, or None.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)


def windows(tokens: Sequence[int] | Tensor, *, batch: int, length: int, seed: int = 0) -> Batches:
    """Return batches of random windows of one long text; batch number n is always the same.

    tokens: integers [N], N > length. batch: rows per batch. length: predicted tokens per row.
    Returns a function of n that returns tokens int64 [batch, length + 1], and None for counts.
    Raises ValueError if the text is too short.
    """
    text = torch.as_tensor(tokens, dtype=torch.int64)
    positive_int("batch", batch)
    if text.dim() != 1 or text.numel() <= positive_int("length", length):
        raise ValueError(
            f"tokens must be one row of more than {length} tokens, got {tuple(text.shape)}"
        )

    def batch_number(n: int) -> tuple[Tensor, None]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + n)
        starts = torch.randint(text.numel() - length, (batch, 1), generator=generator)
        return text[starts + torch.arange(length + 1)], None

    return batch_number


def next_token_loss(
    model: Llama, tokens: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the sum of the cross entropies of all next tokens, in nats, and their number.

    tokens: integers [B, T], right-padded. counts: integers [B]; None means T. A row of n tokens
    predicts n - 1. The sum is fp32 for half-precision models, and 0 if nothing is predicted.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if counts is None:
        ignored, predicted = targets, targets.numel()
    else:
        valid = torch.arange(targets.shape[1], device=tokens.device) < counts[:, None] - 1
        ignored, predicted = targets.masked_fill(~valid, -100), int(valid.sum())
    logits = model(inputs).logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, ignored.flatten(), ignore_index=-100, reduction="sum")
    return loss, predicted


def train(
    model: Llama,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    accumulate: int = 1,
    loss: Loss = next_token_loss,
    clip: Clip | None = None,
    schedule: Callable[[int], float] | None = None,
    checkpoint: str | Path | None = None,
    save_every: int = 100,
    progress: bool = True,
) -> Curve:
    """Train in place until `steps` optimizer steps are done; return the curve of all steps.

    batches: a function of the batch number n that returns tokens [B, T], and counts [B] or None.
    Step s uses `accumulate` batches, starting with number s * accumulate. The result for an n must
    always be the same, as with `windows`.
    accumulate: batches per step. The loss is the mean over all predicted tokens of the step, so the
    loss and its gradient equal those of one large batch, even if row lengths differ.
    loss: as `next_token_loss`, for example with a penalty added.
    clip: called before each optimizer step with the parameters that have gradients. It scales the
    gradients in place and returns their norm or None.
    schedule: returns the factor of each group's learning rate at step s, counted from 0.
    checkpoint: a file to write atomically every `save_every` steps and at the end. If it exists,
    training resumes from it, with bitwise the same result as an uninterrupted run. Model and
    optimizer must be built as in the first run.
    progress: show a progress bar with steps and loss.
    Raises ValueError for a step without a predicted token, or a checkpoint from a different run.
    """
    positive_int("steps", steps)
    positive_int("accumulate", accumulate)
    positive_int("save_every", save_every)
    curve = Curve()
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        curve = _resume(path, model, optimizer, accumulate)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    model.train()
    done = len(curve.losses)
    with tqdm(total=steps, initial=min(done, steps), disable=not progress, unit="step") as bar:
        for step in range(done, steps):
            if schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * schedule(step)
            _step(model, batches, optimizer, curve, accumulate, loss, clip)
            if path is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
                _save(path, model, optimizer, curve, accumulate)
            bar.set_postfix(loss=f"{curve.losses[-1]:.3f}", refresh=False)
            bar.update()
    return curve


def _step(
    model: Llama,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    curve: Curve,
    accumulate: int,
    loss: Loss,
    clip: Clip | None,
) -> None:
    """Run one optimizer step and append it to the curve."""
    step = len(curve.losses)
    device = model.embed_tokens.weight.device
    parts = []
    for n in range(step * accumulate, (step + 1) * accumulate):
        tokens, counts = batches(n)
        parts.append((tokens.to(device), None if counts is None else counts.to(device)))
    # Count the whole step's tokens first; a mean of batch means would weight tokens unequally.
    total = sum(_predicted(tokens, counts) for tokens, counts in parts)
    if total == 0:
        raise ValueError(f"step {step} has no token to predict; give a row at least two tokens")
    optimizer.zero_grad(set_to_none=True)
    summed = 0.0
    for tokens, counts in parts:
        part, _ = loss(model, tokens, counts)
        (part / total).backward()
        summed += float(part.detach())
    with_gradients = [p for p in model.parameters() if p.grad is not None]
    norm = None if clip is None else clip(with_gradients)
    optimizer.step()
    curve.losses.append(summed / total)
    curve.tokens.append(total)
    curve.rates.append(float(optimizer.param_groups[0]["lr"]))
    curve.norms.append(None if norm is None else float(norm))


def _predicted(tokens: Tensor, counts: Tensor | None) -> int:
    if counts is None:
        return tokens.shape[0] * (tokens.shape[1] - 1)
    return int((counts - 1).clamp(min=0).sum())


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _save(
    path: Path, model: Llama, optimizer: torch.optim.Optimizer, curve: Curve, accumulate: int
) -> None:
    """Write next to `path`, then move, so a killed process leaves the old or the new checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    with open(beside, "wb") as file:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "curve": asdict(curve),
                "accumulate": accumulate,
                "random": _random_states(),
            },
            file,
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _resume(path: Path, model: Llama, optimizer: torch.optim.Optimizer, accumulate: int) -> Curve:
    """Load the model, optimizer and random states from a checkpoint; return its curve."""
    told = torch.load(path, map_location="cpu", weights_only=True)
    if told["accumulate"] != accumulate:
        raise ValueError(
            f"accumulate must be {told['accumulate']}, as in {path}, got {accumulate}; "
            "a different value would number the batches differently"
        )
    model.load_state_dict(told["model"])
    optimizer.load_state_dict(told["optimizer"])
    torch.set_rng_state(told["random"]["cpu"])
    if told["random"]["cuda"]:
        torch.cuda.set_rng_state_all(told["random"]["cuda"])
    return Curve(**told["curve"])
