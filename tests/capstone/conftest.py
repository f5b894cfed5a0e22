"""A tiny plan and a small text, shared by the tests of the capstone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from labcore.capstone.corpus import Corpus, read_text
from labcore.capstone.plan import Plan, shape

# After each word, the next one is nearly always the same: a model soon has no ties to break.
WORDS = ("a", "line", "of", "the", "text", "that", "small", "models", "learn", "in", "seconds")


def write_texts(folder: Path, *, files: int = 40, size: int = 8_000, seed: int = 0) -> Path:
    """Write files of random sentences."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        words, place = [], 0
        while len(words) < size // 5:
            place = (place + 1 + (draw.random() < 0.1) * draw.randrange(9)) % len(WORDS)
            words.append(WORDS[place])
        lines = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
        (folder / f"file-{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_text(str(write_texts(tmp_path_factory.mktemp("texts") / "mine")))


@pytest.fixture
def plan() -> Plan:
    return Plan(
        config=shape(64), rows=4, length=16, accumulate=2, steps=40, rate=0.01, draft_seconds=0.2
    )
