"""What the tests of the serving package share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a socket, and short: pytest's own folders may be too long for its address."""
    with tempfile.TemporaryDirectory(prefix="labcore-") as folder:
        yield Path(folder) / "engine"
