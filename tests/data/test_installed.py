"""Prompts from installed packages: where they come from, and the rule that cuts them."""

from __future__ import annotations

import hashlib
from importlib import metadata

import pytest

from labcore import data
from labcore.data import installed


def test_each_file_is_named_with_its_version_and_hash() -> None:
    sources = data.installed_sources()
    assert [one.package for one in sources] == sorted(installed.FILES)
    for one in sources:
        assert one.version == metadata.version(one.package)
        assert one.file.endswith(".py") and one.text.count("\n") > 500
        assert one.sha256 == hashlib.sha256(one.text.encode("utf-8")).hexdigest()


@pytest.mark.parametrize(("count", "characters"), [(1, 700), (4, 1), (13, 333)])
def test_prompts_end_where_a_line_begins(count: int, characters: int, seed: int) -> None:
    prompts = data.installed_prompts(count, characters=characters, seed=seed)
    sources = data.installed_sources()
    assert len(prompts) == count
    assert len(set(prompts)) == count or characters == 1
    for turn, prompt in enumerate(prompts):
        text = sources[turn % len(sources)].text
        assert len(prompt) == characters
        assert prompt in text and prompt.endswith("\n")
    assert prompts == data.installed_prompts(count, characters=characters, seed=seed)
    if characters > 1:
        assert prompts != data.installed_prompts(count, characters=characters, seed=seed + 1)


def test_no_line_of_the_training_data_begins_a_package(seed: int) -> None:
    text = data.python_sources(max_bytes=2_000_000).text
    for prompt in data.installed_prompts(8, characters=400, seed=seed):
        assert prompt not in text


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "FILES", {"no-such-package": "none.py"})
    with pytest.raises(ModuleNotFoundError, match=r"must be installed .*pip install no-such"):
        data.installed_sources()
    monkeypatch.setattr(installed, "FILES", {"tqdm": "tqdm/none.py"})
    with pytest.raises(FileNotFoundError, match=r"tqdm .* must have its source at tqdm/none.py"):
        data.installed_prompts()
    monkeypatch.setattr(installed, "FILES", {"tqdm": "tqdm/std.py"})
    with pytest.raises(ValueError, match=r"std.py must have 3 lines after 99999999 characters"):
        data.installed_prompts(3, characters=99_999_999)
