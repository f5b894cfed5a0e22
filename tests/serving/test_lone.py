"""The audit that forgives rounding forgives nothing else."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from labcore.decoding import SamplingConfig
from labcore.models import pretrained, shipped_tokenizer
from tests.serving.lone import EDGE, GAP, departure
from tests.serving.tiny import alone, sampling_of


class Says:
    """A model that has the same logits [V] whatever it reads."""

    def __init__(self, logits: list[float] | torch.Tensor) -> None:
        self.row = torch.as_tensor(logits, dtype=torch.float64)

    def __call__(self, tokens: torch.Tensor) -> Says:
        self.logits = self.row.expand(*tokens.shape, -1)
        return self


def number(seed: int) -> float:
    """The first number that a request with this seed draws."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((), generator=generator, dtype=torch.float64).item()


def passes(logits: list[float] | torch.Tensor, token: int, **sampling: float) -> bool:
    asked = SamplingConfig(max_tokens=1, **{"temperature": 1.0, **sampling})
    return departure(Says(logits), [0], asked, [token]) == ""


def test_lone_outputs_pass_and_another_token_or_seed_does_not(seed: int) -> None:
    chance = random.Random(seed)
    model, tokenizer = pretrained("target"), shipped_tokenizer()
    asked = [(tokenizer.encode("def add(a, b):\n"), sampling_of(chance, 9)) for _ in range(16)]
    asked = [(prompt, replace(one, max_tokens=9)) for prompt, one in asked]
    missed = 0
    for (prompt, one), lone in zip(asked, alone(model, asked, tokenizer), strict=True):
        said = lone.tokens[0]
        assert departure(model, prompt, one, said) == ""
        place = chance.randrange(len(said))
        other = (said[place] + chance.randrange(1, 2048)) % 2048
        missed += departure(model, prompt, one, [*said[:place], other, *said[place + 1 :]]) == ""
        if one.temperature >= 1 and one.top_k != 5 and len(set(said)) > 4:
            missed += departure(model, prompt, replace(one, seed=one.seed + 1), said) == ""
    assert missed <= 1  # by chance, once in hundreds of runs


@pytest.mark.parametrize("away", [-1e-3, -EDGE / 2, EDGE / 2, 1e-3])
def test_a_sampled_token_is_forgiven_by_how_near_its_number_was(away: float, seed: int) -> None:
    """Token 0 has just less or just more than what is drawn, token 1 the rest, token 2 nothing."""
    seed = next(one for one in itertools.count(seed) if 0.01 < number(one) < 0.99)
    share = number(seed) + away
    logits = torch.tensor([share, 1 - share, 0.0], dtype=torch.float64).log()
    near = abs(away) < EDGE
    assert passes(logits, 0, seed=seed) == (away > 0 or near)
    assert passes(logits, 1, seed=seed) == (away < 0 or near)
    assert not passes(logits, 2, seed=seed)


@pytest.mark.parametrize("border", [{"top_k": 2}, {"top_p": 0.7}])
@pytest.mark.parametrize("gap", [EDGE / 2, 3 * EDGE])
def test_a_token_at_the_border_is_forgiven_by_how_near_it_was(border, gap: float, seed: int):
    """Two of three are drawn from; the third is almost as good as the second, and may stand for
    it."""
    seed = next(one for one in itertools.count(seed) if number(one) > 0.95)
    logits = [1.0, 0.0, -gap]
    assert passes(logits, 1, seed=seed, **border)
    assert passes(logits, 2, seed=seed, **border) == (gap < EDGE)
    assert not passes(logits, 0, seed=seed, **border)


@pytest.mark.parametrize("gap", [GAP / 2, 2 * GAP])
def test_a_greedy_token_with_a_penalty_is_forgiven_by_its_gap(gap: float) -> None:
    """What was said before counts half."""
    greedy = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert passes([2.0, 1.5, 1.0], 1, **greedy)
    assert not passes([2.0, 1.5, 1.0], 0, **greedy)
    assert passes([3.0, 1.5, 1.5 - gap], 2, **greedy) == (gap < GAP)
