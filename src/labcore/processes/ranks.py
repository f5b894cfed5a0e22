"""`run(fn, n)`: run a function in n processes of this machine that communicate through gloo."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labcore.checks import positive, positive_int
from labcore.processes.child import Child, how_it_ended, listen
from labcore.processes.travel import dumps, loads

__all__ = ["ProcessesError", "rank_and_world", "run"]

ANSWER = b"\x00labcore"  # Marks the answer after the text that faulthandler may write to the pipe.
SETTLE_S = 0.1
GOODBYE_S = 5.0


class ProcessesError(RuntimeError):
    """A process of `run` failed.

    kind: "exception" (the message has the traceback, and the exception is the cause if it can be
    pickled), "died" (os._exit, a signal) or "timeout".
    rank: the first rank that failed; for a timeout, the lowest rank that had not finished.
    """

    def __init__(self, message: str, *, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size) inside `run` or under torchrun, and (0, 1) in any other process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if dist.is_torchelastic_launched():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def run(
    fn: Callable[..., Any], n: int, *args: Any, timeout_s: float = 60, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` in n processes with a gloo group; return the results by rank.

    fn: any function, including closures and functions defined in a notebook. It may use
        torch.distributed freely.
    n: the number of processes. Each computes on one thread.
    timeout_s: wall-clock seconds for the whole call.

    Returns a list of n results. Arguments and results are copied. Tensors, including those in
    modules, arrive on the CPU and detached from their graph. Each line that a process prints is
    shown with its rank.

    Under `torchrun --nproc-per-node n script.py` the call starts no processes: torchrun's
    processes are the ranks, each calls fn, and each gets the list. The process group of the first
    call, with its timeout, lasts until the program ends.

    Raises ProcessesError for the first process that failed, after ending the others, and
    TypeError for arguments that cannot be pickled. No process outlives the call or the caller,
    even if the caller is killed.
    """
    positive_int("n", n, "pass the number of processes")
    positive("timeout_s", timeout_s, "pass seconds")
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}; pass it without calling it")
    if dist.is_torchelastic_launched():
        return _run_under_torchrun(fn, n, args, kwargs, timeout_s)
    payload = dumps((fn, args, kwargs))
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="labcore-", ignore_cleanup_errors=True) as folder:
        store = str(Path(folder) / "store")
        try:
            deadline = time.monotonic() + timeout_s
            for rank in range(n):
                ranks.append(_start(rank, n, store, timeout_s, payload))
            return _collect(ranks, deadline, timeout_s)
        finally:
            for one in ranks:
                one.child.kill()  # Kill all of them before showing the output of any.
            for one in ranks:
                one.child.close()


@dataclass(slots=True)
class _Rank:
    """What the parent knows about one process."""

    rank: int
    child: Child
    data: bytearray
    done: bool = False
    failed: str = ""  # "", "exception", "died"
    when: float = 0.0
    text: str = ""
    result: Any = None  # The exception if `failed` is "exception".

    def sources(self) -> list[Any]:
        """Return what to wait on for news of this process."""
        streams = (self.child.answers, self.child.output.stream)
        found: list[Any] = [stream for stream in streams if not stream.closed]
        return found if self.done else [*found, self.child.process.sentinel]

    def look(self) -> None:
        """Read what arrived, and judge the answer once it is complete."""
        # Check first whether it ended, so that the reads below get everything it wrote.
        ended = not self.child.process.is_alive()
        self.child.output.show(final=ended)
        self.data += self.child.answers.read_all()
        if not self.done and (self.child.answers.closed or ended):
            self.done = True
            self._judge()

    def _judge(self) -> None:
        _, found, answer = bytes(self.data).partition(ANSWER)
        try:
            if not found:
                raise EOFError
            good, self.when, self.text, packed = loads(answer)
        except Exception:  # No answer, or an incomplete one.
            self.child.process.join(1)
            self.failed = "died"
            self.text = f"rank {self.rank} {how_it_ended(self.child.process.exitcode)}"
            return
        self.failed = "" if good else "exception"
        try:
            self.result = loads(packed) if packed else None
        except Exception as problem:
            if good:
                self.failed = "exception"
                self.text = f"its result cannot be unpickled here: {problem!r}"
                self.result = problem

    def order(self) -> tuple[int, float]:
        """Sort key for failures: losing a peer is a consequence, so it sorts last."""
        lost = "gloo" in self.text and isinstance(self.result, RuntimeError | None)
        return (1 if self.failed == "died" else 2 if lost else 0), self.when


def _start(rank: int, n: int, store: str, timeout_s: float, payload: bytes) -> _Rank:
    child = Child(_main, (rank, n, store, timeout_s, payload), label=f"[rank {rank}]")
    return _Rank(rank, child, bytearray())


def _listen(ranks: list[_Rank], until: float) -> None:
    """Wait for news, until `until` at the latest, and read it."""
    sources = [source for one in ranks for source in one.sources()]
    if sources:
        listen(sources, until - time.monotonic())
    for one in ranks:
        one.look()


