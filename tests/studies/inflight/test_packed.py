"""The engine's attention reads what the mask of a packed step says, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

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


def test_the_cpu_computes_padded_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is the size of the scores that torch's attention is asked for."""
    chance, sizes = random.Random(seed), list[int]()
    attend = functional.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        sizes.append(q.shape[0] * q.shape[2] * k.shape[2])
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    assert pack([(5, 1), (2, 1), (0, 4)]).computed == sum(sizes) == 28
    for _ in range(20):
        sizes.clear()
        asked = [
            (chance.randrange(9), chance.randint(1, 3)) for _ in range(chance.randint(1, 6))
        ]  # fmt: skip
        step = pack(asked)
        assert step.computed == sum(sizes) >= step.pairs


def test_a_step_reads_something() -> None:
    with pytest.raises(ValueError, match="requests must have at least one"):
        pack([])
    with pytest.raises(ValueError, match="read"):
        pack([(3, 0)])
