import json
import math
import random

import pytest

from labcore import records
from labcore.device import hardware, versions
from labcore.records import Record, hashes


def make(**changes) -> Record:
    from dataclasses import asdict

    fields = {
        "slug": "lion",
        "case": "step-time",
        "quantity": "step time",
        "unit": "s",
        "samples": (3.0, 1.0, 2.0),
        "hardware": asdict(hardware()),
        "versions": versions(),
        "date": "2026-01-02T03:04:05+00:00",
        "source": {"function": "f", "benchmark": "a", "labcore": "b", "names": ["labcore.checks"]},
        "peers": {"torch": [4.0, 5.0, 6.0]},
        "details": {"tensors": 148, "what": "größe"},
    }
    return Record(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"samples": (1.0, math.inf)}, {"peers": {"torch": (math.nan,)}}, {"details": {"x": math.inf}}],
)
def test_record_json_cannot_hold_is_refused_and_the_file_stays(tmp_path, changes):
    records.save([make()], tmp_path)
    before = [file.read_text("utf-8") for file in tmp_path.iterdir()]
    with pytest.raises(ValueError, match="finite numbers.*lion"):
        records.save([make(**changes)], tmp_path)
    assert [file.read_text("utf-8") for file in tmp_path.glob("*.jsonl")] == before


def test_a_record_survives_the_file(tmp_path, seed):
    dice = random.Random(seed)
    samples = tuple(dice.gauss(0, 1e-3) for _ in range(17))
    before = make(samples=samples)
    records.save([before], tmp_path)
    assert records.load(folder=tmp_path) == [before]
    line = json.loads((tmp_path / f"{hardware().kind}.jsonl").read_text())
    assert line["n"] == 17
    assert line["p50"] == before.p50 == sorted(samples)[8]


def test_a_newer_record_of_one_key_replaces_the_older(tmp_path):
    records.save([make(), make(case="other")], tmp_path)
    records.save([make(samples=(9.0,))], tmp_path)
    found = {r.case: r.p50 for r in records.load("lion", folder=tmp_path)}
    assert found == {"step-time": 9.0, "other": 2.0}


def test_each_kind_of_hardware_has_its_file(tmp_path):
    gpu = {"kind": "nvidia-h200", "name": "NVIDIA H200", "cores": 16, "memory_gib": 139.0}
    records.save([make(), make(hardware=gpu)], tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {f"{hardware().kind}.jsonl", "nvidia-h200.jsonl"}
    assert [r.hardware for r in records.load(kind="nvidia-h200", folder=tmp_path)] == [gpu]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"slug": "lion"}', '{"speed": 1}', "7", '{"slug": "\\ud800"']
)
def test_a_damaged_line_is_named_and_the_file_left(tmp_path, line):
    file = tmp_path / "cpu.jsonl"
    file.write_text(make().to_json() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"cpu\.jsonl:2 is not a record .*git checkout"):
        records.load(folder=tmp_path)
    with pytest.raises(ValueError, match=r"cpu\.jsonl:2"):
        records.save([make(hardware={**make().hardware, "kind": "cpu"})], tmp_path)
    assert file.read_text().endswith(line + "\n")


@pytest.mark.parametrize(
    "change", [{"mode": "interpreted"}, {"samples": ()}, {"source": {}}, {"hardware": {"kind": 1}}]
)
def test_a_record_that_explains_nothing_is_refused(change):
    with pytest.raises((ValueError, TypeError)):
        make(**change)