def _collect(ranks: list[_Rank], deadline: float, timeout_s: float) -> list[Any]:
    while not all(one.done for one in ranks):
        _listen(ranks, deadline)
        if any(one.failed for one in ranks):
            _settle(ranks)
            _raise_first([one for one in ranks if one.failed])
        if time.monotonic() >= deadline and not all(one.done for one in ranks):
            _raise_timeout(ranks, timeout_s)
    for one in ranks:
        one.child.process.join(min(GOODBYE_S, max(SETTLE_S, deadline - time.monotonic())))
    return [one.result for one in ranks]


def _settle(ranks: list[_Rank]) -> None:
    """Wait a moment for the others: the failure seen first may be a consequence of another."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until and not all(one.done for one in ranks):
        _listen(ranks, until)


def _raise_first(failed: list[_Rank]) -> None:
    first = min(failed, key=_Rank.order)
    of = f"rank {first.rank}"
    if first.failed == "died":
        last = "\n".join(first.child.output.last)
        printed = f"\nThe last lines that it printed:\n{last}" if last else ""
        raise ProcessesError(
            f"{first.text} before fn returned; the other ranks were ended. fn must return or "
            f"raise: look for os._exit, a crash in native code or too little memory{printed}",
            rank=first.rank,
            kind="died",
        )
    cause = first.result if isinstance(first.result, BaseException) else None
    raise ProcessesError(
        f"{of} raised; the others were ended:\n{first.text}", rank=first.rank, kind="exception"
    ) from cause


def _raise_timeout(ranks: list[_Rank], timeout_s: float) -> None:
    late = [one for one in ranks if not one.done]
    for one in late:
        if one.child.process.pid is not None and hasattr(signal, "SIGUSR1"):
            with suppress(ProcessLookupError):
                os.kill(one.child.process.pid, signal.SIGUSR1)
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        _listen(late, until)
    stacks = "\n".join(f"rank {one.rank}: {_stack(one.data)}" for one in late if one.data)
    names = ", ".join(str(one.rank) for one in late)
    raise ProcessesError(
        f"after timeout_s={timeout_s:g} s these ranks had not finished: {names}; all were ended. "
        "Look for a collective that some rank does not call, or pass a larger timeout_s"
        + (f"\nWhere they were:\n{stacks}" if stacks else ""),
        rank=late[0].rank,
        kind="timeout",
    )


def _stack(dumped: bytearray) -> str:
    """Return faulthandler's stack trace, down to where this module called fn."""
    lines = bytes(dumped).partition(ANSWER)[0].decode("utf-8", "replace").strip().splitlines()
    own = [i for i, line in enumerate(lines) if __file__ in line]
    return "\n".join(lines[: own[0]] if own else lines)


def _main(
    _: Connection | FileIO,
    result: Connection | FileIO,
    rank: int,
    n: int,
    store: str,
    timeout_s: float,
    payload: bytes,
) -> None:
    """Run fn in a child of `run`."""
    torch.set_num_threads(1)
    asks = hasattr(signal, "SIGUSR1")  # The parent sends it to see where a process hangs.
    if asks:
        faulthandler.register(signal.SIGUSR1, file=result.fileno(), all_threads=False)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    # The host's name may not resolve, or may resolve to an address outside the machine.
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, n),
            rank=rank,
            world_size=n,
            # Longer than the parent's timeout, so the parent reports it for all ranks.
            timeout=timedelta(seconds=timeout_s + 60),
        )
        # Without it, a rank that ends early breaks the connection of one that still connects.
        dist.barrier()
        fn, args, kwargs = loads(payload)
        answer = (True, time.monotonic(), "", dumps(fn(*args, **kwargs)))
    except BaseException as problem:  # Also SystemExit: sys.exit() in fn is not a result.
        answer = _failure(problem)
    sys.stdout.flush()
    sys.stderr.flush()
    if asks:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Answer before the group ends: peers fail only after that, so their failures come later.
    with os.fdopen(os.dup(result.fileno()), "wb") as pipe_end:
        result.close()
        pipe_end.write(ANSWER + dumps(answer))
    if answer[0]:
        dist.destroy_process_group()


def _failure(problem: BaseException) -> tuple[bool, float, str, bytes]:
    when = time.monotonic()
    # Skip the first frame, which is `_main`.
    frames = problem.__traceback__.tb_next if problem.__traceback__ else None
    text = "".join(traceback.format_exception(type(problem), problem, frames))
    try:
        packed = dumps(problem)
    except TypeError:
        packed = b""
    return False, when, text, packed


def _run_under_torchrun(
    fn: Callable[..., Any], n: int, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
) -> list[Any]:
    world = int(os.environ["WORLD_SIZE"])
    if world != n:
        raise ValueError(
            f"n must be torchrun's number of processes, {world}, got {n}; "
            f"start torchrun with --nproc-per-node {n}"
        )
    if not dist.is_initialized():
        # Keep the group until the process ends: a second group would collide with this one's keys
        # in torchrun's store.
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        atexit.register(_leave_group)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        packed = dumps(fn(*args, **kwargs))
        gathered: list[Any] = [None] * n
        dist.all_gather_object(gathered, packed)
    finally:
        torch.set_num_threads(before)
    return [loads(one) for one in gathered]


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
