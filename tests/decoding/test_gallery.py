"""Each broken verifier of the gallery is caught by the law that the true ones keep."""

from __future__ import annotations

import pytest
import torch

from labcore.decoding.contract import Draft
from labcore.decoding.gallery import FAULTS
from labcore.decoding.theory.exact import cases, chain_proposal, expected_acceptance, random_table
from labcore.decoding.verify import rejection_sampling, sample_and_compare

MARGIN = 1e-3
"""A thousand times what a lossless verifier is allowed."""


@pytest.mark.parametrize("name", list(FAULTS))
def test_the_exact_law_catches_the_fault(name: str) -> None:
    fault = FAULTS[name]
    case = cases()[fault.case]
    assert case.distance(fault.verify) > MARGIN
    assert max(case.distance(rejection_sampling), case.distance(sample_and_compare)) < 1e-6


@pytest.mark.parametrize("name", list(FAULTS))
def test_the_fault_is_caught_on_fresh_tables_too(name: str, seed: int) -> None:
    fault = FAULTS[name]
    found = (cases(seed + i)[fault.case].distance(fault.verify) for i in range(5))
    assert any(distance > MARGIN for distance in found)


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_runs_like_a_verifier_and_says_where_it_was_met(name: str, seed: int) -> None:
    fault = FAULTS[name]
    assert fault.summary.endswith(".") and fault.evidence and len(fault.summary) < 200
    p = torch.rand(4, 9, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    q = p[:3].roll(1, -1)
    for draft, rows in (
        (Draft.chain([1, 2, 3], q), p),
        (Draft.chain([1, 2, 3]), p),
        (Draft.chain([]), p[:1]),
    ):
        said = fault.verify(rows, draft, torch.Generator().manual_seed(seed))
        assert 0 <= said.next_token < 9 and set(said.path) <= set(range(len(draft)))
        assert len(said.draws) >= 1


def test_the_traps_of_the_literature_are_all_there() -> None:
    evidence = " ".join(fault.evidence for fault in FAULTS.values())
    for source in ("HF PR 28508", "30778", "33534", "10198", "bf16"):
        assert source in evidence
    assert len({fault.summary for fault in FAULTS.values()}) == len(FAULTS)


def test_a_bf16_draw_accepts_what_the_target_never_says() -> None:
    p, q = random_table(4, 0, support=(0, 1)), random_table(4, 1, support=(2, 3))
    propose = chain_proposal(q, 1)
    fault = FAULTS["bf16_draws"].verify
    assert expected_acceptance(fault, p, propose)[0] == pytest.approx(1 / 512)
    assert expected_acceptance(rejection_sampling, p, propose) == []
