"""Training follows the choices, resumes to the bit, and traces a spike to its rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from labcore.capstone.corpus import Corpus
from labcore.capstone.plan import Choices, Plan, model_of
from labcore.capstone.training import PLANTED, Moment, train_model


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_the_loss_falls(text: Corpus, plan: Plan, optimizer: str) -> None:
    told: list[Moment] = []
    run = train_model(text, plan, Choices(optimizer=optimizer), watch=told.append)
    assert [one.step for one in told] == list(range(plan.steps))
    assert [one.loss for one in told] == pytest.approx(run.curve.losses, rel=1e-6)
    assert [one.norm for one in told] == run.curve.norms
    assert all(one.seconds > 0 for one in told)
    assert run.curve.losses[-1] < run.curve.losses[0] - 1 and not run.spikes
    assert sum(run.curve.tokens) == plan.tokens and not run.model.training


def test_gradients_are_clipped_to_the_limit(text: Corpus, plan: Plan) -> None:
    plan = dataclasses.replace(plan, steps=1)
    one, none = (train_model(text, plan, Choices(clip=limit)) for limit in (1e-9, None))
    assert one.curve.norms == none.curve.norms  # as they were before
    # Far below AdamW's epsilon, a gradient moves its weight by next to nothing.
    start = model_of(plan, Choices()).state_dict()
    for name, tensor in one.model.state_dict().items():
        if tensor.dim() < 2:  # without weight decay
            assert (tensor - start[name]).abs().max() < 0.2 * plan.rate
            assert (none.model.state_dict()[name] - start[name]).abs().max() > 0.5 * plan.rate


class Killed(Exception):
    """Stands for a process that ends in the middle of a step."""


@pytest.mark.parametrize("at", [1, 17, 39])
def test_a_killed_training_goes_on_to_the_same_bits(
    text: Corpus, plan: Plan, tmp_path: Path, at: int
) -> None:
    plan = dataclasses.replace(plan, seconds=1.0)  # a checkpoint every five steps
    choices = Choices(spike=True)
    whole = train_model(text, plan, choices)

    def kill(moment: Moment) -> None:
        if moment.step == at:
            raise Killed

    path = tmp_path / "training.pt"
    with pytest.raises(Killed):
        train_model(text, plan, choices, checkpoint=path, watch=kill)
    told: list[Moment] = []
    again = train_model(text, plan, choices, checkpoint=path, watch=told.append)
    assert told[0].step == at // 5 * 5
    assert again.curve == whole.curve and again.spikes == whole.spikes
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


@pytest.mark.parametrize("shuffle", [True, False])
def test_planted_noise_is_found_and_traced(text: Corpus, plan: Plan, shuffle: bool) -> None:
    plan = dataclasses.replace(plan, steps=120)
    found = train_model(text, plan, Choices(spike=True, shuffle=shuffle)).spikes
    assert [one.step for one in found] == [72]
    assert found[0].provenance == {PLANTED: 8}


@pytest.mark.parametrize("levers", [{"rows": 1, "accumulate": 8}, {"checkpointing": 1}])
def test_levers_leave_the_training_as_it_is(
    text: Corpus, plan: Plan, levers: dict[str, int]
) -> None:
    plan = dataclasses.replace(plan, steps=4)
    other = dataclasses.replace(plan, **levers)
    one, two = (train_model(text, each, Choices()) for each in (plan, other))
    assert one.curve.losses == pytest.approx(two.curve.losses, rel=1e-5)
    assert type(two.model.layers) is type(one.model.layers)


def test_rows_in_order_come_from_one_file_and_at_random_from_many(text: Corpus, plan: Plan) -> None:
    from labcore.capstone.training import _Rows

    ordered, drawn = (_Rows(text, plan, Choices(shuffle=one)) for one in (False, True))
    assert ordered.files(0) == {text.files[0]: 8}
    assert len(drawn.files(0)) > 3 and sum(drawn.files(0).values()) == 8
    rows, counts = drawn(5)
    assert rows.shape == (4, 17) and counts is None and torch.equal(rows, drawn(5)[0])


def test_another_plan_does_not_resume(text: Corpus, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "training.pt"
    train_model(text, plan, Choices(), checkpoint=path)
    with pytest.raises(ValueError, match="accumulate must be 2"):
        train_model(text, dataclasses.replace(plan, accumulate=4), Choices(), checkpoint=path)
