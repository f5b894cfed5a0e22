"""The drafts of a step: matching the target's argmax without its distribution."""

from __future__ import annotations

import random

import torch
from torch.nn import functional as F

from labcore.decoding.contract import Draft
from labcore.decoding.requests import Plan
from labcore.decoding.verify import greedy_match


def test_a_match_is_what_greedy_match_decides(seed: int) -> None:
    dice, letters, depths = random.Random(seed), 3, set()
    for turn in range(200):
        size = turn % 9
        best = [dice.randrange(letters) for _ in range(size + 1)]
        tokens = torch.tensor([dice.randrange(letters) for _ in range(size)], dtype=torch.int64)
        parents = [dice.randrange(-1, node) for node in range(size)]
        draft = Draft(tokens, torch.tensor(parents, dtype=torch.int32))
        if turn % 2:
            draft = Draft.chain(tokens)
        expected = greedy_match(F.one_hot(torch.tensor(best), letters).float(), draft)
        assert Plan(draft, size, size).match(best) == expected
        depths.add(len(expected.path))
    assert max(depths) >= 2
