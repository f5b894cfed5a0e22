"""`python -m labcore course | doctor | address`: the course's commands."""

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
