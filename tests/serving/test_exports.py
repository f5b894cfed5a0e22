"""The package's face: its names resolve, its programs start clean, and its import stays small."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

from labcore import serving

# What a user without a server, or without its client, never needs.
LATE = ("tornado", "tritonclient", "grpc", "google.protobuf", "yaml", "transformers", "plotly")


def python(*words: str) -> str:
    told = subprocess.run(
        [sys.executable, "-W", "error", *words], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
    assert told.stderr == ""
    return told.stdout


def test_every_name_is_that_of_its_module() -> None:
    for name in serving.__all__:
        thing = getattr(serving, name)
        home = getattr(thing, "__module__", "")
        if home.startswith("labcore.serving."):
            assert name in importlib.import_module(home).__all__
            assert vars(importlib.import_module(home))[name] is thing
    assert len(serving.__all__) == len(set(serving.__all__))


def test_a_name_means_one_thing() -> None:
    """Of two modules with the same name for two things, at most one is shown by the package."""
    things: dict[str, set[int]] = {}
    for item in pkgutil.walk_packages(serving.__path__, "labcore.serving."):
        module = importlib.import_module(item.name)
        for name in getattr(module, "__all__", ()):
            things.setdefault(name, set()).add(id(vars(module)[name]))
    twice = {name for name, ids in things.items() if len(ids) > 1}
    assert twice.isdisjoint(serving.__all__)


@pytest.mark.parametrize("program", ["triton.process", "triton.server"])
def test_programs_are_not_imported_before_they_run(program: str) -> None:
    assert "usage: " in python("-m", f"labcore.serving.{program}", "--help")


def test_the_package_imports_no_client_and_no_reader_of_files() -> None:
    code = f"import sys, labcore.serving.http; print([m for m in {LATE} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"
