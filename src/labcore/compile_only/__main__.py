"""`python -m labcore.compile_only` prints what each program needs of each GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from labcore.compile_only import TARGETS, Resources, measure, problems, read, write


def _rows(found: Resources) -> Iterator[str]:
    width = max(map(len, found))
    yield (
        f"{'program':{width}}  {'target':7} registers spills matrix unit    buffers reuse "
        "shared / limit"
    )
    for name, targets in found.items():
        for target, need in targets.items():
            limit = TARGETS[target].shared_limit
            yield (
                f"{name:{width}}  {target:7} {need['registers']:9} {need['spills']:6} "
                f"{need['matrix']:6} {need['unit']:7} {need['buffers']:7} "
                f"{need['reuse'] or '-':>5} {need['shared']:6} / {limit}"
            )
            yield from (f"  {warning}" for warning in need["warnings"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if --check finds a problem."""
    parser = argparse.ArgumentParser(prog="python -m labcore.compile_only", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument(
        "--gated", action="store_true", help="only the programs that `make test` compiles"
    )
    parser.add_argument(
        "--check", type=Path, metavar="TABLE", help="fail if a program needs more than this table"
    )
    parser.add_argument("--write", type=Path, metavar="TABLE", help="rewrite this table")
    chosen = parser.parse_args(arguments)
    if chosen.write and (chosen.gated or len(chosen.targets) < len(TARGETS)):
        parser.error("--write needs all programs and targets, got a part; leave out the others")
    found = measure(gated=chosen.gated, targets=chosen.targets)
    print("\n".join(_rows(found)))
    if chosen.write:
        write(found, chosen.write)
    if chosen.check is None:
        return 0
    wrong = problems(found, read(chosen.check))
    print("\n".join(wrong) or "no program needs more than the table")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
