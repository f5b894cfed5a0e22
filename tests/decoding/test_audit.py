"""The audit passes near ties and finds every other departure from the argmax."""

from __future__ import annotations

import pytest
import torch

from labcore.decoding.audit import Audit, Difference, near_tie_audit
from labcore.decoding.contract import SamplingConfig
from labcore.decoding.generation import generate
from tests.decoding.toys import Toy
from tests.models.shapes import CONFIGS, model_of


def test_a_planted_token_is_found_at_its_place(seed: int) -> None:
    """Each other token, at each place, with the gap of a forward over the same prefix."""
    model = model_of(CONFIGS["grouped"], torch.Generator().manual_seed(seed)).double()
    prompt = [5, 7, 1]
    tokens = generate(model, [prompt], SamplingConfig(max_tokens=9)).tokens[0]
    assert near_tie_audit(model, prompt, tokens) == Audit(9, 1e-3, ())
    for place in range(9):
        planted = [*tokens]
        planted[place] = (tokens[place] + 1 + place) % 37
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:place]])).logits[0, -1]
        weights = logits.log_softmax(-1)
        audit = near_tie_audit(model, prompt, planted)
        first = audit.differences[0]
        assert (first.position, first.token, first.best) == (place, planted[place], tokens[place])
        assert first.gap == pytest.approx(float(weights.max() - weights[planted[place]]))
        assert audit.worst >= first.gap and audit.passed == (audit.worst <= 1e-3)


def test_a_gap_is_forgiven_up_to_the_limit() -> None:
    target = Toy(3, lambda prefix: torch.tensor([1.0, 1.0 - 1e-2, 1.0]))
    audit = near_tie_audit(target, [0], [0, 1, 2], gap=2e-2)
    # Token 2 has the same logit as token 0, the first of the largest.
    assert [(d.position, d.token, d.best) for d in audit.differences] == [(1, 1, 0), (2, 2, 0)]
    assert audit.worst == pytest.approx(1e-2, rel=1e-4) and audit.passed
    assert not near_tie_audit(target, [0], [0, 1, 2], gap=5e-3).passed
    assert near_tie_audit(target, [0], [2], gap=0.0) == Audit(1, 0.0, (Difference(0, 2, 0, 0.0),))
    assert near_tie_audit(target, [0], []).passed


def test_errors_name_the_rule() -> None:
    target = Toy.random(3, 0)
    with pytest.raises(ValueError, match="at least one token"):
        near_tie_audit(target, [], [1])
    with pytest.raises(ValueError, match=r"between 0 and 2, got \[3\]"):
        near_tie_audit(target, [1], [2, 3])
    with pytest.raises(ValueError, match="gap must be"):
        near_tie_audit(target, [1], [2], gap=-1.0)
