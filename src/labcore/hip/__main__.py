"""Build, check and time the steps on this machine's GPU, or check compiler reports against a table.

Without --check or --write, this needs an AMD CDNA GPU and hipcc (or, for the steps without matrix
cores, an NVIDIA GPU and nvcc), and writes the records that the chapter shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from labcore import records
from labcore.device import badge, default_device, hardware, versions
from labcore.hip import compile as compiling
from labcore.hip import gpu
from labcore.hip.build import DECODE
from labcore.records import Record, hashes


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command's options."""
    top = argparse.ArgumentParser(prog="python -m labcore.hip", description=__doc__)
    top.add_argument(
        "--save",
        type=Path,
        default=records.FOLDER,
        metavar="FOLDER",
        help="folder for the records (default: the one in the package)",
    )
    top.add_argument(
        "--check", type=Path, metavar="TABLE", help="check compiler reports against this table"
    )
    top.add_argument(
        "--write", type=Path, metavar="TABLE", help="write compiler reports to this table"
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 for success, 1 for a failed check, or 2 if it can't run."""
    asked = parser().parse_args(arguments)
    try:
        if asked.check or asked.write:
            return hold(asked.check, asked.write)
        return run(asked.save)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"labcore.hip: {error}", file=sys.stderr)
        return 2


def hold(table: Path | None, write: Path | None) -> int:
    """Compile for every target with an installed compiler; requires those of the gated targets."""
    lacking = [compiling.missing(name) for name, t in compiling.TARGETS.items() if t.gated]
    if any(lacking):
        raise RuntimeError("; ".join(filter(None, lacking)))
    found = compiling.measure()
    print("\n".join(compiling.rows(found)))
    if write:
        text = json.dumps(compiling.table_of(found), indent=1) + "\n"
        write.write_text(text, encoding="utf-8")
    if table is None:
        return 0
    wrong = compiling.problems(found, json.loads(table.read_text(encoding="utf-8")))
    print("".join(f"{sentence}\n" for sentence in wrong), end="")
    return 1 if wrong else 0


def run(folder: Path) -> int:
    """Build, check and time the steps, then write records to `folder` unless a step is wrong."""
    lacking = gpu.problem()
    if lacking:
        print(f"labcore.hip: {lacking}", file=sys.stderr)
        return 2
    print(badge())
    device, steps = default_device(), {}
    failed = False
    for name, step in gpu.build():
        failed |= told(name, gpu.wrong(step, device))
        steps[name] = step
    decoder = gpu.build_decoder()
    if decoder is not None:
        failed |= told(DECODE.stem, gpu.wrong_decoder(decoder, device))
    if failed:
        return 1
    for case in gpu.timed_cases():
        record = timed(case, gpu.times(steps, case, device))
        records.save([record], folder)
        shown = {**record.peers, record.quantity.rpartition("/")[2]: record.samples}
        medians = ", ".join(
            f"{name} {sorted(samples)[len(samples) // 2]:.3g}" for name, samples in shown.items()
        )
        print(f"{case.name}: {medians} ms", flush=True)
    print(f"records are in {folder}; `python -m benchmarks --merge {folder}` merges them elsewhere")
    return 0


def told(name: str, wrong: Sequence[str]) -> bool:
    """Print whether a step agrees with torch; return whether it doesn't."""
    print(f"{name}: {'agrees with torch' if not wrong else 'WRONG'}", flush=True)
    print("".join(f"  {sentence}\n" for sentence in wrong), end="")
    return bool(wrong)


def timed(case: gpu.Case, comparison: gpu.Comparison) -> Record:
    """Return a case's record: the last step's times in ms, with the other steps' as peers."""
    samples = {
        name: tuple(1e3 * second for second in timing.samples)
        for name, timing in comparison.timings.items()
    }
    last = max(name for name in samples if name != "torch")
    file = hashes.PACKAGE.parent.parent / "benchmarks" / "hip.py"
    return Record(
        slug="hip",
        case="gpu/steps",
        quantity=f"{case.name}/{last}",
        unit="ms",
        samples=samples.pop(last),
        hardware=asdict(hardware()),
        versions=versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # In a checkout, a record becomes stale when its slug's benchmark changes.
        source=hashes.describe(file if file.is_file() else Path(gpu.__file__), "", gpu=True),
        peers=samples,
        details={
            "arch": gpu.architecture(),
            "heads": case.heads,
            "queries": case.q_len,
            "keys": case.k_len,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
