"""A class of attackers between honest students: each gets what it deserves, and nothing escapes."""

from __future__ import annotations

import contextlib
import csv
import html
import json
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import labcore
from labcore.grading import steps
from labcore.grading.sandbox import Limits
from labcore.grading.steps import Settings
from tests.grading.hostile import ENDLESS, ENDS, Hostile, World, placed
from tests.grading.hostile_files import BROKEN, FORMS
from tests.grading.hostile_lies import LIES, SPIES
from tests.grading.test_grading import tree
from tests.labs import mini

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("bubblewrap")]
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(
    limits=Limits(cell_s=mini.CELL_S, wall_s=150, memory_mib=mini.MEMORY_MIB, file_mib=64)
)
CORPUS = ENDLESS | ENDS | SPIES | LIES
INSTRUCTORS = ("labs/source", "tests", "pyproject.toml", ".git")
RUN = CORPUS | FORMS
MOST_OF_A_PAGE = 3_000_000  # signs; a cell keeps 1 MB of its outputs
FIRST, VICTIM, LAST = "0 honest", "0 victim", "王 honest"  # before and behind all others


@dataclass(frozen=True, kw_only=True)
class Class:
    """A class that was graded among secrets; before and after are hashes of all but `out`."""

    rows: dict[str, dict[str, str]]
    out: Path
    world: World
    said: list[str]
    before: str
    after: str

    def page(self, student: str) -> str:
        """The page of feedback."""
        return (self.out / self.rows[student]["feedback"]).read_text("utf-8")


@contextlib.contextmanager
def _told_secret(family: int, place: object, secret: str) -> Iterator[socket.socket]:
    """A listener that tells the secret to everybody who connects."""
    with socket.socket(family) as listener:
        listener.bind(place)
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].sendall(secret.encode())

        threading.Thread(target=serve, daemon=True).start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory, bubblewrap: None) -> Iterator[Class]:
    """One grading of them all."""
    mark, secret = (f"{kind}-{secrets.token_hex(8)}" for kind in ("mark", "secret-of"))
    base = tmp_path_factory.mktemp("world")
    root, folder, out = mini.checkout(base / "checkout"), base / "class", base / "out"
    source = mini.read(mini.source_path(root))
    test = mini.cell(source, mini.SQUARE)
    test["source"] = test["source"].replace("assert", f"note = '{secret}'\nassert")
    mini.save(source, mini.source_path(root))
    release = mini.released(root)
    gradebook = out / "course" / "gradebook.db"
    gradebook.parent.mkdir(parents=True)
    (out / "grading.log").touch()
    (out / "course" / "notes.txt").write_text(secret)
    victim = folder / VICTIM / "mini.ipynb"
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        shared = stack.enter_context(tempfile.NamedTemporaryFile("w", dir="/dev/shm", prefix=mark))
        shared.write(secret)
        shared.flush()
        tcp = stack.enter_context(_told_secret(socket.AF_INET, ("127.0.0.1", 0), secret))
        abstract = f"\0{mark}"
        stack.enter_context(_told_secret(socket.AF_UNIX, abstract, secret))
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9999)", secret])
        stack.callback(sleeper.wait)
        stack.callback(sleeper.kill)
        patch.setenv("LABCORE_SECRET", secret)
        spots = (mini.source_path(root), victim, gradebook, out / "course" / "secret", folder)
        world = World(
            mark=mark,
            secret=secret,
            spots=(*map(str, spots), *(str(ROOT / one) for one in INSTRUCTORS), shared.name),
            labcore=str(Path(labcore.__file__).parent),
            port=tcp.getsockname()[1],
            name=abstract,
        )
        honest = mini.solved(release)
        right = json.dumps(honest)
        for student in (FIRST, VICTIM, LAST):
            mini.save(honest, folder / student / "mini.ipynb")
        own = json.loads(right)
        mini.cell(own, "title")["source"] += secret
        mini.save(own, victim)
        for student, attack in RUN.items():
            placed(folder / student, attack.notebook(release, world))
        for student, broken in BROKEN.items():
            broken.write(folder / student, right)
        said: list[str] = []
        before = _outside(base)
        steps.grade(root, folder, out, say=said.append, settings=SETTINGS)
        with (out / "grades.csv").open(encoding="utf-8", newline="") as file:
            rows = {row["student"].strip("'"): row for row in csv.DictReader(file)}
        yield Class(rows=rows, out=out, world=world, said=said, before=before, after=_outside(base))


def _outside(base: Path) -> str:
    """A hash of all that grading must leave as it is."""
    links = [str(path.readlink()) for path in sorted(base.rglob("*")) if path.is_symlink()]
    return tree(base / "checkout") + "".join(links) + tree(base / "class")


@pytest.mark.parametrize("student", RUN)
def test_an_attack_gets_what_its_answers_deserve(graded: Class, student: str) -> None:
    attack, row = RUN[student], graded.rows[student]
    assert (float(row["points"]), row["maximum"]) == (attack.points, "5"), f"{row}"
    assert row["status"] in (attack.status, *attack.also)
    page = graded.page(student)
    reason = attack.status.removeprefix("not graded: ")
    wanted = [*attack.page, *([html.escape(reason)] if reason != attack.status else [])]
    assert [text for text in wanted if text not in page] == []
    assert [text for text in attack.flags if text not in row["flags"]] == []
    assert "REACHED" not in page and len(page) < MOST_OF_A_PAGE


