"""Proposers: lookups equal a search, lengths follow their rule, no drafted token is withdrawn."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from labcore.decoding.contract import Accepted, Draft
from labcore.decoding.proposers import Adaptive, DraftModel, Gated, NGram, NGramIndex, NoProposer
from labcore.models import Llama
from tests.decoding.histories import CONFIG, GREEDY, SAMPLINGS, history, on, one, same
from tests.models.shapes import model_of


@pytest.fixture
def model(generator: torch.Generator) -> Llama:
    """In double precision, so that a row in a batch draws what it draws alone."""
    return model_of(CONFIG, generator).double()


def searched(row: list[int], sizes: range, match: str, occurrence: str, count: int) -> list[int]:
    """The n-gram lookup as it is told, by brute force."""
    for size in sorted(sizes, reverse=match == "longest"):
        starts = [at for at in range(len(row) - size) if row[at : at + size] == row[-size:]]
        if starts and size <= len(row):
            at = (starts[-1] if occurrence == "latest" else starts[0]) + size
            return row[at : at + count]
    return []


@pytest.mark.parametrize("match", ["longest", "shortest"])
@pytest.mark.parametrize("occurrence", ["latest", "earliest"])
def test_ngram_lookup_equals_a_search(match: str, occurrence: str, seed: int) -> None:
    draw = random.Random(seed)
    found = 0
    for _ in range(25):
        low = draw.randrange(1, 4)
        high = low + draw.randrange(4)
        gamma, alphabet = draw.randrange(1, 7), draw.randrange(1, 5)
        proposer = NGram(high, low, gamma=gamma, match=match, occurrence=occurrence)

        def drafts(row, proposer=proposer):
            return one(proposer, row).tokens.tolist()

        for row in history(draw, alphabet, 12, drafts):
            most = draw.randrange(1, 9)
            wanted = searched(row, range(low, high + 1), match, occurrence, min(gamma, most))
            draft = one(proposer, row, most=most)
            same(draft, Draft.chain(wanted))
            found += bool(wanted)
    assert found > 50


def test_ngram_options_choose_what_they_say() -> None:
    row = [1, 2, 3, 4, 9, 3, 5, 2, 3, 6, 8, 3, 7, 2, 3]
    wanted = {
        ("longest", "earliest"): [4, 9],
        ("longest", "latest"): [6, 8],
        ("shortest", "earliest"): [4, 9],
        ("shortest", "latest"): [7, 2],
    }
    for (match, occurrence), tokens in wanted.items():
        proposer = NGram(2, 1, gamma=2, match=match, occurrence=occurrence)
        assert one(proposer, row).tokens.tolist() == tokens
    assert one(NGram(2, 2, gamma=2), [5, 3, 8, 3]).tokens.tolist() == []
    assert one(NGram(1, 1, gamma=9), [5, 5, 5]).tokens.tolist() == [5]
    assert one(NGram(1, 1, gamma=9, occurrence="earliest"), [5, 5, 5]).tokens.tolist() == [5, 5]


def test_ngram_equals_the_prompt_lookup_of_transformers(seed: int) -> None:
    draw = random.Random(seed)
    peer = PromptLookupCandidateGenerator(
        eos_token_id=None, num_output_tokens=6, max_matching_ngram_size=2, max_length=1000
    )
    ours = NGram(2, 1, gamma=6, occurrence="earliest")
    for _ in range(60):
        row = [draw.randrange(5) for _ in range(draw.randrange(2, 30))]
        candidates = peer.get_candidates(torch.tensor([row]))[0][0].tolist()
        assert one(ours, row).tokens.tolist() == candidates[len(row) :]


def test_an_index_that_shrinks_is_the_index_of_the_shorter_row(seed: int) -> None:
    draw = random.Random(seed)
    row = [draw.randrange(3) for _ in range(60)]
    index = NGramIndex(3, 1)
    index.follow(row)
    for length in (60, 59, 41, 40, 7, 1, 0):
        index.truncate(length)
        fresh = NGramIndex(3, 1)
        fresh.follow(row[:length])
        assert vars(index) == vars(fresh)


def told(draft: Draft, kept: int) -> list[Accepted]:
    return [Accepted(tuple(range(kept)), 0)]


def test_adaptive_lengths_follow_the_rule(model: Llama) -> None:
    proposer = Adaptive(DraftModel(model, gamma=9), start=4, maximum=7)
    row, lengths = [1, 2], []
    for kept in (4, 6, 7, 6, 0, 5, 0, 0, 0, 0, 0, 0, 0, 1):
        draft = one(proposer, row)
        lengths.append(len(draft))
        proposer.commit(told(draft, kept))
        row = [*row, *draft.tokens.tolist()[:kept], 3]
    assert lengths == [4, 6, 7, 7, 6, 5, 7, 6, 5, 4, 3, 2, 1, 1]
    assert proposer.lengths == [3]
    one(proposer, row, most=0)
    proposer.commit([Accepted((), 0)])
    assert proposer.lengths == [3]  # no draft, no verdict
    assert len(one(proposer, [5, 5, 5])) == 4  # another request


def test_adaptive_takes_any_proposer_and_tells_it() -> None:
    class Forked(NoProposer):
        committed = 0

        def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
            self.asked = list(max_tokens)
            tokens, parents = torch.tensor([1, 2, 3]), torch.tensor([-1, -1, 1])
            return [Draft(tokens, parents.int())]

        def commit(self, accepted):
            self.committed += 1

    inner = Forked()
    proposer = Adaptive(inner)
    for path, length in (((1, 2), 4), ((0,), 6), ((1, 2), 5)):
        one(proposer, [1])
        assert inner.asked == [length]
        proposer.commit([Accepted(path, 0)])
    assert inner.committed == 3
    with pytest.raises(ValueError, match="commit once"):
        proposer.commit([Accepted((), 0)])


def test_a_confidence_stop_keeps_the_token_it_looked_at(model: Llama, seed: int) -> None:
    stopped = 0
    for step in range(12):
        sampling = SAMPLINGS[2 * (step % 2)]
        whole = one(DraftModel(model, gamma=8), [step % 7, 2], sampling, seed=seed + step)
        proposer = Adaptive(DraftModel(model, gamma=8), start=8, confidence=0.6)
        generators = on(seed + step)
        draft = proposer.propose([[step % 7, 2]], [sampling], [99], generators)[0]
        if whole.q is None:
            with torch.no_grad():
                row = torch.tensor([[step % 7, 2, *whole.tokens.tolist()]])
                rows = model(row).logits[0, 1:-1].float().softmax(-1)
        else:
            rows = whole.q
        told_by = [float(q[token]) for q, token in zip(rows, whole.tokens, strict=True)]
        below = [i for i, probability in enumerate(told_by) if probability < 0.6]
        length = below[0] + 1 if below else 8
        assert draft.tokens.tolist() == whole.tokens.tolist()[:length]
        stopped += length < 8
        (counted,) = on(seed + step)
        for _ in range(0 if draft.q is None else length):
            torch.rand((), dtype=torch.float64, generator=counted)
        assert torch.equal(generators[0].get_state(), counted.get_state())
    assert stopped


@pytest.mark.parametrize("slack", [0, 1, 2])
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[3]], ids=["greedy", "all"])
def test_gated_ends_behind_the_unconfirmed_token(model, slack: int, sampling, seed: int) -> None:
    """It drafts what the drafter drafts, up to and with unconfirmed token number slack + 1."""
    ngram = NGram(3, 1, occurrence="earliest")
    gated = Gated(DraftModel(model, gamma=6), ngram, slack)
    lengths = set()

    def drafts(row):
        return one(gated, row, sampling, seed=seed).tokens.tolist()

    for step, row in enumerate(history(random.Random(seed), 7, 14, drafts)):
        whole = one(DraftModel(model, gamma=6), row, sampling, seed=step)
        tokens = whole.tokens.tolist()
        seen, confirmed = list(row), []
        while len(confirmed) < 6 and confirmed.count(False) <= slack:
            token = tokens[len(confirmed)]
            confirmed.append(searched(seen, range(1, 4), "longest", "earliest", 1) == [token])
            seen.append(token)
        generators = on(step)
        draft = gated.propose([row], [sampling], [99], generators)[0]
        length = len(confirmed)
        same(draft, Draft.chain(tokens[:length], None if whole.q is None else whole.q[:length]))
        assert gated.confirmed == [confirmed]
        (counted,) = on(step)
        for _ in range(0 if draft.q is None else length):
            torch.rand((), dtype=torch.float64, generator=counted)
        assert torch.equal(generators[0].get_state(), counted.get_state())
        lengths.add(length)
    assert min(lengths) > 0


def test_rules_combine_and_commit_reaches_the_drafter(model: Llama, monkeypatch) -> None:
    drafter = DraftModel(model, gamma=5)
    calls = []
    monkeypatch.setattr(drafter, "commit", calls.append)
    proposer = Adaptive(Gated(drafter, NGram(2), slack=9), start=9, confidence=0.3)
    assert proposer.start == proposer.gamma == 5
    draft = one(proposer, [1, 2, 3])
    proposer.commit(told(draft, 1))
    assert len(calls) == 1


def test_no_proposer_drafts_nothing() -> None:
    drafts = NoProposer().propose([[1], []], [GREEDY] * 2, [5, 0], on(1, 2))
    assert [len(draft) for draft in drafts] == [0, 0]


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (ValueError, "gamma", lambda model: DraftModel(model, gamma=0)),
        (TypeError, "gamma", lambda model: NGram(gamma=1.5)),
        (ValueError, "maximum must be at least minimum", lambda model: NGram(1, 2)),
        (ValueError, "minimum", lambda model: NGram(1, 0)),
        (ValueError, "match", lambda model: NGram(match="long")),
        (ValueError, "occurrence", lambda model: NGram(occurrence="first")),
        (ValueError, "start", lambda model: Adaptive(NGram(), start=0)),
        (ValueError, "maximum", lambda model: Adaptive(NGram(), maximum=0)),
        (ValueError, "confidence", lambda model: Adaptive(DraftModel(model), confidence=1.0)),
        (TypeError, "gives no probabilities", lambda model: Adaptive(NGram(), confidence=0.4)),
        (TypeError, "drafter", lambda model: Gated(NGram(), NGram())),
        (TypeError, "ngram", lambda model: Gated(DraftModel(model), 3)),
        (ValueError, "slack", lambda model: Gated(DraftModel(model), NGram(), -1)),
        (TypeError, "slack", lambda model: Gated(DraftModel(model), NGram(), 0.5)),
    ],
)
def test_options_that_mean_nothing_are_refused(model: Llama, error, match: str, make) -> None:
    with pytest.raises(error, match=match):
        make(model)


def test_rows_that_do_not_fit_are_refused(model: Llama) -> None:
    for proposer in (NoProposer(), NGram(), DraftModel(model), Adaptive(NGram())):
        with pytest.raises(ValueError, match="one entry .* got 2, 1, 2, 2"):
            proposer.propose([[1], [2]], [GREEDY], [3, 3], on(1, 2))
        with pytest.raises(ValueError, match="hold a token"):
            proposer.propose([[]], [GREEDY], [3], on(1))
        with pytest.raises(ValueError, match="at least 0"):
            proposer.propose([[1]], [GREEDY], [-1], on(1))
