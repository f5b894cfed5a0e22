"""A fault ends its own requests with a reason; the others go on, and nothing leaks."""

from __future__ import annotations

import random

import pytest
import torch

from labcore.decoding import Draft, NGram, SamplingConfig
from labcore.serving.clock import ManualClock
from labcore.serving.engine.engine import Engine
from tests.serving.invariants import check
from tests.serving.tiny import BYTES, Heard, alone, mixed, nothing_left, run, tiny

OPTIONS = {
    "num_blocks": 40,
    "block_size": 8,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 40,
    "max_length": 96,
}


def counted_as_heard(engine: Engine, heard: Heard) -> None:
    """Clients, metrics and counters agree on how many tokens there were."""
    told = engine.stats()
    for one in engine.metrics:
        assert one.output == len(heard.tokens.get(one.id, []))
    assert told.output_tokens == sum(map(len, heard.tokens.values()))
    assert told.wasted == told.drafted - told.accepted


class Fails:
    """Stands before a method, and raises in the calls that are named."""

    def __init__(self, method, *calls: int, problem: BaseException | None = None) -> None:
        self.method, self.calls, self.count = method, calls, 0
        self.problem = problem or RuntimeError("planted")
        self.rows: list = []  # of the calls that failed

    def __call__(self, rows, wanted):
        self.count += 1
        if self.count in self.calls:
            self.rows += rows
            raise self.problem
        return self.method(rows, wanted)


def poison(engine: Engine, blocks) -> None:
    """Overwrite blocks with NaN, so that any later read of a failed forward's data shows."""
    for pages in (*engine.runner.cache.keys, *engine.runner.cache.values):
        pages[list(blocks)] = float("nan")


def as_alone(engine: Engine, heard: Heard, names, asked, *, but=()) -> None:
    for name, reference in zip(names, alone(engine.model, asked), strict=True):
        said = heard.tokens.get(name, [])
        if name in but:
            assert heard.finish[name] == "error"
            assert reference.tokens[0][: len(said)] == said
            assert heard.text[name] == BYTES.decode(said)
        else:
            assert (said, heard.finish[name]) == (reference.tokens[0], reference.finish[0])


@pytest.mark.parametrize("policy", ["static", "guaranteed_no_evict", "max_utilization"])
def test_a_forward_that_fails(seed: int, policy: str) -> None:
    chance = random.Random(seed)
    engine = Engine(tiny(seed), BYTES, policy=policy, proposer="ngram", **OPTIONS)
    asked = mixed(chance, 16)
    names = [engine.submit(*one) for one in asked]
    runner = engine.runner
    fails = runner.run = Fails(runner.run, 1, 3, 8)
    heard, seen = Heard(), 0
    while not engine.idle:
        heard.add(engine.step())
        check(engine.scheduler)
        failed = fails.rows
        if len(failed) > seen:
            theirs, pool = {block for row in failed[seen:] for block in row.blocks}, engine.pool
            poison(
                engine,
                {b for b in theirs if not pool.references(b) and pool.digest(b) is None},
            )
            seen = len(failed)
    failed = {name for record in engine.trace for name in record.failed}
    assert len(failed) == len([row for row in fails.rows if row.blocks]) > 2
    assert {heard.reason[name] for name in failed} == {"RuntimeError: planted"}
    as_alone(engine, heard, names, asked, but=failed)
    nothing_left(engine)
    # What was poisoned is not found as a shared beginning.
    again = [engine.submit(*one) for one in asked]
    as_alone(engine, run(engine), again, asked)
    assert engine.stats().finished["error"] == len(failed)


def test_an_interrupt_ends_the_step_and_not_the_engine(seed: int) -> None:
    engine = Engine(tiny(seed), BYTES, **OPTIONS)
    asked = mixed(random.Random(seed), 9)
    names = [engine.submit(*one) for one in asked]
    engine.runner.run = Fails(engine.runner.run, 2, problem=KeyboardInterrupt())
    heard = Heard()
    with pytest.raises(KeyboardInterrupt):
        while True:
            heard.add(engine.step())
    check(engine.scheduler)
    run(engine, heard)
    failed = {name for name in names if heard.finish[name] == "error"}
    assert failed and all("interrupted" in heard.reason[name] for name in failed)
    as_alone(engine, heard, names, asked, but=failed)
    nothing_left(engine)


def test_logits_that_are_not_finite_end_their_row_alone(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)
    asked = [
        ([n, 7, 9], SamplingConfig(max_tokens=9, temperature=0.5 * (n % 3), seed=n))
        for n in range(5)
    ]
    names = [engine.submit(*one) for one in asked]
    whole, calls = engine.runner.run, []

    def read(segments, wanted):
        calls.append(len(segments))
        logits, hidden = whole(segments, wanted)
        if len(calls) == 4:
            logits[1] = float("nan")
            logits[3, 5] = float("inf")
        return logits, hidden

    engine.runner.run = read
    heard = run(engine)
    assert [heard.finish[name] for name in names] == ["length", "error"] * 2 + ["length"]
    assert "logits must have a finite largest value" in heard.reason[names[1]]
    assert [len(heard.tokens[name]) for name in names] == [9, 3, 9, 3, 9]
    as_alone(engine, heard, names, asked, but={names[1], names[3]})
    nothing_left(engine)


