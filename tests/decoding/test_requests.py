"""The drafts of a step: matching the target's argmax without its distribution."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from labcore.decoding.contract import Draft, SamplingConfig
from labcore.decoding.requests import Plan, Request, likeliest
from labcore.decoding.verify import greedy_match


def test_a_match_is_what_greedy_match_decides(seed: int) -> None:
    dice, letters, depths = random.Random(seed), 3, set()
    row = Request([0], SamplingConfig(temperature=0.0), None)
    for turn in range(200):
        size = turn % 9
        best = [dice.randrange(letters) for _ in range(size + 1)]
        tokens = torch.tensor([dice.randrange(letters) for _ in range(size)], dtype=torch.int64)
        parents = [dice.randrange(-1, node) for node in range(size)]
        draft = Draft(tokens, torch.tensor(parents, dtype=torch.int32))
        if turn % 2:
            draft = Draft.chain(tokens)
        expected = greedy_match(F.one_hot(torch.tensor(best), letters).float(), draft)
        unread = torch.zeros(size + 1, letters)  # all the same, so they'd say otherwise
        assert Plan(draft, size, size).verify(unread, best, row, greedy_match) == expected
        depths.add(len(expected.path))
    assert max(depths) >= 2


def test_what_is_not_finite_is_told() -> None:
    row = Request([0], SamplingConfig(temperature=0.0), None)
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    assert likeliest(logits) == [1, -1]
    plan = Plan(Draft.chain([1]), 1, 1)
    with pytest.raises(ValueError, match="logits must have a finite largest value"):
        plan.verify(logits, likeliest(logits), row, greedy_match)
