"""Makes each student's own notebooks: `make labs VARIANT=roster.csv`.

`<out>/<student>/<slug>.ipynb` is the lab's release with the student's number as `STUDENT`. Some
cases and the order of the clinic's patients depend on the number. The numbers are derived from the
roster's names and a secret that the instructor keeps; the same roster and secret give the same
bytes. `key.csv`, next to the folder and only for the instructor, says what each number means in
each lab.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from labcore import exercises
from labcore.exercises import Clinic, student_seed
from labcore.labs import releases
from labcore.labs.source import LabError, cell_text
from labcore.labs.students import name_problem, number_of

__all__ = ["KEY", "OUT", "SECRET", "numbers", "read_roster", "read_table", "write"]

# Defaults, relative to the checkout.
OUT = Path("_build/variants/release")
KEY, SECRET = OUT.with_name("key.csv"), OUT.with_name("secret")
COLUMNS = ("student", "name", "id", "SIS User ID")
KEY_COLUMNS = ("student", "number", "lab", "exercise", "what", "value")
SHORTEST = 20  # characters of a secret; `leaks` searches for lines of this length or more
NOBODY = re.compile(r"^STUDENT = 0\b", re.MULTILINE)


def _text(path: Path, what: str) -> str:
    """The file's text without a byte order mark. what: the file's role, for messages."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} {path} is not in UTF-8; save it in that encoding") from error


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The nonempty rows, each with its line number."""
    text = _text(path, "roster")
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if any(cell.strip() for cell in row):
                yield rows.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: is not valid CSV ({error})") from error


def _same(name: str) -> str:
    """A form in which two spellings of one name are equal, as in `student_seed`."""
    return unicodedata.normalize("NFKC", name).strip().casefold()


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """A roster: each student's row by column title, in the roster's order.

    The file is CSV, separated by commas, semicolons or tabs. The student is in the first existing
    column of `student`, `name`, `id` and `SIS User ID`. A student's name becomes a folder name and
    is converted to Unicode's composed form (NFC). Raises ValueError listing each bad line.
    """
    records = _records(path)
    header = [title.strip() for title in next(records, (0, []))[1]]
    known = [title.casefold() for title in header]
    column = next((known.index(one.casefold()) for one in COLUMNS if one.casefold() in known), None)
    if column is None:
        there = ", ".join(header) or "nothing"
        raise ValueError(f"{path} must have a column {' or '.join(COLUMNS)}, got {there}")
    table: dict[str, dict[str, str]] = {}
    lines: dict[str, list[tuple[int, str]]] = {}
    problems = []
    for line, row in records:
        name = unicodedata.normalize("NFC", row[column].strip()) if len(row) > column else ""
        if len(row) > len(header):
            problem = f"{len(row)} columns, but the header has {len(header)}; quote the name"
        elif name == "Points Possible":  # Canvas's second line is not a student
            continue
        else:
            problem = name_problem(name) if name else f"the column {header[column]} is empty"
        if problem:
            problems.append(f"line {line}: {name!r}: {problem}")
        else:
            lines.setdefault(_same(name), []).append((line, name))
            cells = [cell.strip() for cell in row]
            table[name] = dict(itertools.zip_longest(header, cells, fillvalue=""))
    for found in lines.values():
        if len(found) > 1:
            where = ", ".join(str(line) for line, _ in found)
            problems.append(f"lines {where}: {found[0][1]!r} occurs more than once")
    if problems:
        raise ValueError("\n".join(f"{path}, {problem}" for problem in problems))
    if not lines:
        raise ValueError(f"{path} names no student; write one per line below the header")
    return table


def read_roster(path: Path) -> list[str]:
    """The students of a roster, in its order; see `read_table`."""
    return list(read_table(path))


def _read_secret(path: Path) -> str:
    secret = _text(path, "secret").strip()
    if len(secret) < SHORTEST:
        raise ValueError(
            f"the secret {path} has {len(secret)} characters; a short one can be guessed from a "
            f"number, so give it {SHORTEST} or more, or delete the file to get a new one"
        )
    return secret


def _drawn(students: Sequence[str], secret: str) -> dict[str, int]:
    """A distinct number for each student. The numbers do not depend on the roster's order.

    In the rare case that two names give the same number, the first in the alphabet keeps it, and no
    other student's number changes.
    """
    found: dict[int, str] = {}
    others = []
    for name in sorted(students, key=_same):
        if found.setdefault(student_seed(secret, name), name) != name:
            others.append(name)
    for name in others:
        again = 1
        while found.setdefault(student_seed(secret, f"{name}\n{again}"), name) != name:
            again += 1
    by_name = {name: number for number, name in found.items()}
    return {name: by_name[name] for name in students}


def numbers(roster: Path, secret: Path) -> dict[str, int]:
    """Each student's number, by the name that `read_roster` returns.

    roster, secret: paths of the files that the class's notebooks were made with. Raises ValueError
    if either cannot be used.
    """
    return _drawn(read_roster(roster), _read_secret(secret))


def _write_private(path: Path, text: str) -> None:
    """Atomically writes a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    os.replace(new, path)


