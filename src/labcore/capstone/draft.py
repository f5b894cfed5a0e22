"""A draft for a trained model, chosen by a measurement: n-grams, or an EAGLE-like head."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labcore.capstone.corpus import Corpus
from labcore.checks import positive
from labcore.decoding import Generation, NGram, Proposer, SamplingConfig, generate
from labcore.decoding.eagle import Eagle, EagleHead, fitted_sharpness, train_eagle
from labcore.models import Llama
from labcore.models.states import live_states
from labcore.timing import measure, paired

__all__ = ["PLAIN", "Speed", "prompts_of", "speeds", "steps_within", "train_draft"]

# Small steps: in a minute, a small head learns far more from many of them.
ROWS, UNROLL, RATE = 2, 2, 0.25  # the rate times the width
TRIED = 4  # steps per measurement
FIT_ROWS = 8  # for the sharpness
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast a draft makes the model.

    over_plain: the median ratio to plain decoding in the same rounds. tokens_per_second: plain
    decoding's median times that ratio. per_step: tokens that a forward of the model brought. same:
    the share of rows whose greedy tokens equal plain decoding's; a tie of two tokens may be broken
    by rounding.
    """

    tokens_per_second: float
    over_plain: float
    per_step: float
    same: float


def steps_within(model: Llama, text: Corpus, *, seconds: float) -> int:
    """Return how many steps of `train_draft` take about so many seconds."""
    head = EagleHead(model)
    once = measure(lambda: _train(head, model, text.train, steps=TRIED), repeats=3, warmup=1)
    return max(1, int(positive("seconds", seconds) / once.p50 * TRIED))


def train_draft(
    model: Llama, text: Corpus, *, steps: int, checkpoint: str | Path | None = None
) -> EagleHead:
    """Train an EAGLE-like head on the frozen model, or go on from a checkpoint."""
    head = EagleHead(model)
    _train(head, model, text.train, steps=steps, checkpoint=checkpoint)
    held_out = live_states(model, text.held_out, length=model.config.max_position_embeddings)
    head.sharpness = fitted_sharpness(head, held_out.part(0, FIT_ROWS))
    return head


def _train(
    head: EagleHead,
    model: Llama,
    tokens: Tensor,
    *,
    steps: int,
    checkpoint: str | Path | None = None,
) -> None:
    train_eagle(
        head,
        live_states(model, tokens, length=model.config.max_position_embeddings),
        steps=steps,
        batch=ROWS,
        unroll=UNROLL,
        rate=RATE / model.config.hidden_size,
        warmup=max(1, steps // 10),
        checkpoint=checkpoint,
        progress=False,
    )


def prompts_of(text: Corpus, *, count: int = 4, length: int = 64, seed: int = 0) -> list[list[int]]:
    """Return prompts from the held-out files, at places that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text.held_out) - length, (count,), generator=generator)
    return [text.held_out[start : start + length].tolist() for start in starts.tolist()]


def speeds(
    model: Llama,
    head: EagleHead,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 64,
    rounds: int = 3,
) -> dict[str, Speed]:
    """Time greedy decoding of each prompt plainly and with each draft, in turns."""
    sampling = SamplingConfig(max_tokens=tokens)
    drafts: dict[str, Proposer | None] = {PLAIN: None, "n-grams": NGram(), "EAGLE": Eagle(head)}

    def all_of(name: str) -> list[Generation]:
        return [generate(model, [one], sampling, proposer=drafts[name]) for one in prompts]

    found = {name: all_of(name) for name in drafts}
    calls = {name: (lambda name=name: all_of(name)) for name in drafts}
    timed = paired(calls, rounds=rounds, warmup=0)
    rows = {name: [row for one in all_ for row in one.tokens] for name, all_ in found.items()}
    plain = sum(map(len, rows[PLAIN])) / timed.timings[PLAIN].p50
    return {
        name: Speed(
            tokens_per_second=plain * timed.ratio(PLAIN, name),
            over_plain=timed.ratio(PLAIN, name),
            per_step=sum(map(len, rows[name])) / sum(one.statistics.steps for one in found[name]),
            same=statistics.mean(a == b for a, b in zip(rows[name], rows[PLAIN], strict=True)),
        )
        for name in drafts
    }
