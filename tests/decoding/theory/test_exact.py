"""Exact losslessness by enumeration, on tables of fresh seeds."""

from __future__ import annotations

import pytest
import torch

from labcore.decoding.contract import Draft, Verifier
from labcore.decoding.draws import Drawing
from labcore.decoding.theory.exact import (
    cases,
    chain_proposal,
    expected_acceptance,
    outcomes,
    output_law,
    proposal,
    random_table,
    step_law,
    target_law,
    total_variation,
    typical_bias,
)
from labcore.decoding.verify import (
    TypicalAcceptance,
    block_verification,
    greedy_match,
    rejection_sampling,
    sample_and_compare,
)

EXACT = 1e-6
SAMPLED = [rejection_sampling, sample_and_compare, block_verification]


@pytest.mark.parametrize("verify", SAMPLED)
@pytest.mark.parametrize("name", list(cases()))
def test_one_step_has_the_law_of_the_target(verify: Verifier, name: str, seed: int) -> None:
    assert cases(seed)[name].distance(verify) < EXACT


@pytest.mark.parametrize("verify", SAMPLED)
def test_the_largest_chain_is_exact(verify: Verifier, seed: int) -> None:
    p, q = random_table(8, seed), random_table(8, seed + 1, support=(0, 2, 3, 7))
    for drawn in (True, False):
        law = step_law(verify, p, chain_proposal(q, 3, drawn=drawn), 4)
        assert total_variation(law, target_law(p, 4)) < EXACT


@pytest.mark.parametrize("verify", SAMPLED)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(("V", "gamma", "length"), [(2, 3, 4), (3, 1, 3), (3, 2, 2), (5, 0, 2)])
def test_many_steps_have_the_joint_law_of_the_target(
    verify: Verifier, drawn: bool, V: int, gamma: int, length: int, seed: int
) -> None:
    p, q = random_table(V, seed), random_table(V, seed + 1)
    law = output_law(verify, p, chain_proposal(q, gamma, drawn=drawn), length, (1,))
    assert law.sum().item() == pytest.approx(1, abs=1e-12)
    assert total_variation(law, target_law(p, length, (1,))) < EXACT


@pytest.mark.parametrize("verify", [greedy_match, *SAMPLED])
@pytest.mark.parametrize("certain", [None, (), (0, 2)])
def test_greedy_targets_are_met_exactly(
    verify: Verifier, certain: tuple[int, ...] | None, seed: int
) -> None:
    p, q = random_table(4, seed, one_hot=True), random_table(4, seed + 1)
    for parents in ((-1, 0, 1), (-1, -1, 1), (-1, -1, -1)):
        law = output_law(verify, p, proposal(q, parents, certain), 4)
        assert total_variation(law, target_law(p, 4)) < EXACT


def test_float32_tables_are_exact_to_their_rounding(seed: int) -> None:
    p, q = random_table(4, seed), random_table(4, seed + 1)
    narrow = chain_proposal(lambda context: q(context).float(), 2)
    law = step_law(rejection_sampling, lambda context: p(context).float(), narrow, 3)
    assert total_variation(law, target_law(p, 3)) < EXACT


@pytest.mark.parametrize("V", [2, 5, 8])
def test_acceptance_is_the_sum_of_minima_or_of_products(V: int, seed: int) -> None:
    p, q = random_table(V, seed), random_table(V, seed + 1)
    propose = chain_proposal(q, 1)
    lossless, compared, block = (expected_acceptance(rule, p, propose)[0] for rule in SAMPLED)
    assert block == pytest.approx(lossless, abs=1e-12)
    assert lossless == pytest.approx(torch.minimum(p(()), q(())).sum().item(), abs=1e-12)
    assert compared == pytest.approx((p(()) * q(())).sum().item(), abs=1e-12)
    assert compared <= lossless
    first = [p((x,)) * q(()).minimum(p(()))[x] for x in range(V)]
    both = sum(
        part.minimum(q((x,)) * q(()).minimum(p(()))[x]).sum() for x, part in enumerate(first)
    )
    assert expected_acceptance(rejection_sampling, p, chain_proposal(q, 2))[1] == pytest.approx(
        float(both), abs=1e-12
    )


def rounding(V: int, N: int) -> float:
    """The error of a step's law in fp64, in total variation.

    On a path, each of N + 1 rows takes at most 16 V roundings, each of relative size 2**-53. A
    difference p - q may lose digits, but its error is small beside p, and so beside the law.
    """
    return 16 * V * (N + 1) * 2.0**-53


TREES = [(-1, 0, 1), (-1, -1, 0), (-1, -1, 1), (-1, 0, 0, 1), (-1, 0, 0, 2)]


@pytest.mark.parametrize("parents", TREES)
@pytest.mark.parametrize("certain", [None, (), (1,)])
def test_blocks_are_exact_up_to_the_rounding_of_fp64(
    parents: tuple[int, ...], certain: tuple[int, ...] | None, seed: int
) -> None:
    p, q = random_table(3, 2 * seed), random_table(3, 2 * seed + 1)
    law = step_law(block_verification, p, proposal(q, parents, certain), 4)
    assert total_variation(law, target_law(p, 4)) < rounding(3, len(parents))


