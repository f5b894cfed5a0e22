"""scripts/gates.py: every gate runs, one failure fails the whole, and pytest's line comes last."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLOSING = "===== 12 passed, 1 skipped in 3.21s ====="


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    spec = importlib.util.spec_from_file_location("course_gates", ROOT / "scripts" / "gates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["course_gates"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def result(gates: ModuleType, name: str, passed: bool = True, line: str = CLOSING) -> object:
    return gates.Result(name=name, passed=passed, seconds=1.0, line=line)


@pytest.mark.parametrize(
    "failing", [None, "lint", "format", "spelling", "types", "imports", "tests"]
)
@pytest.mark.parametrize("which", ["all", "quick"])
def test_each_gate_can_fail_the_whole(
    gates: ModuleType, failing: str | None, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def runner(name: str, command: list[str], environment: dict[str, str]) -> object:
        ran.append(name)
        return result(gates, name, name != failing)

    code = gates.main(which, runner)
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert ran == ["lint", "format", "spelling", "types", "imports", "tests"]
    assert code == (failing is not None)
    assert lines[-1] == CLOSING
    assert sum(line.startswith("FAILED") for line in lines) == (failing is not None)


@pytest.mark.parametrize("line", ["", "Killed", "Segmentation fault", "collected 812 items"])
def test_pytest_ending_without_its_closing_line_is_a_failure(
    gates: ModuleType, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = gates.main("all", lambda name, *_: result(gates, name, True, line))
    assert code == 1
    assert "pytest gave no closing line" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        CLOSING,
        "\x1b[32m=== \x1b[32m\x1b[1m5 passed\x1b[0m\x1b[32m in 1.00s\x1b[0m\x1b[32m ===\x1b[0m",
        "== 1 failed, 3 passed in 100.10s (0:01:40) ==",
        "==== no tests ran in 0.01s ====",
        "1 passed in 0.01s",
    ],
)
def test_closing_lines_are_known(gates: ModuleType, line: str) -> None:
    said = gates.closing_line(result(gates, "tests", True, line))
    assert " in " in said and "no closing line" not in said


def test_a_gate_s_words_are_shown_and_its_code_counts(
    gates: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = gates.run("x", [sys.executable, "-c", "print('one'); print('two'); exit(3)"], {})
    assert not ended.passed
    assert ended.line == "two"
    assert "one\ntwo\n" in capsys.readouterr().out


def test_the_quick_gates_leave_out_the_long_tests(gates: ModuleType) -> None:
    quick, everything = gates.pytest_command("quick"), gates.pytest_command("all")
    assert quick == [*everything, "-m", "not long"]
