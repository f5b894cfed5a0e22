"""Closed forms of speculation against sums, enumeration, and simulation."""

import itertools
import math
import random

import pytest

from labcore.decoding.theory import speedup as laws
from labcore.models import Llama
from labcore.models.config import LlamaConfig


@pytest.fixture
def chance(seed: int) -> random.Random:
    return random.Random(seed)


def test_expected_tokens_are_the_closed_form_and_its_limits(chance: random.Random) -> None:
    for gamma in (0, 1, 2, 5, 17):
        alpha = chance.uniform(0.01, 0.99)
        closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert laws.expected_tokens(alpha, gamma) == pytest.approx(closed)
        assert laws.expected_tokens(0, gamma) == 1
        assert laws.expected_tokens(1, gamma) == gamma + 1
        assert laws.expected_tokens(1 - 1e-12, gamma) == pytest.approx(gamma + 1)


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_expected_tokens_are_those_of_all_outcomes(gamma: int, chance: random.Random) -> None:
    rates = [chance.random() for _ in range(gamma)]
    total = 0.0
    for outcome in itertools.product((True, False), repeat=gamma):
        weight = math.prod(
            rate if taken else 1 - rate for rate, taken in zip(rates, outcome, strict=True)
        )
        total += weight * (1 + len(list(itertools.takewhile(bool, outcome))))
    assert laws.expected_tokens_of(rates) == pytest.approx(total)
    alpha = rates[0]
    assert laws.expected_tokens_of([alpha] * gamma) == pytest.approx(
        laws.expected_tokens(alpha, gamma)
    )


def test_more_acceptance_and_longer_drafts_give_more_tokens(chance: random.Random) -> None:
    low, high = sorted((chance.uniform(0.05, 0.5), chance.uniform(0.5, 0.95)))
    for gamma in range(1, 9):
        assert laws.expected_tokens(low, gamma) < laws.expected_tokens(high, gamma)
        assert laws.expected_tokens(low, gamma - 1) < laws.expected_tokens(low, gamma) < gamma + 1


def test_speed_is_tokens_over_what_they_cost() -> None:
    assert laws.speedup(0.5, 0) == 1
    assert laws.speedup(0.8, 4, draft_cost=0.1) == pytest.approx((1 - 0.8**5) / (0.2 * 1.4))
    assert laws.speedup(0, 3, verify_cost=1.5, draft_cost=0.5) == pytest.approx(1 / 3)
    # Leviathan's corollary 3.9: where alpha is above c, some length pays, and one token does.
    assert laws.speedup(0.31, 1, draft_cost=0.3) > 1 > laws.speedup(0.29, 1, draft_cost=0.3)


def test_the_best_length_beats_all_others(chance: random.Random) -> None:
    costs = [1 + 0.08 * k for k in range(9)]
    for _ in range(20):
        alpha, draft_cost = chance.random(), chance.uniform(0, 0.4)
        best = laws.best_length(alpha, costs, draft_cost)
        gains = [
            laws.speedup(alpha, gamma, verify_cost=costs[gamma], draft_cost=draft_cost)
            for gamma in range(9)
        ]
        assert gains[best] == max(gains) >= 1
        assert laws.best_length(alpha, costs, draft_cost, longest=3) <= 3
    assert laws.best_length(0.9, [1.0] * 9, 0.0) == 8
    assert laws.best_length(0.9, [float(k) for k in range(1, 10)], 0.01) == 0
    assert laws.best_length(0, costs, 0.1) == 0


SMALL = LlamaConfig(
    vocab_size=11, hidden_size=12, intermediate_size=20, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, head_dim=4,
)  # fmt: skip


def test_a_roofline_counts_the_weights_of_the_products_and_the_cache_of_a_token() -> None:
    model = Llama(SMALL)
    roof = laws.Roofline.of(SMALL, flops=1.0, bandwidth=1.0)
    matrices = {n: w for n, w in model.named_parameters() if w.dim() == 2 and "embed" not in n}
    assert roof.weights == sum(weight.numel() for weight in matrices.values())
    assert roof.cache == 2 * 2 * 3 * 2 * 4  # keys and values, 2 bytes, layers, heads, head_dim
    assert roof.attention == 4 * 3 * 6 * 4  # two products of 2 FLOP per number of a query


def test_cost_is_flat_until_computing_takes_longer_than_reading() -> None:
    roof = laws.Roofline(flops=300.0, bandwidth=1.0, weights=7.0, cache=0.0, attention=0.0)
    assert [roof.cost(k) for k in (1, 5, 9)] == [1, 1, 1]
    assert [roof.cost(k, batch=600) for k in (1, 5, 9)] == pytest.approx([1, 5, 9])
    costs = [roof.cost(5, batch=batch) for batch in (1, 32, 64, 128, 256, 512)]
    assert costs == sorted(costs)


def test_a_long_context_keeps_a_full_batch_bound_by_memory() -> None:
    roof = laws.Roofline(flops=300.0, bandwidth=1.0, weights=1000.0, cache=4.0, attention=4.0)
    costs = [roof.cost(5, batch=512, context=length) for length in (0, 100, 1000, 10_000)]
    assert costs == sorted(costs, reverse=True) and costs[0] == pytest.approx(5)
    assert costs[-1] < 1.2


