"""Drafts in an engine: trees, hidden states, slots, and what a proposer receives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from labcore.decoding import Accepted, Draft, SamplingConfig
from labcore.decoding.requests import Plan
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.outputs import Entry
from labcore.serving.engine.request import Request, State
from labcore.serving.engine.speculation import Speculation
from tests.serving.tiny import BYTES, Heard, alone, mixed, nothing_left, run, tiny

OPTIONS = {
    "num_blocks": 15,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "chunk": 13,
    "max_length": 104,
}


class Oracle:
    """Knows what each request says alone, and hides it in trees among wrong siblings."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], chance: random.Random) -> None:
        self.known, self.chance = known, chance
        self.told: list[tuple[list[int], list[Accepted]]] = []
        self.sizes: list[int] = []

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        assert len(contexts) == len(samplings) == len(max_tokens) == len(generators) == 4
        drafts = [
            self._tree(context, most) if most else Draft.chain([])
            for context, most in zip(contexts, max_tokens, strict=True)
        ]
        self.sizes = [len(draft) for draft in drafts]
        return drafts

    def _rest(self, context: list[int]) -> list[int]:
        whole = next(
            [*prompt, *said]
            for prompt, said in self.known.items()
            if context[: len(prompt)] == list(prompt)
            and [*prompt, *said][: len(context)] == context
        )
        return whole[len(context) :]

    def _tree(self, context: list[int], most: int) -> Draft:
        rest = self._rest(context)[: min(most, 3)]
        tokens, parents, parent = [], [], -1
        for right in rest:
            siblings = [self.chance.randrange(256) for _ in range(self.chance.randrange(3))]
            siblings = [token for token in siblings if token != right]
            tokens += [*siblings, right]
            parents += [parent] * (len(siblings) + 1)
            parent = len(tokens) - 1
        return Draft(
            torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int32)
        )

    def commit(self, accepted) -> None:
        self.told.append((self.sizes, list(accepted)))


def known_of(asked, references) -> dict[tuple[int, ...], list[int]]:
    return {
        tuple(prompt): reference.tokens[0]
        for (prompt, _), reference in zip(asked, references, strict=True)
    }


@pytest.mark.parametrize("policy", ["static", "guaranteed_no_evict", "max_utilization"])
def test_trees_are_verified_and_their_paths_kept(seed: int, policy: str) -> None:
    model, chance = tiny(seed), random.Random(seed)
    asked = [(prompt, one) for prompt, one in mixed(chance, 12, most=30)]
    references = alone(model, asked)
    oracle = Oracle(known_of(asked, references), chance)
    engine = Engine(model, BYTES, policy=policy, proposer=oracle, **OPTIONS)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, reference in zip(names, references, strict=True):
        assert heard.tokens[name] == reference.tokens[0]
        assert heard.finish[name] == reference.finish[0]
    told = engine.stats()
    assert told.accepted > told.steps / 4
    gaps = 0
    for sizes, accepted in oracle.told:
        assert len(accepted) == 4
        for size, one in zip(sizes, accepted, strict=True):
            assert all(node < size for node in one.path)
            gaps += one.path != tuple(range(len(one.path)))
    assert gaps, "no path had a gap, so that keeping one was never tried"
    assert sum(len(one.path) for _, rows in oracle.told for one in rows) == told.accepted
    nothing_left(engine)


class Evens(Oracle):
    """Guesses right what comes at even places, and wrong what comes at odd ones."""

    def _tree(self, context: list[int], most: int) -> Draft:
        right = self._rest(context)[0]
        return Draft.chain([(right + len(context) % 2) % BYTES.vocab_size])