def test_blocks_are_exact_even_if_tokens_decide_the_length(seed: int) -> None:
    """As with `confidence` or a `Gated` drafter: the draft ends after its first token 0 or 2."""
    p, q = random_table(3, 2 * seed), random_table(3, 2 * seed + 1)

    def propose(context: tuple[int, ...], draws: Drawing) -> Draft:
        tokens: list[int] = []
        rows = []
        while len(tokens) < 3 and not set(tokens) & {0, 2}:
            rows.append(q((*context, *tokens)))
            tokens.append(draws.token(rows[-1]))
        return Draft.chain(tokens, torch.stack(rows))

    law = step_law(block_verification, p, propose, 4)
    assert total_variation(law, target_law(p, 4)) < rounding(3, 3)


def test_blocks_never_accept_fewer_than_tokens_one_by_one(seed: int) -> None:
    """On chains, and on trees in which no later sibling has the deeper branch."""
    more = 0
    for parents in ((-1, 0), (-1, 0, 1), (-1, -1, 0), (-1, 0, 0, 1)):
        for turn in range(4):
            p, q = (random_table(3, 100 * seed + 2 * turn + i) for i in range(2))
            for certain in ((), None):
                propose = proposal(q, parents, certain)
                by_block, by_token = (
                    expected_acceptance(rule, p, propose)
                    for rule in (block_verification, rejection_sampling)
                )
                tolerance = rounding(3, len(parents))
                assert sum(by_block) > sum(by_token) - len(parents) * tolerance
                more += sum(by_block) > sum(by_token) + 1e-3
                if certain is None and parents[-1] == len(parents) - 2:
                    # A chain that isn't drawn has nothing to make up for.
                    assert by_block == pytest.approx(by_token, abs=tolerance)
    assert more > 8


def test_a_late_deep_branch_may_cost_blocks_some_tokens() -> None:
    """Node 0 has the children 1 and 2, and only 2 has descendants; these tables are fixed."""
    propose = proposal(random_table(2, 23), (-1, 0, 0, 2, 3), ())
    by_block, by_token = (
        sum(expected_acceptance(rule, random_table(2, 22), propose))
        for rule in (block_verification, rejection_sampling)
    )
    assert by_block < by_token - 0.05


@pytest.mark.parametrize("V", [2, 7])
def test_acceptance_of_a_block_is_the_weight_of_its_prefixes(V: int, seed: int) -> None:
    """P(at least i accepted) = E[w_i], with w_i = min(1, w_(i-1) p / q): Sun et al., 2024."""
    p, q = random_table(V, 2 * seed), random_table(V, 2 * seed + 1)
    found = expected_acceptance(block_verification, p, chain_proposal(q, 2))
    expected = [0.0, 0.0]
    for x in range(V):
        first = min(1.0, float(p(())[x] / q(())[x]))
        expected[0] += float(q(())[x]) * first
        for y in range(V):
            second = min(1.0, first * float(p((x,))[y] / q((x,))[y]))
            expected[1] += float(q(())[x] * q((x,))[y]) * second
    assert found == pytest.approx(expected, abs=1e-12)


def test_typical_acceptance_is_biased_except_at_temperature_zero(seed: int) -> None:
    p = random_table(4, 3)
    propose = chain_proposal(random_table(4, 4), 2)
    bias = typical_bias(TypicalAcceptance(), p, propose, 2)
    law = output_law(TypicalAcceptance(), p, propose, 2)
    assert bias == total_variation(law, target_law(p, 2)) and bias > 0.1
    assert typical_bias(TypicalAcceptance(threshold=1.0, alpha=1e9), p, propose, 2) < EXACT
    sharp = random_table(4, seed, one_hot=True)
    assert typical_bias(TypicalAcceptance(), sharp, propose, 2) < EXACT


def test_outcomes_are_all_of_them_once() -> None:
    def experiment(draws: Drawing) -> tuple[int, bool]:
        token = draws.token(torch.tensor([1.0, 0.0, 3.0]))
        return (token, draws.coin(0.25)) if token else (token, draws.coin(1.0))

    found = outcomes(experiment)
    assert found == [((0, True), 0.25), ((2, True), 0.1875), ((2, False), 0.5625)]
    assert outcomes(lambda draws: 7) == [(7, 1.0)]


def test_errors_of_the_exact_law() -> None:
    p = random_table(3, 0)
    with pytest.raises(ValueError, match=r"a and b must .* got \(3,\) and \(3, 3\)"):
        total_variation(target_law(p, 1), target_law(p, 2))
    with pytest.raises(ValueError, match="length must be at least 1"):
        output_law(rejection_sampling, p, chain_proposal(p, 1), 0)
    with pytest.raises(ValueError, match="at least 4"):
        cases(0, vocab=3)
    for support in ((), (3,), (-1, 0)):
        with pytest.raises(ValueError, match="from 0 to 2"):
            random_table(3, 0, support=support)
