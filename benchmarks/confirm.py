"""Keep the records of counted cases after a change that left all their numbers as they were.

A faster form or a new path makes records stale that need hours to take again, though it can't
change what they say. So each such case runs twice at its small sizes, with the code of the commit
that the record was taken with and with today's. Where every sample is the same to the last bit, the
record gets the hashes of today's code. What is timed is never confirmed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import runner
from labcore import records

ROOT = runner.FOLDER.parent


def numbers(slug: str, name: str) -> dict[str, Any]:
    """Run a case of the importable checkout at its small sizes; return its code and its numbers."""
    (case,) = (one for one in runner.cases_of(slug) if one.name == name)
    sizes = []
    if "sizes" in inspect.signature(case.function).parameters:
        sizes = [importlib.import_module(f"benchmarks.{slug}").SMALL]
    small = functools.wraps(case.function)(lambda: case.function(*sizes))
    found = runner.run(replace(case, function=small))
    return {
        "source": dict(found[0].source),
        "numbers": {one.quantity: [one.unit, one.samples, dict(one.peers)] for one in found},
    }


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A second work tree of this repository at a commit. Raises ValueError if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        made = _git("worktree", "add", "--detach", str(tree), commit)
        if made.returncode:
            raise ValueError(f"--confirm needs a commit of this repository: {made.stderr.strip()}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def numbers_in(tree: Path, slug: str, name: str) -> dict[str, Any]:
    """Return `numbers` by the code of a checkout. Raises RuntimeError if the case fails there."""
    paths = {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, "-P", __file__, slug, name]
    ran = subprocess.run(
        command, cwd=tree, env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"failed in {tree}: {ran.stderr.strip()[-300:]}")
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


def verdict(kept: list[records.Record], before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return why the records of a case can't be confirmed, or "" if they can."""
    if any(dict(one.source) != before["source"] for one in kept):
        return "was taken with other code than that commit's"
    if before["numbers"].keys() != after["numbers"].keys():
        return "returns other quantities"
    moved = [name for name, told in before["numbers"].items() if told != after["numbers"][name]]
    return f"differs in {moved[0]!r}" if moved else ""


def confirm(cases: list[runner.Case], commit: str, folder: Path = records.FOLDER) -> None:
    """Confirm the stale records of these cases in a folder of records, and say what became of each.

    Raises ValueError if there is no such commit.
    """
    stale = [one for one in records.load(folder=folder) if records.is_stale(one)]
    with checkout(commit) as tree:
        for case in cases:
            kept = [one for one in stale if (one.slug, one.case) == (case.slug, case.name)]
            if not kept:
                continue
            why = "is timed: run it again"
            if case.needs == "any":
                try:
                    of = functools.partial(numbers_in, slug=case.slug, name=case.name)
                    with ThreadPoolExecutor(2) as pool:
                        before, after = pool.map(of, (tree, ROOT))
                    why = verdict(kept, before, after)
                except RuntimeError as error:  # one broken case must not cost the others theirs
                    why = str(error)
            if not why:
                records.save([replace(one, source=after["source"]) for one in kept], folder)
            print(f"{case.slug}/{case.name}: {why or 'confirmed'}", flush=True)


if __name__ == "__main__":
    print(json.dumps(numbers(*sys.argv[1:])))
