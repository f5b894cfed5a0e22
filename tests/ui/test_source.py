"""show_file() shows files that another program reads, whole or function by function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from labcore.serving.triton.server import FILES
from labcore.ui import show_file


def test_a_file_is_shown_as_it_lies_there() -> None:
    shown = show_file(FILES / "config.pbtxt")
    ((name, path, line, text),) = shown.parts
    assert (name, line) == ("config.pbtxt", 1)
    assert path == "src/labcore/serving/triton/files/config.pbtxt"
    assert text == (FILES / "config.pbtxt").read_text("utf-8").rstrip()
    assert "decoupled" in shown._repr_mimebundle_()["text/html"]


def test_functions_are_shown_alone_and_without_docstrings() -> None:
    shown = show_file(FILES / "model.py", "TritonPythonModel.talk", "read")
    lines = (FILES / "model.py").read_text("utf-8").splitlines()
    for name, _, line, text in shown.parts:
        assert lines[line - 1].strip() == text.splitlines()[0]
        (node,) = ast.parse(text).body
        assert node.name == name.split(".")[-1] and ast.get_docstring(node) is None
    with pytest.raises(ValueError, match="name must be"):
        show_file(FILES / "model.py", "TritonPythonModel.walk")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only labcore's files"):
        show_file(tmp_path / "a.py")
