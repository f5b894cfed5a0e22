import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import runner
from labcore import records
from labcore.attention import flash_attention


@pytest.fixture
def cases(monkeypatch):
    """The runner with a slug of its own, `lion`, and no cases yet."""
    found = {}
    monkeypatch.setattr(runner, "_CASES", found)
    monkeypatch.setattr(runner, "slugs", lambda: ["lion"])
    # Not importlib's own function: triton, imported later, needs it.
    monkeypatch.setattr(runner, "importlib", SimpleNamespace(import_module=lambda name: None))
    return found


def add(cases, name, function, **options):
    function.__module__ = "benchmarks.lion"
    runner.case(name, **{"minutes": 1.0, **options})(function)


def measurement(value=1.0):
    return runner.Measurement(quantity="q", unit="s", samples=[value], peers={"torch": [2.0]})


def test_cases_run_shortest_first_and_failures_lose_no_record(cases, tmp_path, capsys):
    ran = []

    def quick():
        ran.append("quick")
        return [measurement()]

    def broken():
        ran.append("broken")
        raise RuntimeError("no luck")

    def slow():
        ran.append("slow")
        return [measurement(3.0)]

    add(cases, "slow", slow, minutes=5)
    add(cases, "broken", broken, minutes=1)
    add(cases, "quick", quick, minutes=0.1)
    assert command.main(["--save", str(tmp_path)]) == 1
    assert ran == ["quick", "broken", "slow"]
    assert {r.case for r in records.load("lion", folder=tmp_path)} == {"quick", "slow"}
    assert "RuntimeError: no luck" in capsys.readouterr().err
    ran.clear()
    assert command.main(["--save", str(tmp_path)]) == 1
    assert ran == ["broken"]
    ran.clear()
    command.main(["lion", "--case", "quick", "--save", str(tmp_path)])
    assert ran == ["quick"]


def test_each_case_is_saved_as_it_ends(cases, tmp_path):
    seen = []
    add(cases, "first", lambda: [measurement()], minutes=0.1)

    def second():
        seen.extend(r.case for r in records.load("lion", folder=tmp_path))
        return [measurement()]

    add(cases, "second", second)
    assert command.main(["--save", str(tmp_path)]) == 0
    assert seen == ["first"]


def test_a_case_for_a_gpu_waits_for_one(cases, monkeypatch, tmp_path):
    add(cases, "fused", lambda: [measurement()], needs="gpu")
    monkeypatch.setattr(runner, "gpu_visible", lambda: False)
    assert command.main(["--save", str(tmp_path)]) == 0
    assert records.load("lion", folder=tmp_path) == []
    monkeypatch.setattr(runner, "gpu_visible", lambda: True)
    assert command._chosen([], None, tmp_path)[0].name == "fused"


def test_case_lacking_its_needs_is_skipped_with_the_reason(cases, tmp_path, capsys):
    lacks = ["a server is missing; `make server` brings it"]
    add(cases, "served", lambda: [measurement()], lacks=lambda: lacks[0])
    add(cases, "other", lambda: [measurement()])
    assert command.main(["--save", str(tmp_path)]) == 0
    assert "skipped: a server is missing" in capsys.readouterr().out
    assert {r.case for r in records.load("lion", folder=tmp_path)} == {"other"}
    lacks[0] = ""
    assert command.main(["--save", str(tmp_path)]) == 0
    assert {r.case for r in records.load("lion", folder=tmp_path)} == {"served", "other"}


def test_a_case_that_measures_nothing_is_an_error(cases, capsys):
    add(cases, "empty", lambda: [])
    assert command.main(["lion"]) == 1
    assert "returned no measurement" in capsys.readouterr().err


def test_a_case_on_a_cpu_that_runs_the_interpreter_is_an_error(cases, capsys):
    pytest.importorskip("triton")
    x = torch.ones(1, 1, 2, 4)
    add(cases, "interpreted", lambda: flash_attention(x, x, x, backend="triton"))
    assert command.main(["lion"]) == 1
    assert "interpreter is never recorded" in capsys.readouterr().err


def test_two_cases_of_one_name_are_refused(cases):
    add(cases, "same", lambda: [measurement()])
    with pytest.raises(ValueError, match="declared twice"):
        add(cases, "same", lambda: [measurement()])


def test_benchmarks_run_on_one_thread(cases, tmp_path):
    torch.set_num_threads(2)
    threads = []

    def count():
        threads.append(torch.get_num_threads())
        return [measurement()]

    add(cases, "count", count)
    command.main(["lion", "--save", str(tmp_path)])
    assert threads == [1]
    assert torch.get_num_threads() == 2
    assert records.load(folder=tmp_path)[0].details["threads"] == 1


def test_merge_and_bad_input_say_what_to_do(tmp_path, capsys):
    assert command.main(["--merge", str(tmp_path)]) == 2
    assert "must hold records" in capsys.readouterr().err
    assert command.main(["lyon"]) == 2
    assert "slug must be one of" in capsys.readouterr().err


def test_the_command_lists_its_cases():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--list", "lion"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "lion/step-time" in done.stdout
    assert all("about" in line for line in done.stdout.splitlines())


def test_stale_lists_keys(monkeypatch, capsys):
    class Old:
        key = ("lion", "case", "q", "cpu")

    monkeypatch.setattr(records, "load", lambda: [Old()])
    monkeypatch.setattr(records, "is_stale", lambda record: True)
    assert command.main(["--stale"]) == 0
    assert capsys.readouterr().out == "lion · case · q · cpu\n"