@pytest.mark.parametrize("student", BROKEN)
def test_what_is_no_notebook_is_told_in_a_sentence(graded: Class, student: str) -> None:
    broken = BROKEN[student]
    row = graded.rows[student]
    assert (row["points"], row["status"]) == (broken.points, f"not graded: {broken.status}")
    if broken.points:
        assert html.escape(broken.status) in graded.page(student)


def test_honest_students_among_them_lose_nothing(graded: Class) -> None:
    for student in (FIRST, VICTIM, LAST):
        row = graded.rows[student]
        assert (row["points"], row["status"], row["flags"]) == ("5", "graded", "")


def test_the_run_reaches_its_end(graded: Class) -> None:
    count = len(RUN) + len(BROKEN) + 3
    assert len(graded.rows) == count
    assert graded.said[-2].startswith("graded ") and f" of {count}; " in graded.said[-2]


def test_nothing_outside_is_changed(graded: Class) -> None:
    assert graded.before == graded.after
    mark = graded.world.mark
    package = Path(graded.world.labcore)
    for path in (*package.rglob("*"), *Path("/tmp").iterdir(), *Path.home().iterdir()):
        assert mark not in path.name
        if path.suffix == ".py" and package in path.parents:
            assert mark not in path.read_text("utf-8")


def test_nothing_lives_on(graded: Class) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert graded.world.mark.encode() not in path.read_bytes()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not [one for one in commands if b"bwrap" in one or b"ipykernel" in one]


def test_no_secret_is_in_anything_that_came_out(graded: Class) -> None:
    secret = graded.world.secret.encode()
    own = graded.page(VICTIM)
    assert secret.decode() in own  # of itself it may tell
    pages = [graded.out / row["feedback"] for row in graded.rows.values() if row["feedback"]]
    results = list((graded.out / "queue" / "results").iterdir())
    assert len(pages) > len(RUN) and len(results) > len(RUN)
    assert "\n".join(graded.said).encode() not in secret
    for path in (graded.out / "grades.csv", *pages, *results):
        if path != graded.out / graded.rows[VICTIM]["feedback"]:
            assert secret not in path.read_bytes(), path


def test_no_page_has_what_a_browser_runs(graded: Class) -> None:
    runs = re.compile(
        r"<script|<iframe|<[a-z][^>]*\son[a-z]+=|<[a-z][^>]*=[\"']?javascript:", re.IGNORECASE
    )
    assert runs.search("<img src=x onerror=alert(2)>") and runs.search("<a href='javascript:x'>")
    for student, row in graded.rows.items():
        if row["feedback"]:
            assert runs.findall(graded.page(student)) == [], student


def test_dangerous_code_is_guarded() -> None:
    for name, attack in CORPUS.items():
        text = attack.double + attack.square + attack.extra
        deadly = ("fork", "kill(", "<< 30", "<< 20)", "system", "Popen", "os.write")
        if any(word in text for word in deadly):
            assert attack.guarded or "hostname" in text, name
    release = mini.mini_lab()
    world = World(mark="", secret="", spots=(), labcore="", port=1, name="")
    notebook = Hostile(points=0, square="os.fork()", guarded=True).notebook(release, world)
    with pytest.raises(AssertionError, match="this is no sandbox"):
        exec(mini.cell(notebook, "square")["source"], {})


def _packed(files: Mapping[str, bytes], links: Mapping[str, str], path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for name, target in links.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, target)


def test_an_archive_neither_leads_out_nor_fills_the_disk(tmp_path: Path) -> None:
    root = mini.checkout(tmp_path / "checkout")
    right = json.dumps(mini.solved(mini.released(root))).encode()
    files = {
        "Ana Müller/mini.ipynb": right,
        "../../out/mini.ipynb": right,
        "/etc/evil/mini.ipynb": right,
        "bomb/mini.ipynb": right + b" " * 300_000_000,
        "inner/mini.zip": b"PK\x05\x06" + b"\0" * 18,
        "李雷/mini.ipynb": right,
    }
    _packed(files, {"linked/mini.ipynb": "/etc/passwd"}, tmp_path / "class.zip")
    before = {path for path in tmp_path.rglob("*") if path != tmp_path / "out"}
    steps.prepare(root, tmp_path / "class.zip", tmp_path / "out", say=print)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text("utf-8"))["entries"]
    taken = {entry["student"] for entry in plan if entry["key"]}
    problems = {entry["student"]: entry["problem"] for entry in plan if not entry["key"]}
    assert taken == {"Ana Müller", "李雷"} and len(plan) == len(files) + 1
    assert "leads out" in problems.pop("")
    assert set(problems) == {"bomb", "inner", "linked"}
    assert "larger than 20 MB" in problems["bomb"] and "link" in problems["linked"]
    after = {path for path in tmp_path.rglob("*") if tmp_path / "out" not in path.parents}
    assert after - {tmp_path / "out"} == before
    assert not Path("/etc/evil").exists()
