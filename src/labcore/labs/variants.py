"""Each student's own notebooks: `make labs VARIANT=roster.csv`.

`<out>/<student>/<slug>.ipynb` is the release of the lab with the student's number as `STUDENT`, on
which some cases and the order of the clinic's patients depend. The numbers come from the roster's
names and from a secret that the instructor keeps: the same two give the same bytes. `key.csv`
beside the folder, for the instructor alone, has what each number means in each lab.
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

# In the checkout, where nothing else is said.
OUT = Path("_build/variants/release")
KEY, SECRET = OUT.with_name("key.csv"), OUT.with_name("secret")
COLUMNS = ("student", "name", "id", "SIS User ID")
KEY_COLUMNS = ("student", "number", "lab", "exercise", "what", "value")
SHORTEST = 20  # characters of a secret; `leaks` looks for lines of this length on
NOBODY = re.compile(r"^STUDENT = 0\b", re.MULTILINE)


def _text(path: Path, what: str) -> str:
    """The file's text without a byte order mark. what: the file's part here, for messages."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"the {what} {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} {path} is no UTF-8; save it in that encoding") from error


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that hold anything, each with the number of its line."""
    text = _text(path, "roster")
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if any(cell.strip() for cell in row):
                yield rows.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: is no CSV ({error})") from error


def _same(name: str) -> str:
    """What two spellings of one name have in common, as for `student_seed`."""
    return unicodedata.normalize("NFKC", name).strip().casefold()


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """A roster by student, in its order: what each column has for the student.

    CSV, its columns parted by commas, semicolons or tabs. The student stands in the column
    `student`, `name`, `id` or `SIS User ID`, the first of these that is there. A student's name
    becomes a folder's: it comes in Unicode's composed form (NFC), whatever the file has. Raises
    ValueError with each bad line.
    """
    records = _records(path)
    header = [title.strip() for title in next(records, (0, []))[1]]
    known = [title.casefold() for title in header]
    column = next((known.index(one.casefold()) for one in COLUMNS if one.casefold() in known), None)
    if column is None:
        there = ", ".join(header) or "nothing"
        raise ValueError(f"{path} needs a column {' or '.join(COLUMNS)}, got {there}")
    table: dict[str, dict[str, str]] = {}
    lines: dict[str, list[tuple[int, str]]] = {}
    problems = []
    for line, row in records:
        name = unicodedata.normalize("NFC", row[column].strip()) if len(row) > column else ""
        if len(row) > len(header):
            problem = f"{len(row)} columns, the header has {len(header)}; put the name in quotes"
        elif name == "Points Possible":  # Canvas's second line is nobody
            continue
        else:
            problem = name_problem(name) if name else f"nothing in the column {header[column]}"
        if problem:
            problems.append(f"line {line}: {name!r}: {problem}")
        else:
            lines.setdefault(_same(name), []).append((line, name))
            cells = [cell.strip() for cell in row]
            table[name] = dict(itertools.zip_longest(header, cells, fillvalue=""))
    for found in lines.values():
        if len(found) > 1:
            where = ", ".join(str(line) for line, _ in found)
            problems.append(f"lines {where}: {found[0][1]!r} stands there more than once")
    if problems:
        raise ValueError("\n".join(f"{path}, {problem}" for problem in problems))
    if not lines:
        raise ValueError(f"{path} names no student; write one a line below the header")
    return table


def read_roster(path: Path) -> list[str]:
    """The students of a roster in its order; see `read_table`."""
    return list(read_table(path))


def _read_secret(path: Path) -> str:
    secret = _text(path, "secret").strip()
    if len(secret) < SHORTEST:
        raise ValueError(
            f"the secret {path} has {len(secret)} characters, and a short one can be guessed from "
            f"a number; give it {SHORTEST} or more, or remove the file for a new one"
        )
    return secret


def _drawn(students: Sequence[str], secret: str) -> dict[str, int]:
    """A number of its own for each student, in the roster's order; that order does not matter.

    Two names with the same number are rare. Then the first in the alphabet keeps it, and no
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
    """Each student's number, by the name that `read_roster` gives.

    roster, secret: paths of the files that the class's notebooks were made with. Raises ValueError
    where either cannot be used.
    """
    return _drawn(read_roster(roster), _read_secret(secret))


def _write_private(path: Path, text: str) -> None:
    """Writes a file that its owner alone can read, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    os.replace(new, path)


def _numbered(slug: str, release: str, number: int) -> str:
    """The text of a release with another number as STUDENT; as it is where the lab has none."""
    plain, notebook = json.loads(release), json.loads(release)
    if not number_of(plain, plain):
        return release
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = NOBODY.sub(f"STUDENT = {number}", cell_text(cell))
            cell["source"] = text.splitlines(keepends=True)
    if number_of(notebook, plain) != str(number):
        raise LabError(f"{slug}: give its source one plain line STUDENT = 0, and no other")
    return releases.sealed(notebook)


def _means(slug: str, number: int) -> Iterator[tuple[str, str, str]]:
    """What depends on a student's number in a lab: exercise, what, value.

    Of a function the arguments that the check puts into every case; of a clinic each patient's
    fault. One row of "" where nothing does.
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
        raise ValueError(f"the secret {secret} lies in {out}, which students get; move it out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is no folder; name another --out")
    if key.exists() and not _text(key, "key").startswith(",".join(KEY_COLUMNS)):
        raise ValueError(f"{key} is no key of this command and would be lost; name another --out")


def write(
    root: Path, roster: Path, secret: Path, out: Path, slugs: Sequence[str] = ()
) -> list[str]:
    """Writes `<out>/<student>/<slug>.ipynb` for the roster and `key.csv` beside out.

    roster: see `read_roster`. secret: the file of the class's secret, made where there is none.
    slugs: the labs, all where none is named. Returns what was done, a line each. A notebook that
    someone edited is kept beside the new one. Raises ValueError, and writes no notebook, for a bad
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
        said.append(f"made the secret {secret}; keep it: without it the numbers do not come back")
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
        raise ValueError(f"the secret {secret} is a word of the labs; choose another one")
    made = [
        releases.place(slug, out / student / f"{slug}.ipynb", text)
        for (student, slug), text in texts.items()
    ]
    _write_private(key, _key(drawn, list(originals)))
    count = sum(one.written for one in made)
    said.append(
        f"{out}: {count} notebooks written, {len(made) - count} unchanged "
        f"({len(students)} students, {len(originals)} labs)"
    )
    said += [f"{one.kept} is a notebook that had been edited" for one in made if one.kept]
    strangers = sorted(path.name for path in out.iterdir() if path.name not in drawn)
    if strangers:
        said.append(f"not on the roster, and left as they are: {', '.join(strangers)}")
    said.append(f"{key}: what each number means; for you alone")
    return said
