"""Fixtures for all tests; those that build the book or open a browser live beside their tests."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

import labcore  # noqa: F401  (before triton, so that kernels run in the interpreter)
from labcore.device import seed_from_environment
from labcore.grading import sandbox

pytest_plugins = ["tests.book_fixtures"]

# A shell that runs the tests in its background has them, and all that they start, ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On other systems these folders and files are skipped, before anything in them is imported.
NEEDS_LINUX = {
    "grading and the tools around it need Linux": ("grading", "labs"),
    "an engine in a process of its own is tested on Linux": (
        *("serving/test_triton_model.py", "serving/test_triton_program.py"),
        *("serving/test_triton_requests.py", "serving/test_triton_server.py"),
        *("serving/test_triton_environment.py", "serving/test_triton_process.py"),
    ),
    "children of the fork server need Linux": ("processes/test_run.py", "processes/test_worker.py"),
    "signals of a terminal are tested on Linux": (
        "capstone/test_project.py",
        "course/test_server.py",
    ),
    "it takes from Linux what other systems lack": ("test_other_systems.py",),
}


class Skipped(pytest.Module):
    """A file of tests that need Linux, somewhere else."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(why_not(self.path), allow_module_level=True)


def why_not(path: Path) -> str:
    """Why the tests in a file need Linux; "" where they run everywhere."""
    place = Path(path).relative_to(Path(__file__).parent).as_posix()
    found = (
        why
        for why, names in NEEDS_LINUX.items()
        if any(place == name or place.startswith(f"{name}/") for name in names)
    )
    return next(found, "")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    """Skips on other systems than Linux what needs it."""
    if sys.platform == "linux" or not why_not(module_path):
        return None
    return Skipped.from_parent(parent, path=module_path)


# One worker builds the book for this file, while the other runs chapters.
FIRST = ("tests/book/test_clinics.py", "tests/test_chapters.py")
# Their tests take minutes together and share no costly fixture, so both workers take them.
SPREAD = ("tests/test_chapters.py", "tests/browser/test_static_book.py")


class Scheduler(LoadScopeScheduling):
    """Gives a worker whole files, and of the files in SPREAD single tests."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file in SPREAD else file


def place(item: pytest.Item) -> int:
    """When a test runs: who needs the built book comes last and does not wait for it."""
    file = item.nodeid.partition("::")[0]
    if file in FIRST:
        return FIRST.index(file)
    return len(FIRST) + ("strict_build" in getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts whole files by `place`, so that a file with any late test is late."""
    places: dict[str, int] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        places[file] = max(places.get(file, 0), place(item))
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    """The scheduler of `make test`."""
    return Scheduler(config, log)


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed when the test fails; LABCORE_SEED=<n> repeats a failure."""
    asked = seed_from_environment()
    value = random.SystemRandom().randrange(2**31) if asked is None else asked
    print(f"LABCORE_SEED={value}")
    return value


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A CPU generator on the test's seed."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two busy threads on a shared core are slower than one, and sums then differ by order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A language model is judged on 16 windows of the held-out text instead of 512."""
    from labcore.studies.language import bench

    monkeypatch.setattr(bench.held_out_loss.__wrapped__, "__defaults__", (16,))


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without the project's own variables."""
    for name in list(os.environ):
        if name.startswith("LABCORE_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """A machine on which students' code can be fenced in."""
    if lack := sandbox.missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has no sandbox: {lack}")
        pytest.skip(lack)
