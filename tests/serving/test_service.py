"""An engine in its own thread: other threads submit, read, cancel and leave."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.engine.service import Service
from tests.serving.tiny import BYTES, Heard, alone, mixed, nothing_left, tiny

OPTIONS = {
    "num_blocks": 24,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "max_length": 96,
    "max_waiting": 6,
}
LONG = SamplingConfig(max_tokens=90)
PATIENCE = 60.0  # seconds that a test waits before it fails; nothing is measured


class Gate:
    """Stands before an engine's step: one step for each that is allowed."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step, self._allowed = engine, engine.step, threading.Semaphore(0)
        engine.step = self  # type: ignore[method-assign]

    def __call__(self):
        self._allowed.acquire(timeout=PATIENCE)
        return self._step()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        self._engine.step = self._step  # type: ignore[method-assign]
        self._allowed.release()


@contextmanager
def held_up(service: Service) -> Iterator[Gate]:
    """The engine makes only the steps that are allowed, up to the end of the block."""
    gate = Gate(service.engine)
    try:
        yield gate
    finally:
        gate.open()


def settled(service: Service) -> None:
    """Wait until the engine has nothing to do; then nothing may be left."""
    for _ in range(int(PATIENCE * 100)):
        if service._ask(lambda: service.engine.idle):
            break
        time.sleep(0.01)
    service._ask(lambda: nothing_left(service.engine))
    assert not service._outputs


def test_many_threads_at_once(seed: int) -> None:
    model = tiny(seed)
    asked = mixed(random.Random(seed), 40)
    references = alone(model, asked)
    engine = Engine(model, BYTES, policy="max_utilization", proposer="ngram", **OPTIONS)
    with Service(engine) as service, ThreadPoolExecutor(12) as pool:

        def one(number: int) -> Heard:
            heard = Heard()
            stream = service.submit(*asked[number], timeout=PATIENCE, wait=PATIENCE)
            heard.add(list(stream))
            assert [*heard.finish] == [stream.id]
            assert stream.finish == heard.finish[stream.id]
            return heard

        for heard, reference in zip(pool.map(one, range(40)), references, strict=True):
            assert [*heard.tokens.values()] == reference.tokens
            assert [*heard.text.values()] == reference.texts
            assert [*heard.finish.values()] == reference.finish
        settled(service)
        assert sum(service.stats().finished.values()) >= 40


def test_cancel_and_leave(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, **{**OPTIONS, "num_blocks": 60})
    with Service(engine) as service:
        with held_up(service) as gate:
            # The first waits in a step that isn't allowed yet; the others join it there.
            streams = [service.submit([0, 5], LONG, id="r0", timeout=PATIENCE)]
            with ask(service):
                streams += [
                    service.submit([n, 5], LONG, id=f"r{n}", timeout=PATIENCE) for n in (1, 2, 3)
                ]
            gate.allow(2)
            for stream in streams:
                assert next(stream).tokens
            streams[0].cancel()
            with streams[1] as stream:
                next(stream)
            streams[2].cancel()
            streams[2].cancel()
            first = streams[0]
            del streams, stream
            gc.collect()  # nothing refers to the last one any more
            gate.allow(1)
        *_, last = first
        assert (last.finish, first.finish) == ("cancelled", "cancelled")
        first.cancel()  # harmless
        settled(service)
        assert service.stats().finished == {"cancelled": 4}
        again = service.submit([3, 5], SamplingConfig(max_tokens=3), id="r0", timeout=PATIENCE)
        assert [output.finish for output in again][-1] == "length"


def test_an_old_stream_does_not_cancel_a_new_request_of_its_name(seed: int) -> None:
    with Service(Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)) as service:
        short = SamplingConfig(max_tokens=1)
        old = service.submit([4], short, id="same", timeout=PATIENCE)
        assert next(old).finish == "length"
        new = service.submit([4], LONG, id="same", timeout=PATIENCE)
        old.cancel()
        del old
        gc.collect()
        assert [output.finish for output in new][-1] == "length"
        with pytest.raises(StopIteration):
            next(new)


def test_a_reader_waits_no_longer_than_asked(seed: int) -> None:
    with Service(Engine(tiny(seed), BYTES, **OPTIONS)) as service, held_up(service) as gate:
        stream = service.submit([1, 2], SamplingConfig(max_tokens=4), timeout=0.01)
        with pytest.raises(TimeoutError, match=r"produce an output within 0\.01 s"):
            next(stream)
        gate.open()
        stream.timeout = PATIENCE
        first = next(stream)  # it may end the request
        assert first.tokens
        assert [first, *stream][-1].finish in ("length", "eos")


