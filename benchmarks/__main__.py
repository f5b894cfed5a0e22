"""Run the benchmarks: every case without a record for this kind of hardware, or those you name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import page, runner
from benchmarks.confirm import confirm
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
    parser.add_argument(
        "--confirm",
        metavar="COMMIT",
        help="keep stale records of counted cases whose numbers are still that commit's, and stop",
    )
    parser.add_argument("--page", action="store_true", help="write benchmarks/README.md, and stop")
    parser.add_argument("--stale", action="store_true", help="list records older than their code")
    parser.add_argument(
        "--gpu", action="store_true", help="only cases that need a GPU, the most telling first"
    )
    parser.add_argument(
        "--minutes", type=float, help="start no case that would end later, by its estimate"
    )
    parser.add_argument("--list", action="store_true", help="list the cases, and stop")
    return parser


# With --gpu, in this order: what fails here is not worth timing.
ORDER = ("parity", "forward", "backward", "decode", "fused")


def _worth(case: runner.Case) -> tuple[int, float]:
    """Return a sort key: the place in ORDER, then the estimated minutes."""
    kind = case.name.split("/")[0]
    return ORDER.index(kind) if kind in ORDER else len(ORDER), case.minutes


def _has_record(case: runner.Case, folder: Path) -> bool:
    kind = hardware().kind
    return any(r.case == case.name for r in records.load(case.slug, kind=kind, folder=folder))


def _chosen(
    slugs: list[str], part: str | None, folder: Path, *, gpu: bool = False
) -> list[runner.Case]:
    """Return all cases of the named chapters; without names, those without a record.

    Cases that can't run on this hardware are left out. gpu: take only those that need a GPU.
    """
    cases = [case for slug in slugs or runner.slugs() for case in runner.cases_of(slug)]
    cases = [case for case in cases if case.runs_here() and (part is None or part in case.name)]
    if not slugs:
        cases = [case for case in cases if not _has_record(case, folder)]
    if gpu:
        return sorted((case for case in cases if case.needs == "gpu"), key=_worth)
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
        if args.page:
            page.PAGE.write_text(page.text(), encoding="utf-8")
            return 0
        if args.stale:
            for record in filter(records.is_stale, records.load()):
                print(" · ".join(record.key))
            return 0
        slugs = args.slugs or (runner.slugs() if args.confirm else [])
        cases = _chosen(slugs, args.case, args.save or records.FOLDER, gpu=args.gpu)
        if args.confirm:
            confirm(cases, args.confirm, args.save or records.FOLDER)
            return 0
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if args.list:
        for case in cases:
            print(f"{case.slug}/{case.name}  (about {case.minutes:g} min, needs {case.needs})")
        return 0
    print(badge())
    failed, begun = 0, time.perf_counter()
    barred: list[records.Record] = []
    for case in cases:
        spent = (time.perf_counter() - begun) / 60
        if args.minutes is not None and spent + case.minutes > args.minutes:
            print(f"{case.slug}/{case.name} and what follows: left for another run")
            break
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
            if case.name.startswith("parity/"):
                print("what errs is not timed: mend it first", file=sys.stderr)
                break
            continue
        for record in found:
            _show(record)
        barred += [record for record in found if "bar" in record.details]
        if args.save:
            records.save(found, args.save)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    for record in barred:
        name = f"{record.case}: {record.quantity}"
        print(f"{name:70} {record.p50:8.3f}, aim {record.details['bar']:g}")
    if not cases:
        print("every case that runs here has a record; name a chapter to run it again")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
