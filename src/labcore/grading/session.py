"""The part of grading that runs inside the sandbox: a student's notebook, then its functions.

`python -m labcore.grading.session` reads requests from its standard input and answers each one on
its standard output, in frames of `labcore.processes.wire`. Its answers are not trusted: student
code runs in its kernel and may impersonate it. So it only reports what functions return, never
whether that is right.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import linecache
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import nbformat
import numpy as np
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat.v4 import new_code_cell, new_output
from traitlets.config import Config

from labcore.exercises import Clinic, load
from labcore.exercises.running import Played, play_forked, unsendable
from labcore.grading.forked import fork_kernels
from labcore.grading.references import copied
from labcore.processes import wire
from labcore.processes.travel import dumps, loads

__all__ = ["DIED", "LABCORES_OWN", "TIMEOUT", "export", "main"]

TIMEOUT, DIED = "CellTimeoutError", "KernelDied"
# A loop that catches the interrupt keeps the kernel busy, and every later cell times out too. So a
# notebook gets the time of a few cells in all.
CELLS_PER_NOTEBOOK = 3
ATTEMPTS = 4
OWN_S = 60.0  # for labcore's own cells, on a busy machine
CELL_BYTES = 1_000_000  # of outputs that a cell keeps
REQUEST_LIMIT = 1 << 62  # no limit: requests come from the trusted side
LABCORES_OWN = "labcore's own solution was called"
HANDED_IN = "handed_in.json"
EXPORT = "from labcore.grading.session import export as _export\n_export({names!r}, {folder!r})"
BEGIN = "from labcore.exercises.running import play_by, play_forked; play_by(play_forked)"
KERNEL = ["--IPKernelApp.log_level=ERROR", "--HistoryManager.hist_file=:memory:"]


class _Client(NotebookClient):
    """nbclient's client, but it keeps at most CELL_BYTES of a cell's outputs."""

    kept: tuple[int, int] = (-1, 0)

    def output(self, outs: Any, msg: Any, display_id: Any, cell_index: int) -> Any:
        """Keeps an output, or notes once that there were more."""
        place, size = self.kept
        size = size if place == cell_index else 0
        grown = size + len(json.dumps(msg["content"], default=str))
        self.kept = cell_index, grown
        if grown <= CELL_BYTES:
            return super().output(outs, msg, display_id, cell_index)
        if size <= CELL_BYTES:
            outs.append(new_output("stream", name="stderr", text="[More output was left out.]\n"))
        return None


def _stopped(name: str, text: str) -> list[Any]:
    return [new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])]


def _run(notebook: Any, names: Sequence[str], seconds: float, folder: str) -> str:
    """Runs the notebook in place and exports `names`; returns a phrase for what failed, or "".

    A cell that kills its kernel, garbles its messages or cannot be interrupted is skipped, and the
    others are run again without it, so it spoils only its own answer. The first and the last cell
    are labcore's own, and their time does not count against the student.
    """
    left = CELLS_PER_NOTEBOOK * seconds

    def budget(cell: Any) -> float:
        return OWN_S if cell is begin or cell is exporting else max(1.0, min(seconds, left))

    left_out: dict[int, list[Any]] = {}
    config = Config({"KernelManager": {"shutdown_wait_time": 1.0}})
    exporting = new_code_cell(EXPORT.format(names=list(names), folder=folder))
    notebook.cells.append(exporting)
    begin = new_code_cell(BEGIN)
    notebook.cells.insert(0, begin)
    codes = [at for at, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for _ in range(ATTEMPTS):
        client = _Client(
            notebook,
            config=config,
            timeout_func=budget,
            interrupt_on_timeout=True,
            allow_errors=True,
            raise_on_iopub_timeout=True,
            store_widget_state=False,
            extra_arguments=KERNEL,
            error_on_timeout={
                "ename": TIMEOUT,
                "evalue": "",
                "traceback": [f"{TIMEOUT}: the cell was stopped"],
            },
        )
        client.on_cell_executed = _keep_timeout
        at = -1
        try:
            client.reset_execution_trackers()
            with client.setup_kernel():
                for at, cell in enumerate(notebook.cells):
                    if cell.cell_type == "code":
                        cell.outputs = []
                    if cell.cell_type != "code" or at in left_out:
                        continue
                    started = time.monotonic()
                    try:
                        client.execute_cell(cell, at, store_history=at > 0)
                    finally:
                        if cell is not begin and cell is not exporting:
                            left -= time.monotonic() - started
            problem = ""
        except TimeoutError:
            problem = "a cell ran out of time and could not be interrupted"
            outputs = _stopped(TIMEOUT, "the cell could not be interrupted and was skipped")
        except DeadKernelError:
            problem = "its kernel died while it ran (os._exit, a crash, or out of memory)"
            outputs = _stopped(DIED, "the kernel died; the cell was skipped")
        except Exception as broke:  # threads that print garble messages; a cell may forge them
            said = f"{type(broke).__name__}: {broke}"[:200]
            problem = f"its kernel's messages could not be read ({said})"
            outputs = _stopped(DIED, "the kernel's messages broke; the cell was skipped")
        if not problem:
            break
        if notebook.cells[at] is exporting and left > 0:  # what a cell started may still run
            at = max((n for n in codes if 0 < n < at and n not in left_out), default=0)
        left_out[at] = outputs
        if at == 0 or left <= 0:
            break
    for place, outputs in left_out.items():
        notebook.cells[place].outputs = outputs
    for one in exporting.outputs:
        if one.output_type == "error" and not problem:
            problem = f"its answers could not be saved ({one.ename}: {one.evalue})"
    notebook.cells = notebook.cells[1:-1]
    return problem


def _keep_timeout(cell: Any, execute_reply: Any, **_more: Any) -> None:
    """Gives a cell that was stopped a timeout error, as nbgrader does."""
    content = execute_reply["content"]
    if content.get("ename") == TIMEOUT:
        cell.outputs.append(
            new_output("error", ename=TIMEOUT, evalue="", traceback=content["traceback"])
        )


# In the kernel -----------------------------------------------------------------------------------


def _described(thing: Any) -> dict[str, Any]:
    """What the judge needs to know about a function without having it."""
    told: dict[str, Any] = {"parameters": None, "copied": copied(thing), "lines": []}
    try:
        found = inspect.signature(thing).parameters.values()
        told["parameters"] = [
            [one.name, one.kind.name, one.default is not one.empty] for one in found
        ]
    except (TypeError, ValueError):
        pass  # some builtins have no signature
    code = getattr(thing, "__code__", None)
    if code is not None:
        told["lines"] = linecache.getlines(code.co_filename)[:2000]
    return told


def _plain(thing: Any) -> Any:
    """Plain data, such as the dict that a clinic takes, with tuples as lists; else None."""
    try:
        return json.loads(json.dumps(thing))
    except (TypeError, ValueError, RecursionError):
        return None


def export(names: Sequence[str], folder: str) -> None:
    """Runs in the student's kernel: writes the values of `names` to a folder."""
    from IPython import get_ipython

    namespace = get_ipython().user_ns
    found: dict[str, Any] = {}
    for name in names:
        if name not in namespace:
            continue
        thing = namespace[name]
        if not callable(thing):
            found[name] = {"value": _plain(thing)}
            continue
        told = _described(thing)
        try:
            Path(folder, name).write_bytes(dumps(thing))
        except TypeError as problem:
            told["refused"] = dataclasses.asdict(unsendable(thing, problem))
        found[name] = told
    Path(folder, HANDED_IN).write_text(json.dumps(found), encoding="utf-8")