def test_backpressure(seed: int) -> None:
    with Service(Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)) as service:
        with held_up(service):
            first = service.submit([1], SamplingConfig(max_tokens=2), timeout=PATIENCE)
            kept = [first]
            with pytest.raises(QueueFull, match="at most 6 requests may wait"), ask(service):
                while True:
                    kept.append(service.submit([1], SamplingConfig(max_tokens=2)))
            assert len(kept) == 6
        late = service.submit([1], SamplingConfig(max_tokens=2), wait=PATIENCE, timeout=PATIENCE)
        for stream in (*kept, late):
            stream.timeout = PATIENCE
            assert [output.finish for output in stream][-1] == "length"
        settled(service)


@contextmanager
def ask(service: Service) -> Iterator[None]:
    """Bypass the engine's thread, which can't answer during a held-up step."""
    whole = service._ask
    service._ask = lambda what: what()  # type: ignore[method-assign]
    try:
        yield
    finally:
        service._ask = whole  # type: ignore[method-assign]


def test_errors_at_the_door_come_to_the_caller(seed: int) -> None:
    with Service(Engine(tiny(seed), BYTES, **OPTIONS)) as service:
        with pytest.raises(ValueError, match="between 0 and 256"):
            service.submit([999])
        with pytest.raises(ValueError, match="prompt and max_tokens"):
            service.submit([9], SamplingConfig(max_tokens=10**9))
        with pytest.raises(ValueError, match="wait must be"):
            service.submit([9], wait=-1)
        with pytest.raises(ValueError, match="seconds must be"):
            service.submit([9], seconds=float("inf"))
        late = service.submit([9], SamplingConfig(max_tokens=3), seconds=0.0, timeout=PATIENCE)
        assert [output.finish for output in late] == ["deadline"]
        stream = service.submit("é", SamplingConfig(max_tokens=3), timeout=PATIENCE)
        assert [output.finish for output in stream][-1] in ("length", "eos")
        settled(service)


def test_close_ends_every_stream(seed: int) -> None:
    service = Service(Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS))
    with held_up(service):
        streams = [service.submit([n], LONG, timeout=PATIENCE) for n in range(1)]
        closing = threading.Thread(target=service.close)
        closing.start()
        while not service._closing:
            time.sleep(0.001)
    closing.join(PATIENCE)
    assert not closing.is_alive() and not service._thread.is_alive()
    assert [[output.finish for output in stream][-1] for stream in streams] == ["cancelled"]
    nothing_left(service.engine)
    for asked in (lambda: service.submit([1]), service.stats):
        with pytest.raises(RuntimeError, match="the service is closed; make another"):
            asked()
    service.close()


def test_an_engine_that_breaks_ends_every_stream(seed: int) -> None:
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)
    submitted, calls, whole = threading.Event(), [], engine.step

    def breaks():
        submitted.wait(PATIENCE)
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return whole()

    engine.step = breaks
    with Service(engine) as service:
        streams = [service.submit([1], LONG, timeout=PATIENCE)]
        with ask(service):
            streams += [service.submit([n], LONG, timeout=PATIENCE) for n in (2, 3)]
        submitted.set()
        for stream in streams:
            *_, last = stream
            assert last.finish == "error" and "planted" in last.reason
        service._thread.join(PATIENCE)
        assert not service._thread.is_alive()
        with pytest.raises(RuntimeError, match="broken.*planted"):
            service.submit([1])


def test_an_interrupted_request_is_not_forgotten(seed: int) -> None:
    """A forward that fails ends its requests, and the service goes on."""
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)
    whole, calls = engine.runner.run, []

    def fails_once(segments, wanted):
        calls.append(len(segments))
        if len(calls) == 3:
            raise RuntimeError("planted")
        return whole(segments, wanted)

    engine.runner.run = fails_once
    with Service(engine) as service:
        first = service.submit([1], LONG, timeout=PATIENCE)
        assert [output.finish for output in first][-1] == "error"
        second = service.submit([1], LONG, timeout=PATIENCE)
        assert [output.finish for output in second][-1] == "length"
        settled(service)


