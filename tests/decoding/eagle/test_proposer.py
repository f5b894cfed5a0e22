"""The proposer: outputs as without it, and states of the target at every token that stays."""

from __future__ import annotations

import pytest
import torch

from labcore.decoding import SamplingConfig, generate
from labcore.decoding.audit import near_tie_audit
from labcore.decoding.contract import Draft
from labcore.decoding.eagle import Costs, Eagle
from tests.decoding.eagle.made import SHAPES, made
from tests.decoding.histories import on

EAGER = Costs(worth=0.05, go_on=0.02, beam=2, ranks=3)


def prompts_of(generator, rows: int = 4) -> list[list[int]]:
    lengths = torch.randint(1, 12, (rows,), generator=generator).tolist()
    return [torch.randint(37, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_outputs_are_the_targets_own(shape, generator) -> None:
    backbone, head = made(shape, generator)
    prompts = prompts_of(generator)
    asked = [SamplingConfig(max_tokens=most) for most in (1, 9, 23, 30)]
    told = generate(backbone, prompts, asked, proposer=Eagle(head, costs=EAGER))
    assert told.statistics.drafted > 20
    for prompt, output in zip(prompts, told.tokens, strict=True):
        assert near_tie_audit(backbone, prompt, output, gap=1e-3).passed


class Watched(Eagle):
    """Compares the features from which drafts start with those of the whole context at once."""

    def __init__(self, backbone, head, **options) -> None:
        super().__init__(head, **options)
        self.backbone, self.module, self.compared, self.seen = backbone, head, 0, 0

    def observe(self, row, start, hidden) -> None:
        self.seen += len(hidden)
        super().observe(row, start, hidden)

    @torch.inference_mode()
    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        drafts = super().propose(contexts, samplings, max_tokens, generators, hidden=hidden)
        for row, (context, most) in enumerate(zip(contexts, max_tokens, strict=True)):
            if most and len(context) > 1:
                text = torch.tensor([context])
                states = self.backbone(text[:, :-1]).hidden
                feature = self.module(states, text[:, 1:])[0, -1:]
                known = self._rows[row].memory
                assert known.length == len(context) - 1
                torch.testing.assert_close(known.feature, feature, atol=1e-3, rtol=1e-3)
                self.compared += 1
        return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_head_has_read_every_token_that_stays(temperature, generator) -> None:
    backbone, head = made("grouped", generator)
    prompts = prompts_of(generator)
    watched = Watched(backbone, head, costs=EAGER)
    asked = [SamplingConfig(max_tokens=25, temperature=temperature, seed=n) for n in range(4)]
    for _ in range(2):  # the second generation starts over
        generate(backbone, prompts, asked, proposer=watched)
    assert watched.compared > 20


def drafts_of(eagle, contexts, hidden=None, most=4) -> list[Draft]:
    rows = range(len(contexts))
    asked = [SamplingConfig() for _ in rows]
    return eagle.propose(contexts, asked, [most] * len(contexts), on(*rows), hidden=hidden)


def same(first: Draft, second: Draft) -> bool:
    return first.tokens.tolist() == second.tokens.tolist() and torch.equal(
        first.parents, second.parents
    )


@torch.no_grad()
def test_what_is_observed_anew_replaces_what_was_known(generator) -> None:
    backbone, head = made("grouped", generator)
    first, second = (torch.randint(37, (12,), generator=generator) for _ in range(2))
    second[:6] = first[:6]
    states = {id(text): backbone(text[None]).hidden[0] for text in (first, second)}
    fresh = Eagle(head, costs=EAGER)
    fresh.observe(0, 0, states[id(second)][:11])
    (wanted,) = drafts_of(fresh, [second.tolist()])
    for cut in (0, 3, 5):
        eagle = Eagle(head, costs=EAGER)
        eagle.observe(0, 0, states[id(first)][:6])
        eagle.observe(0, 6, states[id(first)][6:9])
        if cut != 3:
            drafts_of(eagle, [first[:10].tolist()])  # reads what waits
        eagle.observe(0, cut, states[id(second)][cut:8])
        eagle.observe(0, 8, states[id(second)][8:11])
        assert same(drafts_of(eagle, [second.tolist()])[0], wanted), cut


@torch.no_grad()
def test_states_with_a_gap_begin_after_it(generator) -> None:
    backbone, head = made("grouped", generator)
    text = torch.randint(37, (12,), generator=generator)
    states = backbone(text[None]).hidden[0]
    short, gap = Eagle(head, costs=EAGER), Eagle(head, costs=EAGER)
    short.observe(0, 7, states[7:11])
    gap.observe(0, 0, states[:5])
    gap.observe(0, 7, states[7:11])
    (wanted,) = drafts_of(short, [text.tolist()])
    assert len(wanted) and same(drafts_of(gap, [text.tolist()])[0], wanted)
    # Nothing observed: the one state that propose gets is all.
    alone, last = Eagle(head, costs=EAGER), Eagle(head, costs=EAGER)
    last.observe(0, 10, states[10:11])
    found = drafts_of(alone, [text.tolist()], hidden=states[10:11])
    assert same(found[0], drafts_of(last, [text.tolist()])[0])
    assert len(drafts_of(Eagle(head), [text.tolist()])[0]) == 0


@torch.no_grad()
def test_another_requests_tokens_are_noticed(generator) -> None:
    backbone, head = made("grouped", generator)
    first = torch.randint(37, (9,), generator=generator)
    second = (first + 1) % 37
    states = backbone(second[None]).hidden[0]
    eagle, fresh = Eagle(head, costs=EAGER), Eagle(head, costs=EAGER)
    eagle.observe(0, 0, backbone(first[None]).hidden[0, :8])
    drafts_of(eagle, [first.tolist()])
    found = drafts_of(eagle, [second.tolist()], hidden=states[7:8])
    assert same(found[0], drafts_of(fresh, [second.tolist()], hidden=states[7:8])[0])


def test_limits_and_siblings(generator) -> None:
    _, head = made("grouped", generator)
    hidden = torch.randn(3, 24, generator=generator)
    eagle = Eagle(head, costs=Costs(worth=0.0001, go_on=0.0, beam=2, ranks=2), gamma=3)
    asked = [SamplingConfig(temperature=t) for t in (0.0, 2.0, 2.0)]
    drafts = eagle.propose([[1, 2], [3, 4], [5]], asked, [9, 2, 4], on(0, 1, 2), hidden=hidden)
    assert len(drafts[2]) == 0
    for draft, most in zip(drafts, (3, 2), strict=False):
        depths: list[int] = []
        for parent in draft.parents.tolist():
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert max(depths) == most and draft.q is None
        pairs = list(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
    eagle.commit([])