def test_merge_keeps_the_newer_of_two(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    records.save([make(case="a", samples=(1.0,)), make(case="b", samples=(1.0,))], here)
    old = make(case="a", samples=(2.0,), date="2025-01-01T00:00:00+00:00")
    new = make(case="b", samples=(2.0,), date="2027-01-01T00:00:00+00:00")
    records.save([old, new, make(case="c")], there)
    assert records.merge(there, here) == 2
    assert {r.case: r.p50 for r in records.load(folder=here)} == {"a": 1.0, "b": 2.0, "c": 2.0}
    with pytest.raises(FileNotFoundError, match="got none"):
        records.merge(tmp_path / "nowhere", here)


def test_find_prefers_this_machine_and_lists_what_there_is(tmp_path, monkeypatch):
    other = {"kind": "a-gpu", "name": "A", "cores": 1, "memory_gib": 1.0}
    records.save([make(hardware=other, samples=(7.0,)), make()], tmp_path)
    load = records.load
    monkeypatch.setattr(records, "load", lambda slug=None: load(slug, folder=tmp_path))
    assert records.find("lion", "step-time", "step time").p50 == 2.0
    assert records.find("lion", "step-time", "step time", kind="a-gpu").p50 == 7.0
    with pytest.raises(KeyError, match="available: step-time; .*python -m benchmarks lion"):
        records.find("lion", "steptime", "step time")
    found = r"step-time: step time \(a-gpu\), step time \(.*benchmarks lion"
    with pytest.raises(KeyError, match=found):
        records.find("lion", "step-time", "step times")


def test_staleness_follows_the_code(tmp_path):
    source = hashes.describe(hashes.PACKAGE / "timing.py", "paired", gpu=True)
    fresh = make(source=source, slug="no-such-benchmark")
    assert not records.is_stale(fresh)
    assert "since changed" not in records.provenance(fresh)
    assert records.is_stale(make(source=source, slug="lion"))  # another benchmark's code
    stale = make(source={**source, "labcore": "0" * 16}, slug="no-such-benchmark")
    assert records.is_stale(stale)
    assert records.provenance(stale).endswith("; code since changed")
    older = make(source=source, slug="no-such-benchmark", date="2000-01-02T00:00", samples=(1.0,))
    both = records.provenance(fresh, older)
    assert f"2000-01-02 to {fresh.date[:10]}" in both and both.endswith(f"n = 1 to {fresh.n}")
    assert records.provenance(stale, fresh).endswith("; some of the code since changed")


def test_shipped_records_can_be_read():
    assert all(r.n >= 1 for r in records.load())


def names(paths) -> set[str]:
    return {p.relative_to(hashes.PACKAGE).as_posix() for p in paths}


def test_closure_follows_imports_through_packages(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def f():\n    from labcore import timing\n")
    found = names(hashes.closure(script))
    assert {"__init__.py", "device.py", "checks.py", "timing.py"} == found


def test_closure_of_a_notebook_skips_magics(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["import labcore.claims"]},
        {"cell_type": "code", "source": ["%pip install x\n", "!ls\n", "import labcore.records"]},
    ]
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    found = names(hashes.closure(notebook))
    assert "records/__init__.py" in found
    assert "records/hashes.py" in found
    assert "claims.py" not in found


def test_digest_changes_only_with_imported_modules(tmp_path, monkeypatch):
    package = tmp_path / "labcore"
    package.mkdir()
    for name, text in {"__init__": "", "a": "from labcore import b", "b": "x = 1", "c": ""}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(hashes, "PACKAGE", package)
    script = tmp_path / "script.py"
    script.write_text("import labcore.a")
    before = hashes.digest(script)
    (package / "c.py").write_text("y = 2")
    assert hashes.digest(script) == before
    (package / "b.py").write_text("x = 2")
    assert hashes.digest(script) != before


def test_digest_changes_with_a_file_that_a_package_compiles(tmp_path, monkeypatch):
    folder = tmp_path / "labcore" / "a" / "source" / "deeper"
    folder.mkdir(parents=True)
    monkeypatch.setattr(hashes, "PACKAGE", tmp_path / "labcore")
    (folder.parent.parent / "__init__.py").write_text("")
    (folder.parent.parent / "b.py").write_text("")
    kernel, before = folder / "kernel.h", hashes.digest_modules(["labcore.a", "labcore.a.b"])
    for text in ("int x;", "int y;"):
        kernel.write_text(text)
        after = hashes.digest_modules(["labcore.a", "labcore.a.b"])
        assert after != before
        before = after
    (folder / "another.h").write_text("")
    assert hashes.digest_modules(["labcore.a", "labcore.a.b"]) != before
