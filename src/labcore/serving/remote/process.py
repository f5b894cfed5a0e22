"""`python -m labcore.serving.remote.process --socket PATH`: one engine behind a Unix socket.

It speaks the protocol of `labcore.serving.remote.messages`. With `--spare` it loads its modules and
waits for a line on standard input before it makes the engine: a second process that is ready to
take over. With `--attached` it exits when standard input closes, which happens when its parent
dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from labcore.checks import one_of
from labcore.device import default_device
from labcore.models import Llama, from_pretrained, pretrained, shipped_tokenizer
from labcore.models.tokenizer import Tokenizer
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.scheduler import QueueFull
from labcore.serving.engine.service import Service
from labcore.serving.remote.ipc import Backend, Listener, Overloaded, Running
from labcore.serving.remote.messages import Submit

__all__ = ["ServiceBackend", "attend", "main"]

SHIPPED = ("target", "draft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOOK_S = 0.1
STALLED_S = 300.0  # longer than a first step that compiles, or a large model's step on a slow CPU


class StalledError(RuntimeError):
    """The engine's thread hangs in a step: nothing can be closed, so the process must exit."""


class ServiceBackend:
    """Adapt a `Service` to the interface that `ipc.Listener` expects."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def submit(self, request: Submit, name: str) -> Running:
        """Accept a request. Raises Overloaded if the engine's queue is full."""
        try:
            return self.service.submit(
                request.prompt,
                request.sampling,
                id=name,
                priority=request.priority,
                seconds=request.timeout,
            )
        except QueueFull as error:
            raise Overloaded(str(error)) from None

    def health(self) -> Mapping[str, Any]:
        """Return the status. Raises RuntimeError if the service is closed, broken, or stalled."""
        if not self.service.healthy:
            raise RuntimeError("the engine is closed or broken; start another")
        if self.service.busy > STALLED_S:
            raise StalledError(f"a step has taken more than {STALLED_S:.0f} s; start another")
        return {"status": "ok"}

    def stats(self) -> Mapping[str, Any]:
        """Return the engine's queues, blocks and counters, with `finished_<why>` per finish."""
        told = asdict(self.service.stats())
        finished = told.pop("finished")
        return {**told, **{f"finished_{why}": count for why, count in finished.items()}}

    def close(self) -> None:
        """Cancel the requests in flight and end the engine's thread."""
        self.service.close()


def attend(
    make: Callable[[], Backend],
    path: str | Path,
    *,
    spare: bool = False,
    attached: bool = True,
    most: int = 1024,
) -> int:
    """Serve the backend that `make` returns on the socket `path` until a signal ends it.

    SIGTERM and SIGINT end it. If `attached`, the end of standard input ends it too. spare: write
    "ready" to standard input, for a supervisor that holds the other end of a socket there, and
    wait for a line before calling `make`. Returns the process's exit code: 0, or 1 if the
    backend's health check raised, which makes a supervisor start another process. Call it from
    the main thread.
    """
    if spare:
        with suppress(OSError):  # standard input may be a pipe or a file
            os.write(0, b"ready\n")
        if not os.read(0, 4096):
            return 0
    ended = threading.Event()
    with _signals(ended):
        backend = make()
        try:
            with Listener(backend, path, most=most):
                if attached or spare:
                    threading.Thread(target=_watch_input, args=(ended,), daemon=True).start()
                while not ended.wait(LOOK_S):
                    try:
                        backend.health()
                    except Exception as error:
                        sys.stderr.write(f"the engine is exiting: {error}\n")
                        if isinstance(error, StalledError):
                            sys.stderr.flush()
                            os._exit(1)
                        return 1
        finally:
            close = getattr(backend, "close", None)
            if close is not None:
                close()
    return 0


@contextmanager
def _signals(ended: threading.Event) -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch_input(ended: threading.Event) -> None:
    # os.read, not sys.stdin: a thread inside sys.stdin would keep the interpreter from exiting.
    with suppress(OSError):  # the other end may be closed with unread data in it
        while os.read(0, 4096):
            pass
    ended.set()


def load(name: str, *, dtype: torch.dtype = torch.float32) -> tuple[Llama, Tokenizer]:
    """Load a shipped model or a folder's checkpoint, with its tokenizer, on the default device."""
    if name in SHIPPED:
        return pretrained(name, dtype=dtype).to(default_device()), shipped_tokenizer()
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"model must be target, draft or a checkpoint folder, got {name!r}")
    model = from_pretrained(folder, dtype=dtype, device=default_device())
    return model, Tokenizer.from_pretrained(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labcore.serving.remote.process", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--socket", required=True, help="path of the Unix socket")
    parser.add_argument("--model", default="target", help="target, draft or a checkpoint folder")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--num-blocks", type=int, default=256, help="number of blocks in the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument(
        "--max-num-seqs", type=int, default=8, help="maximum requests running at once"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=256, help="maximum tokens per step"
    )
    parser.add_argument("--chunk", type=int, help="maximum tokens of one prompt per step")
    parser.add_argument("--policy", default="guaranteed_no_evict")
    parser.add_argument("--max-waiting", type=int, default=1024, help="maximum queue length")
    parser.add_argument("--proposer", choices=["ngram"], help="speculation")
    parser.add_argument("--threads", type=int, help="number of torch threads on a CPU")
    parser.add_argument("--spare", action="store_true", help="wait for a line before starting")
    parser.add_argument("--attached", action="store_true", help="exit when standard input closes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code."""
    told = _parser().parse_args(arguments)

    def make() -> Backend:
        if told.threads:
            torch.set_num_threads(told.threads)
        model, tokenizer = load(told.model, dtype=DTYPES[one_of("dtype", told.dtype, DTYPES)])
        engine = Engine(
            model,
            tokenizer,
            num_blocks=told.num_blocks,
            block_size=told.block_size,
            max_num_seqs=told.max_num_seqs,
            max_num_batched_tokens=told.max_num_batched_tokens,
            chunk=told.chunk,
            policy=told.policy,
            max_waiting=told.max_waiting,
            proposer=told.proposer,
        )
        return ServiceBackend(Service(engine))

    # The margin lets the engine itself report that it is full.
    most = told.max_num_seqs + told.max_waiting + 64
    try:
        return attend(make, told.socket, spare=told.spare, attached=told.attached, most=most)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
