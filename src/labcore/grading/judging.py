"""The part of grading that decides: it runs outside of the sandbox, without any student code.

Graded cells run here, in a namespace with the lab's own imports. Each student function is a proxy:
a call goes to the sandbox, and only plain data comes back. A student who patches a check, numpy or
the kernel therefore changes nothing here.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labcore.exercises.outcome import NotCheckedError
from labcore.exercises.running import Played, elsewhere
from labcore.grading.sandbox import MEMORY, TIME, Limits, Process
from labcore.grading.session import LABCORES_OWN
from labcore.labs.source import Lab, cell_text, code_tree, import_cells, nbgrader_of
from labcore.processes import wire
from labcore.processes.travel import dumps

__all__ = ["HandedIn", "Ran", "Sandbox", "Verdicts", "answer_names", "calls_solutions", "judge"]

NUMBER = "STUDENT"
MIB = 1 << 20
ANSWER_MIB = 256
START_S = 60.0  # for a worker to start on a busy machine
CALL_S = 10.0  # for a direct call of a student's function
TEXT_LIMIT = 4000
# What malformed data can raise; an array instead of a dict raises IndexError.
MALFORMED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
KINDS = ("", "missing", "error", "timeout", "memory", "exit", "unavailable")
ENDED = {
    MEMORY: "the notebook's processes together used more than the limit of {memory_mib} MiB",
    TIME: "the notebook ran longer than the limit of {wall_s:g} seconds",
    "": "it killed the sandbox that it ran in",
}


class SandboxEndedError(RuntimeError):
    """The sandbox is gone; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What a sandbox reported about a notebook. Only the form is checked; nothing is trusted.

    outputs, counts: of each cell. problem: why the notebook did not run to the end, "" if it did.
    number: the final value of STUDENT, None if that is not a nonnegative integer.
    """

    outputs: Sequence[Sequence[dict[str, Any]]]
    counts: Sequence[int | None]
    problem: str
    number: int | None


class Sandbox:
    """A session in a sandbox, restarted whenever it ends; a context manager."""

    def __init__(self, limits: Limits, *, sandboxed: bool) -> None:
        self._limits, self._sandboxed = limits, sandboxed
        self._process: Process | None = None
        self._end = time.monotonic() + limits.wall_s
        self._packed: dict[str, Any] = {}
        self.told: Mapping[str, Any] = {}

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.__exit__(None, None, None)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """The answer to a request. Raises SandboxEndedError, also for a malformed answer."""
        if self._process is None:
            left = self._end - time.monotonic()
            if left <= 0:
                raise SandboxEndedError(ENDED[TIME].format(wall_s=self._limits.wall_s))
            command = [sys.executable, "-m", "labcore.grading.session"]
            self._process = Process(command, self._limits, sandboxed=self._sandboxed)
            if request["do"] != "run":
                self._ask({"do": "adopt", "packed": self._packed}, START_S)
        process = self._process
        over = process.end_after(seconds)
        try:
            process.stdin.write(wire.pack(dict(request)))
            process.stdin.flush()
            return wire.unpack(_reader(process), ANSWER_MIB * MIB)
        except (OSError, EOFError, wire.WireError):
            process.end()
            why = ENDED[process.ended_by].format(
                memory_mib=self._limits.memory_mib, wall_s=self._limits.wall_s
            )
            self._close()
            raise SandboxEndedError(why) from None
        finally:
            over.cancel()

    def run(self, notebook: Mapping[str, Any], names: Sequence[str]) -> Ran:
        """Runs a notebook and keeps the functions among `names` for `play`."""
        text = np.frombuffer(json.dumps(notebook).encode(), np.uint8)
        seconds = self._limits.cell_s
        request = {"do": "run", "notebook": text, "names": list(names), "seconds": seconds}
        cells = len(notebook["cells"])
        nothing: list[list[dict[str, Any]]] = [[] for _ in range(cells)]
        try:
            answer = self._ask(request, self._limits.wall_s)
            told = json.loads(answer["told"].tobytes())
            self._packed = {
                str(name): data for name, data in answer["packed"].items() if name in names
            }
            self.told = {
                name: one for name, one in told.items() if name in names and isinstance(one, dict)
            }
            outputs, counts = json.loads(answer["outputs"].tobytes())
            outputs = [list(map(dict, one)) for one in outputs]
            counts = [one if type(one) is int else None for one in counts]
            if len(outputs) != cells or len(counts) != cells:
                raise ValueError("wrong number of cells")
            problem = str(answer["problem"])[:TEXT_LIMIT]
        except SandboxEndedError as ended:
            return Ran(outputs=nothing, counts=[None] * cells, problem=str(ended), number=None)
        except MALFORMED:
            problem = "the sandbox gave a malformed answer"
            return Ran(outputs=nothing, counts=[None] * cells, problem=problem, number=None)
        value = self.told.get(NUMBER, {}).get("value")
        number = value if type(value) is int and 0 <= value < 10**18 else None
        return Ran(outputs=outputs, counts=counts, problem=problem, number=number)

    def play(
        self,
        fn: Callable[..., Any],
        cases: Sequence[Mapping[str, Any]],
        timeout_s: float,
        *,
        spread: bool = False,
        without: str = "",
    ) -> Played:
        """`exercises.running.play` in the sandbox, for a student's function or any other."""
        own = fn if isinstance(fn, HandedIn) else None
        if own is not None and own.refused is not None:
            return own.refused
        packed = dumps((None if own else fn, own.__name__ if own else "", list(cases), spread))
        request = {
            "do": "play",
            "packed": np.frombuffer(packed, np.uint8),
            "lines": own.lines if own else [],
            "timeout_s": float(timeout_s),
            "without": without,
        }
        try:
            return _read(self._ask(request, timeout_s + START_S), len(cases))
        except SandboxEndedError as ended:
            return Played(kind="exit", problem=f"your function was stopped: {ended}")


