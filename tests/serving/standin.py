"""An engine without a model, for tests of what stands around it: its text comes from the prompt.

`main` serves it behind a socket, as `labcore.serving.triton.process` serves the real one. Each
request holds blocks from its start to its end, so that a leak shows.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labcore.decoding import SamplingConfig
from labcore.serving.clock import Clock
from labcore.serving.engine.outputs import Output
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.triton.process import EngineServer

ENDLESS = 9000  # with as many max_tokens, an output goes on


def expected(prompt: str, count: int, seed: int = 0) -> list[int]:
    """The tokens that the stand-in says to a prompt."""
    draw = random.Random(f"{prompt!r}/{seed}")
    return [draw.randrange(1000) for _ in range(count)]


def until(what: Callable[[], Any], seconds: float = 120.0) -> bool:
    """Whether it comes true; the bound is for a fault, nothing is timed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.005)
    return False


def engine_stats(path: Path) -> dict[str, Any]:
    """What the engine behind a socket says to `stats`. Raises OSError if it is away."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(120.0)
        end.connect(str(path))
        end.sendall(b'{"type": "stats"}\n')
        with end.makefile() as lines:
            told: dict[str, Any] = json.loads(lines.readline() or '{"blocks": 0}')
            return told


@dataclass
class One:
    id: str
    tokens: list[int]
    deadline: float | None
    endless: bool  # so that only a cancellation or a deadline can end it
    said: int = 0


@dataclass
class Numbers:
    """What `Engine.stats` returns, as far as these tests look at it."""

    blocks: int
    blocks_free: int
    running: int
    waiting: int
    finished: dict[str, int] = field(default_factory=dict)


class StandIn:
    """The methods of an `Engine` that a server calls. blocks: of the pool, four per request."""

    def __init__(
        self, *, blocks: int = 64, max_num_seqs: int = 8, waiting: int = 64, delay: float = 0.0
    ) -> None:
        self.blocks, self.max_num_seqs, self.most, self.delay = blocks, max_num_seqs, waiting, delay
        self.clock = Clock()
        self.waiting: list[One] = []
        self.running: list[One] = []
        self.news: list[Output] = []
        self.names: set[str] = set()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.news)

    def submit(
        self,
        prompt: str,
        sampling: SamplingConfig,
        *,
        id: str,
        priority: int = 0,
        deadline: float | None = None,
    ) -> str:
        if not prompt:
            raise ValueError("prompt must hold at least one token, got none")
        if sampling.max_tokens > 10_000:
            raise ValueError("max_tokens must fit into the pool")
        if len(self.waiting) >= self.most:
            raise QueueFull(f"at most {self.most} requests may wait; try again later")
        self.names.add(prompt)
        tokens = expected(prompt, sampling.max_tokens, sampling.seed)
        self.waiting.append(One(id, tokens, deadline, sampling.max_tokens >= ENDLESS))
        self._admit()
        return id

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.pop(0))

    def cancel(self, id: str) -> bool:
        for queue in (self.waiting, self.running):
            for one in queue:
                if one.id == id:
                    queue.remove(one)
                    self.news.append(Output(id=id, finish="cancelled"))
                    self._admit()
                    return True
        return False

    def step(self) -> list[Output]:
        time.sleep(self.delay)
        told, self.news = self.news, []
        for one in [*self.running, *self.waiting]:
            if one.deadline is not None and self.clock.now() >= one.deadline:
                (self.running if one in self.running else self.waiting).remove(one)
                told.append(Output(id=one.id, finish="deadline"))
        for one in list(self.running):
            token = one.tokens[one.said % len(one.tokens)]
            one.said += 1
            told.append(Output(id=one.id, tokens=(token,), text=f"{token} "))
            if one.said == len(one.tokens) and not one.endless:
                self.running.remove(one)
                told.append(Output(id=one.id, finish="length"))
        self._admit()
        return told

    def stats(self) -> Numbers:
        free = self.blocks - 4 * len(self.running)
        return Numbers(self.blocks, free, len(self.running), len(self.waiting))

    def close(self) -> None:
        self.waiting, self.running = [], []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--waiting", type=int, default=64)
    told = parser.parse_args()
    engine: Any = StandIn(delay=told.delay, waiting=told.waiting)
    EngineServer(engine, told.socket).serve(lambda: False)
