"""Training by the plan, and where a spike of the loss comes from.

Each step's rows are known by their place in the text, so a spike can be traced to files.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from labcore.capstone.corpus import Corpus
from labcore.capstone.plan import Choices, Plan, model_of, optimizer_of
from labcore.clipping import clip_by_global_norm
from labcore.memory import set_checkpointing
from labcore.models import Curve, Llama, next_token_loss, train
from labcore.shuffling import LossSpikeDetector, Spike

__all__ = ["Moment", "Run", "train_model"]

SAVED_EVERY = 5.0  # seconds by the plan, so that a machine six times as slow still saves in 30
THRESHOLD = 10.0  # of a spike, beyond what thousands of steps of four rows reach by chance
PLANTED, PLANTED_AT, PLANTED_STEPS = "planted noise", 0.6, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A step as it ends: its number from 0, loss in nats per token, norm before clipping, and s."""

    step: int
    loss: float
    norm: float
    seconds: float


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """What a training brought.

    model: trained, in evaluation mode, on the CPU. curve: every step. spikes: their provenance says
    how many rows of the first step came from each file.
    """

    model: Llama = field(repr=False)
    curve: Curve = field(repr=False)
    spikes: tuple[Spike, ...]


class _Rows:
    """Numbered batches of a text, with the place of each row."""

    def __init__(self, text: Corpus, plan: Plan, choices: Choices) -> None:
        self.text, self.plan, self.choices = text, plan, choices
        first = int(PLANTED_AT * plan.steps)
        self.planted = range(first, first + PLANTED_STEPS if choices.spike else first)
        self.step = 0  # of the last batch

    def places(self, step: int) -> Tensor:
        """Return where the rows of a step begin, int64 [rows * accumulate]."""
        count = self.plan.rows * self.plan.accumulate
        room = len(self.text.train) - self.plan.length
        if not self.choices.shuffle:
            return (torch.arange(step * count, (step + 1) * count) * self.plan.length) % room
        return torch.randint(room, (count,), generator=self._generator(step))

    def __call__(self, n: int) -> tuple[Tensor, None]:
        """Return batch n, int64 [rows, length + 1], and None for counts."""
        self.step = step = n // self.plan.accumulate
        part = n % self.plan.accumulate
        places = self.places(step).chunk(self.plan.accumulate)[part]
        rows = self.text.train[places[:, None] + torch.arange(self.plan.length + 1)]
        if step in self.planted:
            rows = torch.randint(
                self.plan.config.vocab_size, rows.shape, generator=self._generator(n)
            )
        return rows, None

    def files(self, step: int) -> dict[str, int]:
        """Return how many rows of a step came from each file, the most first."""
        places = self.places(step).tolist()
        if step in self.planted:
            return {PLANTED: len(places)}
        return dict(collections.Counter(map(self.text.file_of, places)).most_common())

    def _generator(self, n: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.choices.seed * 1_000_003 + n)


class _Watched:
    """The loss and the clipping of `train`, which tell what each step brought."""

    def __init__(self, rows: _Rows, tell: Callable[[Moment], None]) -> None:
        self.limit, self.tell, self.rows = rows.choices.clip or float("inf"), tell, rows
        self.total, self.count, self.since = 0.0, 0, time.perf_counter()

    def loss(self, model: Llama, tokens: Tensor, counts: Tensor | None) -> tuple[Tensor, int]:
        summed, count = next_token_loss(model, tokens, counts)
        self.total, self.count = self.total + float(summed.detach()), self.count + count
        return summed, count

    def clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm, now = clip_by_global_norm(parameters, self.limit).norm, time.perf_counter()
        loss, seconds = self.total / self.count, now - self.since
        self.tell(Moment(step=self.rows.step, loss=loss, norm=float(norm), seconds=seconds))
        self.total, self.count, self.since = 0.0, 0, now
        return norm


def train_model(
    text: Corpus,
    plan: Plan,
    choices: Choices,
    *,
    checkpoint: str | Path | None = None,
    watch: Callable[[Moment], None] = lambda _: None,
) -> Run:
    """Train by the plan, or go on where a killed training saved its last checkpoint.

    checkpoint: a file to write every few seconds. watch: called with each step as it ends.
    Raises ValueError for a checkpoint from another plan.
    """
    rows, model = _Rows(text, plan, choices), model_of(plan, choices)
    watched = _Watched(rows, watch)
    curve = train(
        model,
        rows,
        optimizer_of(model, plan, choices),
        steps=plan.steps,
        accumulate=plan.accumulate,
        loss=watched.loss,
        clip=watched.clip,
        schedule=plan.schedule,
        checkpoint=checkpoint,
        save_every=max(1, round(SAVED_EVERY / max(plan.seconds, 1e-3))),
        progress=False,
    )
    detector = LossSpikeDetector(threshold=THRESHOLD)
    for step, loss in enumerate(curve.losses):
        detector.update(step, loss)
    set_checkpointing(model, None)
    spikes = tuple(replace(one, provenance=rows.files(one.step)) for one in detector.spikes)
    return Run(model=model.cpu().eval(), curve=curve, spikes=spikes)
