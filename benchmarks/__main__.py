"""Run the benchmarks: every case without a record for this kind of hardware, or those you name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import runner
from labcore import records
from labcore.device import badge, hardware


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "slugs", nargs="*", metavar="slug", help="chapters; default: all cases without a record"
    )
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument(
        "--save",
        nargs="?",
        const=records.FOLDER,
        type=Path,
        metavar="FOLDER",
        help="write the records after each case (default folder: the package's)",
    )
    parser.add_argument(
        "--merge", type=Path, metavar="FOLDER", help="merge another folder's records, and stop"
    )
    parser.add_argument("--stale", action="store_true", help="list records older than their code")
    parser.add_argument("--list", action="store_true", help="list the cases, and stop")
    return parser


def _has_record(case: runner.Case, folder: Path) -> bool:
    kind = hardware().kind
    return any(r.case == case.name for r in records.load(case.slug, kind=kind, folder=folder))


def _chosen(slugs: list[str], part: str | None, folder: Path) -> list[runner.Case]:
    """Return all cases of the named chapters; without names, those without a record.

    Cases that can't run on this hardware are left out.
    """
    cases = [case for slug in slugs or runner.slugs() for case in runner.cases_of(slug)]
    cases = [case for case in cases if case.runs_here() and (part is None or part in case.name)]
    if not slugs:
        cases = [case for case in cases if not _has_record(case, folder)]
    return sorted(cases, key=lambda case: case.minutes)


def _show(record: records.Record) -> None:
    print(f"  {record.quantity}: {record.p50:.4g} {record.unit}", end="")
    print(f"  (p20 {record.p20:.4g}, p80 {record.p80:.4g}, n {record.n})", flush=True)
    for name, samples in record.peers.items():
        ordered = sorted(samples)
        print(f"    {name}: {ordered[len(ordered) // 2]:.4g} {record.unit}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 1 if a case failed; the records of the others are kept."""
    args = _parser().parse_args(arguments)
    try:
        if args.merge:
            print(f"merged {records.merge(args.merge)} records")
            return 0
        if args.stale:
            for record in filter(records.is_stale, records.load()):
                print(" · ".join(record.key))
            return 0
        cases = _chosen(args.slugs, args.case, args.save or records.FOLDER)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if args.list:
        for case in cases:
            print(f"{case.slug}/{case.name}  (about {case.minutes:g} min, needs {case.needs})")
        return 0
    print(badge())
    failed = 0
    for case in cases:
        print(f"{case.slug}/{case.name}", flush=True)
        if lack := case.lacks():
            print(f"  skipped: {lack}", flush=True)
            continue
        start = time.perf_counter()
        try:
            found = runner.run(case)
        except Exception as error:  # one broken case must not cost the others their records
            failed += 1
            print(f"  failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        for record in found:
            _show(record)
        if args.save:
            records.save(found, args.save)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    if not cases:
        print("every case that runs here has a record; name a chapter to run it again")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
