"""The path that a GPU takes, on stand-ins for torch's graphs: order, pool, replay and end."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from labcore.models import Llama
from labcore.parallel import graphs
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.launch_time import _in_turns
from tests.parallel.small import CAPACITY, made, plain, prefilled


@pytest.fixture
def model(seed: int) -> Llama:
    return made(seed)


class FakeGraph:
    """What torch.cuda.CUDAGraph does, on a CPU: a replay runs the step again."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.again: Callable[[], None] = lambda: None

    def replay(self) -> None:
        self.gpu.log.append("replay")
        self.again()

    def reset(self) -> None:
        self.gpu.log.append("reset")


class FakeStream:
    def __init__(self, name: str = "aside") -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None: ...


class FakeGpu:
    """torch.cuda as far as graphs need it: the calls in order, and which stream is the current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.default = self.current = FakeStream("the caller's")
        self.pools = 0
        self.capturing = self.broken = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
        fakes: dict[str, Any] = {
            "CUDAGraph": lambda: FakeGraph(self),
            "Stream": FakeStream,
            "current_stream": lambda: self.current,
            "device": self.device,
            "graph": self.graph,
            "graph_pool_handle": self.pool,
            "is_current_stream_capturing": lambda: self.capturing,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self.stream,
            "synchronize": lambda device=None: self.log.append(f"synchronize {device}"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        return self

    def pool(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(f"on {device}")
        yield

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"warm-up {stream.name}")
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(
        self,
        graph: FakeGraph,
        *,
        stream: FakeStream,
        capture_error_mode: str,
        pool: str = "a pool of its own",
    ) -> Iterator[None]:
        self.log.append(f"capture in {pool}, {stream.name}, {capture_error_mode}")
        before, self.current, self.capturing = self.current, stream, True
        try:
            yield
        finally:
            self.capturing = False
            if self.broken:  # torch then raises before it sets the stream back
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before

    def breaks(self, *_: object) -> None:
        """A forward hook: what CUDA refuses in a capture only."""
        if self.capturing:
            self.broken = True
            raise RuntimeError("operation not permitted")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu().install(monkeypatch)


class OnFakeGpu(GraphedDecoder):
    _on_gpu = True
    steps = 0

    def _recorded_graph(self, size: int) -> graphs._Captured:
        captured = super()._recorded_graph(size)

        def again() -> None:  # past torch's count of a tensor's changes, as a graph writes
            with torch.autograd._unsafe_preserve_version_counter(self.cache.lengths):
                captured.logits.copy_(self._step(size))

        captured.graph.again = torch.inference_mode()(again)
        return captured

    def _step(self, size: int) -> Tensor:
        self.steps += 1
        return super()._step(size)


CAPTURE = ["warm-up aside", "capture in pool 1, aside, thread_local"]


def test_the_path_of_a_gpu(gpu: FakeGpu, model: Llama, seed: int) -> None:
    alone, shared = prefilled(model, seed, 3), prefilled(model, seed)
    decoder = OnFakeGpu(model, shared, batches=(2, 4), warmup=5)
    decoder.capture()
    assert gpu.log == ["on cpu", *CAPTURE, "on cpu", *CAPTURE]
    assert decoder.steps == 2 * (1 + 5 + 1)
    assert list(decoder._graphs) == [4, 2]
    del gpu.log[:]
    results = []
    for token in (3, 8):
        tokens = torch.tensor([token, 4, 5])
        results.append(decoder(tokens))
        torch.testing.assert_close(results[-1], plain(model, alone, tokens), rtol=1e-5, atol=1e-5)
    assert not torch.equal(*results)
    assert gpu.log == ["replay", "replay"]
    told = _in_turns(decoder, 1, 4, 2)
    assert gpu.log == ["replay"] * (2 + 2 + 4)
    assert (told.eager.n, told.graphed_host.n) == (4, 4)
    assert told.launches == len(decoder.launches(1)) > 20
    assert all(host <= all_of_it for host, all_of_it in zip(
        told.eager_host.samples, told.eager.samples, strict=True))  # fmt: skip
    assert torch.equal(shared.lengths[:3], alone.lengths)
    ended = ["synchronize cpu", "reset", "reset"]
    del gpu.log[:]
    decoder.capture()
    assert gpu.log[:3] == ended
    assert [one for one in gpu.log if "capture" in one] == [
        "capture in pool 2, aside, thread_local"
    ] * 2
    del gpu.log[:]
    decoder.close()
    decoder.close()
    assert gpu.log == ended


def test_a_failed_capture_says_why(gpu: FakeGpu, model: Llama, seed: int) -> None:
    decoder = OnFakeGpu(model, prefilled(model, seed), batches=(1, 2))
    hook = model.norm.register_forward_hook(lambda _, __, out: out * out.max().item())
    with pytest.raises(RuntimeError, match="must not wait for the device"):
        decoder.capture()
    assert not any("capture" in one for one in gpu.log)  # what CUDA would refuse was not begun
    hook.remove()
    decoder.capture()
    held = decoder._graphs[2]
    hook = model.norm.register_forward_hook(gpu.breaks)
    told = r"1 rows .*, got .*not permitted in breaks \(test_graphs_captured.py, line .*may wait"
    del decoder._graphs[1]
    with pytest.raises(RuntimeError, match=told):
        decoder(torch.tensor([1]))
    assert gpu.current is gpu.default
    assert decoder.captured == (2,) and decoder._graphs[2] is held
    hook.remove()
    gpu.broken = False
    decoder(torch.tensor([1]))
    assert gpu.log[-2:] == ["capture in pool 2, aside, thread_local", "replay"]
    decoder.close()


def test_what_waits_only_in_a_capture_is_named(gpu: FakeGpu, model: Llama, seed: int) -> None:
    decoder = OnFakeGpu(model, prefilled(model, seed), batches=(2,))
    hook = model.norm.register_forward_hook(
        lambda _, __, out: out * out.max().item() if gpu.capturing else out
    )
    with pytest.raises(RuntimeError, match="step must not wait.*_local_scalar_dense in"):
        decoder.capture()
    hook.remove()
    decoder.capture()
    decoder.close()


def test_two_decoders_of_one_cache_see_each_others_steps(
    gpu: FakeGpu, model: Llama, seed: int
) -> None:
    cache = prefilled(model, seed)
    cache.lengths.fill_(CAPACITY - 3)
    first, second = (OnFakeGpu(model, cache, batches=(2,)) for _ in range(2))
    tokens = torch.tensor([1, 2])
    for decoder in (first, second, first):
        decoder(tokens)
    for decoder in (first, second):
        with pytest.raises(ValueError, match=f"at most {CAPACITY} tokens, got {CAPACITY + 1}"):
            decoder(tokens)
    assert cache.lengths[:3].tolist() == [CAPACITY, CAPACITY, CAPACITY - 3]
    first.close()
    second.close()


def test_what_moved_is_not_timed(gpu: FakeGpu, model: Llama, seed: int) -> None:
    with OnFakeGpu(model, prefilled(model, seed), batches=(1,)) as decoder:
        decoder.capture()
        model.norm.weight.data = model.norm.weight.data.clone()
        with pytest.raises(RuntimeError, match=r"norm.weight stands at another.*capture\(\) again"):
            _in_turns(decoder, 1, 1, 1)


def test_graphs_end_with_their_decoder(gpu: FakeGpu, model: Llama, seed: int) -> None:
    for capturing in (False, True):
        decoder = OnFakeGpu(model, prefilled(model, seed), batches=(1, 2))
        decoder.capture()
        for captured in decoder._graphs.values():
            captured.graph.again = lambda: None  # the fake holds its decoder, torch's does not
        del gpu.log[:], captured
        gpu.capturing = capturing  # in the capture of another, where nobody may wait
        del decoder
        gc.collect()
        assert gpu.log == ["synchronize cpu"] * (not capturing) + ["reset", "reset"]


def test_graphs_end_before_the_group_at_exit() -> None:
    script = """
import atexit, torch
from labcore.models import DenseCache, Llama, LlamaConfig
atexit.register(print, "the group ends")
from labcore.parallel import graphs
class Graph:
    def reset(self): print("a graph ends")
torch.cuda.synchronize = lambda _: None
torch.cuda.is_current_stream_capturing = lambda: False
config = LlamaConfig(vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                     num_attention_heads=1)
decoder = graphs.GraphedDecoder(Llama(config), DenseCache(config, batch=1, capacity=3))
decoder._graphs[1] = graphs._Captured(launches=(), graph=Graph(), logits=torch.zeros(1))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True,
                          text=True)  # fmt: skip
    assert (done.stdout, done.stderr) == ("a graph ends\nthe group ends\n", "")
