"""Spikes made on purpose in the language model, and cures for them.

A trunk is trained on random windows. From there, branches go on with the same schedule: one on
clean data, one that leaves out the steps of the damage, others with a shard of damaged rows, with
or without a cure. After each step of a branch the loss is measured on windows that never change, so
that harm to the model is told apart from a batch that is merely hard.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import one_of
from labcore.device import default_device
from labcore.models import Llama, causal_attention
from labcore.models.training import Batches, Curve, Loss, next_token_loss, train, windows
from labcore.studies.language import bench
from labcore.studies.language.bench import CONFIG, LENGTH, ROWS
from labcore.studies.language.tuning import Setting
from labcore.studies.shuffling.language_orders import places

__all__ = [
    "CURES",
    "DAMAGES",
    "DOCUMENT",
    "FEWER",
    "LONGEST",
    "MENDED",
    "TIMES",
    "Branch",
    "Plan",
    "Stream",
    "branches",
    "damaged",
    "fewer",
    "kinds_with",
    "mended",
    "qk_norm_attention",
    "repeats",
    "stream",
    "train_hot",
    "z_loss",
]

LONGEST, TIMES = 13, 32  # of OLMo 2's filter
_SHORT = 16  # tokens that a row without packing predicts
DOCUMENT = 4  # rows of a damaged document
BATCH = 8_192  # tokens per step

# Cures ------------------------------------------------------------------------------------------


def repeats(rows: Tensor, *, longest: int = LONGEST, times: int = TIMES) -> Tensor:
    """Return which rows repeat an n-gram, of at most `longest` tokens, `times` times in a row.

    rows: integers [B, T]. Returns bool [B].
    Source: the rule of Team OLMo, 2025, arXiv 2501.00656, for whole documents.
    """
    found = torch.zeros(len(rows), dtype=torch.bool)
    for n in range(1, longest + 1):
        same, run = rows[:, n:] == rows[:, :-n], n * (times - 1)
        if run <= same.shape[1]:
            found |= same.unfold(1, run, 1).all(-1).any(-1)
    return found


def z_loss(
    model: Llama, tokens: Tensor, counts: Tensor | None = None, *, weight: float = 1e-4
) -> tuple[Tensor, int]:
    """Return `next_token_loss`, whose gradient also has that of weight * log(Z)^2 per token.

    Z is the softmax's normalizer. The value leaves the penalty out, so losses stay comparable.
    Source: Chowdhery et al., 2022, arXiv 2204.02311.
    """
    targets = tokens[:, 1:]
    valid = torch.ones_like(targets, dtype=torch.bool)
    if counts is not None:
        valid = torch.arange(targets.shape[1], device=tokens.device) < counts[:, None] - 1
    logits = model(tokens[:, :-1]).logits.float()
    log_z = logits.logsumexp(-1)[valid]
    chosen = logits.gather(-1, targets[..., None])[..., 0][valid]
    penalty = weight * log_z.square().sum()
    # Only the penalty's gradient counts: its value cancels.
    return (log_z - chosen).sum() + penalty - penalty.detach(), int(valid.sum())


def qk_norm_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run causal attention on queries and keys that are divided by their RMS over the head.

    q: [B, H, T, D]; k, v: [B, Hkv, T, D]. Without a learned gain, this commutes with the rotation.
    Source: Henry et al., 2020, arXiv 2010.04245; the RMS form is usual today.
    """
    size = q.shape[-1:]
    return causal_attention(F.rms_norm(q, size), F.rms_norm(k, size), v)


def _language_model(seed: int, cure: str) -> Llama:
    attention = qk_norm_attention if cure == "QK-norm" else causal_attention
    generator = torch.Generator().manual_seed(seed)
    return Llama(CONFIG, attention=attention, generator=generator).to(default_device())


CURES: Mapping[str, Loss] = {
    "none": next_token_loss,
    "z-loss": z_loss,
    "QK-norm": next_token_loss,
}
"""What is built into the model or its loss, and the loss function that goes with it."""

