"""The package's face shows what its modules hold, and costs no more than torch to import."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

from labcore import parallel

# What graphs need inside, and a command.
INSIDE = {"addresses", "generate"}
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


def test_the_face_holds_every_public_name() -> None:
    names = {item.name for item in pkgutil.iter_modules(parallel.__path__)} - INSIDE
    held = set()
    for name in sorted(names):
        module = importlib.import_module(f"labcore.parallel.{name}")
        for public in module.__all__:
            assert getattr(parallel, public) is getattr(module, public), (name, public)
        held |= set(module.__all__)
    assert held == set(parallel.__all__)
    assert len(parallel.__all__) == len(held)


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