def _reader(process: Process) -> Callable[[int], bytes]:
    def read(size: int) -> bytes:
        data = process.stdout.read(size)
        if len(data) < size:
            raise EOFError
        return data

    return read


def _read(told: Any, cases: int) -> Played:
    """An answer from the sandbox, with every part checked."""
    nothing = Played(kind="error", problem="the answer did not come from your function's return")
    try:
        answers, at = list(told["answers"]), told["at"]
        changed = [[str(name)[:100] for name in names] for names in told["changed"]]
        kind, problem = told["kind"], str(told["problem"])[:TEXT_LIMIT]
    except MALFORMED:
        return nothing
    whole = len(answers) == len(changed) == cases
    if type(kind) is not str or kind not in KINDS or (kind == "" and not whole):
        return nothing
    at = at if type(at) is int and 0 <= at < cases else None
    return Played(answers=answers, changed=changed, kind=kind, problem=problem, at=at)


class HandedIn:
    """A proxy for a student's function: its name and parameters; the code is in the sandbox."""

    def __init__(self, name: str, sandbox: Sandbox, told: Mapping[str, Any], without: str) -> None:
        self.__name__ = name
        self._sandbox, self._without = sandbox, without
        lines = told.get("lines")
        self.lines = [str(one) for one in lines] if isinstance(lines, list) else []
        self.refused: Played | None = None
        if "refused" in told:
            self.refused = _read(told["refused"], 0)
        with contextlib.suppress(TypeError, ValueError, KeyError):
            self.__signature__ = _signature(told["parameters"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value that the function returns in the sandbox.

        Raises NotImplementedError for an unwritten function, TimeoutError, or RuntimeError.
        """
        case = {"args": args, "kwargs": kwargs}
        played = self._sandbox.play(self, [case], CALL_S, spread=True, without=self._without)
        if played.kind == "missing":
            raise NotImplementedError("write this part")
        if played.kind:
            raise (TimeoutError if played.kind == "timeout" else RuntimeError)(played.problem)
        return played.answers[0]


def _signature(parameters: Any) -> inspect.Signature:
    kinds = {kind.name: kind for kind in inspect._ParameterKind}
    return inspect.Signature(
        [
            inspect.Parameter(
                str(name), kinds[kind], default=... if has_default else inspect.Parameter.empty
            )
            for name, kind, has_default in parameters
        ]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """errors: (name, message) by grade_id, for the graded cells that failed.

    unchecked: cells that this machine could not check. timeouts: cells whose function was stopped.
    """

    errors: Mapping[str, tuple[str, str]]
    unchecked: int
    timeouts: int


@dataclass(slots=True)
class _Tally:
    errors: dict[str, tuple[str, str]] = field(default_factory=dict)
    unchecked: int = 0
    timeouts: int = 0


def answer_names(lab: Lab) -> list[str]:
    """The names that the lab's solution cells define at their top level, and STUDENT."""
    found = [NUMBER]
    for cell in lab.notebook["cells"]:
        if nbgrader_of(cell).get("solution"):
            for node in code_tree(cell_text(cell)).body:
                if name := getattr(node, "name", ""):
                    found.append(name)
                for target in getattr(node, "targets", ()):
                    found += [target.id] if hasattr(target, "id") else []
    return list(dict.fromkeys(found))


def _namespace(lab: Lab, sandbox: Sandbox, number: int, without: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "graded"}
    for cell in import_cells(lab.notebook["cells"]):
        exec(compile(code_tree(cell_text(cell)), f"<imports of {lab.path.stem}>", "exec"), names)
    for name in answer_names(lab):
        told = sandbox.told.get(name)
        if told is not None and "parameters" in told:
            names[name] = HandedIn(name, sandbox, told, without)
        elif told is not None:
            names[name] = told.get("value")
    return names | {NUMBER: number}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _define(text: str, names: dict[str, Any]) -> None:
    """Runs a graded cell's definitions; later cells rely on them even if this one failed."""
    for statement in code_tree(text).body:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Assign):
            with contextlib.suppress(Exception):
                exec(compile(ast.Module([statement], []), "<graded cell>", "exec"), names)


def judge(
    lab: Lab, sandbox: Sandbox, *, number: int, chosen: Sequence[str], without: str = ""
) -> Verdicts:
    """Runs the graded cells in `chosen` (grade_ids), in the notebook's order.

    without: the slug of a lab whose reference solutions the student's functions must not reach.
    """
    tally = _Tally()
    stopped = False

    def player(fn: Callable[..., Any], cases: Sequence[Any], timeout_s: float) -> Played:
        nonlocal stopped
        played = sandbox.play(fn, cases, timeout_s, without=without)
        stopped = stopped or played.kind == "timeout"
        return played

    with elsewhere(player), _quiet():
        names = _namespace(lab, sandbox, number, without)
        for cell in lab.notebook["cells"]:
            if not nbgrader_of(cell).get("grade"):
                continue
            name = str(nbgrader_of(cell)["grade_id"])
            if name not in chosen:
                _define(cell_text(cell), names)
                continue
            stopped = False
            try:
                exec(compile(cell_text(cell), f"<graded cell {name}>", "exec"), names)
            except NameError as problem:
                missing = f"{problem.name} is not defined: its cell is missing or raised an error"
                own = problem.name in answer_names(lab)
                tally.errors[name] = ("NameError", missing if own else str(problem))
            except Exception as problem:  # the check failed or could not handle the answer
                tally.errors[name] = (type(problem).__name__, str(problem)[:TEXT_LIMIT])
                tally.unchecked += isinstance(problem, NotCheckedError)
                stopped = stopped or isinstance(problem, TimeoutError)
            tally.timeouts += stopped
            if name in tally.errors:
                _define(cell_text(cell), names)
    return Verdicts(errors=tally.errors, unchecked=tally.unchecked, timeouts=tally.timeouts)


def calls_solutions(verdicts: Verdicts) -> Mapping[str, str]:
    """A concern for each cell that fails when judged `without` solutions, by grade_id."""
    return {
        name: "calls labcore's own solution"
        if LABCORES_OWN in " ".join(text.split())
        else "fails when labcore's own solutions are taken away"
        for name, (_, text) in verdicts.errors.items()
    }
