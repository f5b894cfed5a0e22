"""A draft model's drafts depend on the context and the generator, on nothing before."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import transformers

from labcore.decoding.decoders import LlamaDecoder, as_decoder
from labcore.decoding.proposers import DraftModel, Gated, NGram
from labcore.decoding.sampling import probabilities
from labcore.models import Llama, save_pretrained
from labcore.models.fused import FusedLlama
from tests.decoding.histories import CONFIG, GREEDY, SAMPLINGS, history, on, one, same
from tests.models.shapes import model_of


@pytest.fixture
def model(generator: torch.Generator) -> Llama:
    """In double precision, so that a row in a batch draws what it draws alone."""
    return model_of(CONFIG, generator).double()


class Spy:
    """A decoder that counts the tokens it is fed."""

    def __init__(self, model: Llama) -> None:
        self.decoder = as_decoder(model)
        self.fed: list[list[int]] = []

    def __getattr__(self, name: str):
        return getattr(self.decoder, name)

    def __call__(self, tokens, *, counts, cache, tree=None):
        self.fed.append(counts.tolist())
        return self.decoder(tokens, counts=counts, cache=cache, tree=tree)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalty", "sampled", "all"])
def test_a_draft_depends_on_its_context_alone(model: Llama, sampling, seed: int) -> None:
    """The keys of a last drafted token that was accepted and never fed must not be missing."""
    draw = random.Random(seed)
    used = DraftModel(model, gamma=3)

    def drafts(row):
        return one(used, row, sampling, seed=seed).tokens.tolist()

    for step, row in enumerate(history(draw, 7, 12, drafts)):
        fresh = DraftModel(model, gamma=3)
        same(one(used, row, sampling, seed=step), one(fresh, row, sampling, seed=step))


def test_only_what_the_cache_lacks_is_read(model: Llama) -> None:
    spy = Spy(model)
    drafter = DraftModel(spy, gamma=3)
    row = [1, 2, 3, 4]
    drafted = one(drafter, row).tokens.tolist()
    assert spy.fed == [[4], [1], [1]]
    spy.fed.clear()
    row = [*row, *drafted, 5]  # accepted in full: the last of the draft was never fed
    drafted = one(drafter, row).tokens.tolist()
    assert spy.fed == [[2], [1], [1]] and drafter.lengths == [len(row) + 2]
    spy.fed.clear()
    row = [*row, (drafted[0] + 1) % 7]  # rejected at once
    one(drafter, row)
    assert spy.fed == [[1], [1], [1]]
    spy.fed.clear()
    one(drafter, row, most=1)  # once more: only the last token is read again
    assert spy.fed == [[1]]
    spy.fed.clear()
    one(drafter, [6, 6, 1], most=2)
    assert spy.fed == [[3], [1]]


def test_ragged_batches_equal_each_row_alone(model: Llama, seed: int) -> None:
    draw = random.Random(seed)
    batch = DraftModel(model, gamma=4)
    gated = Gated(DraftModel(model, gamma=4), NGram(2, 1), slack=1)
    rows = [[draw.randrange(7) for _ in range(draw.randrange(1, 13))] for _ in SAMPLINGS]
    for _ in range(6):
        most = [draw.choice([0, 1, 3, 9]) for _ in rows]
        seeds = [draw.randrange(2**31) for _ in rows]
        for proposer in (batch, gated):
            drafts = proposer.propose(rows, SAMPLINGS, most, on(*seeds))
            assert len(drafts) == len(rows)
            for b, draft in enumerate(drafts):
                alone = DraftModel(model, gamma=4)
                if proposer is gated:
                    alone = Gated(alone, NGram(2, 1), slack=1)
                same(draft, one(alone, rows[b], SAMPLINGS[b], most[b], seeds[b]))
                assert proposer is gated or len(draft) == min(most[b], 4)
        for b, draft in enumerate(drafts):
            kept = draw.randrange(len(draft) + 1)
            if most[b]:  # a finished row keeps its context
                rows[b] = [*rows[b], *draft.tokens.tolist()[:kept], draw.randrange(7)]
    assert batch.lengths != [0] * len(rows)
    fewer = batch.propose(rows[:2], SAMPLINGS[:2], [4, 4], on(1, 2))
    same(fewer[1], one(DraftModel(model, gamma=4), rows[1], SAMPLINGS[1]))


@torch.no_grad()
def test_q_is_what_the_request_asked_for(model: Llama, seed: int) -> None:
    row = [1, 2, 2, 5]
    for sampling in SAMPLINGS:
        generators = on(seed)
        draft = DraftModel(model, gamma=4).propose([row], [sampling], [4], generators)[0]
        tokens = draft.tokens.tolist()
        for i, token in enumerate(tokens):
            seen = [*row, *tokens[:i]]
            wanted = probabilities(model(torch.tensor([seen])).logits[0, -1], sampling, seen)
            assert wanted[token] > 0
            if sampling.temperature == 0:
                assert draft.q is None and wanted[token] == 1
            else:
                torch.testing.assert_close(draft.q[i], wanted, rtol=1e-5, atol=1e-6)
        # One uniform number a drawn token, none elsewhere: nothing was drawn and thrown away.
        (counted,) = on(seed)
        for _ in range(0 if draft.q is None else len(draft)):
            torch.rand((), dtype=torch.float64, generator=counted)
        assert torch.equal(generators[0].get_state(), counted.get_state())


def test_drafted_tokens_have_the_law_q(model: Llama, seed: int) -> None:
    drafter, sampling = DraftModel(model, gamma=1), SAMPLINGS[2]
    (generator,) = on(seed)
    found = torch.zeros(7)
    for _ in range(30):
        drafts = drafter.propose([[1, 2, 3]] * 50, [sampling] * 50, [1] * 50, [generator] * 50)
        found += torch.bincount(torch.cat([draft.tokens for draft in drafts]), minlength=7)
    (draft, *_) = drafts
    distance = (found / 1500 - draft.q[0]).abs().sum() / 2
    # McDiarmid: P(distance > E + t) <= exp(-2 n t^2), E <= sqrt(V / 4n); here 1e-6.
    assert distance < (7 / 6000) ** 0.5 + (13.8 / 3000) ** 0.5


def test_a_draft_ends_behind_the_end_of_sequence(model: Llama) -> None:
    free = one(DraftModel(model, gamma=6), [1, 2, 3]).tokens.tolist()
    model.config = dataclasses.replace(CONFIG, eos_token_ids=(free[1],))
    ended = one(DraftModel(model, gamma=6), [1, 2, 3]).tokens.tolist()
    assert ended == free[: free.index(free[1]) + 1]


def test_the_cache_grows_past_what_the_first_request_needed(model: Llama) -> None:
    short = dataclasses.replace(GREEDY, max_tokens=1)
    drafter = DraftModel(model, gamma=3)
    for length in (1, 2, 9, 30, 4):
        row = [(3 * i) % 7 for i in range(length)]
        same(one(drafter, row, short), one(DraftModel(model, gamma=3), row))


def test_a_draft_model_of_transformers_drafts_what_ours_does(
    model: Llama, tmp_path, seed: int
) -> None:
    save_pretrained(model.float(), tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    loaded.double().eval()
    used, sampling = DraftModel(loaded, gamma=3), SAMPLINGS[3]

    def drafts(row):
        return one(used, row, sampling, seed=seed).tokens.tolist()

    for step, row in enumerate(history(random.Random(seed), 7, 5, drafts)):
        draft = one(used, row, sampling, seed=step)
        same(draft, one(DraftModel(loaded, gamma=3), row, sampling, seed=step))
        # Its norms are in fp32, so a token may differ, and with it what follows; the first q not.
        ours = one(DraftModel(model.double(), gamma=1), row, sampling, seed=step)
        torch.testing.assert_close(draft.q[:1], ours.q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalty", "sampled", "all"])
def test_one_call_per_round_drafts_what_steps_draft(sampling, seed: int) -> None:
    """A decoder without `greedy` goes step by step; rollbacks and full accepts alternate."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    calls, lengths = [], set()
    greedy = FusedLlama.greedy

    def counted(self, tokens, count, cache, least):
        calls.append(count)
        return greedy(self, tokens, count, cache, least)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedLlama, "greedy", counted)
        for _ in range(4):  # a single model may stop after the same number of guesses each time
            model = model_of(CONFIG, generator)
            rounds = DraftModel(model, gamma=4, confidence=0.3)
            steps = DraftModel(LlamaDecoder(model), gamma=4, confidence=0.3)
            row = [1, 2, 3]
            for step in range(12):
                said = one(rounds, row, sampling, seed=step).tokens.tolist()
                assert said == one(steps, row, sampling, seed=step).tokens.tolist()
                assert rounds.lengths == steps.lengths
                lengths.add(len(said))
                row = [*row, *said[: draw.randrange(len(said) + 1)], draw.randrange(7)]
    plain = sampling.temperature == 0 and sampling.repetition_penalty == 1
    assert len(calls) == (48 if plain else 0) and len(lengths) > 1


def test_a_confidence_that_is_no_probability_is_refused(model: Llama) -> None:
    with pytest.raises(ValueError, match="confidence must be at least 0 and below 1, got 1"):
        DraftModel(model, confidence=1)