@pytest.mark.parametrize("tight", [True, False])
def test_outputs_say_which_tokens_a_draft_had_guessed(seed: int, tight: bool) -> None:
    model, chance = tiny(seed), random.Random(seed)
    several = enumerate(mixed(chance, 12, longest=59, most=40))
    asked = [([place, *prompt], one) for place, (prompt, one) in several]  # all unlike
    references = alone(model, asked)
    evens = Evens(known_of(asked, references), chance)
    if not tight:  # what a stop text takes back has no mark either
        asked[::2] = [
            (prompt, replace(one, stop=(said.texts[0][-2:] or "none",)))
            for (prompt, one), said in zip(asked[::2], references[::2], strict=True)
        ]
    room = {"num_blocks": 13} if tight else {"num_blocks": 60, "max_num_batched_tokens": 400}
    engine = Engine(model, BYTES, policy="max_utilization", proposer=evens, **{**OPTIONS, **room})
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    assert (engine.stats().preemptions > 0) == tight
    for name, (prompt, one), reference in zip(names, asked, alone(model, asked), strict=True):
        assert heard.tokens[name] == reference.tokens[0]
        # The first token follows the prompt, and nothing is drafted where one token is left.
        places = range(len(prompt), len(prompt) + len(reference.tokens[0]))
        wanted = [
            place % 2 == 0 and 0 < place - len(prompt) < one.max_tokens - 1 for place in places
        ]
        found = heard.guessed[name]
        if tight:  # not all was drafted
            assert not any(mark and not right for mark, right in zip(found, wanted, strict=True))
        else:
            assert found == wanted
    assert sum(map(sum, heard.guessed.values())) > 20


class Looks(Oracle):
    """Compares the hidden states that it is given with the model's own."""

    def __init__(self, model, known, chance: random.Random) -> None:
        super().__init__(known, chance)
        self.model, self.compared = model, 0

    @torch.inference_mode()
    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        for place, (context, most) in enumerate(zip(contexts, max_tokens, strict=True)):
            if most:
                own = self.model(torch.tensor([context[:-1]])).hidden[0, -1]
                torch.testing.assert_close(hidden[place], own)
                self.compared += 1
        return super().propose(contexts, samplings, max_tokens, generators)


def test_hidden_states_are_those_of_the_last_token_read(seed: int) -> None:
    model, chance = tiny(seed, eos_token_ids=()), random.Random(seed)
    asked = mixed(chance, 12, most=40)
    references = alone(model, asked)
    looks = Looks(model, known_of(asked, references), chance)
    tight = {**OPTIONS, "num_blocks": 13}
    engine = Engine(model, BYTES, policy="max_utilization", proposer=looks, **tight)
    names, heard, holders = [], Heard(), engine.speculation._holders
    while len(names) < len(asked) or not engine.idle:
        # Later requests have a higher priority, so they pass those that were preempted.
        if len(names) < 10 or (len(names) < len(asked) and chance.random() < 0.2):
            names.append(engine.submit(*asked[len(names)], priority=-len(names)))
        heard.add(engine.step())
        for state in engine.scheduler.running:
            one = engine._entries[state.id]
            assert one.slot is not None and holders[one.slot] is one  # a slot of its own
    for name, reference in zip(names, references, strict=True):
        assert (heard.tokens[name], heard.reason[name]) == (reference.tokens[0], "")
    assert looks.compared > 20
    told = engine.stats()
    assert told.preemptions > 0 and told.accepted > 0
    nothing_left(engine)


class Always:
    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        return [Draft.chain([1, 2, 3][:most]) for most in max_tokens]

    def commit(self, accepted) -> None:
        pass


def decoding(id: str) -> Entry:
    entry = Entry(Request(id, (1, 2), SamplingConfig(max_tokens=9)), None)
    entry.state = State(entry.request)
    entry.row.context.append(3)
    entry.state.tokens.append(3)
    entry.state.computed = 2
    return entry


def test_a_request_that_does_not_run_leaves_its_slot() -> None:
    """Two requests take turns in one slot: one is preempted and returns when the other ends."""
    speculation = Speculation(Always(), slots=1, max_length=20, vocab_size=9)
    first, second = decoding("first"), decoding("second")
    for statuses in (("running", "waiting"), ("waiting", "running"), ("running", "finished")):
        first.state.status, second.state.status = statuses
        drafts = speculation.propose([first, second])
        assert list(drafts) == ["first" if statuses[0] == "running" else "second"]
        assert all(isinstance(draft, Plan) for draft in drafts.values())


def test_drafts_never_cost_a_neighbor_its_place_in_the_step(seed: int) -> None:
    """A budget for one token a row leaves no room for drafts; one more token is one more."""
    model = tiny(seed, eos_token_ids=())
    prompt = [5, 6, 7] * 4
    for budget, most in ((4, 0), (5, 1), (40, 12)):
        engine = Engine(
            model,
            proposer=Always(),
            num_blocks=40,
            block_size=8,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
        )
        for n in range(4):
            engine.submit(prompt, SamplingConfig(max_tokens=40, temperature=1.0, seed=n))
        run(engine)
        full = [record.drafted for record in engine.trace if len(record.decodes) == 4]
        assert max(full) == most
        nothing_left(engine)