def test_a_public_log_reads_as_a_burst() -> None:
    # vLLM issue 19254: acceptance by place in the draft.
    by_place = [0.543, 0.357, 0.264]
    found = laws.conditionals(by_place)
    assert found == pytest.approx([0.543, 0.657, 0.739], abs=1e-3)
    assert laws.expected_tokens_of(found) == pytest.approx(1 + sum(by_place))
    assert round(laws.expected_tokens_of(found), 2) == 2.16
    assert round(laws.expected_tokens(0.388, 3), 2) == 1.6
    assert round(laws.expected_tokens(0.543, 3), 2) == 2.0


def test_conditionals_take_counts_for_drafts_of_mixed_lengths() -> None:
    assert laws.conditionals([60, 30, 0], 80) == [0.75, 0.5, 0.0]
    assert laws.conditionals([60, 30], [80, 40]) == [0.75, 0.75]
    # The third place was never judged.
    assert laws.conditionals([10, 0, 0], 20) == [0.5, 0.0]
    assert laws.conditionals([], 5) == []


def test_judged_outcomes_stop_at_the_rejection() -> None:
    assert laws.judged([2, 0, 3, 0], [4, 1, 3, 0]) == [True, True, False, False, True, True, True]


def test_acceptance_after_counts_pairs() -> None:
    after_accepted, after_rejected = laws.acceptance_after([True, True, False, True, False, False])
    assert after_accepted == pytest.approx(1 / 3) and after_rejected == pytest.approx(1 / 2)
    always, never = laws.acceptance_after([True, True])
    assert always == 1 and math.isnan(never)


def simulated(chance: random.Random, after: dict[bool, float], gamma: int, steps: int) -> list[int]:
    """Accepted tokens of each step of a chain of outcomes, each depending on the one before."""
    before, accepted = True, []
    for _ in range(steps):
        taken = 0
        while taken < gamma:
            before = chance.random() < after[before]
            if not before:
                break
            taken += 1
        accepted.append(taken)
    return accepted


@pytest.mark.parametrize("gamma", [1, 4])
def test_bursty_tokens_are_those_of_a_simulation(gamma: int, chance: random.Random) -> None:
    high, low, steps = chance.uniform(0.6, 0.8), chance.uniform(0.3, 0.5), 20_000
    accepted = simulated(chance, {True: high, False: low}, gamma, steps)
    # The mean of 20,000 steps, each within gamma, their correlation below 0.5^k: its standard
    # deviation is below gamma / 2 * sqrt(3 / steps); six of them are a false alarm in 500 million.
    slack = 6 * gamma / 2 * math.sqrt(3 / steps)
    tokens = 1 + sum(accepted) / steps
    assert tokens == pytest.approx(laws.bursty_tokens(high, low, gamma), abs=slack)
    outcomes = laws.judged(accepted, [gamma] * steps)
    found = laws.acceptance_after(outcomes)
    # At least 20,000 outcomes, of which a fifth or more are of each kind.
    assert found == pytest.approx((high, low), abs=6 * 0.5 / math.sqrt(steps / 5))


def test_bursts_shorten_steps_at_the_same_acceptance(chance: random.Random) -> None:
    for gamma in (0, 1, 2, 7):
        alpha = chance.random()
        assert laws.bursty_tokens(alpha, alpha, gamma) == pytest.approx(
            laws.expected_tokens(alpha, gamma)
        )
    # Of all judged tokens .47 / (1 - .71 + .47) are accepted: the facts of two tiny models.
    alpha = 0.47 / (1 - 0.71 + 0.47)
    assert round(alpha, 2) == 0.62
    assert laws.bursty_tokens(0.71, 0.47, 4) < laws.expected_tokens(alpha, 4)
    assert laws.bursty_tokens(1, 0, 3) == 4 and laws.bursty_tokens(1, 1, 3) == 4
    assert laws.bursty_tokens(1, 0.2, 3) == pytest.approx(4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: laws.expected_tokens(1.2, 3), "alpha must be a probability"),
        (lambda: laws.expected_tokens(math.nan, 3), "alpha must be a probability"),
        (lambda: laws.expected_tokens(0.5, -1), "gamma must be a whole number"),
        (lambda: laws.speedup(0.5, 2, verify_cost=0), "verify_cost must be"),
        (lambda: laws.speedup(0.5, 2, draft_cost=-0.1), "draft_cost must be"),
        (lambda: laws.best_length(0.5, [1.0, 1.2], 0.1, longest=4), "costs must hold v.1. to v.5."),
        (lambda: laws.best_length(0.5, [], 0.1), "costs must hold"),
        (lambda: laws.conditionals([3, 2]), "accepted must be .* got 3 of 1.0 at place 0"),
        (lambda: laws.conditionals([3, 2], [4]), "a number for each of the 2 places"),
        (lambda: laws.judged([3], [2]), "must accept 0 to all 2"),
        (lambda: laws.expected_tokens_of([0.5, 1.5]), r"conditionals\[1\]"),
        (lambda: laws.bursty_tokens(0.5, 2, 3), "after_rejected must be"),
        (lambda: laws.Roofline.of(SMALL, flops=0.0, bandwidth=1.0), "flops must be"),
    ],
)
def test_what_is_no_probability_or_length_is_refused(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