# Data -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """The rows that a run reads, in order.

    rows: int64 [R, LENGTH + 1]. counts: int64 [R], the valid tokens of each row. skipped: the steps
    after the trunk that are left out, with their rows and their place in the schedule.
    """

    rows: Tensor
    counts: Tensor
    skipped: int = 0

    def batches(self, start: int = 0) -> Batches:
        """Return batches of ROWS rows, numbered from row `start` on.

        A batch past the end raises ValueError.
        """

        def batch_number(n: int) -> tuple[Tensor, Tensor]:
            at = slice(start + n * ROWS, start + (n + 1) * ROWS)
            if at.stop > len(self.rows):
                raise ValueError(
                    f"the stream must have a row for every step, got {len(self.rows)} rows and "
                    f"batch {n}; too many rows were dropped"
                )
            return self.rows[at], self.counts[at]

        return batch_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """When a run is damaged: after `trunk` steps, for `bad` of the `after` steps that follow."""

    trunk: int = 24
    after: int = 18
    bad: int = 4
    batch: int = BATCH  # tokens per step

    @property
    def steps(self) -> int:
        """All steps."""
        return self.trunk + self.after

    def row(self, step: int) -> int:
        """Return the first row of a step."""
        return step * self.batch // LENGTH


def stream(plan: Plan, seed: int, *, max_files: int | None = None) -> Stream:
    """Return the windows of the random run of `seed`, and spare ones for those that are dropped."""
    text = bench.text("report", max_files=max_files)
    starts = places(len(text), plan.row(plan.steps + plan.bad), seed)
    rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return Stream(rows=rows, counts=torch.full((len(rows),), LENGTH + 1))


def _noise(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    shape = tuple(rows.shape)
    return torch.randint(CONFIG.vocab_size, shape, generator=generator), LENGTH + 1


def _repeated(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """Cut documents of DOCUMENT rows that repeat their first 1 to LONGEST tokens."""
    out = rows.clone()
    for first in range(0, len(rows), DOCUMENT):
        n = int(torch.randint(1, LONGEST + 1, (), generator=generator))
        part = out[first : first + DOCUMENT]
        part.copy_(rows[first, torch.arange(part.numel()) % n].view_as(part))
    return out, LENGTH + 1


def _unpacked(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """Keep the first tokens of each row, as if it held one short document and padding."""
    del generator
    return rows, _SHORT + 1


DAMAGES: Mapping[str, Callable[[Tensor, torch.Generator], tuple[Tensor, int]]] = {
    "random tokens": _noise,
    "repeated n-grams": _repeated,
    "short rows": _unpacked,
}
"""From rows [R, LENGTH + 1] to damaged ones, and their valid tokens."""


def kinds_with(cure: str) -> tuple[str, ...]:
    """Return the damages that are tried with a cure; "none" has all."""
    return tuple(DAMAGES)[: None if cure == "none" else 2]


def damaged(clean: Stream, kind: str, plan: Plan, seed: int) -> Stream:
    """Damage the rows of the `plan.bad` steps right after the trunk, in one of DAMAGES."""
    first = plan.row(plan.trunk)
    bad = slice(first, first + plan.row(plan.bad))
    generator = torch.Generator().manual_seed(seed)
    spoilt, valid = DAMAGES[one_of("damage", kind, DAMAGES)](clean.rows[bad], generator)
    rows, counts = clean.rows.clone(), clean.counts.clone()
    rows[bad], counts[bad] = spoilt, valid
    return Stream(rows=rows, counts=counts)


FEWER = "the bad steps left out"


def fewer(clean: Stream, plan: Plan) -> Stream:
    """Leave out the steps that a damage would spoil, as a trainer does that skips an update."""
    return replace(clean, skipped=plan.bad)


MENDED = ("random tokens, stopped", "restart without the shard")


def mended(clean: Stream, plan: Plan, seed: int) -> dict[str, Stream]:
    """Return streams with what a run does about a damaged shard, by the names of MENDED.

    "stopped" skips the rest of a shard of random tokens after its first bad step. A restart goes
    back to the trunk and skips the whole shard, whatever its damage: later rows take its place.
    """
    first, stop = plan.row(plan.trunk), plan.row(plan.trunk + plan.bad)
    noise = damaged(clean, "random tokens", plan, seed)
    streams = _without(noise, first + plan.row(1), stop), _without(clean, first, stop)
    return dict(zip(MENDED, streams, strict=True))


def _without(data: Stream, first: int, stop: int) -> Stream:
    keep = torch.ones(len(data.rows), dtype=torch.bool)
    keep[first:stop] = False
    return Stream(rows=data.rows[keep], counts=data.counts[keep])


# Runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A run from the trunk's first step to the branch's last.

    losses, norms: of each step, in nats per token, and the gradient's norm before clipping.
    fixed: the loss on 16 held-out windows, before the branch and after each of its steps.
    held_out: the loss on held-out files at the end.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    fixed: tuple[float, ...]
    held_out: float


def branches(
    streams: Mapping[str, Stream],
    setting: Setting,
    plan: Plan,
    *,
    seed: int,
    cure: str = "none",
    max_files: int | None = None,
) -> dict[str, Branch]:
    """Train a trunk with AdamW, and from there a branch on each of the streams.

    The streams must be equal in the rows of the trunk, which reads the first of them.
    cure: one of CURES.
    """
    loss = CURES[one_of("cure", cure, CURES)]
    model = _language_model(seed, cure)
    make = functools.partial(bench.OPTIMIZERS["AdamW"], lr=setting.lr, decay=setting.decay)
    optimizer = make(model)
    trunk = Curve()
    if plan.trunk:
        first = next(iter(streams.values()))
        trunk = _train(model, optimizer, first, plan, range(plan.trunk), loss)
    judged = bench.text("held out", max_files=max_files)
    rows = windows(judged, batch=ROWS, length=LENGTH, seed=2)(0)[0]
    found = {}
    for name, data in streams.items():
        grown = copy.deepcopy(model)
        going = make(grown)
        going.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        losses, norms, fixed = list(trunk.losses), list(trunk.norms), [_loss_on(grown, rows)]
        for step in range(plan.trunk + data.skipped, plan.steps):
            one = _train(grown, going, data, plan, range(step, step + 1), loss)
            losses += one.losses
            norms += one.norms
            fixed.append(_loss_on(grown, rows))
        found[name] = Branch(
            losses=tuple(losses),
            norms=tuple(norm or 0.0 for norm in norms),
            fixed=tuple(fixed),
            held_out=bench.held_out_loss(grown, judged),
        )
    return found


def train_hot(
    setting: Setting,
    plan: Plan,
    *,
    seed: int,
    cure: str,
    factor: float,
    max_files: int | None = None,
) -> Branch:
    """Train on clean data at `factor` times the tuned learning rate, with one of CURES."""
    hot = Setting(lr=factor * setting.lr, decay=setting.decay / factor)
    streams = {"hot": stream(plan, seed, max_files=max_files)}
    return branches(streams, hot, plan, seed=seed, cure=cure, max_files=max_files)["hot"]


@torch.no_grad()
def _loss_on(model: Llama, rows: Tensor) -> float:
    total, count = next_token_loss(model, rows.to(model.embed_tokens.weight.device))
    return total.item() / count


def _train(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    data: Stream,
    plan: Plan,
    steps: range,
    loss: Loss,
) -> Curve:
    """Run these steps of a run's schedule; return their curve."""
    return train(
        model,
        data.batches(plan.row(steps.start)),
        optimizer,
        steps=len(steps),
        accumulate=plan.batch // (ROWS * LENGTH),
        loss=loss,
        clip=bench.clip_to(1.0),
        schedule=lambda step: bench.warmup_and_decay(step + steps.start, plan.steps),
        progress=False,
    )