# In the session ----------------------------------------------------------------------------------


def _without_solutions(slug: str, fn: Callable[..., Any], **case: Any) -> Any:
    """Runs in the worker: calls `fn` with all of the lab's solutions disabled."""

    def called(*_: Any, **__: Any) -> Any:
        raise RuntimeError(LABCORES_OWN)

    importlib.import_module(f"labcore.exercises.topics.{slug}")
    Clinic.diagnoses = called  # type: ignore[method-assign]
    for exercise in load(slug):
        reference = getattr(exercise, "reference", None)
        # A notebook may hold the reference under another name, in a list or in a default argument.
        # Replacing its code makes all of these raise. A closure's code cannot be replaced.
        if isinstance(reference, FunctionType) and not reference.__code__.co_freevars:
            reference.__code__ = called.__code__
            reference.__globals__.setdefault("LABCORES_OWN", LABCORES_OWN)
    return fn(**case)


def _spread(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fn(*args, **kwargs)


class _Session:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._known: dict[str, Any] = {}

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        notebook = nbformat.from_dict(json.loads(request["notebook"].tobytes()))
        folder, names = self._folder, request["names"]
        problem = _run(notebook, names, request["seconds"], str(folder))
        outputs = [[dict(o) for o in cell.get("outputs", ())] for cell in notebook.cells]
        counts = [cell.get("execution_count") for cell in notebook.cells]
        try:
            text = (folder / HANDED_IN).read_text(encoding="utf-8")
            packed = {name: (folder / name).read_bytes() for name in names if name in self._names()}
        except OSError:
            text, packed = "{}", {}
            problem = problem or "its answers could not be saved"
        return {
            "problem": problem,
            "outputs": _bytes(json.dumps([outputs, counts])),
            "told": _bytes(text),
            "packed": {name: np.frombuffer(data, np.uint8) for name, data in packed.items()},
        }

    def _names(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()}

    def adopt(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Takes over the functions of a session that ended."""
        for name, data in request["packed"].items():
            (self._folder / name).write_bytes(data.tobytes())
        return {}

    def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        fn, name, cases, spread = loads(request["packed"].tobytes())
        if name:
            fn = self._function(name, request["lines"])
        if isinstance(fn, Played):
            return dataclasses.asdict(fn)
        if spread:
            fn = functools.partial(_spread, fn)
        if request["without"]:
            fn = functools.partial(_without_solutions, request["without"], fn)
        return dataclasses.asdict(play_forked(fn, cases, request["timeout_s"]))

    def _function(self, name: str, lines: Sequence[str]) -> Any:
        if name not in self._known:
            try:
                fn = loads((self._folder / name).read_bytes())
            except Exception as problem:  # a student's class may do anything here
                said = f"{type(problem).__name__}: {problem}"
                return Played(kind="error", problem=f"your function could not be loaded: {said}")
            code = getattr(fn, "__code__", None)
            if code is not None and lines:  # error messages quote the source line
                size = sum(map(len, lines))
                linecache.cache[code.co_filename] = (size, None, list(lines), code.co_filename)
            self._known[name] = fn
        return self._known[name]


def _bytes(text: str) -> Any:
    return np.frombuffer(text.encode(), np.uint8)


def main() -> None:
    """Answers requests until the input ends."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Keep what student code prints or reads away from the frames.
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 0)
    os.dup2(empty, 1)

    def read(size: int) -> bytes:
        data = source.read(size)
        if len(data) < size:
            raise EOFError
        return data

    fork_kernels()
    folder = Path(os.environ.get("TMPDIR", "/tmp"), "handed-in")
    folder.mkdir(mode=0o700)
    session = _Session(str(folder))
    while True:
        try:
            request = wire.unpack(read, REQUEST_LIMIT)
        except EOFError:
            return
        act = {"run": session.run, "adopt": session.adopt, "play": session.play}[request["do"]]
        told = act(request)
        try:
            frame = wire.pack(told)
        except (TypeError, ValueError) as problem:
            refused = f"your function's return value is refused: {problem}"
            frame = wire.pack(dataclasses.asdict(Played(kind="error", problem=refused)))
        sink.write(frame)
        sink.flush()


if __name__ == "__main__":
    main()