class Proposes(NGram):
    """Raises in the calls that are named, or gives a draft that is none."""

    def __init__(self, fault: str, *calls: int) -> None:
        super().__init__()
        self.fault, self.calls, self.count = fault, calls, 0

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        self.count += 1
        drafts = super().propose(contexts, samplings, max_tokens, generators)
        if self.count not in self.calls:
            return drafts
        if self.fault == "raises":
            raise RuntimeError("planted")
        if self.fault == "too few":
            return drafts[1:]
        deepest = max(range(len(max_tokens)), key=max_tokens.__getitem__)
        if self.fault == "unknown":
            drafts[deepest] = Draft.chain([10**6] * min(2, max_tokens[deepest]))
        else:
            drafts[deepest] = Draft.chain([1] * (max_tokens[deepest] + 1))
        return drafts


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: planted"),
        ("too few", "a draft for each of the 5 rows"),
        ("too deep", "tokens deep, got"),
        ("unknown", "must lie below the model's vocabulary"),
    ],
)
def test_a_proposer_that_fails(seed: int, fault: str, reason: str) -> None:
    engine = Engine(tiny(seed), BYTES, proposer=Proposes(fault, 2, 6), **OPTIONS)
    asked = mixed(random.Random(seed), 14, most=30)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    failed = {name for name in names if heard.finish[name] == "error"}
    assert failed and all(reason in heard.reason[name] for name in failed)
    as_alone(engine, heard, names, asked, but=failed)
    nothing_left(engine)


