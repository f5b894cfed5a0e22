"""Fixtures for all tests; those that build the book or open a browser live beside their tests."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
import torch

import labcore  # noqa: F401  (before triton, so that kernels run in the interpreter)
from labcore.device import seed_from_environment

pytest_plugins = ["tests.book_fixtures"]

# A shell that runs the tests in its background has them, and all that they start, ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without the project's own variables."""
    for name in list(os.environ):
        if name.startswith("LABCORE_"):
            monkeypatch.delenv(name)
    return monkeypatch
