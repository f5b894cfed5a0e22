"""A proposer in an engine that observes the target's states at every token that stays."""

from __future__ import annotations

import random

import torch

from labcore.serving.engine.engine import Engine
from labcore.serving.engine.speculation import Speculation
from tests.serving.test_speculation import OPTIONS, Oracle, decoding, known_of
from tests.serving.tiny import BYTES, alone, mixed, nothing_left, run, tiny


class Observes(Oracle):
    """Keeps what it observes, and compares it with the model's own states before each draft."""

    def __init__(self, model, known, chance: random.Random) -> None:
        super().__init__(known, chance)
        self.model, self.compared = model, 0
        self.rows: dict[int, tuple[int, torch.Tensor]] = {}  # first position and states

    def observe(self, row: int, start: int, hidden: torch.Tensor) -> None:
        if not len(hidden):
            self.rows.pop(row, None)
            return
        first, states = self.rows.get(row, (start, hidden[:0]))
        if start < first:  # a prefix that was cached is read after a preemption
            first, states = start, hidden[:0]
        assert start <= first + len(states), "a gap"
        self.rows[row] = first, torch.cat((states[: start - first], hidden))

    @torch.inference_mode()
    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        for row, (context, most) in enumerate(zip(contexts, max_tokens, strict=True)):
            if most:
                first, states = self.rows[row]
                own = self.model(torch.tensor([context[:-1]])).hidden[0, first:]
                torch.testing.assert_close(states, own)
                self.compared += 1
        return super().propose(contexts, samplings, max_tokens, generators)


def test_states_of_all_tokens_arrive_in_order(seed: int) -> None:
    model, chance = tiny(seed, eos_token_ids=()), random.Random(seed)
    asked = mixed(chance, 14, most=40)
    references = alone(model, asked)
    observes = Observes(model, known_of(asked, references), chance)
    tight = {**OPTIONS, "num_blocks": 13}
    engine = Engine(model, BYTES, policy="max_utilization", proposer=observes, **tight)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, reference in zip(names, references, strict=True):
        assert (heard.tokens[name], heard.reason[name]) == (reference.tokens[0], "")
    told = engine.stats()
    assert observes.compared > 20 and told.accepted > 0 and told.preemptions > 0
    nothing_left(engine)


class Refuses(Observes):
    """Fails once, where it observes."""

    failed = False

    def observe(self, row: int, start: int, hidden: torch.Tensor) -> None:
        super().observe(row, start, hidden)
        if len(hidden) and start and not self.failed:
            self.failed = True
            raise RuntimeError("cannot observe this")


def test_an_error_ends_the_request_that_was_observed(seed: int) -> None:
    model, chance = tiny(seed, eos_token_ids=()), random.Random(seed)
    asked = [one for one in mixed(chance, 14, most=40) if one[1].max_tokens > 5][:5]
    references = alone(model, asked)
    refuses = Refuses(model, known_of(asked, references), chance)
    engine = Engine(model, BYTES, proposer=refuses, **OPTIONS)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    errors = [name for name in names if heard.finish[name] == "error"]
    assert refuses.failed and len(errors) <= 1
    for name, reference in zip(names, references, strict=True):
        if name in errors:
            assert "cannot observe this" in heard.reason[name]
        else:
            assert heard.tokens[name] == reference.tokens[0]
    nothing_left(engine)


class Notes:
    def __init__(self) -> None:
        self.noted: list[tuple[int, int, int]] = []

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        raise NotImplementedError

    def commit(self, accepted) -> None:
        pass

    def observe(self, row: int, start: int, hidden: torch.Tensor) -> None:
        self.noted.append((row, start, len(hidden)))


def test_a_slot_that_changes_hands_is_observed_anew() -> None:
    """Else a request whose prefix was cached would go on from another's states."""
    notes = Notes()
    speculation = Speculation(notes, slots=1, max_length=20, vocab_size=9)
    first, second = decoding("first"), decoding("second")
    first.state.status, second.state.status = "running", "waiting"
    speculation.remember(first, 0, torch.ones(2, 3))
    speculation.remember(first, 2, torch.ones(1, 3))
    first.state.status, second.state.status = "waiting", "running"
    speculation.remember(second, 3, torch.ones(1, 3))
    assert notes.noted[-4:] == [(0, 0, 2), (0, 2, 1), (0, 0, 0), (0, 3, 1)]
