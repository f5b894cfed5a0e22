"""Importing the package costs no more than importing torch."""

from __future__ import annotations

import subprocess
import sys

SLOW = (
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor",
    "triton",
    "transformers",
    "plotly",
    "ipywidgets",
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_importing_it_imports_nothing_slow() -> None:
    done = python(
        "-c",
        "import sys, labcore.parallel as p; print(*sys.modules)",
    )
    assert done.returncode == 0, done.stderr
    assert not set(SLOW) & set(done.stdout.split())


def test_the_command_is_not_imported_twice() -> None:
    done = python("-m", "labcore.parallel.generate", "--help")
    assert done.returncode == 0 and "--model" in done.stdout
    assert done.stderr == ""
