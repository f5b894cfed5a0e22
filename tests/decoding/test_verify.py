"""Verifiers with real generators: distribution, trees, traces, greedy tables and errors."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from labcore.decoding.contract import Draft, Verifier
from labcore.decoding.draws import Draws
from labcore.decoding.gallery import FAULTS
from labcore.decoding.theory.exact import Propose, Table, proposal, random_table, target_law
from labcore.decoding.verify import (
    LOSSLESS,
    VERIFIERS,
    TypicalAcceptance,
    block_verification,
    check_draft,
    greedy_match,
    rejection_sampling,
    residual,
    sample_and_compare,
)

V, SAMPLES = 3, 3000
FALSE_ALARMS = 1e-6
SETTINGS: dict[str, tuple[Verifier, tuple[int, ...], tuple[int, ...] | None]] = {
    "drawn chain, rejection": (rejection_sampling, (-1, 0), ()),
    "one-hot chain, rejection": (rejection_sampling, (-1, 0), None),
    "mixed tree, rejection": (rejection_sampling, (-1, -1, 1), (0,)),
    "drawn chain, block": (block_verification, (-1, 0), ()),
    "drawn tree, comparison": (sample_and_compare, (-1, -1, 0), ()),
}
TESTS = len(SETTINGS) + 1
"""Tests that draw at random: they share the rate of false alarms."""


def smooth(seed: int) -> Table:
    """Rows of which no token has less than 1/6, so that each cell expects 83 samples or more."""
    rough = random_table(V, seed)
    return functools.cache(lambda context: (rough(context) + 1 / V) / 2)


def statistic(verify: Verifier, p: Table, propose: Propose, seed: int) -> float:
    """Pearson's, of the first two tokens against the target's law."""
    draws = Draws(torch.Generator().manual_seed(seed))
    counts = torch.zeros(V, V, dtype=torch.float64)
    known: dict[tuple[int, ...], Tensor] = {}
    for _ in range(SAMPLES):
        draft = propose((), draws)
        tokens = tuple(draft.tokens.tolist())
        if tokens not in known:
            rows = [p(())]
            for token, parent in zip(tokens, draft.parents.tolist(), strict=True):
                rows.append(p((token,) if parent < 0 else (tokens[parent], token)))
            known[tokens] = torch.stack(rows)
        accepted = verify(known[tokens], draft, draws)
        said = [*(tokens[node] for node in accepted.path), accepted.next_token]
        if len(said) == 1:
            said.append(draws.token(p((said[0],))))
        counts[said[0], said[1]] += 1
    expected = SAMPLES * target_law(p, 2)
    return ((counts - expected) ** 2 / expected).sum().item()


def threshold() -> float:
    return float(stats.chi2.isf(FALSE_ALARMS / TESTS, V * V - 1))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_samples_follow_the_target(name: str, seed: int) -> None:
    verify, parents, certain = SETTINGS[name]
    p, q = smooth(seed), smooth(seed + 1)
    assert statistic(verify, p, proposal(q, parents, certain), seed) < threshold()


def test_the_samples_are_enough_to_see_a_fault(seed: int) -> None:
    """Power: a law of two tokens that is off by a total variation of 0.1 is seen with 99.9 %."""
    # The noncentrality is samples * sum(d d / p), at least samples * sum(|d|) ** 2.
    assert stats.ncx2.sf(threshold(), V * V - 1, SAMPLES * (2 * 0.1) ** 2) > 0.999
    broken = FAULTS["first_unverified"].verify  # off by at least 1/3: p is at most 2/3
    propose = proposal(random_table(V, seed, one_hot=True), (-1, 0))
    assert statistic(broken, smooth(seed), propose, seed) > threshold()


def one_hot_rows(tokens: list[int], vocab: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


@pytest.mark.parametrize("name", sorted(LOSSLESS | {"typical"}))
@pytest.mark.parametrize(
    ("drafted", "target", "kept"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 5, 3, 4], 1),
        ([1, 2, 3], [0, 2, 3, 4], 0),
        ([], [5], 0),
        ([4], [4, 4], 1),
    ],
)
def test_greedy_tables(name: str, drafted: list[int], target: list[int], kept: int) -> None:
    p = one_hot_rows(target, 6)
    for q in (None, one_hot_rows(drafted, 6) if drafted else torch.zeros(0, 6)):
        said = VERIFIERS[name](p, Draft.chain(drafted, q), torch.Generator())
        assert said.path == tuple(range(kept)) and said.next_token == target[kept]


def test_greedy_takes_the_first_of_equals_and_any_branch() -> None:
    p = torch.tensor([[0.2, 0.4, 0.4], [0.1, 0.1, 0.8], [0.5, 0.5, 0.0], [1.0, 0, 0]])
    draft = Draft(torch.tensor([2, 1, 0]), torch.tensor([-1, -1, 1], dtype=torch.int32))
    said = greedy_match(p, draft)
    assert said.path == (1, 2) and said.next_token == 0 and said.draws == ()


@pytest.mark.parametrize("name", ["rejection", "block", "sample_and_compare", "typical"])
def test_decision_repeats_from_its_seed_and_records_its_draws(name: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for N in (0, 1, 5):
        p = torch.randn(N + 1, 50, generator=g).softmax(-1)
        q = torch.randn(N, 50, generator=g).softmax(-1)
        tokens = torch.randint(50, (N,), generator=g)
        first, second = (
            VERIFIERS[name](p, Draft.chain(tokens, q), torch.Generator().manual_seed(seed))
            for _ in range(2)
        )
        assert first == second
        judged = min(len(first.path) + 1, N)
        expected = {
            "rejection": judged + 1,
            "block": N - len(first.path) + bool(first.path) + 1,
            "sample_and_compare": len(first.path) + 1,
            "typical": 1,
        }
        assert len(first.draws) == expected[name] and all(0 <= u < 1 for u in first.draws)
        if name == "rejection":
            for node in range(judged):
                ratio = p[node, tokens[node]].item() / q[node, tokens[node]].item()
                assert (first.draws[node] < ratio) == (node in first.path)


def test_a_shared_log_is_cut_to_the_decision(seed: int) -> None:
    draws = Draws(torch.Generator().manual_seed(seed))
    draws.coin(0.5)
    p = torch.full((2, 4), 0.25)
    said = rejection_sampling(p, Draft.chain([1]), draws)
    assert said.draws == tuple(draws.log[1:])


def test_a_token_without_probability_is_never_accepted_nor_drawn(seed: int) -> None:
    p = torch.tensor([[0.0, 0.3, 0.0, 0.7]] * 3)
    q = torch.tensor([[0.5, 0.0, 0.5, 0.0]] * 2)
    g = torch.Generator().manual_seed(seed)
    for verify in (rejection_sampling, sample_and_compare):
        for draft in (Draft.chain([0, 2], q), Draft.chain([2, 0])):
            for _ in range(200):
                said = verify(p, draft, g)
                assert said.path == () and said.next_token in (1, 3)


def test_the_residual_is_normalised_and_falls_back_to_p() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert residual(p, q).tolist() == [1, 0, 0]
    assert torch.equal(residual(p, p), p)
    torch.testing.assert_close(
        residual(p, torch.tensor([1.0, 0, 0])), torch.tensor([0.0, 0.6, 0.4])
    )
    with pytest.raises(ValueError, match=r"p and q must be .* \(3,\) and \(2,\)"):
        residual(p, q[:2])


def test_typical_acceptance_keeps_deepest_path_above_its_bound(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, 9, generator=g).mul(2).softmax(-1)
    typical = TypicalAcceptance(threshold=0.15, alpha=0.4)
    for row in rows:
        entropy = -sum(x * math.log(x) for x in row.tolist())
        bound = min(0.15, 0.4 * math.exp(-entropy))
        for token in range(9):
            said = typical(torch.stack([row, row]), Draft.chain([token]), g)
            assert (said.path == (0,)) == (row[token].item() > bound)
    p = torch.tensor([[0.4, 0.4, 0.2, 0.0]] + [[0.0, 0.5, 0.0, 0.5]] * 4)
    parents = torch.tensor([-1, -1, 1, 0], dtype=torch.int32)
    said = TypicalAcceptance()(p[:5], Draft(torch.tensor([0, 1, 3, 0]), parents), g)
    assert said.path == (1, 2) and said.next_token in (1, 3)
    with pytest.raises(ValueError, match="at most 1"):
        TypicalAcceptance(threshold=1.5)
    with pytest.raises(ValueError, match="at least 0"):
        TypicalAcceptance(alpha=-1.0)


def test_errors_say_the_rule() -> None:
    p, draft = torch.full((3, 4), 0.25), Draft.chain([1, 2])
    for verify in VERIFIERS.values():
        with pytest.raises(TypeError, match="p must be float32, got torch.bfloat16"):
            verify(p.bfloat16(), draft, None)
        with pytest.raises(ValueError, match="N \\+ 1 = 3 rows, got \\(2, 4\\)"):
            verify(p[:2], draft, None)
    int32 = torch.int32
    bad: list[tuple[type[Exception], str, Draft]] = [
        (TypeError, "whole numbers", Draft(torch.ones(1), torch.tensor([-1], dtype=int32))),
        (ValueError, "both be", Draft(torch.tensor([1, 2]), torch.tensor([-1], dtype=int32))),
        (ValueError, "below 4, got 4 at node 1", Draft.chain([0, 4])),
        (ValueError, "below 4, got -1 at node 0", Draft.chain([-1])),
        (ValueError, "got 0 at node 0", Draft(torch.tensor([1]), torch.tensor([0], dtype=int32))),
        (ValueError, "got -2", Draft(torch.tensor([1]), torch.tensor([-2], dtype=int32))),
        (TypeError, "draw from it in float32", Draft.chain([1, 2], p[:2].half())),
        (ValueError, "must be \\(2, 4\\)", Draft.chain([1, 2], p)),
        (ValueError, "add up to 1", Draft.chain([1, 2], 2 * p[:2])),
        (ValueError, "add up to 1", Draft.chain([1, 2], p[:2] * torch.nan)),
        (ValueError, "above 0 at each", Draft.chain([1, 2], one_hot_rows([1, 1], 4))),
    ]
    for kind, message, faulty in bad:
        with pytest.raises(kind, match=message):
            check_draft(faulty, 4)
    check_draft(Draft.chain([]), 4)
    check_draft(Draft.chain([], torch.zeros(0, 4)), 4)