def _numbered(slug: str, release: str, number: int) -> str:
    """The text of a release with this number as STUDENT; unchanged if the lab has no numbers."""
    plain, notebook = json.loads(release), json.loads(release)
    if not number_of(plain, plain):
        return release
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = NOBODY.sub(f"STUDENT = {number}", cell_text(cell))
            cell["source"] = text.splitlines(keepends=True)
    if number_of(notebook, plain) != str(number):
        raise LabError(f"{slug}: its source must have exactly one plain line STUDENT = 0")
    return releases.sealed(notebook)


def _means(slug: str, number: int) -> Iterator[tuple[str, str, str]]:
    """What depends on a student's number in a lab: exercise, what, value.

    For a function, these are the arguments that its check puts into every case; for a clinic, each
    patient's fault. One row of "" if nothing depends on it.
    """
    rows = []
    for task in exercises.load(slug) if slug in exercises.slugs() else []:
        own: Mapping[str, object]
        own = task.diagnoses(number) if isinstance(task, Clinic) else task.variant(number)
        rows += [(task.id, what, str(value)) for what, value in own.items()]
    yield from rows or [("", "", "")]


def _key(drawn: Mapping[str, int], slugs: Sequence[str]) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(KEY_COLUMNS)
    for student, number in drawn.items():
        for slug in slugs:
            writer.writerows((student, number, slug, *row) for row in _means(slug, number))
    return file.getvalue()


def _check_places(out: Path, secret: Path, key: Path) -> None:
    if out in secret.parents or out == secret:
        raise ValueError(f"the secret {secret} is in {out}, which students get; move it elsewhere")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder; choose another --out")
    if key.exists() and not _text(key, "key").startswith(",".join(KEY_COLUMNS)):
        raise ValueError(
            f"{key} was not made by this command and would be overwritten; choose another --out"
        )


def write(
    root: Path, roster: Path, secret: Path, out: Path, slugs: Sequence[str] = ()
) -> list[str]:
    """Writes `<out>/<student>/<slug>.ipynb` for the roster, and `key.csv` next to out.

    roster: see `read_roster`. secret: the file with the class's secret, created if missing.
    slugs: the labs, all if none is named. Returns lines that say what was done. A notebook that
    someone edited is kept next to the new one. Raises ValueError and writes no notebook for a bad
    roster, secret, slug or source.
    """
    students = read_roster(roster)
    out, secret = out.resolve(), secret.resolve()
    key = out.with_name(KEY.name)
    _check_places(out, secret, key)
    originals = {
        slug: releases.generate(path) for slug, path in releases.chosen(root, slugs).items()
    }
    said = []
    if not secret.exists():
        _write_private(secret, secrets.token_urlsafe(32) + "\n")
        said.append(f"made the secret {secret}; keep it: without it, the numbers are lost")
    elif secret.stat().st_mode & 0o077:
        said.append(f"others can read the secret {secret}; run chmod 600 on it")
    word = _read_secret(secret)
    drawn = _drawn(students, word)
    texts = {
        (student, slug): _numbered(slug, release, number)
        for student, number in drawn.items()
        for slug, release in originals.items()
    }
    if any(word in text for text in texts.values()):
        raise ValueError(f"the secret {secret} occurs in the labs; choose another one")
    made = [
        releases.place(slug, out / student / f"{slug}.ipynb", text)
        for (student, slug), text in texts.items()
    ]
    _write_private(key, _key(drawn, list(originals)))
    count = sum(one.written for one in made)
    said.append(
        f"{out}: {count} notebooks written, {len(made) - count} unchanged "
        f"(students: {len(students)}, labs: {len(originals)})"
    )
    said += [f"{one.kept} is an edited notebook that was kept" for one in made if one.kept]
    strangers = sorted(path.name for path in out.iterdir() if path.name not in drawn)
    if strangers:
        said.append(f"not on the roster, and left unchanged: {', '.join(strangers)}")
    said.append(f"{key}: what each number means; for you only")
    return said
