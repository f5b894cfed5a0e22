"""Outputs of imposed lengths: they end as by EOS, at a length that the scheduler does not know."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from labcore.decoding import DraftModel, SamplingConfig, generate
from labcore.serving.engine.engine import Engine
from tests.serving.tiny import BYTES, TINY_POOL, alone, mixed, nothing_left, run, tiny


@pytest.mark.parametrize("policy", ["static", "guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("drafts", [False, True])
def test_outputs_end_where_they_are_told(seed: int, policy: str, drafts: bool) -> None:
    model, chance = tiny(seed), random.Random(seed)
    asked = [(prompt, replace(one, max_tokens=30)) for prompt, one in mixed(chance, 14)]
    lengths = [chance.randint(1, 30) for _ in asked[:-1]] + [30]
    # The target is its own draft: blocks of four tokens, in whose midst outputs end.
    proposer = DraftModel(model, gamma=3) if drafts else None
    engine = Engine(model, BYTES, policy=policy, proposer=proposer, eos_token_ids=(), **TINY_POOL)
    names = [
        engine.submit(*one, ends_after=length) for one, length in zip(asked, lengths, strict=True)
    ]
    heard = run(engine)
    for name, reference, length in zip(
        names, alone(tiny(seed, eos_token_ids=()), asked), lengths, strict=True
    ):
        assert heard.tokens[name] == reference.tokens[0][:length]
        assert heard.text[name] == BYTES.decode(heard.tokens[name])
        assert heard.finish[name] == "eos"
    assert (engine.stats().accepted > 0) == drafts
    nothing_left(engine)


def test_the_scheduler_does_not_know(seed: int) -> None:
    """Promised is what max_tokens asks for: the plans are those of longer outputs, cut short."""
    model = tiny(seed, eos_token_ids=())
    options = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    traces = []
    for ends_after in (2, None):
        engine = Engine(model, eos_token_ids=(), **options)
        for n in range(3):
            engine.submit([n, 5, 6], SamplingConfig(max_tokens=14), ends_after=ends_after)
        run(engine)
        traces.append(engine.trace)
        nothing_left(engine)
    short, long = ([(one.admitted, one.running) for one in trace] for trace in traces)
    assert short[0] == long[0] == (("request-1", "request-2"), 2)  # of 8 blocks 4 each
    assert short[1][1] == 0 and long[1][1] == 2


def test_what_ends_it_sooner_counts(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())
    sampling = SamplingConfig(max_tokens=64, temperature=1.0, seed=seed)
    said = generate(model, [[1, 2]], sampling).tokens[0]
    place = next(n for n, token in enumerate(said) if token < 128 and said.index(token) == n)
    ends = Engine(model, eos_token_ids=(said[place],))
    stops = Engine(model, BYTES)
    name = ends.submit([1, 2], sampling, ends_after=64)
    out = ends.drain()[name]
    assert (out.tokens, out.finish) == (tuple(said[: place + 1]), "eos")
    # Two bytes of a broken character are one sign: fewer tokens may spell the same text.
    text = BYTES.decode(said[:place])
    kept = next(n for n in range(place + 1) if BYTES.decode(said[:n]).startswith(text))
    name = stops.submit([1, 2], replace(sampling, stop=(chr(said[place]),)), ends_after=place + 1)
    out = stops.drain()[name]
    assert (out.tokens, out.finish) == (tuple(said[:kept]), "stop")


def test_lengths_that_are_none(seed: int) -> None:
    engine = Engine(tiny(seed))
    for given, kind, message in (
        (0, ValueError, "ends_after must be at least 1"),
        (6, ValueError, "ends_after must be at most max_tokens = 5, got 6"),
        (2.0, TypeError, "ends_after must be"),
    ):
        with pytest.raises(kind, match=message):
            engine.submit([1], SamplingConfig(max_tokens=5), ends_after=given)
    assert engine.idle and not engine.metrics
