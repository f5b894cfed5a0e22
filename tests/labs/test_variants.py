"""Each student's own notebooks: the roster, the numbers, the files, and the instructor's key."""

from __future__ import annotations

import csv
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from labcore import exercises
from labcore.exercises import CheckFailedError, Clinic, student_seed
from labcore.labs import leaks, releases, variants
from labcore.labs.source import LabError, cell_text, nbgrader_of, read_lab
from labcore.labs.students import name_problem, number_of
from tests.exercises.reasons import with_reasons
from tests.labs import mini

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["Ada Lovelace", "李 雷", "J. R. R. O'Neil", "Zoë", "e.x.1815"]


def roster(folder: Path, text: str | bytes, name: str = "the roster.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def numbered(notebook: mini.Notebook) -> None:
    """The mini lab with a number, on which its square depends."""
    notebook["cells"].insert(2, mini.code("student", "STUDENT = 0  # yours"))


@pytest.fixture
def course(tmp_path: Path) -> Path:
    return mini.checkout(tmp_path / "course", numbered)


def write(course: Path, folder: Path, names: list[str] = NAMES, secret: str = "") -> list[str]:
    """Variants of the course in folder/out of it, with the secret if it is not to be made."""
    folder.mkdir(parents=True, exist_ok=True)
    if secret:
        (folder / "secret").write_text(secret, "utf-8")
        (folder / "secret").chmod(0o600)
    path = roster(folder, "\n".join(["student", *names]))
    return variants.write(course, path, folder / "secret", folder / "out of it")


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# The roster.


@pytest.mark.parametrize(
    "text",
    [
        "student\n" + "\n".join(NAMES),
        "\ufeffStudent;Section\r\n" + "".join(f"{name};B\r\n" for name in NAMES),
        "\n\nname,mail\n" + "\n\n".join(f'" {name} ",x' for name in NAMES) + "\n,,\n",
        "Section\tSIS User ID\n" + "".join(f"A\t{name}\n" for name in NAMES),
        "Student,ID,SIS User ID\n    Points Possible,,\n" + "".join(f"{n},1,2\n" for n in NAMES),
        "STUDENT\n" + "\n".join(unicodedata.normalize("NFD", name) for name in NAMES),
    ],
    ids=["plain", "byte order mark and semicolons", "quoted", "tabs", "Canvas", "macOS"],
)
def test_a_roster_gives_its_students_in_their_order(tmp_path: Path, text: str) -> None:
    assert variants.read_roster(roster(tmp_path, text)) == NAMES


def test_a_table_has_every_column_by_student(tmp_path: Path) -> None:
    path = roster(tmp_path, 'ID,Student,Section\n7,"Lee, Ann",A\n8,Bo,\n9,Cy\n')
    assert variants.read_table(path) == {
        "Lee, Ann": {"ID": "7", "Student": "Lee, Ann", "Section": "A"},
        "Bo": {"ID": "8", "Student": "Bo", "Section": ""},
        "Cy": {"ID": "9", "Student": "Cy", "Section": ""},
    }


BAD = {
    "no column": ("First;Last\nA;B", ["a column student or name or id", "got First, Last"]),
    "nothing": ("", ["got nothing"]),
    "a header alone": ("student\n\n", ["names no student"]),
    "twice": ("student\nAda\nBo\n ada\nZoe\u0308\nZoë", [
        "lines 2, 4: 'Ada' occurs", "lines 5, 6: 'Zoë' occurs",
    ]),
    "a path": ("student\na/b\n..\n.ssh\nc:\\d", ["line 2:", "line 3:", "line 4:", "line 5:"]),
    "a control sign": ("student\n\"a\nb\"\nc\x1bd", ["line 3: 'a\\nb'", "line 4: 'c\\x1bd'"]),
    "a formula": ("student\n=1+1", ["line 2: '=1+1'"]),
    "a folder that is none": ("student\nAda.", ["line 2: 'Ada.'"]),
    "an unquoted comma": ("student\nLee, Ann", ["line 2", "2 columns, but the header has 1"]),
    "no name": ("id,mail\n,x\n3,y", ["line 2", "the column id is empty"]),
    "a short line": ("mail,id\nx", ["line 2", "the column id is empty"]),
    "an open quote": ('student\n"Ada', ["is not valid CSV"]),
    "other encoding": ("student\nZoë".encode("latin-1"), ["is not in UTF-8"]),
    "UTF-16": ("student\nZoë".encode("utf-16"), ["is not in UTF-8"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_a_bad_roster_is_refused_by_line_and_nothing_is_written(
    course: Path, tmp_path: Path, text: str | bytes, words: list[str]
) -> None:
    path = roster(tmp_path, text)
    before = files(tmp_path)
    with pytest.raises(ValueError, match="the roster.csv") as caught:
        variants.write(course, path, tmp_path / "secret", tmp_path / "out")
    assert all(word in str(caught.value) for word in words), caught.value
    assert files(tmp_path) == before and not (tmp_path / "out").exists()


def test_a_roster_that_is_none_is_refused(course: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ValueError, match="the roster .* cannot be read"):
            variants.write(course, path, tmp_path / "secret", tmp_path / "out")


# The numbers.


def test_numbers_come_from_name_and_secret_and_from_nothing_else(tmp_path: Path) -> None:
    secret = roster(tmp_path, "the secret of a class\n", "secret")
    found = variants.numbers(roster(tmp_path, "student\n" + "\n".join(NAMES)), secret)
    assert found == {name: student_seed("the secret of a class", name) for name in NAMES}
    assert list(found) == NAMES
    more = [*reversed(NAMES), "Someone Else"]
    again = variants.numbers(roster(tmp_path, "name\n" + "\n".join(more)), secret)
    assert again.items() >= found.items()
    other = roster(tmp_path, "the secret of a clasS", "secret")
    changed = variants.numbers(roster(tmp_path, "student\n" + "\n".join(NAMES)), other)
    assert not set(changed.values()) & set(found.values())


def test_two_students_never_have_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 12 numbers for 10 students: most names collide, some again with what they are given then.
    monkeypatch.setattr(variants, "student_seed", lambda s, name: 1 + student_seed(s, name) % 12)
    names = [f"student {letter}" for letter in "abcdefghij"]
    secret = roster(tmp_path, "a secret that is long enough", "secret")
    orders = []
    for seed in range(20):
        random.Random(seed).shuffle(names)
        path = roster(tmp_path, "student\n" + "\n".join(names))
        orders.append(dict(sorted(variants.numbers(path, secret).items())))
    assert all(order == orders[0] for order in orders)
    assert len(set(orders[0].values())) == len(names)
    first = {name: variants.student_seed("a secret that is long enough", name) for name in names}
    assert len(set(first.values())) < len(names)  # or nothing was tried
    assert sum(orders[0][name] == first[name] for name in names) == len(set(first.values()))


@pytest.mark.parametrize("text", ["", "\n \n", "nineteen characters\n"])
def test_a_secret_that_can_be_guessed_is_refused(course: Path, tmp_path: Path, text: str) -> None:
    path = roster(tmp_path, "student\nAda")
    secret = roster(tmp_path, text, "secret")
    for use in (
        lambda: variants.numbers(path, secret),
        lambda: variants.write(course, path, secret, tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match="has 1?[0-9] characters.*give it 20 or more"):
            use()
    assert secret.read_text("utf-8") == text and not (tmp_path / "out").exists()


def test_no_secret_is_made_where_numbers_are_only_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the secret .* cannot be read"):
        variants.numbers(roster(tmp_path, "student\nAda"), tmp_path / "secret")
    assert not (tmp_path / "secret").exists()


# The files.


def test_same_roster_and_secret_alone_give_the_same_bytes(course: Path, tmp_path: Path) -> None:
    write(course, tmp_path / "one")
    secret = (tmp_path / "one/secret").read_text("utf-8")
    write(course, tmp_path / "two", NAMES[::-1], secret)
    write(course, tmp_path / "three", NAMES, secret + "x")
    one, two, three = (files(tmp_path / name / "out of it") for name in ("one", "two", "three"))
    assert one == two and one.keys() == three.keys() == {f"{name}/mini.ipynb" for name in NAMES}
    assert all(one[name] != three[name] for name in one) and len({*one.values()}) == len(NAMES)


def test_only_the_number_differs_from_the_release(course: Path, tmp_path: Path) -> None:
    write(course, tmp_path / "class")
    release = mini.released(course)
    numbers = variants.numbers(tmp_path / "class/the roster.csv", tmp_path / "class/secret")
    for name, number in numbers.items():
        variant = mini.read(tmp_path / "class/out of it" / name / "mini.ipynb")
        assert number_of(variant, release) == str(number)
        cell = mini.cell(variant, "student")
        assert cell["source"] == [f"STUDENT = {number}  # yours"]
        cell["source"] = ["STUDENT = 0  # yours"]
        assert variant["cells"] == release["cells"]
        assert name_problem(name) == ""


def test_a_lab_without_a_number_is_its_release(tmp_path: Path) -> None:
    course = mini.checkout(tmp_path / "course")
    write(course, tmp_path / "class", ["Ada", "Bo"])
    mini.released(course)
    release = releases.release_path(course, "mini").read_bytes()
    assert set(files(tmp_path / "class/out of it").values()) == {release}
    key = (tmp_path / "class/key.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[0] for line in key] == ["student", "Ada", "Bo"]


@pytest.mark.parametrize(
    "line", ["STUDENT = int('0')", "STUDENT = 0\nSTUDENT = 0", "STUDENT = 7", "STUDENT=0"]
)  # fmt: skip
def test_a_number_that_cannot_be_set_is_a_fault_of_the_source(tmp_path: Path, line: str) -> None:
    def other(notebook: mini.Notebook) -> None:
        numbered(notebook)
        mini.cell(notebook, "student")["source"] = line

    course = mini.checkout(tmp_path / "course", other)
    with pytest.raises(LabError, match="mini: .*STUDENT = 0"):
        write(course, tmp_path / "class")
    assert not (tmp_path / "class/out of it").exists()


def test_the_secret_and_the_key_are_the_instructors_alone(course: Path, tmp_path: Path) -> None:
    said = write(course, tmp_path)
    secret, key = tmp_path / "secret", tmp_path / "key.csv"
    assert said[0].startswith(f"made the secret {secret}; keep it")
    assert secret.stat().st_mode & 0o777 == key.stat().st_mode & 0o777 == 0o600
    word = secret.read_bytes().strip()
    assert len(word) >= 32 and variants.SHORTEST >= leaks.SHORTEST
    for name, content in files(tmp_path / "out of it").items():
        assert word not in content and b"key" not in name.encode() and name.endswith("mini.ipynb")
    assert word not in key.read_bytes()
    secret.chmod(0o644)
    assert any("others can read the secret" in line for line in write(course, tmp_path))
    assert secret.read_bytes().strip() == word


def test_a_secret_that_is_a_word_of_a_lab_is_refused(course: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the secret .* occurs in the labs"):
        write(course, tmp_path / "class", secret="raise NotImplementedError")
    assert not (tmp_path / "class/out of it").exists()


def test_an_edited_notebook_is_kept_and_who_left_is_named(course: Path, tmp_path: Path) -> None:
    write(course, tmp_path, ["Ada", "Bo"])
    path = tmp_path / "out of it/Ada/mini.ipynb"
    mine = path.read_bytes().replace(b"STUDENT = ", b"STUDENT = 1")
    path.write_bytes(mine)
    said = "\n".join(write(course, tmp_path, ["Ada", "Cy"]))
    assert "2 notebooks written, 0 unchanged (students: 2, labs: 1)" in said
    assert path.with_name("mini.edited-1.ipynb").read_bytes() == mine
    assert "mini.edited-1.ipynb is an edited notebook" in said
    assert "not on the roster, and left unchanged: Bo" in said
    said = "\n".join(write(course, tmp_path, ["Ada", "Cy"]))
    assert "0 notebooks written, 2 unchanged" in said and "edited-2" not in said


def test_a_new_release_of_the_lab_is_no_edit(course: Path, tmp_path: Path) -> None:
    write(course, tmp_path, ["Ada"])
    notebook = mini.read(mini.source_path(course))
    mini.cell(notebook, "more")["source"] = "secret_two = 1 + 1"
    mini.save(notebook, mini.source_path(course))
    said = write(course, tmp_path, ["Ada"])
    assert "1 notebooks written" in said[0] and len(files(tmp_path / "out of it")) == 1


def test_what_would_be_lost_or_given_away_is_refused(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, secret = roster(tmp_path, "student\nAda"), tmp_path / "secret"
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path / "out", Path("out"), Path("course/../out")):
        for bad in (tmp_path / "out/secret", Path("out/Ada/secret")):
            with pytest.raises(ValueError, match="which students get"):
                variants.write(course, path, bad, out)
    roster(tmp_path, "student,points\nAda,7", "key.csv")
    with pytest.raises(ValueError, match=r"key\.csv was not made by this command"):
        variants.write(course, path, secret, tmp_path / "out")
    assert (tmp_path / "key.csv").read_text("utf-8") == "student,points\nAda,7"
    (tmp_path / "key.csv").unlink()
    with pytest.raises(ValueError, match="is not a folder"):
        variants.write(course, path, secret, path)
    with pytest.raises(ValueError, match="lion.*mini"):
        variants.write(course, path, secret, tmp_path / "out", ["lion"])
    mini.checkout(course, lambda notebook: notebook.pop("cells"))
    with pytest.raises(LabError, match="is not a notebook"):
        variants.write(course, path, secret, tmp_path / "out")
    assert not secret.exists() and not (tmp_path / "out").exists()


# The course's own labs.


@pytest.fixture(scope="module")
def klass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two students' notebooks of every lab."""
    folder = tmp_path_factory.mktemp("class")
    write(ROOT, folder, ["Ada Lovelace", "李 雷"], "a secret that is long enough")
    return folder


def numbers_of(klass: Path) -> dict[str, int]:
    return variants.numbers(klass / "the roster.csv", klass / "secret")


def key_of(klass: Path) -> list[dict[str, str]]:
    with (klass / "key.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_lab_takes_a_students_number(klass: Path) -> None:
    numbers = numbers_of(klass)
    assert len(set(numbers.values())) == 2
    for name, number in numbers.items():
        for slug in releases.source_paths(ROOT):
            variant = mini.read(klass / "out of it" / name / f"{slug}.ipynb")
            release = mini.read(releases.release_path(ROOT, slug))
            assert number_of(variant, release) == str(number)
            pairs = zip(variant["cells"], release["cells"], strict=True)
            assert [theirs["id"] for theirs, ours in pairs if theirs != ours] == ["student"]
    word = (klass / "secret").read_bytes().strip()
    assert not [name for name, content in files(klass / "out of it").items() if word in content]


def test_the_key_is_what_the_exercises_give_for_that_number(klass: Path) -> None:
    rows, numbers = key_of(klass), numbers_of(klass)
    assert {row["student"]: int(row["number"]) for row in rows} == numbers
    counted = 0
    for slug in exercises.slugs():
        for task in exercises.load(slug):
            for student, number in numbers.items():
                told = {
                    row["what"]: row["value"]
                    for row in rows
                    if (row["student"], row["lab"], row["exercise"]) == (student, slug, task.id)
                }
                counted += len(told)
                if isinstance(task, Clinic):
                    outcome = task.check(with_reasons(task, told), student=number)
                    assert outcome.passed, (task.id, outcome.message)
                elif told:
                    (case, *_) = task.numbered_cases(3, number)
                    assert {name: str(case[name]) for name in told} == told, task.id
                else:
                    own, nobodys = (task.numbered_cases(3, n) for n in (number, 0))
                    assert repr(own) == repr(nobodys), task.id
    assert counted == len(rows)


def answered(klass: Path, student: str, slug: str, number: int | None = None) -> dict[str, str]:
    """Runs a student's notebook with the source's answers, then its hidden tests: complaints."""
    variant = mini.read(klass / "out of it" / student / f"{slug}.ipynb")
    space: dict[str, Any] = {"__name__": "__main__"}
    complaints = {}
    for cell in read_lab(releases.source_paths(ROOT)[slug]).notebook["cells"]:
        if cell["cell_type"] != "code" or cell["id"] == "setup":
            continue
        meta = nbgrader_of(cell)
        text = cell_text(cell if meta else mini.cell(variant, cell["id"]))
        if number is not None and cell["id"] == "clinic-check":
            space["STUDENT"] = number  # graded by another number than it was answered with
        if meta.get("solution") and cell["id"] == "clinic":
            # As a student does: names written down, not looked up.
            clinic = space["lion"].CLINIC
            told = with_reasons(clinic, clinic.diagnoses(space["STUDENT"]))
            text = f"def diagnose():\n    return {told}"
        try:
            exec(compile(text, cell["id"], "exec"), space)
        except CheckFailedError as problem:
            complaints[meta["grade_id"]] = str(problem)
    return complaints


def test_right_answers_pass_only_by_the_students_own_number(
    klass: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ada, lei = numbers_of(klass).values()
    lion = exercises.load("lion")
    own = [[task.variant(number) for task in lion[:-1]] for number in (ada, lei)]
    clinic = lion[-1]
    assert isinstance(clinic, Clinic)
    assert own[0] != own[1] and clinic.diagnoses(ada) != clinic.diagnoses(lei)
    printed = []
    for student in numbers_of(klass):
        assert answered(klass, student, "lion") == {}
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]
    wrong = answered(klass, "Ada Lovelace", "lion", number=lei)
    assert wrong and all(name.startswith("clinic") for name in wrong)
