"""Run a student's function on one case after another, in a separate process."""

from __future__ import annotations

import copy
import functools
import io
import linecache
import os
import selectors
import signal
import struct
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

__all__ = [
    "MEMORY_MIB",
    "Played",
    "Player",
    "elsewhere",
    "play",
    "play_by",
    "play_forked",
    "unsendable",
]

MEMORY_MIB = 2048
ANSWER_MIB = 256
START_S = 60
TEXT_LIMIT = 2000
FRAME_LIMIT = 200
ENDINGS = {"exit", "quit"}  # in IPython, these objects hold the whole session
WRAPPED = (
    "your function, or one that it calls, has a decorator that cannot be sent to the process "
    "that runs it, such as functools.lru_cache; leave that decorator out"
)

_worker: Any = None  # this process's labcore.processes.Worker, made at the first check
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """The result of the calls.

    answers: results of the calls up to the first failure.
    changed: for each answer, the names of the arguments that the call changed in place.
    kind, problem: of the failure: "missing", "error", "timeout", "memory", "exit" or "unavailable",
    and sentences without the last full stop; both are empty if nothing failed.
    at: the index of the case that failed; None if no single case did.
    """

    answers: Sequence[Any] = ()
    changed: Sequence[Sequence[str]] = ()
    kind: str = ""
    problem: str = ""
    at: int | None = None


Player = Callable[[Callable[..., Any], Sequence[Mapping[str, Any]], float], Played]
_player: Player | None = None


@contextmanager
def elsewhere(player: Player) -> Iterator[None]:
    """Within this context, `play` passes every call to `player(fn, cases, timeout_s)`."""
    before = _player
    play_by(player)
    try:
        yield
    finally:
        play_by(before)


def play_by(player: Player | None) -> None:
    """Make `play` pass every call to `player`; None restores the default."""
    global _player
    _player = player


def play(fn: Callable[..., Any], cases: Sequence[Mapping[str, Any]], *, timeout_s: float) -> Played:
    """Call `fn` with each case's keyword arguments, all calls together within `timeout_s`.

    The arguments are copies. What fn prints is shown. Anything it does wrong is in the result.
    """
    if _player is not None:
        return _player(fn, cases, timeout_s)
    from labcore.processes import Worker, WorkerError

    if hasattr(fn, "cache_parameters"):  # Python 3.14 pickles such a function by name only
        return Played(kind="error", problem=WRAPPED)
    global _worker
    with _one_at_a_time:
        if _worker is None:
            _worker = Worker(memory_mib=MEMORY_MIB, answer_mib=ANSWER_MIB)
        try:
            if _worker.pid is None:  # don't count the worker's imports against the time limit
                _worker.call(functools.partial(_perform, len, []), timeout_s=START_S)
            told = _worker.call(functools.partial(_perform, fn, list(cases)), timeout_s=timeout_s)
        except TypeError as problem:
            return unsendable(fn, problem)
        except WorkerError as problem:
            return _worker_problem(problem.kind, str(problem), timeout_s)
        except (RuntimeError, OSError) as problem:
            return _unavailable(str(problem))
    return _read(told, fn, len(cases))


def play_forked(
    fn: Callable[..., Any], cases: Sequence[Mapping[str, Any]], timeout_s: float
) -> Played:
    """Run `play` in a plain fork of this process, without the seconds that a worker takes to start.

    Use it only in a process that is already sandboxed and holds no GPU. What fn prints is lost.
    """
    from labcore.processes import wire

    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, since Python 3.12
        pid = os.fork()
    if pid == 0:
        _answer_and_leave(fn, cases, theirs)
    os.close(theirs)
    data, end, late = bytearray(), time.monotonic() + timeout_s, False
    with selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        while not late:
            late = not selector.select(max(0.0, end - time.monotonic()))
            part = b"" if late else os.read(ours, 1 << 20)
            if not part or len(data) > ANSWER_MIB << 20:
                break
            data += part
    os.close(ours)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if late:
        return _worker_problem("timeout", "", timeout_s)
    try:
        told = wire.unpack(io.BytesIO(data).read, ANSWER_MIB << 20)
    except (wire.WireError, ValueError, struct.error):
        return _worker_problem("died", "your function ended the process that ran it", timeout_s)
    return _read(told, fn, len(cases))


def _answer_and_leave(
    fn: Callable[..., Any], cases: Sequence[Mapping[str, Any]], theirs: int
) -> NoReturn:
    """Run in the forked process: send one answer, and exit without the parent's exit handlers."""
    import resource

    from labcore.processes import wire

    try:
        empty = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(empty, stream)
        sys.stdout = sys.stderr = io.StringIO()  # a Jupyter kernel's streams talk to its client
        limit = MEMORY_MIB << 20
        limit += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        with open(theirs, "wb") as sink:
            sink.write(wire.pack(_perform(fn, list(cases))))
    finally:
        os._exit(0)


def unsendable(fn: Callable[..., Any], problem: TypeError) -> Played:
    """Return the result for a function that can't be sent to the process that runs it."""
    if ENDINGS & _names(fn):
        return Played(kind="exit", problem=_left(sorted(ENDINGS & _names(fn))[0]))
    if "lru_cache" in str(problem):
        return Played(kind="error", problem=WRAPPED)
    return Played(
        kind="error",
        problem="your function cannot be sent to the process that runs it: "
        f"{problem.__cause__ or problem}. It uses something from outside; create that "
        "inside the function, or take it from the arguments",
    )


def _unavailable(reason: str) -> Played:
    return Played(
        kind="unavailable",
        problem="a check runs your function in a separate process, and none can be started here: "
        f"{reason}",
    )


