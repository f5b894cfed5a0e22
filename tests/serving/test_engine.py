"""Every output of an engine is that of its request alone, whatever happens around it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from labcore import processes
from labcore.decoding import DraftModel, SamplingConfig, generate
from labcore.parallel import parallelize
from labcore.serving.clock import ManualClock
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.scheduler import QueueFull
from tests.serving.invariants import check
from tests.serving.tiny import (
    BYTES,
    TINY_POOL,
    Heard,
    alone,
    mixed,
    nothing_left,
    run,
    tiny,
)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "max_utilization"},
        {"policy": "max_utilization", "proposer": "ngram"},
        {"policy": "max_utilization", "enable_prefix_caching": False},
        {"graphs": True},
        {"policy": "static"},
        {"graphs": True, "proposer": "ngram", "policy": "max_utilization"},
        {"graphs": True, "policy": "static"},
        {"block_size": 1, "num_blocks": 120},
        {"block_size": 3, "num_blocks": 40, "max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 6, "chunk": 1},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_options_change_no_token(seed: int, options: dict) -> None:
    model = tiny(seed)
    asked = mixed(random.Random(seed), 12)
    with Engine(model, BYTES, **{**TINY_POOL, **options}) as engine:
        names = [engine.submit(*one) for one in asked]
        heard = run(engine)
        for name, reference in zip(names, alone(model, asked), strict=True):
            assert heard.tokens[name] == reference.tokens[0]
            assert heard.text[name] == reference.texts[0]
            assert heard.finish[name] == reference.finish[0]
        nothing_left(engine)


@pytest.mark.parametrize("verifier", ["sample_and_compare", "rejection", "block"])
def test_a_draft_model_inside(seed: int, verifier: str) -> None:
    """With one number per token the output is that of the request alone; else its distribution."""
    model = tiny(seed)
    asked = mixed(random.Random(seed), 10)
    engine = Engine(
        model,
        BYTES,
        policy="max_utilization",
        proposer=DraftModel(model, gamma=3),
        verifier=verifier,
        **TINY_POOL,
    )
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, (_, sampling), reference in zip(names, asked, alone(model, asked), strict=True):
        if verifier != "sample_and_compare" and sampling.temperature:
            assert heard.finish[name] in ("eos", "length")
        else:
            assert heard.tokens[name] == reference.tokens[0]
    assert engine.stats().accepted > 0  # the target is its own draft
    nothing_left(engine)


def test_ranks_of_a_divided_model_agree(seed: int) -> None:
    told = processes.run(_divided, 2, seed)
    references = alone(tiny(seed, vocab_size=258), mixed(random.Random(seed), 6), None)
    assert told == [[reference.tokens[0] for reference in references]] * 2


def _divided(seed: int) -> list[list[int]]:
    model = parallelize(tiny(seed, vocab_size=258))
    engine = Engine(model, policy="max_utilization", **TINY_POOL)
    names = [engine.submit(*one) for one in mixed(random.Random(seed), 6)]
    outputs = engine.drain()
    nothing_left(engine)
    return [list(outputs[name].tokens) for name in names]


class Letters:
    """Seven letters for all tokens, so that the beginnings of stop texts are everywhere."""

    def decode(self, tokens) -> str:
        return "".join(chr(97 + token % 7) for token in tokens)


@pytest.mark.parametrize("proposer", [None, "ngram"])
def test_what_may_belong_to_a_stop_text_is_not_said(seed: int, proposer: str | None) -> None:
    model, chance, letters = tiny(seed, eos_token_ids=()), random.Random(seed), Letters()
    asked = []
    for prompt, one in mixed(chance, 12, most=30):
        plain = replace(one, max_tokens=25)
        text = letters.decode(generate(model, [prompt], plain).tokens[0])
        begin = chance.randrange(20)
        end = text[begin : begin + 4]  # four tokens; the others begin alike and go on otherwise
        asked.append((prompt, replace(plain, stop=(end, end[:3] + "z", end[1:3] + "zz"))))
    engine = Engine(model, letters, policy="max_utilization", proposer=proposer, **TINY_POOL)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, reference in zip(names, alone(model, asked, letters), strict=True):
        assert heard.finish[name] == reference.finish[0] == "stop"
        assert heard.tokens[name] == reference.tokens[0]
        assert heard.text[name] == reference.texts[0]
    nothing_left(engine)


def test_a_shared_beginning_is_read_once(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())
    chance = random.Random(seed)
    prompt = [chance.randrange(256) for _ in range(48)]
    sampling = SamplingConfig(max_tokens=5)
    engine = Engine(model, block_size=8, num_blocks=30, max_num_batched_tokens=64)
    first, second = (
        engine.drain()[name] for name in (engine.submit(prompt, sampling) for _ in range(2))
    )
    assert first.tokens == second.tokens
    told = engine.stats()
    # The last token of a prompt is always read, so of six full blocks five are found.
    assert told.prompt_tokens == 48 + 8
    assert told.cached_tokens == 40
    assert [one.cached for one in engine.metrics] == [0, 40]
    assert engine.trace[-5].chunks[0].start == 40


def test_deadlines_end_requests_with_what_they_have(seed: int) -> None:
    model, clock = tiny(seed, eos_token_ids=()), ManualClock()
    asked = [([5 + n, 9, 12], SamplingConfig(max_tokens=30)) for n in range(4)]
    engine = Engine(model, BYTES, clock=clock, **{**TINY_POOL, "num_blocks": 20})
    names = [engine.submit(*one, deadline=10.0 * n + 5) for n, one in enumerate(asked)]
    late = engine.submit([1], SamplingConfig(max_tokens=2), deadline=0.0)
    heard = Heard()
    while not engine.idle:
        heard.add(engine.step())
        check(engine.scheduler)
        clock.advance(1.0)
    assert (heard.tokens[late], heard.finish[late]) == ([], "deadline")
    counts = [len(heard.tokens[name]) for name in names]
    # A token a step, the first with the prompt; the step at the deadline is not the request's.
    assert counts == [5, 15, 25, 30]
    assert [heard.finish[name] for name in names] == ["deadline"] * 3 + ["length"]
    for name, reference in zip(names, alone(model, asked), strict=True):
        assert reference.tokens[0][: len(heard.tokens[name])] == heard.tokens[name]
        assert heard.text[name] == BYTES.decode(heard.tokens[name])
    assert [one.e2e for one in engine.metrics if one.id in names[:3]] == [5.0, 15.0, 25.0]
    nothing_left(engine)


def test_the_trace_adds_up(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())  # so that the blocks do not suffice
    asked = mixed(random.Random(seed), 36)
    engine = Engine(model, BYTES, policy="max_utilization", proposer="ngram", **TINY_POOL)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    trace, told = engine.trace, engine.stats()
    read: dict[str, int] = {}
    for record in trace:
        assert record.free + record.held + record.cached == 15
        assert record.tokens <= 24
        assert all(chunk.count <= 11 for chunk in record.chunks)
        drafted = sum(decode.drafted for decode in record.decodes)
        assert record.tokens == record.prefill_tokens + len(record.decodes) + drafted
        assert record.seconds > 0 and record.accepted <= record.drafted == drafted
        assert {one.id: one.start for one in (*record.chunks, *record.decodes)} == record.contexts
        for chunk in record.chunks:
            read[chunk.id] = read.get(chunk.id, 0) + chunk.count
    assert sum(record.emitted for record in trace) == told.output_tokens
    assert told.output_tokens == sum(map(len, heard.tokens.values()))
    assert told.steps == len(trace) and told.drafted > 0
    assert told.wasted == told.drafted - told.accepted
    assert told.preemptions == sum(len(record.preempted) for record in trace) > 0
    assert {one.id for one in engine.metrics} == set(names)
    assert told.prompt_tokens == sum(read.values())
    assert [one.output for one in engine.metrics if one.id == names[0]] == [
        len(heard.tokens[names[0]])
    ]


def test_a_static_batch_computes_the_rows_that_have_ended(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())
    engine = Engine(model, policy="static", max_num_seqs=3, num_blocks=40)
    widths = []
    whole = engine.runner.run

    def spy(segments, wanted):
        widths.append((len(segments), sum(bool(one.blocks) for one in segments)))
        return whole(segments, wanted)

    engine.runner.run = spy
    for most in (2, 4, 7, 3):
        engine.submit([most, 1, 2], SamplingConfig(max_tokens=most))
    run(engine)
    # Of 2, 4 and 7 tokens the first comes with the prompt; the fourth waits for the seventh.
    assert widths == [
        (3, 3),
        (3, 3),
        (3, 2),
        (3, 2),
        (3, 1),
        (3, 1),
        (3, 1),
        (1, 1),
        (1, 1),
        (1, 1),
    ]


def test_refused_at_the_door(seed: int) -> None:
    model = tiny(seed, max_position_embeddings=50)
    engine = Engine(model, num_blocks=20, block_size=8, max_waiting=3, max_num_seqs=2)
    with_text = Engine(model, BYTES)
    bad = [
        (TypeError, "no tokenizer that encodes", ("text",)),
        (TypeError, "a row of tokens, got bytes", (b"text",)),
        (TypeError, "a row of tokens, got int", (5,)),
        (ValueError, "at least one token", ([],)),
        (ValueError, "between 0 and 256, got 3 to 257", ([257, 3],)),
        (ValueError, "between 0 and 256, got -1 to 3", ([3, -1],)),
        (TypeError, "sampling must be a SamplingConfig, got dict", ([3], {"temperature": 1})),
        (TypeError, "tokens must be whole numbers", ([1.9],)),
        (TypeError, "tokens must be whole numbers", (torch.tensor([3.0, 4.0]),)),
        (ValueError, r"seed must be at least -2\*\*63", ([3], SamplingConfig(seed=2**64))),
        (ValueError, r"below 2\*\*64, got -", ([3], SamplingConfig(seed=-(2**63) - 1))),
        (TypeError, "seed must be a whole number, got 1.5", ([3], SamplingConfig(seed=1.5))),  # type: ignore[arg-type]
        (TypeError, "seed must be a whole number, got None", ([3], SamplingConfig(seed=None))),  # type: ignore[arg-type]
        (ValueError, "stop texts need a tokenizer", ([3], SamplingConfig(stop=("x",)))),
        (ValueError, "at most 50 tokens", ([3] * 10, SamplingConfig(max_tokens=42))),
    ]
    for kind, message, arguments in bad:
        with pytest.raises(kind, match=message):
            engine.submit(*arguments)
    with pytest.raises(ValueError, match="deadline must be finite"):
        engine.submit([3], deadline=float("nan"))
    assert engine.idle and engine.scheduler.idle
    assert engine.stats().finished == {"refused": 1}
    short = SamplingConfig(max_tokens=2)
    assert engine.submit([3], short, id="request-2") == "request-2"
    with pytest.raises(ValueError, match="unlike those under way, got 'request-2'"):
        engine.submit([3], short, id="request-2")
    for _ in range(2):
        engine.submit([3], short)
    with pytest.raises(QueueFull, match="at most 3 requests may wait"):
        engine.submit([3], short)
    assert engine.stats().finished["queue_full"] == 1
    assert not engine.cancel("request-9")
    assert len(engine.drain()) == 3
    assert with_text.submit("text", short)
    assert with_text.drain()["request-1"].tokens == tuple(
        generate(model, [list(b"text")], short).tokens[0]
    )
    nothing_left(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proposer": "medusa"}, "proposer must be 'ngram'"),
        ({"proposer": 3}, "proposer must have propose"),
        ({"verifier": "typical"}, "verifier must be one of"),
        ({"policy": "none"}, "policy must be one of"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"max_length": -1}, "max_length must be at least 1"),
        ({"max_length": 10**6}, "max_length must be at most the model's max_position_embeddings"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Engine(tiny(0), **options)


def test_a_name_is_taken_until_its_last_output_is_told(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES)
    short = SamplingConfig(max_tokens=2)
    for name in ("mine", "request-1"):
        engine.submit([3, 4], short, id=name)
        assert engine.cancel(name)
        with pytest.raises(ValueError, match=f"unlike those under way, got '{name}'"):
            engine.submit([3, 4], short, id=name)
    assert engine.submit([3, 4], short) == "request-2"
    heard = Heard()
    heard.add(engine.step())
    assert heard.finish == {"mine": "cancelled", "request-1": "cancelled"}
    assert engine.submit([3, 4], short, id="mine") == "mine"
    assert {id: one.finish for id, one in engine.drain().items()} == {
        "request-2": "length",
        "mine": "length",
    }
    nothing_left(engine)


@pytest.mark.parametrize("value", [-(2**63), -1, 2**63, 2**64 - 1])
def test_every_seed_of_a_generator_is_taken(seed: int, value: int) -> None:
    model, asked = tiny(seed), ([3, 4], SamplingConfig(temperature=1.0, max_tokens=4, seed=value))
    engine = Engine(model, BYTES)
    engine.submit(*asked)
    assert engine.drain()["request-1"].tokens == tuple(alone(model, [asked])[0].tokens[0])


def test_graphs_are_refused_if_a_proposer_may_read_hidden_states() -> None:
    model = tiny(0)
    with pytest.raises(ValueError, match="graphs must be False"):
        Engine(model, proposer=DraftModel(model), graphs=True)
    with pytest.raises(TypeError, match="model must be a Llama, got Linear"):
        Engine(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
