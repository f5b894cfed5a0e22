"""Replayed decode steps in an engine; on a CPU, the same steps run one operation at a time."""

from __future__ import annotations

import random

import pytest
import torch

from labcore.decoding import Draft, NGram, SamplingConfig
from labcore.serving.clock import ManualClock
from labcore.serving.engine.engine import Engine
from tests.serving.invariants import check
from tests.serving.tiny import BYTES, TINY_POOL, Heard, alone, mixed, nothing_left, run, tiny


class Replays:
    """Stands before a GraphedDecoder and writes down what its steps are given and leave."""

    def __init__(self, engine: Engine) -> None:
        self.inner, self.cache = engine.runner._graphed, engine.runner.cache
        self.rows: list[int] = []
        engine.runner._graphed = self

    def __call__(self, tokens):
        self.rows.append(len(tokens))
        before = self.cache.lengths.clone()
        logits = self.inner(tokens)
        assert (self.cache.lengths - before).tolist()[: len(tokens)] == [1] * len(tokens)
        return logits

    def close(self) -> None:
        self.inner.close()


def test_rows_that_have_ended_rest_in_a_static_batch(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())
    asked = [([most, 1, 2], SamplingConfig(max_tokens=most)) for most in (2, 4, 7, 3)]
    with Engine(model, policy="static", max_num_seqs=3, num_blocks=40, graphs=True) as engine:
        replays = Replays(engine)
        names = [engine.submit(*one) for one in asked]
        heard = run(engine)
        for name, reference in zip(names, alone(model, asked, None), strict=True):
            assert heard.tokens[name] == reference.tokens[0]
        # Of 2, 4 and 7 tokens the first comes with the prompt; the fourth request waits for the
        # seventh token, and the rows that have ended are computed until then.
        assert replays.rows == [3, 3, 3, 3, 3, 3, 1, 1]
        nothing_left(engine)


def _requests(record) -> int:
    return len(record.chunks) + len(record.decodes)


class EveryOther(NGram):
    """Drafts one token wherever a context's length is even."""

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        return [
            Draft.chain([7][: most if len(context) % 2 == 0 else 0])
            for context, most in zip(contexts, max_tokens, strict=True)
        ]


@pytest.mark.parametrize("proposer", [None, EveryOther()])
def test_steps_that_drafted_nothing_are_replayed(seed: int, proposer: NGram | None) -> None:
    model, asked = tiny(seed), mixed(random.Random(seed), 12)
    with Engine(model, BYTES, graphs=True, proposer=proposer, **TINY_POOL) as engine:
        replays = Replays(engine)
        names = [engine.submit(*one) for one in asked]
        heard = run(engine)
        for name, reference in zip(names, alone(model, asked), strict=True):
            assert heard.tokens[name] == reference.tokens[0]
        plain = [record for record in engine.trace if record.tokens == _requests(record)]
        assert len(replays.rows) == len(plain) > 0
        assert (engine.stats().drafted > 0) == (proposer is not None)
        nothing_left(engine)


def test_a_static_batch_tells_each_client_its_own_end(seed: int) -> None:
    model, clock = tiny(seed, eos_token_ids=()), ManualClock()
    engine = Engine(model, policy="static", max_num_seqs=3, num_blocks=40, clock=clock)
    names = [engine.submit([3, n], SamplingConfig(max_tokens=n)) for n in (2, 5, 9)]
    heard, ended = Heard(), {}
    while not engine.idle:
        outputs = engine.step()
        heard.add(outputs)
        ended |= {output.id: clock.now() for output in outputs if output.finish}
        assert all(len(output.tokens) == 1 for output in outputs)
        # The slots stay taken: what has ended holds its blocks.
        assert engine.pool.held == (0 if engine.idle else 3)
        clock.advance(1.0)
    assert [ended[name] for name in names] == [1.0, 4.0, 8.0]
    assert {one.id: one.e2e for one in engine.metrics} == ended


@pytest.mark.parametrize("policy", ["static", "guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("proposer", [None, "ngram"])
def test_cancelled_at_any_time(seed: int, policy: str, proposer: str | None) -> None:
    """In the queue, within or after the prompt, within the output: nothing changes for others."""
    model, chance = tiny(seed, eos_token_ids=()), random.Random(seed)
    asked = mixed(chance, 20, most=30)
    engine = Engine(
        model,
        BYTES,
        policy=policy,
        proposer=proposer,
        **{**TINY_POOL, "chunk": 5, "max_num_batched_tokens": 12},
    )
    names = [engine.submit(*one) for one in asked]
    heard, seen = Heard(), set()
    while not engine.idle:
        for state in list(engine.scheduler.states.values()):
            where = state.status, state.computed > 0, state.emitted > 0, state.missing > 1
            if where not in seen and len(seen) < 6:
                seen.add(where)
                held = engine.pool.held
                assert engine.cancel(state.id) and not engine.cancel(state.id)
                check(engine.scheduler)
                assert engine.pool.held <= held
                break
        heard.add(engine.step())
        check(engine.scheduler)
    assert {("waiting", False, False, True), ("running", True, False, True)} & seen
    gone = [name for name in names if heard.finish[name] == "cancelled"]
    assert len(gone) == len(seen) >= 3
    for name, reference in zip(names, alone(model, asked), strict=True):
        said = heard.tokens[name]
        assert said == reference.tokens[0][: len(said)]
        assert name in gone or said == reference.tokens[0]
    assert torch.isfinite(engine.runner.cache.keys[0][: engine.pool.num_blocks]).all()
    nothing_left(engine)
