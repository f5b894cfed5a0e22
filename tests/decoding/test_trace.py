"""The counts are those made by hand, the trace is what the rule says about p, q and the draw."""

from __future__ import annotations

import math

import pytest
import torch

from labcore.decoding.contract import Accepted, Draft, SamplingConfig
from labcore.decoding.generation import generate
from labcore.decoding.proposers import Adaptive, DraftModel
from labcore.decoding.sampling import probabilities
from labcore.decoding.trace import Position, Statistics, Tally, step_of, tried_nodes
from labcore.decoding.verify import residual
from labcore.models import ByteTokenizer
from tests.decoding.toys import Guess, Toy

# -1 ─ 0 ─ 2 ─ 5
#   │    └ 3
#   └ 1 ─ 4
TREE = [-1, -1, 0, 0, 1, 2]


class Told:
    """Drafts that are written down."""

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = list(drafts)

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        return [Draft.chain(self.drafts.pop(0)[:most]) for most in max_tokens]

    def commit(self, accepted) -> None:
        pass


def test_counts_by_hand() -> None:
    """Says 1 to 8: three accepted of three, none of two, one of two, then nothing is left."""
    target = Toy.script(12, list(range(12)))
    proposer = Told([1, 2, 3], [0, 6], [6, 0, 8], [8])
    found = generate(target, [[0]], SamplingConfig(max_tokens=8), proposer=proposer, trace=True)
    assert found.tokens == [[1, 2, 3, 4, 5, 6, 7, 8]]
    # The last draft was cut to nothing: one token was left.
    assert found.statistics == found.per_row[0] == Statistics(
        steps=4, tokens=8, drafted=7, accepted=4, tried=6,
        by_position=(Position(3, 3, 2), Position(3, 2, 1), Position(1, 1, 1)),
    )  # fmt: skip
    assert [draft.draft_tokens for draft in found.trace.steps] == [(1, 2, 3), (0, 6), (6, 0), ()]
    assert found.statistics.acceptance_rate == 4 / 7
    assert found.statistics.alpha == 4 / 6
    assert found.statistics.tokens_per_step == 2
    assert [place.rate for place in found.statistics.by_position] == [2 / 3, 1 / 3, 1]
    assert [place.alpha for place in found.statistics.by_position] == [2 / 3, 1 / 2, 1]


def test_what_is_drafted_behind_eos_is_not_accepted() -> None:
    """The target repeats EOS, the draft too: an engine that counts them shows rate 1."""
    target = Toy.script(12, [0, 1, 2, 9, 9, 9, 9, 9], eos=(9,))
    for draft, accepted, tried in (
        ([1, 2, 9, 9, 9], 3, 3),  # EOS was drafted; it stands, what follows counts not
        ([1, 2, 9, 0, 9], 3, 3),  # nor does a wrong one behind it
        ([1, 2, 0, 9, 9], 2, 3),  # EOS came in place of a rejected token
        ([1, 2], 2, 2),  # EOS was the bonus
    ):
        found = generate(target, [[0]], SamplingConfig(), proposer=Told(draft))
        assert found.tokens == [[1, 2, 9]] and found.finish == ["eos"]
        counts = found.statistics
        assert (counts.accepted, counts.tried, counts.drafted) == (accepted, tried, len(draft))
        assert counts.steps == 1 and counts.tokens == 3


def test_a_stop_text_takes_counts_of_earlier_steps_back() -> None:
    """'xEND' in the blocks xE, N and D: only x stands, so neither E nor N counts."""
    tokenizer = ByteTokenizer()
    x, e, n, d = tokenizer.encode("xEND")
    target = Toy.script(257, [0, x, e, n, d, 0, 0])
    found = generate(
        target, [[0]], SamplingConfig(stop=("END",)), tokenizer=tokenizer,
        proposer=Told([x], [n, d, 0]),
    )  # fmt: skip
    assert found.tokens == [[x]] and found.finish == ["stop"]
    assert found.statistics == Statistics(
        steps=2, tokens=1, drafted=4, accepted=1, tried=1,
        by_position=(Position(2, 1, 1), Position(1, 0, 0), Position(1, 0, 0)),
    )  # fmt: skip


def test_a_tree_counts_the_siblings_that_were_tried() -> None:
    assert tried_nodes(TREE, ()) == [0, 1]
    assert tried_nodes(TREE, (1,)) == [0, 1, 4]
    assert tried_nodes(TREE, (0, 3)) == [0, 2, 3]
    assert tried_nodes(TREE, (0, 2, 5)) == [0, 2, 5]
    tally = Tally()
    tally.add(0, TREE, 6, (1,))
    tally.add(2, TREE, 6, (0, 3))
    places = (Position(4, 3, 2), Position(6, 3, 1), Position(2, 0, 0))
    assert tally.statistics(5) == Statistics(
        steps=2, tokens=5, drafted=12, accepted=3, tried=6, by_position=places
    )
    # The output ends with node 0 of the second tree: what came behind it is not counted.
    cut = tally.statistics(3)
    assert (cut.accepted, cut.tried, cut.tokens) == (2, 4, 3)


