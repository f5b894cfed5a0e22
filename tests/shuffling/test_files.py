"""A row of a corpus is traced to the files that its characters came from."""

import dataclasses

import pytest

from labcore.data.python import python_sources, python_text
from labcore.shuffling import FileRows


def test_rows_by_hand() -> None:
    # a: 0-9, b: 10-11, c: 12-25; rows of 5 end at 24.
    found = FileRows(files=("a", "b", "c"), starts=(0, 10, 12), length=26, row_length=5)
    assert found.rows == 5 and found.first_rows == (0, 2, 2)
    assert found.of([0, 1]) == ("a",) and found.of([2]) == ("b", "c")
    assert found.of([4, 2, 0, 0]) == ("a", "b", "c") and found.of([]) == ()
    for row in (-1, 5):
        with pytest.raises(ValueError, match=rf"row must .*0\.\.4, got {row}"):
            found.of([row])


@pytest.mark.parametrize("row_length", [1, 64, 997])
def test_every_character_of_the_sources_belongs_to_its_file(row_length: int) -> None:
    text = python_sources(max_bytes=200_000)
    found = FileRows.of_sources(text, row_length)
    assert len(found.files) == len(text.files) > 2 and found.length == len(text.text)
    ends = (*found.starts[1:], found.length + 1)
    # Joined again, the pieces are the text; each begins where its row says.
    pieces = [text.text[a : b - 1] for a, b in zip(found.starts, ends, strict=True)]
    assert "\n".join(pieces) == text.text
    for file, row in zip(found.files, found.first_rows, strict=True):
        assert row == found.rows or file in found.of([row])


def test_another_text_is_refused() -> None:
    text = python_sources(max_bytes=30_000)
    with pytest.raises(ValueError, match="text must match .* got another"):
        FileRows.of_sources(dataclasses.replace(text, text="x" + text.text), 8)
    with pytest.raises(ValueError, match="python_sources"):
        FileRows.of_sources(python_text(max_bytes=30_000), 8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"starts": (1, 10)}, r"starts must .*got \(1, 10\)"),
        ({"starts": (0, 0)}, r"starts must .*got \(0, 0\)"),
        ({"starts": (0, 26)}, r"starts must .*got \(0, 26\)"),
        ({"starts": ()}, r"starts must .*got \(\)"),
        ({"files": ("a",)}, "one start"),
        ({"row_length": 0}, "row_length"),
    ],
)
def test_bad_arguments_say_what_to_do(changes, sentence: str) -> None:
    arguments = {"files": ("a", "b"), "starts": (0, 10), "length": 26, "row_length": 5}
    with pytest.raises(ValueError, match=sentence):
        FileRows(**{**arguments, **changes})
