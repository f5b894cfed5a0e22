"""`python -m labcore course | doctor | address | labs | grade`: the course's commands."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="python -m labcore", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    course = commands.add_parser("course", help="JupyterLab and the book behind one local address")
    course.add_argument("--host", default="127.0.0.1")
    course.add_argument("--port", type=int, default=8888)
    course.add_argument("--no-browser", action="store_true", help="open no browser")
    commands.add_parser("doctor", help="what this machine has and lacks, and what mends it")
    address = commands.add_parser("address", help="shows or sets the repository's address")
    address.add_argument("url", nargs="?", help='https://<host>/<owner>/<name>, "" to remove it')
    labs = commands.add_parser("labs", help="students' notebooks from the labs' sources")
    labs.add_argument("slug", nargs="*", help="labs to release; all where none is named")
    grade = commands.add_parser("grade", help="grades the notebooks of a class")
    grade.add_argument("folder", type=Path, help="holds <student>/<slug>.ipynb")
    grade.add_argument("--out", type=Path, default=Path("_build/grades"))
    grade.add_argument("--unsandboxed", action="store_true", help="run students' code as it is")
    return top


def run(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Runs one command in the checkout at root (default: here). Returns the exit code."""
    asked = parser().parse_args(arguments)
    root = root or Path.cwd()
    if asked.command == "course":
        from labcore.publish.server import serve

        quiet = asked.no_browser or bool(os.environ.get("NO_BROWSER"))
        serve(root, host=asked.host, port=asked.port, browser=not quiet)
        return 0
    if asked.command == "labs":
        from labcore.publish import labs

        releases = labs.write(root, asked.slug)
        print("\n".join(map(str, releases)))
        return 1 if any(release.problem for release in releases) else 0
    if asked.command == "grade":
        return grade(root, asked.folder, asked.out, unsandboxed=asked.unsandboxed)
    if asked.command == "doctor":
        from labcore.publish import doctor

        findings = doctor.examine(root)
        print("\n".join(map(str, findings)))
        return 0 if all(finding.fine for finding in findings) else 1
    from labcore.publish import address

    if asked.url is not None:
        for path in address.write(root, asked.url):
            print(f"written: {path.relative_to(root)}")
    lines, agree = address.report(root)
    print("\n".join(lines))
    return 0 if agree else 1


def grade(root: Path, folder: Path, out: Path, *, unsandboxed: bool) -> int:
    """Grades a class; exit code 2, and nothing is run, without `--unsandboxed`."""
    from labcore.publish import grading

    if not unsandboxed:
        print(grading.NOT_SANDBOXED, file=sys.stderr)
        return 2
    grading.grade(root, folder, root / out, say=lambda line: print(line, flush=True))
    return 0


def main() -> int:
    """The command line: an error is one sentence, not a traceback."""
    try:
        return run()
    except ModuleNotFoundError as error:
        print(f"{error.name} is missing; run pip install 'labcore[all]'", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
