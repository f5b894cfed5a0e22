"""A text is whole files, split the same way each time, and each place knows its file."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from labcore.capstone.corpus import JUDGED, STRETCH, Corpus, read_text
from labcore.data.files import SMALLEST
from tests.capstone.conftest import write_texts


class Numbers:
    """It decodes tokens to their numbers."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def test_files_are_whole_in_one_part_and_known_by_place(text: Corpus, tmp_path: Path) -> None:
    assert len(text.files) == len(text.starts) and text.starts[0] == 0
    bounds = [*text.starts.tolist(), len(text.train)]
    for name, start, stop in zip(text.files, bounds, bounds[1:], strict=False):
        assert text.train[stop - 1] == 0  # end of text
        assert text.file_of(start) == text.file_of(stop - 1) == name
    assert len(text.held_out) and 20 < len(text.files) < 40


def test_a_token_of_a_file_decodes_to_the_file(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "mine", seed=3)
    found = read_text(str(folder))
    stop = int(found.starts[1])
    whole = (folder / found.files[0]).read_text("utf-8")
    assert found.tokenizer.decode(found.train[: stop - 1].tolist()) == whole


def test_a_model_is_judged_on_stretches_from_all_of_the_held_out_text(text: Corpus) -> None:
    numbers = torch.arange(123_457)
    read = replace(text, held_out=numbers, tokenizer=Numbers())  # type: ignore[arg-type]
    judged = torch.tensor([int(word) for word in read.judged.split()])
    assert len(judged) == JUDGED * STRETCH
    assert judged[0] == 0 and judged[-1] == numbers[-1]
    steps, counts = judged.diff().unique(return_counts=True)
    assert counts[steps == 1] == JUDGED * (STRETCH - 1)
    assert steps[steps != 1].min() > 0 and steps.max() - steps[1] <= 1  # evenly, without overlap
    few = replace(read, held_out=numbers[:777])
    assert few.judged.split() == [str(number) for number in range(777)]


def test_the_split_depends_on_names_alone(tmp_path: Path) -> None:
    one = read_text(str(write_texts(tmp_path / "one", seed=1)))
    two = read_text(str(write_texts(tmp_path / "two", seed=2)))
    assert one.files == two.files


def test_less_is_read_when_less_is_wanted(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "mine")
    some, all_ = (read_text(str(folder), max_bytes=most) for most in (SMALLEST + 20_000, 10**9))
    assert all_.files[: len(some.files)] == some.files and len(some.files) < len(all_.files)


def test_what_is_no_text_is_left_out(tmp_path: Path, text: Corpus) -> None:
    folder = write_texts(tmp_path / "mine")
    (folder / "picture.png").write_bytes(b"\x89PNG" * 1000)
    (folder / "latin.txt").write_bytes("é".encode("latin-1") * 1000)
    (folder / "empty.md").write_text("\n")
    for hidden in (".git", "node_modules", "__pycache__", "idlelib"):
        (folder / hidden).mkdir()
        (folder / hidden / "some.txt").write_text("not mine " * 1000)
    (folder / "loop").symlink_to(folder)
    locked = folder / "locked.txt"
    locked.write_text("no one may read this")
    locked.chmod(0)
    found = read_text(str(folder)).files
    assert set(found) - {"locked.txt"} == set(text.files)  # root reads it all the same


@pytest.mark.parametrize("files", [1, 2, 3])
def test_few_files_are_enough_if_they_are_long(files: int, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "mine", files=files, size=300_000)
    for most in (250_000, 10**9):
        found = read_text(str(folder), max_bytes=most)
        assert len(found.train) > 2 * len(found.held_out) > 2_000
        assert len(found.files) == files or most < 10**9


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no_such_package", "installed package, got 'no_such_package'"),
        ("../nowhere", "a folder or an installed package, got '../nowhere'"),
        ("json", "at least 200,000 bytes"),
        ("os", "installed package, got 'os'"),
        ("", "installed package, got ''"),
    ],
)
def test_a_source_that_is_none_is_refused_in_a_sentence(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        read_text(source)


def test_a_package_is_named_with_its_version() -> None:
    assert read_text("networkx", max_bytes=300_000).name.startswith("networkx 3")


@pytest.mark.parametrize("names", [("a.txt", "note.txt"), ("book0.txt", "note.txt")])
def test_one_long_file_is_neither_held_out_nor_learned_as_a_whole(
    names: tuple[str, str], tmp_path: Path
) -> None:
    write_texts(tmp_path / "source", files=1, size=304_000)
    (tmp_path / "source" / "file-0.txt").rename(tmp_path / "source" / names[0])
    (tmp_path / "source" / names[1]).write_text("a line of the text " * 700)
    found = read_text(str(tmp_path / "source"))
    assert 0.05 < len(found.held_out) / len(found.train) < 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="names and pipes as Linux has them")
def test_strange_names_are_read_and_pipes_are_not(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "source")
    os.mkfifo(folder / "pipe.txt")
    strange = {os.fsdecode(b"\xe9t\xe9%d.txt" % number) for number in range(4)}
    for name in strange:
        (folder / name).write_text("a line of the text " * 900)
    found = read_text(str(folder))
    assert strange & {*found.files} and "pipe.txt" not in found.files
