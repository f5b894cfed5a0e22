"""Runs the gates of `make test` ("all") or `make check` ("quick") and says how each one ended.

Every gate runs, even if an earlier one failed. The summary comes last, followed by pytest's closing
line. The exit code is 0 only if every gate passed.
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
WORKERS = 2  # each also starts notebooks, compilers and browsers

GATES = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "spelling": ("codespell",),
    "types": ("mypy", "--platform=linux"),  # on every system: Windows has no os.fork
    "imports": ("lint-imports",),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one gate ended: its name, whether it passed, its seconds and its last line."""

    name: str
    passed: bool
    seconds: float
    line: str


def run(name: str, command: list[str], environment: dict[str, str]) -> Result:
    """Runs one gate and shows its output live."""
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
    """Pytest's closing line, or a sentence if pytest ended without one."""
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
        *("--dist=loadfile", "--no-loadscope-reorder"),  # keep the order: the longest files first
    ]
    if which == "quick":
        command += ["-m", "not long"]
    return command


def main(which: str, runner: Callable[..., Result] = run) -> int:
    """Runs the gates and prints the summary. Returns the exit code."""
    environment = os.environ | {"LABCORE_STRICT_CLAIMS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONUTF8"] = "1"  # Windows would use another encoding.
    # A thousand processes import labcore, and each would compile it anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # On a machine with two cores, two threads of one process only wait for each other.
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
