"""Runs in one format: which diverge, and what counts as diverging."""

import math

import pytest
import torch

from labcore.studies.adamw_epsilon import divergence, gradient_scale


@pytest.fixture(autouse=True)
def no_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(gradient_scale, "_corpus", lambda _: text)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0, 4.0, 3.0], None),
        ([5.0, 6.0, 3.0], None),
        ([5.0, 4.0, 6.0, 7.0], 2),
        ([5.0, 5.0], 1),
        ([5.0, 4.0, math.nan, 3.0], 2),
        ([math.nan, math.nan], 0),
        ([5.0, math.inf, 4.0], 1),
        ([5.0], None),
    ],
)
def test_the_first_bad_step(losses: list[float], expected: int | None) -> None:
    assert divergence.first_bad_step(losses) == expected


def test_torchs_loop_dies_after_one_step_in_fp16_alone(seed: int) -> None:
    curve = divergence.losses("fp16", "torch AdamW", seed, width=16, steps=3)
    assert math.isfinite(curve[0]) and not math.isfinite(curve[1])
    for form, name in (("fp32", "torch AdamW"), ("fp16", "fp32 state")):
        assert all(map(math.isfinite, divergence.losses(form, name, seed, width=16, steps=3)))


def test_other_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of"):
        divergence.losses("fp8", "torch AdamW", 0)
    with pytest.raises(ValueError, match="name must be one of"):
        divergence.losses("fp32", "atan2", 0)
