"""The engine's attention reads what the mask of a packed step says, and nothing else."""

from __future__ import annotations

import random

import pytest

from labcore.studies.inflight.packed import pack


def test_a_row_reads_its_own_request_up_to_itself(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        asked = [
            (chance.randrange(9), chance.randint(1, 6)) for _ in range(chance.randint(1, 5))
        ]  # fmt: skip
        step = pack(asked, block_size=chance.choice([2, 3, 4]))
        assert sorted(step.rows) == [
            (who, held + at) for who, (held, read) in enumerate(asked) for at in range(read)
        ]
        for (who, at), seen in zip(step.rows, step.mask, strict=True):
            keys = [key for key, one in zip(step.keys, seen, strict=True) if one]
            assert keys == [(who, before) for before in range(at + 1)]
        assert step.pairs == sum(held + at + 1 for held, read in asked for at in range(read))


def test_a_step_reads_something() -> None:
    with pytest.raises(ValueError, match="requests must have at least one"):
        pack([])
    with pytest.raises(ValueError, match="read"):
        pack([(3, 0)])
