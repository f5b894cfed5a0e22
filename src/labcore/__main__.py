"""`python -m labcore <command>`: the course's commands; `--help` lists them."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Build the parser for the commands and their options."""
    top = argparse.ArgumentParser(prog="python -m labcore", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    course = commands.add_parser("course", help="serve JupyterLab and the book locally")
    course.add_argument("--host", default="127.0.0.1")
    course.add_argument("--port", type=int, default=8888)
    course.add_argument("--no-browser", action="store_true", help="don't open a browser")
    commands.add_parser("doctor", help="check what this machine has and how to fix what's missing")
    address = commands.add_parser("address", help="show or set the repository's address")
    address.add_argument("url", nargs="?", help='https://<host>/<owner>/<name>; "" removes it')
    labs = commands.add_parser("labs", help="make students' notebooks from the labs' sources")
    labs.add_argument("slug", nargs="*", help="labs to release; default: all")
    labs.add_argument("--variant", type=Path, metavar="CSV", help="roster: one variant per student")
    labs.add_argument("--secret", type=Path, metavar="FILE", help="the secret, if not the default")
    labs.add_argument("--out", type=Path, help="for --variant; default: _build/variants/release")
    grade = commands.add_parser("grade", help="grade the notebooks of a class")
    grade.add_argument(
        "submissions", type=Path, nargs="?", help="a folder, a zip, or a list of repositories"
    )
    grade.add_argument("--out", type=Path, help="a private folder; default: _build/grades")
    grade.add_argument("--due", metavar="TIME", help="deadline, such as 2026-11-30T23:59+01:00")
    grade.add_argument("--columns", type=Path, metavar="TOML", help="columns for a learning system")
    grade.add_argument("--roster", type=Path, metavar="CSV", help="all students, for --columns")
    grade.add_argument("--variant", type=Path, metavar="CSV", help="the roster of `labs --variant`")
    grade.add_argument("--secret", type=Path, metavar="FILE", help="the secret, if not the default")
    grade.add_argument("--jobs", type=int, default=0, help="processes; default: one per processor")
    grade.add_argument("--unsandboxed", action="store_true", help="run students' code unprotected")
    step = grade.add_mutually_exclusive_group()
    step.add_argument("--only-queue", action="store_true", help="fill the queue, run nothing")
    step.add_argument("--work", type=Path, metavar="OUT", help="work on the queue of OUT")
    step.add_argument("--collect", type=Path, metavar="OUT", help="write the results of OUT")
    students = commands.add_parser("student-repository", help="make the students' repository")
    students.add_argument("out", type=Path, help="a new folder, or an earlier one to update")
    commands.add_parser("progress", help="list what you have passed in your copies of the labs")
    slides = commands.add_parser("slides", help="make one slide deck per chapter")
    slides.add_argument("slug", nargs="*", help="chapters; default: all")
    slides.add_argument("--out", type=Path, default=Path("_build/slides"))
    pdf = commands.add_parser("pdf", help="make a PDF of the built book")
    pdf.add_argument("--out", type=Path, default=Path("_build/course.pdf"))
    offline = commands.add_parser("zip", help="zip the built book, to open without a network")
    offline.add_argument("--out", type=Path, default=Path("_build/course.zip"))
    chapter = commands.add_parser(
        "new-chapter", help="write the files of a new chapter and its lab"
    )
    chapter.add_argument("slug", help="its name everywhere, such as gradient_noise")
    chapter.add_argument("--title", default="", help="the page's title; default: the slug in words")
    key = commands.add_parser("clinic-key", help="print the instructor's key to the clinics")
    key.add_argument("slug", nargs="*", help="labs; default: all")
    key.add_argument("--number", type=int, default=0, help="the student's number; default: 0")
    return top


def run(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run one command in the checkout at `root` (default: here) and return the exit code."""
    asked = parser().parse_args(arguments)
    root = root or Path.cwd()
    if asked.command == "course":
        from labcore.course.server import serve

        quiet = asked.no_browser or bool(os.environ.get("NO_BROWSER"))
        serve(root, host=asked.host, port=asked.port, browser=not quiet)
        return 0
    if asked.command == "progress":
        from labcore.exercises import progress

        for slug, tasks in progress.kept(root).items():
            print(f"{slug}: {progress.summary(tasks)}")
            print("\n".join(f"    {task.name}: {task}" for task in tasks))
        if not progress.kept(root):
            print("No lab was begun in my/ yet: open a lab's page and press Run this page.")
        return 0
    if asked.command == "labs" and asked.variant:
        from labcore.labs import variants

        secret, out = root / (asked.secret or variants.SECRET), root / (asked.out or variants.OUT)
        print("\n".join(variants.write(root, asked.variant, secret, out, asked.slug)))
        return 0
    if asked.command == "labs":
        from labcore.labs import releases

        if asked.out or asked.secret:
            raise ValueError("--out and --secret need --variant; releases go to labs/release")
        written = releases.write(root, asked.slug)
        print("\n".join(map(str, written)))
        return 1 if any(release.problem for release in written) else 0
    if asked.command == "grade":
        return grade(root, asked)
    if asked.command == "doctor":
        from labcore.course import doctor

        findings = doctor.examine(root)
        print("\n".join(map(str, findings)))
        return 0 if all(finding.fine for finding in findings) else 1
    if asked.command != "address":
        print("\n".join(lines_of(root, asked)))
        return 0
    from labcore.course import address

    if asked.url is not None:
        for path in address.write(root, asked.url):
            print(f"written: {path.relative_to(root)}")
    lines, agree = address.report(root)
    print("\n".join(lines))
    return 0 if agree else 1


def lines_of(root: Path, asked: argparse.Namespace) -> list[str]:
    """Run a command that makes something to hand out, and return the lines to print."""
    if asked.command == "student-repository":
        from labcore.labs import student_repository

        return student_repository.write(root, root / asked.out)
    if asked.command == "new-chapter":
        from labcore.course import new_chapter

        return new_chapter.write(root, asked.slug, asked.title)
    if asked.command == "slides":
        from labcore.book import slides

        return slides.write(root, asked.slug, root / asked.out)
    if asked.command == "clinic-key":
        from labcore.book import clinics

        return [clinics.key(asked.number, asked.slug)]
    from labcore.book import printing

    make = printing.pdf if asked.command == "pdf" else printing.zipped
    return make(root, root / asked.out)


def grade(root: Path, asked: argparse.Namespace) -> int:
    """Grade a class. Without a sandbox, run nothing and return exit code 2."""
    if sys.platform != "linux":
        raise RuntimeError(
            f"grading needs Linux for its sandbox, limits and locks, got {sys.platform}; use WSL "
            "on Windows, or a container or a virtual machine on macOS"
        )
    from labcore.grading import report, steps
    from labcore.labs import variants
    from labcore.labs.releases import source_paths

    def say(line: str) -> None:
        print(line, flush=True)

    if asked.collect:
        rows = steps.collect(root, root / asked.collect, say=say)
        return 1 if any(steps.NOT_YET in row.status for row in rows) else 0
    if not asked.unsandboxed and not asked.only_queue and (why := steps.refusal()):
        print(why, file=sys.stderr)
        return 2
    settings = steps.Settings(sandboxed=not asked.unsandboxed, jobs=asked.jobs)
    if asked.work:
        say(f"{steps.work(root, root / asked.work, settings=settings)} graded here")
        return 0
    if asked.submissions is None:
        raise ValueError("pass the submissions: a folder, a zip, or a list of repositories")
    if asked.roster and not asked.columns:
        raise ValueError("--roster needs --columns, the table for a learning system; pass both")
    if asked.jobs < 0:
        raise ValueError(f"--jobs must be a number of processes, at least 0, got {asked.jobs}")
    sources = source_paths(root)
    roster = variants.read_table(asked.roster) if asked.roster else {}
    names = next(iter(roster.values()), {}).keys()
    settings = replace(
        settings,
        due=report.parse_due(asked.due) if asked.due else None,
        columns=report.read_columns(asked.columns, sources, names) if asked.columns else {},
        roster=roster,
        numbers=variants.numbers(asked.variant, asked.secret or root / variants.SECRET)
        if asked.variant
        else {},
    )
    step = steps.prepare if asked.only_queue else steps.grade
    step(root, asked.submissions, root / (asked.out or "_build/grades"), settings=settings, say=say)
    return 0


def main() -> int:
    """Run the command line. An error prints one sentence, not a traceback."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the pipe's reader is gone, so the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        print(f"{error.name} is missing; run pip install 'labcore[all]'", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
