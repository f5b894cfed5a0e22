"""`python -m benchmarks --confirm COMMIT`: a record is kept only if every number is the same."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import confirm, runner
from labcore import records
from labcore.records import hashes

OLD = {"function": "f", "benchmark": "a", "labcore": "b", "names": ["labcore.x"]}
NEW = {**OLD, "labcore": "c"}
NUMBERS = {"loss": ["nats", [1.0, 2.0], {"torch": [0.1]}], "steps": ["steps", [3.0], {}]}


def told(source: dict[str, Any] = OLD, **changed: Any) -> dict[str, Any]:
    return {"source": source, "numbers": {**NUMBERS, **changed}}


def record(case: str, source: dict[str, Any] = OLD) -> records.Record:
    return replace(records.load("lion", kind="cpu")[0], case=case, source=source)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (told(), ""),
        (told(loss=["nats", [1.0, math.nextafter(2.0, 3.0)], {"torch": [0.1]}]), "differs in"),
        (told(loss=["nats", [1.0], {"torch": [0.1]}]), "differs in 'loss'"),
        (told(loss=["nats", [1.0, 2.0], {"torch": [0.2]}]), "differs in 'loss'"),
        (told(loss=["bits", [1.0, 2.0], {"torch": [0.1]}]), "differs in 'loss'"),
        (told(more=["steps", [3.0], {}]), "other quantities"),
    ],
)
def test_every_number_counts(after: dict[str, Any], why: str) -> None:
    found = confirm.verdict([record("q")], told(), after)
    assert why in found and bool(why) == bool(found)


def test_a_record_of_other_code_is_not_confirmed() -> None:
    kept = [record("q"), record("q", {**OLD, "benchmark": "z"})]
    assert "other code" in confirm.verdict(kept, told(), told())


def test_only_counted_cases_with_equal_numbers_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        runner.Case(slug="lion", name=name, minutes=1, needs=needs, function=list)
        for name, needs in (
            *(("broken", "any"), ("same", "any"), ("moved", "any")),
            *(("timed", "cpu"), ("new", "any")),
        )
    ]
    records.save([record(one.name) for one in cases[:4]], tmp_path)
    ran = []

    def numbers_in(tree: Path, slug: str, name: str) -> dict[str, Any]:
        ran.append((tree, name))
        if name == "broken":
            raise RuntimeError("failed in then: no luck")
        if tree == Path("then"):
            return told()
        return told(NEW, **({"steps": ["steps", [4.0], {}]} if name == "moved" else {}))

    monkeypatch.setattr(confirm, "checkout", lambda commit: contextlib.nullcontext(Path(commit)))
    monkeypatch.setattr(confirm, "numbers_in", numbers_in)
    confirm.confirm(cases, "then", tmp_path)
    both = [(at, name) for name in ("same", "moved") for at in (Path("then"), confirm.ROOT)]
    assert ran == [(Path("then"), "broken"), *both]
    sources = {one.case: dict(one.source) for one in records.load(folder=tmp_path)}
    assert sources == {"broken": OLD, "same": NEW, "moved": OLD, "timed": OLD}
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "lion/broken: failed in then: no luck",
        "lion/same: confirmed",
        "lion/moved: differs in 'steps'",
        "lion/timed: is timed: run it again",
    ]


def test_a_case_is_run_by_the_checkout_that_is_named() -> None:
    found = confirm.numbers_in(confirm.ROOT, "attention", "law/longest")
    file = confirm.ROOT / "benchmarks" / "attention.py"
    assert found["source"] == hashes.describe(file, found["source"]["function"], gpu=False)
    assert all(samples for _, samples, _ in found["numbers"].values())
    with pytest.raises(RuntimeError, match="failed in"):
        confirm.numbers_in(Path(__file__).parent, "attention", "law/longest")


def test_a_commit_that_is_not_there_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="needs a commit of this repository: .*no-such-commit"),
        confirm.checkout("no-such-commit"),
    ):
        pass
