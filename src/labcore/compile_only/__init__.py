"""Compile what the package launches, for GPUs that this machine may not have.

`launches` finds the programs by calling the public functions, `targets` says what a compiled one
needs, and `python -m labcore.compile_only` compiles them and compares them with a committed table.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from labcore.compile_only.targets import TARGETS, Target, needs
from labcore.device import INTERPRET
from labcore.records import hashes

__all__ = [
    "TARGETS",
    "Resources",
    "Target",
    "compilers",
    "measure",
    "names",
    "problems",
    "read",
    "write",
]

SLACK = 1.05  # allowed growth of registers and shared memory over the committed table
# The modules whose text decides what is compiled, beside the compiler.
SOURCES = (
    *(
        f"labcore.attention.{name}"
        for name in ("forward", "descriptors", "backward", "delta", "decode", "tiling", "configs")
    ),
    "labcore.optim.kernels",
    "labcore.optim.kernels_8bit",
)
# program -> target -> what `needs` returns
Resources: TypeAlias = dict[str, dict[str, dict[str, Any]]]


def compilers() -> ProcessPoolExecutor:
    """Return processes in which kernels compile, one per core: they lack Triton's interpreter."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(mp_context=spawn, initializer=_without_interpreter)


def _without_interpreter() -> None:
    # Importing labcore turned it on, as no GPU is visible; Triton itself isn't imported yet.
    os.environ[INTERPRET] = "0"


def measure(*, gated: bool = False, targets: Sequence[str] = tuple(TARGETS)) -> Resources:
    """Compile the programs for `targets` and return what each needs.

    gated: only those that the gate compiles each time. A program takes 1 to 10 s. Raises
    RuntimeError with its name if one doesn't compile.
    """
    with compilers() as pool:
        named = {target: pool.submit(names, target, gated) for target in targets}
        compiled = {
            (name, target): pool.submit(_compiled, name, target)
            for target, names in named.items()
            for name in names.result()
        }
        found: Resources = {name: {} for name, _ in compiled}
        for (name, target), future in compiled.items():
            found[name][target] = future.result()
    return found


def names(target: str, gated: bool = False) -> list[str]:
    """Return the names of `launches.programs`; for a process of `compilers`."""
    from labcore.compile_only.launches import programs

    return list(programs(target, gated=gated))


def _compiled(name: str, target: str) -> dict[str, Any]:
    from labcore.compile_only.launches import build, programs

    try:
        return needs(build(programs(target)[name], target))
    except Exception as error:
        raise RuntimeError(f"{name} did not compile for {target}: {error}") from error


def read(file: Path) -> dict[str, Any]:
    """Read a table: {"triton": its version, "source": a hash of SOURCES, "kernels": Resources}."""
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def write(found: Resources, file: Path) -> None:
    """Write a table, with a line for each program and target."""
    rows = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(target)}: {json.dumps(need)}" for target, need in row.items())
        + "}"
        for name, row in found.items()
    )
    head = f'{{"triton": "{version("triton")}",\n"source": "{_source()}",\n"kernels": {{\n'
    file.write_text(f"{head}{rows}}}}}\n", encoding="utf-8")


def _source() -> str:
    return hashes.digest_modules(SOURCES)


def problems(found: Resources, table: Mapping[str, Any]) -> list[str]:
    """Describe what a program needs beyond its target or beyond `table`.

    The matrix unit must be the table's. No spill, warning or growth by more than 5% may be new, no
    pipeline may hold fewer tiles, and no register may be reused sooner. All but spills and
    warnings are compared only under the Triton version that wrote the table. The table must be of
    today's kernels.
    """
    wrong = []
    if table["source"] != _source():
        wrong.append(
            "the kernels have changed since the table was written; rewrite it with --write"
        )
    same = table["triton"] == version("triton")
    for name, targets in found.items():
        for target, need in targets.items():
            where = f"{name} on {target}"
            limit = TARGETS[target].shared_limit
            if need["shared"] > limit:
                wrong.append(
                    f"{where}: {need['shared']} bytes of shared memory, but a block may use "
                    f"{limit}; use a smaller block or fewer stages"
                )
            bound = table["kernels"].get(name, {}).get(target)
            if bound is None:
                wrong.append(f"{where}: not in the table; rewrite it with --write")
            else:
                wrong += [f"{where}: {text}" for text in _beyond(need, bound, same=same)]
    return wrong


def _beyond(need: Mapping[str, Any], bound: Mapping[str, Any], *, same: bool) -> Iterator[str]:
    """Yield what a program needs beyond its row of the table; same: the same Triton wrote it."""
    for quantity, slack in {"spills": 1.0, "registers": SLACK, "shared": SLACK}.items():
        if need[quantity] > slack * bound[quantity] and (same or quantity == "spills"):
            yield f"{need[quantity]} {quantity}, but the table has {bound[quantity]}"
    if len(need["warnings"]) > len(bound["warnings"]):
        yield f"the assembler's code has a fault: {need['warnings'][0]}"
    if need["unit"] != bound["unit"]:
        yield f"matrix unit {need['unit'] or 'none'}, but the table has {bound['unit'] or 'none'}"
    if same and need["buffers"] < bound["buffers"]:
        yield f"{need['buffers']} tiles in flight, but the table has {bound['buffers']}"
    if same and (need["reuse"] or 1000) < (bound["reuse"] or 1000):
        yield f"a register is reused after {need['reuse']} instructions, not {bound['reuse']}"
