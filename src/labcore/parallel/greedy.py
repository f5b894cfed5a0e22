"""Greedy decoding of one row, on one process or several, and the share of time in all-reduces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labcore.checks import positive_int
from labcore.models.cache import DenseCache
from labcore.models.llama import Llama
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.llama import local_cache
from labcore.parallel.recording import Launch, launch_sequence

__all__ = ["Decoded", "decode", "timed_decode"]

_ALL_REDUCES = ("c10d.allreduce_", "_c10d_functional.all_reduce")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """What a greedy decoder generated, and how long it took.

    tokens: the new tokens, including an EOS that ended them. steps: one-token forwards, one fewer
    than tokens, because the first token comes from the prompt's forward. seconds: for all steps
    together.
    all_reduces: per step. all_reduce_seconds: for one step's all-reduces run alone, one after
    another, the median over some repeats; 0.0 if there are none.
    """

    tokens: tuple[int, ...]
    steps: int
    seconds: float
    all_reduces: int
    all_reduce_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Steps per second; None if there was no step."""
        return self.steps / self.seconds if self.steps else None

    @property
    def all_reduce_share(self) -> float | None:
        """The all-reduces' share of a step's time: 0.25 is a quarter. None if there was no step."""
        return self.all_reduce_seconds * self.steps / self.seconds if self.steps else None


def decode(
    model: Llama, tokens: Sequence[int], *, max_tokens: int, graphed: bool = False
) -> list[int]:
    """Return the tokens that greedy decoding appends to the given ones.

    model: whole, or divided by `parallelize`; then every rank makes the same call and gets the same
    result. tokens: the prompt, at least one token. max_tokens: where to stop, unless an EOS token
    of the model's configuration comes first. graphed: run steps with `GraphedDecoder`; the result
    is the same.
    Returns the new tokens, including an EOS that ended them.
    Raises ValueError or TypeError for an invalid prompt.
    """
    return list(_Run(model, tokens, max_tokens, graphed).finish()[0])


def timed_decode(
    model: Llama,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    graphed: bool = False,
    repeats: int = 20,
) -> Decoded:
    """Run `decode` and time it, without the graph capture. repeats: timings of the all-reduces."""
    positive_int("repeats", repeats)
    run = _Run(model, tokens, max_tokens, graphed)
    found, seconds, launches = run.finish(record=True)
    group = getattr(model, "group", None)
    sums = [launch for launch in launches if launch.op in _ALL_REDUCES]
    return Decoded(
        tokens=tuple(found),
        steps=len(found) - 1,
        seconds=seconds,
        all_reduces=len(sums),
        all_reduce_seconds=_alone(
            sums, group, run.device, repeats, graphed=graphed and run.device.type == "cuda"
        ),
    )


class _Run:
    """One row, from its prompt to its end."""

    def __init__(self, model: Llama, tokens: Sequence[int], max_tokens: int, graphed: bool) -> None:
        positive_int("max_tokens", max_tokens)
        row, limit = list(tokens), model.config.vocab_size
        if not row:
            raise ValueError("tokens must hold at least one token, got none")
        if wrong := [one for one in row if not isinstance(one, int) or not 0 <= one < limit]:
            raise ValueError(f"tokens must be integers from 0 to {limit - 1}, got {wrong[:8]}")
        self.model, self.row, self.limit, self.graphed = model, row, max_tokens, graphed
        self.device = model.embed_tokens.weight.device
        self.ends = frozenset(model.config.eos_token_ids)

    @torch.no_grad()
    def finish(self, *, record: bool = False) -> tuple[list[int], float, tuple[Launch, ...]]:
        """Return the new tokens, their steps' seconds and, with record, one step's launches."""
        cache = local_cache(self.model, batch=1, capacity=len(self.row) + self.limit)
        prompt = torch.tensor([self.row], device=self.device)
        found = [_best(self.model(prompt, cache=cache).logits[0, -1])]
        launches: tuple[Launch, ...] = ()
        with ExitStack() as stack:
            step = self._plain(cache)
            if self.graphed:
                decoder = stack.enter_context(GraphedDecoder(self.model, cache, batches=(1,)))
                decoder.capture()
                step = decoder
            begin = time.perf_counter()
            while len(found) < self.limit and found[-1] not in self.ends:
                found.append(_best(step(torch.tensor(found[-1:], device=self.device))[0]))
            seconds = time.perf_counter() - begin
            if record:
                launches = decoder.recorded(1) if self.graphed else self._recorded(cache)
        return found, seconds, launches

    def _plain(self, cache: DenseCache) -> Callable[[Tensor], Tensor]:
        return lambda token: self.model(token[:, None], cache=cache).logits[:, 0]

    def _recorded(self, cache: DenseCache) -> tuple[Launch, ...]:
        """Record a step in which the row doesn't advance, so the cache doesn't change."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        rest = torch.zeros(1, dtype=torch.int32, device=self.device)
        step = partial(self.model, token, counts=rest, cache=cache)
        return launch_sequence(step, strict=False)[1]


def _best(logits: Tensor) -> int:
    """Return the most likely token; waits for the device."""
    return int(logits.argmax())


def _alone(
    sums: Sequence[Launch],
    group: dist.ProcessGroup | None,
    device: torch.device,
    repeats: int,
    *,
    graphed: bool,
) -> float:
    """Return the median seconds of these all-reduces, one after another, on scratch tensors.

    graphed: launch them as one graph, as in the step they're compared with.
    """
    if not sums:
        return 0.0
    tensors: list[Any] = [
        torch.zeros(launch.shapes[0], dtype=launch.dtypes[0], device=device) for launch in sums
    ]

    def all_of_them() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)

    with ExitStack() as stack:
        run: Callable[[], object] = all_of_them
        if graphed:
            graph = torch.cuda.CUDAGraph()
            stack.callback(graph.reset)  # before the group ends
            all_of_them()
            with torch.cuda.device(device):
                aside = torch.cuda.Stream()
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    all_of_them()
            run = graph.replay
        samples = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples.append(time.perf_counter() - begin)
    return statistics.median(samples[1:])
