"""Contexts as a proposer meets them, and the drafts it then makes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from labcore.decoding.contract import Draft, SamplingConfig
from labcore.models import LlamaConfig

GREEDY = SamplingConfig(max_tokens=40)
SAMPLINGS = [
    GREEDY,
    SamplingConfig(repetition_penalty=1.7, max_tokens=40),
    SamplingConfig(temperature=1.0, max_tokens=40),
    SamplingConfig(temperature=0.7, top_k=4, top_p=0.8, repetition_penalty=1.4, max_tokens=40),
]
CONFIG = LlamaConfig(
    vocab_size=7,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def on(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(value) for value in seeds]


def one(proposer, context: list[int], sampling=GREEDY, most: int = 99, seed: int = 0) -> Draft:
    """The draft of one row."""
    return proposer.propose([context], [sampling], [most], on(seed))[0]


def same(first: Draft, second: Draft) -> None:
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.parents.tolist() == second.parents.tolist() == list(range(-1, len(first) - 1))
    assert (first.q is None) == (second.q is None)
    if first.q is not None and second.q is not None:
        assert first.q.dtype == torch.float32
        torch.testing.assert_close(first.q, second.q, rtol=1e-5, atol=1e-6)


def history(draw: random.Random, alphabet: int, steps: int, drafts) -> Iterator[list[int]]:
    """Contexts of one row: after full accepts, rejections, bonus tokens, and unrelated ones.

    drafts(context): asked for the draft of each before the next is made.
    """
    row = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 9))]
    for _ in range(steps):
        yield row
        drafted = drafts(row)
        kept = draw.choice([0, len(drafted), draw.randrange(len(drafted) + 1)])
        row = [*row, *drafted[:kept], draw.randrange(alphabet)]
        if draw.random() < 0.15:
            row = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 12))]
        elif draw.random() < 0.15:
            row = row[: draw.randrange(1, len(row) + 1)]
