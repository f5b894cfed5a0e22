"""The first code cell of each notebook: it installs labcore if it is missing."""

import re

__all__ = ["REPOSITORY_LINE", "SETUP_LINE", "first_cell", "is_first_cell"]

SETUP_LINE = "# Installs labcore where it is missing (Colab) and says what this machine has."
REPOSITORY_LINE = re.compile(r'^REPOSITORY = "([^"]*)"', re.MULTILINE)

# pip keeps the installed torch and triton: the notebook's kernel may have them loaded, and a hosted
# machine has the builds for its GPU. Without a terminal, git fails rather than ask for a password.
# On the error, a notebook shows only the sentence that _render_traceback_ returns, and stops.
_CELL = """
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

REPOSITORY = "{address}"  # `python -m labcore address <URL>` writes it
if find_spec("labcore") is None:
    kept = [f"{name}=={version(name)}" for name in ("torch", "triton") if find_spec(name)]
    pip = [sys.executable, "-mpip", "install", "-q", *kept, f"labcore[labs] @ git+{REPOSITORY}"]
    done = subprocess.run(pip, capture_output=True, text=True, start_new_session=True)
    said = [s for s in done.stderr.splitlines() if "ERROR: " in s or "fatal: " in s]
    why = (said or [done.stderr])[0].strip() if REPOSITORY else "REPOSITORY needs the course's URL"
    if done.returncode:
        text = f"labcore is missing ({why}): mend that and run the cell again, or use `make course`"
        raise type("Stop", (RuntimeError,), {"_render_traceback_": lambda e: [*e.args]})(text)

from labcore import device

print(device.badge())"""


def first_cell(address: str) -> str:
    """The first code cell of each notebook, for this address ("" if there is none yet)."""
    return SETUP_LINE + _CELL.replace("{address}", address)


def is_first_cell(text: str) -> bool:
    """Whether a cell's text is that first code cell, for any address."""
    match = REPOSITORY_LINE.search(text)
    return match is not None and text == first_cell(match[1])
