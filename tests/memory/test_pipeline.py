"""A pipeline trains the whole model's weights, and waits as long as the formula says."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from labcore import processes
from labcore.device import seed_from_environment
from labcore.memory import Stage, train_stage
from labcore.memory.model import CONFIG, batches, fresh
from labcore.memory.pipeline import PipelineRun, StageWork, bubble, idle, in_flight
from labcore.models import Llama, LlamaConfig, train
from tests.memory.steps import AWKWARD

STAGES, STEPS, BATCH, LENGTH, MICRO = 3, 3, 8, 12, 8
UNITS = {"forward": 1.0, "backward": 2.0}
Runs = tuple[list[float], dict[str, torch.Tensor], list[dict[str, PipelineRun]], list[list[str]]]


def both(seed: int) -> tuple[dict[str, PipelineRun], list[str]]:
    """Both schedules, and what is refused, in one group: processes start slowly."""
    told = []
    for schedule, micro in (("gpipe", 3), ("1f1b", 2), ("zigzag", 2)):
        try:
            train_stage(0, schedule=schedule, micro_batches=micro)
        except ValueError as problem:
            told.append(str(problem))
    runs = {
        schedule: train_stage(
            seed,
            schedule=schedule,
            micro_batches=MICRO,
            steps=STEPS,
            batch=BATCH,
            length=LENGTH,
            dtype=torch.float64,
        )
        for schedule in ("gpipe", "1f1b")
    }
    return runs, told


@pytest.fixture(scope="module")
def runs() -> Runs:
    asked = seed_from_environment()
    seed = random.SystemRandom().randrange(2**31) if asked is None else asked
    print(f"LABCORE_SEED={seed}")
    model = fresh(seed, dtype=torch.float64)
    draw = batches(seed, batch=BATCH, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    alone = train(model, draw, optimizer, steps=STEPS, progress=False)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    came = processes.run(both, STAGES, seed, timeout_s=600)
    return alone.losses, weights, [found for found, _ in came], [told for _, told in came]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_it_trains_what_one_process_trains(schedule: str, runs: Runs) -> None:
    losses, weights, ranks, _ = runs
    found = {name: p for rank in ranks for name, p in rank[schedule].weights.items()}
    assert found.keys() == weights.keys()
    # Gradients differ by rounding, 1e-16 or so; AdamW makes at most lr / eps = 2e5 times that.
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-8)
    torch.testing.assert_close(ranks[-1][schedule].losses, tuple(losses), rtol=0, atol=1e-8)
    assert ranks[0][schedule].losses == ()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_its_order_waits_as_the_formula_says(schedule: str, runs: Runs) -> None:
    for step in range(STEPS):
        works = [rank[schedule].works[step] for rank in runs[2]]
        assert idle(works, UNITS) == pytest.approx(bubble(STAGES, MICRO), abs=1e-12)
        assert 0 <= idle(works) < 1
        for stage, mine in enumerate(works):
            kept = itertools.accumulate(1 if one.kind == "forward" else -1 for one in mine)
            assert max(kept) == in_flight(stage, STAGES, MICRO, schedule=schedule)
            assert len(mine) == 2 * MICRO


def test_1f1b_keeps_fewer_activations(runs: Runs) -> None:
    for stage, mine in enumerate(runs[2]):
        ratio = mine["1f1b"].most.activations / mine["gpipe"].most.activations
        kept = in_flight(stage, STAGES, MICRO, schedule="1f1b")
        # Tokens and messages stand besides.
        assert ratio == pytest.approx(kept / MICRO, abs=0.1)
        assert mine["1f1b"].most.parameters == mine["gpipe"].most.parameters


def order(schedule: str, stage: int, stages: int, micro: int) -> list[StageWork]:
    """The schedules of the papers, written down."""
    warm = micro if schedule == "gpipe" else min(micro, stages - stage)
    kinds = [("forward", n) for n in range(warm)]
    for n in range(micro):
        kinds.append(("backward", n))
        if warm + n < micro:
            kinds.append(("forward", warm + n))
    return [StageWork(kind=kind, micro_batch=n, begin=0, end=1) for kind, n in kinds]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_formula_holds_for_every_pipeline(schedule: str) -> None:
    for stages, micro in itertools.product(range(1, 6), range(1, 10)):
        works = [order(schedule, stage, stages, micro) for stage in range(stages)]
        for seconds in (UNITS, {"forward": 3.0, "backward": 3.5}):
            expected = bubble(stages, micro)
            assert idle(works, seconds) == pytest.approx(expected, abs=1e-12)


def test_measured_times_are_taken_as_they_are() -> None:
    one = [StageWork(kind="forward", micro_batch=0, begin=10, end=13)]
    other = [StageWork(kind="forward", micro_batch=0, begin=14, end=15)]
    assert idle([one, other]) == pytest.approx(1 - 4 / 10)


def test_works_and_seconds_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="works must hold one work or more, got none"):
        idle([[], []])
    works = [order("1f1b", stage, 2, 3) for stage in range(2)]
    with pytest.raises(ValueError, match=r"'forward' and 'backward', got \['forward'\]"):
        idle(works, {"forward": 1.0})


def test_an_order_that_waits_for_ever_is_reported() -> None:
    works = [order("1f1b", stage, 2, 3) for stage in range(2)]
    with pytest.raises(ValueError, match="every work must .* got an order that deadlocks"):
        idle([works[0][::-1], works[1]], UNITS)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_stages_in_a_row_are_the_model(stages: int, generator: torch.Generator) -> None:
    shape = LlamaConfig(**{**AWKWARD["biased"], "num_hidden_layers": 5})
    model = Llama(shape, generator=generator, dtype=torch.float64)
    tokens = torch.randint(700, (2, 11), generator=generator)
    parts = [Stage(model, stage, stages) for stage in range(stages)]
    x = tokens
    for part in parts:
        x = part(x)
    torch.testing.assert_close(x, model(tokens).logits, rtol=0, atol=0)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a head that is not tied"):
        Stage(Llama(LlamaConfig(**AWKWARD["tied"])), 0, 2)
    with pytest.raises(ValueError, match="a layer for each of 5 stages"):
        Stage(Llama(CONFIG), 0, 5)
    with pytest.raises(ValueError, match="stage must be one of 0, 1"):
        Stage(Llama(CONFIG), 2, 2)
    with pytest.raises(ValueError, match="stages must be at least 1"):
        bubble(0, 2)


def test_a_batch_that_cannot_be_divided_is_refused(runs: Runs) -> None:
    for told in runs[3]:
        assert "must divide batch=8" in told[0]
        assert "and be 3 or more for 1f1b on 3 stages, got 2" in told[1]
        assert "schedule must be one of 'gpipe', '1f1b'" in told[2]
