"""Divided training is the same training, and each rank keeps its share."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from labcore import processes
from labcore.device import seed_from_environment
from labcore.memory import Breakdown, estimate, zero
from labcore.memory.accounting.shapes import parameter_shapes
from labcore.memory.model import CONFIG, batches, fresh
from labcore.memory.zero import ZeroRun, train_divided
from labcore.models import Llama, next_token_loss, train

STEPS, BATCH, LENGTH, RANKS = 3, 4, 12, 2
WIDE = torch.float64.itemsize
WHOLE = 2_016_960 * WIDE
SHAPES = parameter_shapes(CONFIG)
LAYER = WIDE * sum(
    torch.Size(shape).numel() for name, shape in SHAPES.items() if name.startswith("layers.0.")
)
REST = WHOLE - CONFIG.num_hidden_layers * LAYER

Runs = tuple[list[float], list[dict[int, ZeroRun]], list[list[str]], list[list[int]]]


def every_stage(seed: int) -> tuple[dict[int, ZeroRun], list[str], list[int]]:
    """All stages, what is refused, and the rows of each forward, in one group: processes start
    slowly.
    """
    told, rows = [], []

    def watched(model: Llama, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows.append(len(tokens))
        return next_token_loss(model, tokens)

    zero.next_token_loss = watched
    for asked in ({"stage": 4}, {"stage": 1, "batch": 3}, {"stage": 1, "steps": 0}):
        try:
            train_divided(0, **asked)
        except ValueError as problem:
            told.append(str(problem))
    made = functools.partial(train_divided, seed, steps=STEPS, dtype=torch.float64)
    runs = {stage: made(stage=stage, batch=BATCH, length=LENGTH) for stage in range(4)}
    return runs, told, rows


@pytest.fixture(scope="module")
def runs() -> Runs:
    asked = seed_from_environment()
    seed = random.SystemRandom().randrange(2**31) if asked is None else asked
    print(f"LABCORE_SEED={seed}")
    model = fresh(seed, dtype=torch.float64)
    draw = batches(seed, batch=BATCH, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    alone = train(model, draw, optimizer, steps=STEPS, progress=False)
    came = processes.run(every_stage, RANKS, seed, timeout_s=600)
    return alone.losses, *map(list, zip(*came, strict=True))  # type: ignore[return-value]


def test_each_storage_is_counted_once_and_buffers_too() -> None:
    layer = torch.nn.Linear(6, 5, bias=False)
    layer.view = torch.nn.Parameter(layer.weight.detach()[2:])
    layer.register_buffer("mean", torch.zeros(7))
    one, other = (torch.optim.SGD([p], momentum=0.9) for p in (layer.weight, layer.view))
    (layer(torch.ones(1, 6)).sum() + layer.view.sum()).backward()
    one.step()
    other.step()
    apart = 4 * (5 * 6 + 3 * 6)  # gradients and momenta have storages of their own
    expected = Breakdown(parameters=4 * (5 * 6 + 7), gradients=apart, optimizer=apart)
    assert zero.held(layer, one, other) == expected


@pytest.mark.parametrize("stage", range(4))
def test_losses_are_those_of_one_process(stage: int, runs: Runs) -> None:
    alone, ranks, _, rows = runs
    assert rows == [[BATCH // RANKS] * 4 * STEPS] * RANKS
    for rank in ranks:
        # Gradients differ by rounding, 1e-16 or so of the largest; AdamW makes at most
        # lr / eps = 2e5 times that of it.
        torch.testing.assert_close(rank[stage].losses, tuple(alone), rtol=0, atol=1e-8)


@pytest.mark.parametrize("stage", range(4))
def test_each_rank_holds_its_share(stage: int, runs: Runs) -> None:
    held = [rank[stage].held for rank in runs[1]]
    steps = 4 * len(SHAPES)  # AdamW's counts of steps, in float32
    divided = {"parameters": stage > 1, "gradients": stage > 1, "optimizer": stage > 0}
    sizes = {"parameters": WHOLE, "gradients": WHOLE, "optimizer": 2 * WHOLE}
    for name, whole in sizes.items():
        found = [getattr(one, name) for one in held]
        counts = steps if name == "optimizer" else 0
        if name == "optimizer" and stage == 1:  # whole parameters go to ranks
            largest = 2 * WIDE * max(torch.Size(shape).numel() for shape in SHAPES.values())
            assert sum(found) == whole + counts
            assert max(found) - min(found) <= largest + counts
        elif divided[name]:
            assert found == [whole // RANKS + counts] * RANKS  # every parameter has even rows
        else:
            assert found == [whole + counts] * RANKS


def test_what_stands_gathered_is_what_the_stage_says(runs: Runs) -> None:
    for rank in runs[1]:
        assert [rank[stage].gathered for stage in (0, 1)] == [0, 0]
        assert rank[2].gathered == WHOLE
        assert rank[3].gathered == REST + LAYER


def test_the_estimate_has_the_same_bytes(runs: Runs) -> None:
    """In float32, of which these are twice."""
    for stage in range(4):
        told = estimate(
            CONFIG,
            batch=BATCH // RANKS,
            length=LENGTH,
            zero_stage=stage,
            data_parallel=RANKS,
            moment="step",
        )
        fullest = max((rank[stage].held for rank in runs[1]), key=lambda held: held.total)
        assert fullest.parameters == 2 * told.parameters
        assert fullest.gradients == 2 * told.gradients
        # Stage 1 gives whole parameters to ranks; the counts of steps do not double.
        rel = 0.05 if stage == 1 else 1e-4
        assert fullest.optimizer == pytest.approx(2 * told.optimizer, rel=rel)


def test_what_does_not_fit_is_refused(runs: Runs) -> None:
    for told in runs[2]:
        assert "stage must be one of 0, 1, 2, 3, got 4" in told[0]
        assert "batch must be a multiple of the 2 ranks, got 3" in told[1]
        assert "steps must be at least 1, got 0" in told[2]