def test_statistics_add_up_and_have_no_rate_without_a_draft() -> None:
    none = Statistics(steps=3, tokens=3)
    assert math.isnan(none.alpha) and math.isnan(none.acceptance_rate)
    assert math.isnan(Statistics().tokens_per_step) and math.isnan(Position().rate)
    one = Statistics(
        steps=1, tokens=2, drafted=1, accepted=1, tried=1, by_position=(Position(1, 1, 1),)
    )
    two = Statistics(
        steps=1, tokens=1, drafted=2, accepted=0, tried=1,
        by_position=(Position(1, 1, 0), Position(1, 0, 0)),
    )  # fmt: skip
    assert Statistics.total([none, one, two]) == Statistics(
        steps=5, tokens=6, drafted=3, accepted=1, tried=2,
        by_position=(Position(2, 2, 1), Position(1, 0, 0)),
    )  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_trace_is_what_the_rule_says(wrapped: bool, seed: int) -> None:
    target, draft = Toy.random(6, seed, spread=1.0), Toy.random(6, seed + 1, spread=1.0)
    proposer = DraftModel(draft, gamma=3)
    if wrapped:
        proposer = Adaptive(proposer, start=3)
    sampling = SamplingConfig(temperature=0.9, top_p=0.9, max_tokens=60, seed=seed)
    prompts = [[1, 2], [3]]
    found = generate(target, prompts, sampling, proposer=proposer, trace=True)
    rejected = 0
    for row, prompt in enumerate(prompts):
        said = [*prompt, *found.tokens[row]]
        steps = found.trace.row(row)
        assert len(steps) == found.per_row[row].steps
        for step in steps:
            prefix = said[: step.context]
            for node in range(len(step.p)):
                before = (*prefix, *step.draft_tokens[:node])
                p = probabilities(target.logits_of(before), sampling)
                torch.testing.assert_close(step.p[node], p)
                if node < len(step.draft_tokens):
                    q = probabilities(draft.logits_of(before), sampling)
                    torch.testing.assert_close(step.q[node], q)
            ratios = [
                min(1.0, float(step.p[node, token] / step.q[node, token]))
                for node, token in enumerate(step.draft_tokens)
            ][: len(step.path) + 1]
            assert step.ratios == pytest.approx(ratios)
            assert step.tried == tuple(range(len(ratios)))
            # The draw is below the ratio just where the token was accepted.
            for node, (draw, ratio) in enumerate(zip(step.draws, ratios, strict=False)):
                assert (draw < ratio) == (node in step.path)
            assert len(step.draws) == len(ratios) + 1  # and one for the next token
            weights = step.p[len(step.path)]
            if len(step.path) < len(step.draft_tokens):
                rejected += 1
                weights = residual(weights, step.q[len(step.path)])
                torch.testing.assert_close(step.residual, weights)
                assert not step.bonus
            else:
                assert step.residual is None and step.bonus == bool(step.draft_tokens)
            place = int(
                (weights.double().cumsum(0) > step.draws[-1] * weights.double().sum())
                .int()
                .argmax()
            )
            assert step.next_token == place
            path = [step.draft_tokens[node] for node in step.path]
            assert list(step.tokens) == [*path, step.next_token]
            assert step.target_length == step.context + len(path)
            if step.draft_tokens:
                # The drafter never read its own last token: a hole after a full accept.
                read = min(len(path), len(step.draft_tokens) - 1)
                assert step.draft_length == step.context + read
    assert rejected > 0
    found.trace.steps[0].p.mul_(2)  # a copy that its reader may change


def test_a_traced_tree_step_by_hand() -> None:
    """Two wrong siblings, then a right one: each rejection takes its token from p."""
    draft = Draft(torch.tensor([0, 1, 3]), torch.tensor([-1, -1, 1], dtype=torch.int32))
    step = step_of(
        torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 4), draft, Accepted((), 2, (0.5, 0.6)),
        row=0, context=1, tokens=[2], target_length=1, draft_length=None,
    )  # fmt: skip
    assert step.tried == (0, 1) and step.draft_parents == (-1, -1, 1)
    assert step.ratios == pytest.approx((0.1, 0.2 / 0.9))
    torch.testing.assert_close(step.residual, torch.tensor([0, 0, 3 / 7, 4 / 7]))
    assert step.q is None and not step.bonus and step.draft_length is None


def test_a_proposer_without_a_cache_has_no_draft_length(seed: int) -> None:
    target = Toy.random(5, seed)
    guess = Guess(target, torch.Generator().manual_seed(seed))
    found = generate(target, [[1]], SamplingConfig(max_tokens=5), proposer=guess, trace=True)
    assert {step.draft_length for step in found.trace.steps} == {None}
    assert generate(target, [[1]], SamplingConfig(max_tokens=2)).trace is None