class Counts:
    """A tokenizer that counts what it encodes."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return BYTES.encode(text)

    def decode(self, tokens) -> str:
        return BYTES.decode(tokens)


def test_a_text_that_waits_is_encoded_once_and_refused_once(seed: int) -> None:
    counts, short = Counts(), SamplingConfig(max_tokens=2)
    engine = Engine(tiny(seed, eos_token_ids=()), counts, **OPTIONS)
    with Service(engine) as service:
        with held_up(service), ask(service):
            kept = [service.submit([1], short) for _ in range(OPTIONS["max_waiting"])]
            with pytest.raises(QueueFull):
                service.submit("text", short, wait=0.2)
            assert counts.encoded == 1 and engine.counters.finished == {"queue_full": 1}
            with pytest.raises(QueueFull):
                service.submit([1], short)
        late = service.submit("text", short, wait=PATIENCE)
        for stream in (*kept, late):
            stream.timeout = PATIENCE
            assert [output.finish for output in stream][-1] == "length"
        assert counts.encoded == 2
        assert service.stats().finished == {"queue_full": 2, "length": len(kept) + 1}
        settled(service)


def test_an_engine_that_is_not_idle_is_refused(seed: int) -> None:
    engine = Engine(tiny(seed), BYTES, **OPTIONS)
    engine.submit([1], LONG)
    with pytest.raises(ValueError, match="an engine must be idle to be served"):
        Service(engine)
    engine.close()
    with pytest.raises(ValueError, match="outputs to be reported"):
        Service(engine)
    engine.step()
    with Service(engine) as service:
        assert list(service.submit([1], SamplingConfig(max_tokens=2), timeout=PATIENCE))


def test_a_name_comes_again_before_its_end_is_told(seed: int) -> None:
    with Service(Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)) as service:
        with held_up(service) as gate, ThreadPoolExecutor(1) as pool:
            old = service.submit([4], LONG, id="same", timeout=PATIENCE)
            old.cancel()
            again = pool.submit(service.submit, [4], LONG, id="same")
            while service._inbox.qsize() < 2:  # both come between two steps
                time.sleep(0.001)
            gate.open()
            with pytest.raises(ValueError, match="unlike those under way, got 'same'"):
                again.result(PATIENCE)
        assert [output.finish for output in old][-1] == "cancelled"
        new = service.submit([4], LONG, id="same", timeout=PATIENCE)
        assert [output.finish for output in new][-1] == "length"
        settled(service)


@pytest.mark.parametrize("broken", ["cancel", "stats", "close"])
def test_nobody_waits_for_an_engine_that_broke(seed: int, broken: str) -> None:
    """Whatever raises in the engine's thread, each question is answered and the engine closed."""
    engine = Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)
    closed, close = [], engine.close

    def breaks(*_):
        raise SystemExit("planted") if broken == "stats" else RuntimeError("planted")

    def closes():
        closed.append(1)
        if broken == "close":
            breaks()
        close()

    engine.close = closes  # type: ignore[method-assign]
    service = Service(engine)
    with held_up(service) as gate, ThreadPoolExecutor(6) as pool:
        stream = service.submit([4], LONG, timeout=PATIENCE)
        if broken != "close":
            setattr(engine, broken, breaks)
        if broken == "cancel":
            for _ in range(2):
                stream.cancel()
        answers = [pool.submit(service.stats) for _ in range(3)]
        while service._inbox.qsize() < 3 + 2 * (broken == "cancel"):
            time.sleep(0.001)
        if broken == "close":
            service._inbox.put(breaks)
        gate.open()
        for answer in answers:
            if broken == "stats":
                with pytest.raises(RuntimeError, match="planted"):
                    answer.result(PATIENCE)
            else:
                assert answer.result(PATIENCE).num_blocks == OPTIONS["num_blocks"]
        *_, last = stream
        assert last.finish == "error" and "planted" in last.reason
    service._thread.join(PATIENCE)
    assert closed and not service._thread.is_alive()
    with pytest.raises(RuntimeError, match="broken.*planted"):
        service.stats()
    service.close()


def test_those_who_ask_without_end_do_not_hold_up_a_step(seed: int) -> None:
    with Service(Engine(tiny(seed, eos_token_ids=()), BYTES, **OPTIONS)) as service:
        asked: list[int] = []

        def again() -> None:
            if service.engine.trace:
                return
            if not service.engine.idle:
                asked.append(1)
            if len(asked) < 1000:
                service._inbox.put(again)

        service._inbox.put(again)
        stream = service.submit([4], LONG, timeout=PATIENCE)
        assert [output.finish for output in stream][-1] == "length"
        assert len(asked) < 1000
        settled(service)


def test_a_broken_service_keeps_no_engine(seed: int) -> None:
    service = Service(Engine(tiny(seed), BYTES, **OPTIONS))
    engine = weakref.ref(service.engine)

    def breaks() -> None:
        raise SystemExit("planted")

    service._inbox.put(breaks)
    service._thread.join(PATIENCE)
    del service, breaks
    gc.collect()
    assert engine() is None
