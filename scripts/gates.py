"""Runs the gates of `make test` ("all") or `make check` ("quick") and says how each one ended.

Every gate runs, whether or not an earlier one failed. The summary comes last, and below it the
closing line of pytest. The exit code is 0 only when every gate passed.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CLOSING = re.compile(r"^(=+ )?(\d+ \w+|no tests ran)(, \d+ \w+)* in [0-9.]+s.*$")
WORKERS = 2  # each starts notebooks, compilers and browsers besides

GATES = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "spelling": ("codespell",),
    "types": ("mypy", "--platform=linux"),  # wherever it runs: Windows has no os.fork
    "imports": ("lint-imports",),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one gate ended: its name, whether it passed, its seconds, what its last line said."""

    name: str
    passed: bool
    seconds: float
    line: str


def run(name: str, command: list[str], environment: dict[str, str]) -> Result:
    """Runs one gate and shows what it says as it comes."""
    print(f"\n── {name}: {Path(command[0]).name} {' '.join(command[1:])}", flush=True)
    began = time.monotonic()
    last = ""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return Result(
        name=name,
        passed=process.returncode == 0,
        seconds=time.monotonic() - began,
        line=last,
    )


def closing_line(result: Result) -> str:
    """Pytest's own last line, or a sentence when pytest ended without one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.line)
    return plain if CLOSING.match(plain) else f"pytest gave no closing line: {plain}"


def pytest_command(which: str) -> list[str]:
    """The pytest call of `make test` ("all") or `make check` ("quick")."""
    command = [
        str(BIN / "python"),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=30",
        f"--numprocesses={min(WORKERS, os.cpu_count() or 1)}",
        *("--dist=loadfile", "--no-loadscope-reorder"),  # in order: the longest files come early
    ]
    if which == "quick":
        command += ["-m", "not long"]
    return command


def main(which: str, runner: Callable[..., Result] = run) -> int:
    """Runs the gates and prints the summary. Returns the exit code."""
    environment = os.environ | {"LABCORE_STRICT_CLAIMS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONUTF8"] = "1"  # Windows would write and read in another encoding.
    # Two threads of one process on a machine of two cores only wait for each other.
    environment.setdefault("OMP_NUM_THREADS", "1")
    results = [
        runner(name, [str(BIN / command[0]), *command[1:]], environment)
        for name, command in GATES.items()
    ]
    results.append(runner("tests", pytest_command(which), environment))
    closing = closing_line(results[-1])
    passed = all(result.passed for result in results) and CLOSING.match(closing) is not None
    total = sum(result.seconds for result in results)
    print(f"\n── summary of make {'test' if which == 'all' else 'check'}, {total / 60:.1f} minutes")
    for result in results:
        print(f"{'passed' if result.passed else 'FAILED'}  {result.name:8} {result.seconds:6.0f} s")
    print("every gate passed" if passed else "a gate FAILED: see above")
    print(closing, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    if sys.argv[1:] not in (["all"], ["quick"]):
        sys.exit("usage: python scripts/gates.py all|quick")
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(main(sys.argv[1]))
