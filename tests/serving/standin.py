"""An engine without a model, for tests of what stands around it: its text comes from the prompt.

`python -m tests.serving.standin --socket PATH` runs it behind a socket, as `remote.process` runs
the real one. Each request holds blocks from its start to its end, so that a leak shows.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labcore.serving.remote.ipc import Overloaded
from labcore.serving.remote.messages import Submit


@dataclass(frozen=True)
class Said:
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""
    reason: str = ""


def expected(prompt: str | tuple[int, ...], count: int, seed: int = 0) -> list[int]:
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


class Running:
    def __init__(self, engine: StandIn, request: Submit) -> None:
        self.engine = engine
        self.request = request
        self.queue: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.blocks = 0

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[Said]:
        while True:
            said = self.queue.get()
            yield said
            if said.finish:
                return


class StandIn:
    """blocks: of the pool. max_num_seqs: most requests at once. waiting: most beside them."""

    def __init__(
        self, *, blocks: int = 64, max_num_seqs: int = 8, waiting: int = 64, delay: float = 0.0
    ) -> None:
        self.blocks, self.max_num_seqs = blocks, max_num_seqs
        self.most_waiting, self.delay = waiting, delay
        self.free = blocks
        self.lock = threading.Condition()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.steps = 0
        self.names: set[str] = set()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def submit(self, request: Submit, name: str) -> Running:
        if request.prompt == "raise":
            raise RuntimeError("planted")
        if request.sampling.max_tokens > 10_000:
            one = Running(self, request)
            one.queue.put(Said(finish="refused", reason="max_tokens must fit into the pool"))
            return one
        with self.lock:
            if len(self.waiting) >= self.most_waiting:
                raise Overloaded(f"at most {self.most_waiting} requests may wait; try again later")
            one = Running(self, request)
            self.waiting.append(one)
            self.names.add(name)
            self.lock.notify_all()
        return one

    def health(self) -> dict[str, Any]:
        return {"status": "ok", "step": self.steps}

    def stats(self) -> dict[str, Any]:
        with self.lock:
            return {
                "blocks": self.blocks,
                "blocks_free": self.free,
                "running": len(self.running),
                "waiting": len(self.waiting),
            }

    def quiet(self) -> bool:
        with self.lock:
            return not self.running and not self.waiting and self.free == self.blocks

    def work(self) -> None:
        progress: dict[int, list[int]] = {}
        ends: dict[int, float] = {}
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.waiting or self.running)
                for one in list(self.waiting):
                    if one.cancelled.is_set():
                        self.waiting.remove(one)
                        one.queue.put(Said(finish="cancelled"))
                    elif len(self.running) < self.max_num_seqs and self.free >= 4:
                        self.waiting.remove(one)
                        self.running.append(one)
                        one.blocks, self.free = 4, self.free - 4
                        wanted = one.request
                        progress[id(one)] = expected(
                            wanted.prompt, wanted.sampling.max_tokens, wanted.sampling.seed
                        )
                        seconds = wanted.timeout if wanted.timeout is not None else 1e9
                        ends[id(one)] = time.monotonic() + seconds
                self.steps += 1
                for one in list(self.running):
                    left = progress[id(one)]
                    finish = ""
                    if one.cancelled.is_set():
                        finish = "cancelled"
                    elif time.monotonic() > ends[id(one)]:
                        finish = "deadline"
                    elif not left:
                        finish = "length"
                    if not finish:
                        token = left.pop(0)
                        one.queue.put(Said(tokens=(token,), text=f"{token} "))
                        continue
                    self.running.remove(one)
                    self.free += one.blocks
                    del progress[id(one)], ends[id(one)]
                    one.queue.put(Said(finish=finish))
            time.sleep(self.delay)


def main() -> None:
    import argparse

    from labcore.serving.remote.process import attend

    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--waiting", type=int, default=64)
    parser.add_argument("--spare", action="store_true")
    told = parser.parse_args()
    attend(lambda: StandIn(delay=told.delay, waiting=told.waiting), told.socket, spare=told.spare)


if __name__ == "__main__":
    main()
