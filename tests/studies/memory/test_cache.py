"""Counts of requests are the engine's, and a cache's loss is the model's own up to its rounding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from labcore.memory.cache import kv_bytes
from labcore.models import ByteTokenizer, Llama
from labcore.models.training import next_token_loss
from labcore.serving.simulation.workload import Workload, fixed
from labcore.studies.memory import cache as study
from tests.serving.tiny import tiny


def workload(prompts: list[int], outputs: list[int], **more: object) -> Workload:
    return Workload(
        arrivals=(0.0,) * len(prompts), prompts=tuple(prompts), outputs=tuple(outputs),
        max_tokens=max(outputs), vocabulary=ByteTokenizer().vocab_size, seed=0, **more,
    )  # fmt: skip


def test_the_average_counts_each_step_of_each_request() -> None:
    asked = workload([3, 5], [2, 4])
    held = [3, 4, 5, 6, 7, 8]  # before the last token, which isn't read
    assert study.average_held(asked) == sum(held) / 6
    assert study.average_held(asked, 4) == sum(-(-n // 4) * 4 for n in held) / 6
    assert study.average_held(asked, 100) == 100


@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_equal_requests_fill_the_pool(page: int, dtype: str) -> None:
    """A prompt that fills whole pages and one output: no one grows, so the count is exact."""
    model, prompt = tiny(1).float(), 80
    asked = workload([prompt] * 40, [*fixed(1, 40)])
    budget = 7 * kv_bytes(model.config, prompt, dtype=dtype) + 3
    found = study.crowd(
        model, asked, budget=budget, dtype=dtype, page=page, longest=prompt
    )  # fmt: skip
    assert found.measured == found.predicted == found.blocks * page / prompt == 7
    assert found.wasted == 0 == found.preemptions


def test_a_contiguous_reservation_wastes_what_is_not_yet_written(seed: int) -> None:
    chance, model = random.Random(seed), tiny(2).float()
    asked = workload([chance.randint(2, 9) for _ in range(30)], [6] * 30)
    found = study.crowd(
        model, asked, budget=3 * kv_bytes(model.config, 50, dtype="float32"), dtype="float32",
        page=50, longest=50,
    )  # fmt: skip
    assert found.measured == found.predicted == 3
    assert found.wasted == pytest.approx(1 - study.average_held(asked) / 50, abs=0.02)


def test_what_cannot_be_counted_is_refused() -> None:
    model, asked = tiny(3).float(), workload([4, 4], [2, 2])
    whole = {"dtype": "int8", "page": 8, "longest": 8}
    with pytest.raises(ValueError, match="budget must hold one request"):
        study.crowd(model, asked, budget=100, **whole)
    with pytest.raises(ValueError, match="requests must wait"):
        study.crowd(model, asked, budget=10**6, **whole)


def test_the_loss_through_a_cache_is_the_models(generator: torch.Generator) -> None:
    base = tiny(4)
    model = Llama(replace(base.config, head_dim=10), generator=generator, dtype=torch.float64)
    rows = torch.randint(256, (3, 38), generator=generator)
    total, count = next_token_loss(model, rows)
    plain = total.item() / count
    losses = {
        dtype: study.loss_through_cache(model, rows, dtype)
        for dtype in ("float32", "bfloat16", "int8", "float8")
    }
    assert losses["float32"] == pytest.approx(plain, rel=1e-5)
    assert len(set(losses.values())) == 4  # each rounds in its own way
    assert losses["float8"] == pytest.approx(plain, abs=0.1)


def test_windows_are_of_the_held_out_text_and_follow_the_seed() -> None:
    one, two = (study.held_out_windows(3, 17, seed) for seed in (5, 6))
    assert one.shape == (3, 18) and not torch.equal(one, two)
    assert torch.equal(one, study.held_out_windows(3, 17, 5))
