"""A draft changes how fast tokens come, and not which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from labcore.capstone.corpus import Corpus
from labcore.capstone.draft import PLAIN, prompts_of, speeds, steps_within, train_draft
from labcore.capstone.plan import Choices, Plan
from labcore.capstone.training import train_model
from labcore.models import Llama


@pytest.fixture(scope="module")
def model(text: Corpus) -> Llama:
    from labcore.capstone.plan import shape

    plan = Plan(config=shape(64), rows=4, length=64, steps=60, rate=0.01)
    return train_model(text, plan, Choices()).model


def test_drafts_bring_the_same_tokens_in_fewer_steps(text: Corpus, model: Llama) -> None:
    head = train_draft(model, text, steps=10)
    found = speeds(model, head, prompts_of(text, count=3, length=20), tokens=24, rounds=2)
    assert found.keys() == {PLAIN, "n-grams", "EAGLE"}
    assert found[PLAIN].per_step == found[PLAIN].over_plain == 1
    for one in found.values():
        told = one.over_plain * found[PLAIN].tokens_per_second
        assert one.tokens_per_second == pytest.approx(told)
    for one in found.values():
        assert one.same == 1 and one.per_step >= 1 and one.tokens_per_second > 0
    assert max(found["n-grams"].per_step, found["EAGLE"].per_step) > 1


def test_a_finished_draft_is_read_from_its_checkpoint(
    text: Corpus, model: Llama, tmp_path: Path
) -> None:
    path = tmp_path / "draft.pt"
    one, again = (train_draft(model, text, steps=3, checkpoint=path) for _ in range(2))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert one.sharpness == again.sharpness


def test_prompts_are_held_out_and_drawn_by_the_seed(text: Corpus) -> None:
    one, same, other = (prompts_of(text, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    held = text.held_out.tolist()
    for prompt in one:
        assert len(prompt) == 64
        assert any(held[at : at + 64] == prompt for at in range(len(held) - 63))


def test_a_draft_needs_time(text: Corpus, model: Llama) -> None:
    with pytest.raises(ValueError, match="seconds must be"):
        steps_within(model, text, seconds=0.0)
    assert steps_within(model, text, seconds=1e-6) == 1