def _worker_problem(kind: str, text: str, timeout_s: float) -> Played:
    if kind == "timeout":
        return Played(
            kind="timeout",
            problem=f"your function did not finish within {timeout_s:g} s; look for a loop that "
            "never ends, or for one that an operation on the whole tensor could replace",
        )
    if kind == "memory":
        return Played(kind="memory", problem=_memory(""))
    if kind == "died":
        return Played(kind="exit", problem=f"{text}. Leave out os._exit and calls like it")
    if kind == "answer":
        return Played(kind="error", problem=text)
    if "Can't get attribute" in text:
        return Played(kind="error", problem=WRAPPED)
    return Played(kind="error", problem=f"your function could not be started: {text[:TEXT_LIMIT]}")


def _left(by: str) -> str:
    return f"your function calls {by}(), which ends the whole program; it must return instead"


def _names(fn: Callable[..., Any]) -> set[str]:
    """Return the names that the code of `fn` looks up outside itself."""
    return set(getattr(getattr(fn, "__code__", None), "co_names", ()))


def _memory(line: str) -> str:
    return (
        f"your function needs more memory than its limit of {MEMORY_MIB} MiB; look for an array "
        f"that is larger than necessary{line}"
    )


# In the worker's process -------------------------------------------------------------------------


def _perform(fn: Callable[..., Any], cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Run in the worker: return answers as plain data, and a failure as text and frames."""
    from labcore.processes import wire

    answers: list[Any] = []
    changed: list[list[str]] = []
    for case in cases:
        given = copy.deepcopy(dict(case))
        try:
            answer = fn(**given)
        except BaseException as problem:  # sys.exit() too
            return {"answers": answers, "changed": changed, "failure": _failure(problem)}
        try:
            wire.pack(answer)
        except (TypeError, ValueError) as problem:
            failure = {"type": "", "text": str(problem), "frames": []}
            return {"answers": answers, "changed": changed, "failure": failure}
        answers.append(answer)
        changed.append([name for name in case if _changed(case[name], given[name])])
    return {"answers": answers, "changed": changed, "failure": None}


def _failure(problem: BaseException) -> dict[str, Any]:
    frames = [
        [frame.f_code.co_filename, line, frame.f_code.co_name]
        for frame, line in traceback.walk_tb(problem.__traceback__)
    ]
    text = str(problem)[:TEXT_LIMIT]
    return {"type": type(problem).__name__, "text": text, "frames": frames[1:][:FRAME_LIMIT]}


def _changed(before: Any, after: Any) -> bool:
    """Return whether a call changed its copy of an argument; compares bytes, so NaN equals NaN."""
    if isinstance(before, torch.Tensor):
        same = before.shape == after.shape and before.dtype == after.dtype
        return not (same and torch.equal(_bits(before), _bits(after)))
    if isinstance(before, np.ndarray):
        same = before.shape == after.shape and before.dtype == after.dtype
        return not same or before.tobytes() != after.tobytes()
    if isinstance(before, Mapping):
        if list(before) != list(after):
            return True
        return any(_changed(value, after[key]) for key, value in before.items())
    if isinstance(before, list | tuple):
        if len(before) != len(after):
            return True
        return any(_changed(*pair) for pair in zip(before, after, strict=True))
    return False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.numel() else plain


# Back in this process ----------------------------------------------------------------------------


def _read(told: Any, fn: Callable[..., Any], cases: int) -> Played:
    """Convert what the worker sent, without trusting any of it."""
    try:
        answers, failure = list(told["answers"]), told["failure"]
        changed = [[str(name) for name in names] for names in told["changed"]]
        if failure is None and len(answers) == len(changed) == cases:
            return Played(answers=answers, changed=changed)
        kind, problem = _words(failure, fn)
        return Played(answers=answers, changed=changed, kind=kind, problem=problem, at=len(answers))
    except (TypeError, KeyError, ValueError, AttributeError):
        return Played(kind="error", problem="the answer did not come from your function's return")


def _words(failure: Mapping[str, Any], fn: Callable[..., Any]) -> tuple[str, str]:
    """Return (kind, problem) of a failure."""
    name, text = failure["type"], failure["text"]
    if name == "":
        return "error", f"your function's return value is refused: {text}"
    line = _own_line(failure["frames"], fn)
    if name == "NotImplementedError":
        return "missing", line
    if name == "MemoryError" or "DefaultCPUAllocator" in text:
        return "memory", _memory(line)
    if name in ("SystemExit", "KeyboardInterrupt"):
        return "exit", f"your function ended with {name}; it must return instead{line}"
    if name in ("OSError", "EOFError") and ("input" in _names(fn) or "input(" in line):
        asks = "your function calls input(), but nobody is there to answer; it gets everything it "
        return "error", f"{asks}needs as arguments{line}"
    return "error", f"your function raised {name}{': ' if text else ''}{text}{line}"


def _own_line(frames: Sequence[Sequence[Any]], fn: Callable[..., Any]) -> str:
    """Return where the student's own code failed: the deepest frame outside libraries."""
    libraries = [str(Path(__file__).resolve().parents[1])]
    libraries += [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    first = getattr(getattr(fn, "__code__", None), "co_filename", None)
    own = [
        (file, number, function)
        for file, number, function in frames
        if file == first or not str(file).startswith(("<frozen", *libraries))
    ]
    if not own:
        return ""
    file, number, function = own[-1]
    source = linecache.getline(str(file), number).strip()
    return f"\n    {function}, line {number}: {source}".rstrip(" :")
