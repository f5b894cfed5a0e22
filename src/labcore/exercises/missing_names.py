"""A sentence in place of a traceback where a check runs before the cells that it needs."""

from __future__ import annotations

import linecache
import re
from types import TracebackType
from typing import Any

from labcore.exercises.progress import kernel

__all__ = ["explain", "sentence"]

OURS = re.compile(r"\.(check|hint|solution|variant|patients)\(|STUDENT\b")


def sentence(error: BaseException, trace: TracebackType | None) -> str:
    """Return which cells to run, if a cell of the lab's own lacks a name; "" for other errors."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, NameError) or not error.name:
        return ""
    code = trace.tb_frame.f_code
    source = "".join(linecache.getlines(code.co_filename))
    if code.co_name != "<module>" or not OURS.search(source):
        return ""
    return (
        f"{error.name} is not defined yet: run the cell above that defines it, and then this one "
        "again. After a restart of the kernel, run all cells above this one."
    )


def explain() -> None:
    """Let this notebook say so; does nothing outside of a notebook."""
    shell = kernel()
    if shell is not None:
        shell.set_custom_exc((NameError,), _shown)


def _shown(shell: Any, kind: type, error: Any, trace: Any, tb_offset: int | None = None) -> None:
    if said := sentence(error, trace):
        error._render_traceback_ = lambda: [said]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)
