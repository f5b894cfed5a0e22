"""A mistake edits a copy of the reference, at places that match exactly once."""

from __future__ import annotations

import re

import pytest

from labcore.exercises import Mistake
from labcore.exercises.mistakes import Change


def halved(x: float) -> float:
    return x / 2


def shifted(x: float, by: float = 1.0) -> float:
    """Half of x, moved."""
    return halved(x) + by


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (("halved(x) + by", "halved(x) - by"), 4.0),
        ([("halved(x) + by", "halved(x + by)"), ("x / 2", "x / 4")], 2.75),
        (lambda x, by=1.0: x * by, 10.0),
    ],
)
def test_edits_change_a_copy(change: Change, wanted: float) -> None:
    wrong = Mistake("m", change, "A hint.").function(shifted, halved)
    assert wrong(x=10.0) == wanted
    assert shifted(10.0) == 6.0 and halved(10.0) == 5.0


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (("by: float = 1.0", "by: float"), "def shifted(x: float, by: float) -> float:\n"),
        (halved, "def halved(x: float) -> float:\n    return x / 2\n"),
    ],
)
def test_the_source_of_an_edit_or_a_function(change: Change, wanted: str) -> None:
    assert Mistake("m", change, "A hint.").source(shifted).startswith(wanted)


@pytest.mark.parametrize(("old", "times"), [("x * 2", 0), ("by", 2), ("x / 2", 0)])
def test_an_edit_that_does_not_match_once_is_refused(old: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(old)}.*'m'.* {times} times"):
        Mistake("m", (old, ""), "A hint.").function(shifted)