class Stumbles:
    """A tokenizer that cannot read one token, as where a model's vocabulary is padded."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, tokens) -> str:
        if self.token in tokens:
            raise ValueError(f"token {self.token} has no text")
        return BYTES.decode(tokens)


def test_a_token_without_a_text_ends_its_request_alone(seed: int) -> None:
    model = tiny(seed)
    asked = mixed(random.Random(seed), 12)
    references = [reference.tokens[0] for reference in alone(model, asked)]
    token = next(said[1] for said in references if len(said) > 3)
    engine = Engine(model, Stumbles(token), **OPTIONS)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    for name, said in zip(names, references, strict=True):
        if token not in said[:-1]:
            assert heard.tokens[name] == said
            continue
        # The token that has no text is not delivered, nor counted.
        assert heard.finish[name] == "error" and "has no text" in heard.reason[name]
        assert heard.tokens.get(name, []) == said[: said.index(token)]
    assert "error" in heard.finish.values()
    counted_as_heard(engine, heard)
    nothing_left(engine)


def test_close_cancels(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, graphs=True, **OPTIONS)
    names = [engine.submit([n, 4], SamplingConfig(max_tokens=9)) for n in range(8)]
    heard = Heard()
    with engine:
        heard.add(engine.step())
    heard.add(engine.step())
    assert heard.finish == dict.fromkeys(names, "cancelled")
    nothing_left(engine)


class Siblings(NGram):
    """Drafts a wrong token and the right one beside it, so that each accepted path has a gap."""

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.known = known

    def propose(self, contexts, samplings, max_tokens, generators, *, hidden=None):
        drafts = []
        for context, most in zip(contexts, max_tokens, strict=True):
            tokens: list[int] = []
            for prompt, said in self.known.items():
                if most and tuple(context[: len(prompt)]) == prompt:
                    right = said[len(context) - len(prompt)]
                    tokens = [(right + 1) % BYTES.vocab_size, right]
            parents = torch.full((len(tokens),), -1, dtype=torch.int32)
            drafts.append(Draft(torch.tensor(tokens, dtype=torch.int64), parents))
        return drafts


def test_a_path_that_cannot_be_kept_brings_nothing(seed: int) -> None:
    model = tiny(seed, eos_token_ids=())
    asked = [([n, 7, 9 + n], SamplingConfig(max_tokens=9)) for n in range(4)]
    references = [one.tokens[0] for one in alone(model, asked)]
    known = {tuple(prompt): said for (prompt, _), said in zip(asked, references, strict=True)}
    engine = Engine(model, BYTES, proposer=Siblings(known), **OPTIONS)
    names = [engine.submit(*one) for one in asked]
    whole, calls = engine.runner.cache.keep, []

    def keep(segment, slots):
        calls.append(segment)
        if len(calls) in (2, 7):
            raise RuntimeError("planted")
        whole(segment, slots)

    engine.runner.cache.keep = keep
    heard = run(engine)
    failed = {name for name in names if heard.finish[name] == "error"}
    assert len(failed) == 2 and {heard.reason[name] for name in failed} == {"RuntimeError: planted"}
    as_alone(engine, heard, names, asked, but=failed)
    counted_as_heard(engine, heard)
    nothing_left(engine)


@pytest.mark.parametrize("why", ["deadline", ""])
def test_an_interrupt_loses_no_expired_or_preempted_request(seed: int, why: str) -> None:
    """The forward is interrupted in a step in which a request expires or is preempted."""
    clock = ManualClock()
    engine = Engine(
        tiny(seed, eos_token_ids=()),
        BYTES,
        proposer="ngram",
        clock=clock,
        policy="max_utilization",
        **{**OPTIONS, "num_blocks": 6},
    )
    names = [engine.submit([n] * 9, SamplingConfig(max_tokens=22)) for n in range(3)]
    if why:
        names.append(engine.submit([5] * 3, SamplingConfig(max_tokens=22), deadline=1.0))
    heard, whole, gone = Heard(), engine.runner.run, []

    def read(segments, wanted):
        plan = engine.scheduler._open
        if not gone and (plan.expired if why else plan.preempted):
            gone.extend(plan.expired or plan.preempted)
            raise KeyboardInterrupt("planted")
        return whole(segments, wanted)

    engine.runner.run = read
    for _ in range(400):
        if engine.idle:
            break
        try:
            heard.add(engine.step())
        except KeyboardInterrupt as problem:
            assert str(problem) == "planted"
        clock.advance(0.25)
        check(engine.scheduler)
    assert heard.finish.keys() == set(names) and heard.finish[gone[0]] == (why or "length")
    assert set(heard.finish.values()) - {"length", "deadline"} == {"error"}
    counted_as_heard(engine, heard)
    nothing_left(engine)


def test_an_entry_that_cannot_be_made_leaves_no_request(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny(seed), BYTES, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr("labcore.serving.engine.engine.Entry", Fails(None, 1))
        with pytest.raises(TypeError):  # Fails takes one argument
            engine.submit([3], SamplingConfig(max_tokens=2), id="same")
    assert engine.scheduler.idle
    engine.submit([3], SamplingConfig(max_tokens=2), id="same")
    assert engine.drain()["same"].tokens
    nothing_left(engine)


class Forgets(NGram):
    """Its commit raises in the calls that are named."""

    def __init__(self, *calls: int) -> None:
        super().__init__()
        self.calls, self.count = calls, 0

    def commit(self, accepted) -> None:
        self.count += 1
        if self.count in self.calls:
            raise RuntimeError("planted")


def test_a_proposer_that_cannot_take_a_commit(seed: int) -> None:
    engine = Engine(tiny(seed), BYTES, proposer=Forgets(2, 5), **OPTIONS)
    asked = mixed(random.Random(seed), 14, most=30)
    names = [engine.submit(*one) for one in asked]
    heard = run(engine)
    failed = {name for name in names if heard.finish[name] == "error"}
    assert failed and {heard.reason[name] for name in failed} == {"RuntimeError: planted"}
    as_alone(engine, heard, names, asked, but=failed)
    # What was decided in the step itself was said.
    assert all(heard.tokens[name] for name in failed)
    counted_as_heard(engine, heard)
    nothing_left(engine)


def test_what_failed_once_is_found_by_nobody(seed: int) -> None:
    """A chunk writes NaN, and its blocks are shared before a later chunk shows the fault."""
    engine = Engine(
        tiny(seed, eos_token_ids=()), BYTES, **{**OPTIONS, "max_num_batched_tokens": 16}
    )
    common = list(range(40))
    asked = [([*common, 100 + n], SamplingConfig(max_tokens=3)) for n in range(3)]
    read, planted = engine.runner.run, []

    def writes_nan(rows, wanted):
        found = read(rows, wanted)
        if not planted:
            planted.append(rows[0].blocks[0])
            poison(engine, planted)
        return found

    engine.runner.run = writes_nan
    for n, one in enumerate(asked):
        name = engine.submit(*one, id=f"u{n}")
        as_alone(engine, run(engine), [name], [one], but=[name] if n == 0 else ())
    assert [one.cached for one in engine.metrics] == [0, 0, 40]
    nothing_left(engine)


def test_stop_texts_are_few_and_short(seed: int) -> None:
    """They are looked for at each token, in the thread that serves everybody."""
    engine = Engine(tiny(seed), BYTES, **OPTIONS)
    for stop in (("a" * 257,), tuple(map(str, range(17)))):
        with pytest.raises(ValueError, match=r"at most 16 texts of at most 256 characters, got"):
            engine.submit([1], SamplingConfig(stop=stop))
    engine.submit([1], SamplingConfig(max_tokens=2, stop=("a" * 256, *map(str, range(15)))))
    assert len(engine.drain()) == 1


def test_drain_tells_of_all_that_ended_since_the_last_step(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, clock=ManualClock(5.0), **OPTIONS)
    went, late, stays = (
        engine.submit([n], SamplingConfig(max_tokens=2), deadline=4.0 if n == 2 else None)
        for n in (1, 2, 3)
    )
    engine.cancel(went)
    ends = {name: output.finish for name, output in engine.drain().items()}
    assert ends == {went: "cancelled", late: "deadline", stays: "length"}
    assert engine.drain() == {}
