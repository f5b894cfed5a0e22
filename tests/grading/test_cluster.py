"""Grading on a cluster, on a real Slurm of one node; skipped without it, but not in CI."""

from __future__ import annotations

import contextlib
import copy
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grading.slurm import PATH, PROGRAMS, Slurm, until
from tests.grading.test_cluster_guide import CLUSTER, blocks
from tests.grading.test_regrading import children
from tests.labs import mini

pytestmark = pytest.mark.long

# Longer than it takes to see who began a notebook and to end that task.
SLOW = "import time\ntime.sleep(3)\ndef double(x):\n    return 2 * x"
STUDENTS = ("anna", "bo b", "李雷", "o'neil")


@pytest.fixture(scope="module")
def cluster(bubblewrap: None) -> Iterator[Slurm]:
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has no {', '.join(lacking)}")
        pytest.skip(f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge")
    # A short path, for munge's socket.
    with tempfile.TemporaryDirectory(
        prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)
        found = Slurm(Path(folder))
        try:
            found.begin()
            yield found
        finally:
            found.end()


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    yield cluster
    cluster.say("scancel", f"--user={os.getuid()}")
    # Without its daemons a job's last process would stay.
    until("the jobs to end", lambda: not cluster.say("squeue", "-h").strip())


class Class:
    """A class that handed in the mini lab, and its grading on a cluster."""

    def __init__(self, place: Path, slurm: Slurm, students: tuple[str, ...]) -> None:
        self.slurm = slurm
        self.root = mini.checkout(place / "a checkout")
        shutil.copytree(CLUSTER, self.root / "labs" / "cluster")
        release = mini.released(self.root)
        self.submissions, self.out = place / "the class", place / "the grades"
        for place_, student in enumerate(students):
            answers = {"square": f"def square(x):\n    return x * x + {place_ % 2}"}
            notebook = mini.solved(copy.deepcopy(release), double=SLOW, **answers)
            mini.save(notebook, self.submissions / student / "mini" / "mini.ipynb")

    def submit(self, *words: str, tasks: int) -> list[str]:
        """The numbers of the three jobs."""
        ran = subprocess.run(
            [self.root / "labs" / "cluster" / "grade.sh", *words],
            cwd=self.root.parent,
            env={
                **self.slurm.environment,
                "SUBMISSIONS": self.submissions.name,
                "OUT": self.out.name,
                "TASKS": str(tasks),
                "PYTHON": sys.executable,
            },
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        return re.findall(r"(?:prepare|work|collect) (\d+)", ran.stdout)

    def work_by_hand(self) -> None:
        """The guide's command for an array alone, to its end."""
        (line,) = [
            line for block in blocks("bash") for line in block.split("\n") if "sbatch" in line
        ]
        assert line.startswith("COURSE=$PWD OUT=/shared/grades sbatch ")
        words = line.partition("sbatch ")[2].replace("--array=1-8", "--array=1").split()
        settings = {"COURSE": self.root, "OUT": self.out, "PYTHON": sys.executable}
        log = self.slurm.folder / "by-hand.log"
        ran = subprocess.run(
            ["sbatch", "--parsable", f"--output={log}", *words],
            cwd=self.root,
            env={**self.slurm.environment, **{key: str(one) for key, one in settings.items()}},
            capture_output=True,
            text=True,
            check=True,
        )
        until("the array", lambda: self.slurm.over([ran.stdout.strip()]))

    def tries(self) -> dict[str, int]:
        """How often each notebook was begun, by its key."""
        folder = self.out / "queue" / "claims"
        return {path.name: path.stat().st_size for path in folder.glob("*.json")}

    def at_work(self) -> dict[str, dict[int, str]]:
        """The tasks that run a notebook now, each with its processes and when they began."""
        claims, results = self.out / "queue" / "claims", self.out / "queue" / "results"
        begun = {
            (claims / name).stat().st_ino
            for name, tries in self.tries().items()
            if tries and not (results / name).exists()
        }
        found = {}
        for line in Path("/proc/locks").read_text().splitlines():
            lock = re.search(r"FLOCK .* (\d+) \w+:\w+:(\d+) ", line)
            if lock and int(lock[2]) in begun:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    environment = Path("/proc", lock[1], "environ").read_bytes()
                    task = re.search(rb"SLURM_ARRAY_TASK_ID=(\d+)", environment)
                    family = [int(lock[1]), *children(int(lock[1]))]
                    if task and len(family) > 1:
                        found[task[1].decode()] = {pid: started(pid) for pid in family}
        return found

    def rows(self) -> dict[str, dict[str, str]]:
        with (self.out / "grades.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        by_student = {row["student"]: row for row in rows}
        assert len(by_student) == len(rows), "a notebook is there twice"
        return by_student

    def said(self) -> str:
        """All that the jobs wrote, for whoever reads a failure."""
        logs = sorted(Path(f"{self.out}.logs").iterdir())
        return "\n".join(f"{log.name}: {log.read_text('utf-8')}" for log in logs)


def started(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; "" for a dead one."""
    try:
        state, *rest = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else rest[18]


def gone(family: dict[int, str]) -> bool:
    return not any(began and started(pid) == began for pid, began in family.items())


def test_of_three_tasks_one_is_cancelled_and_one_requeued(slurm: Slurm, tmp_path: Path) -> None:
    """Nothing is lost, and nothing is tried twice but what those two held."""
    course = Class(tmp_path, slurm, STUDENTS)
    prepare, work, collect = course.submit(tasks=3)

    def two_at_work() -> list[tuple[str, dict[int, str]]]:
        found = list(course.at_work().items())
        return found if len(found) > 1 else []

    (task, family), *_ = until("two tasks at work", two_at_work)
    slurm.say("scancel", f"{work}_{task}")
    until("the cancelled task's processes to end", lambda: gone(family), 120)
    (task, family), *_ = until("two tasks at work", two_at_work)
    slurm.say("scontrol", "requeue", f"{work}_{task}")
    until("the requeued task's processes to end", lambda: gone(family), 120)
    # Slurm would have it wait for two minutes. In the second in which it was killed the node does
    # not take it back: "already killed, do not launch batch job".
    slurm.say("scontrol", "update", f"JobId={work}_{task}", "StartTime=now+3")
    until("the end of all jobs", lambda: slurm.over([prepare, work, collect]))
    rows = course.rows()
    assert {name: row["points"] for name, row in rows.items()} == dict(
        zip(STUDENTS, ("5", "2", "5", "2"), strict=True)
    ), course.said()
    assert all(row["status"] == "graded" for row in rows.values())
    assert len(course.tries()) == 4 and sum(course.tries().values()) == 4 + 2, course.tries()
    assert slurm.states(prepare) == slurm.states(collect) == [("COMPLETED", "0:0")]
    states = sorted(state for state, _ in slurm.states(work))
    assert states == ["CANCELLED", "COMPLETED", "COMPLETED"], course.said()
    assert Path(f"{course.out}.logs").stat().st_mode & 0o077 == 0
    assert course.out.stat().st_mode & 0o077 == 0


def test_where_every_task_dies_the_table_says_what_was_not_tried(
    slurm: Slurm, tmp_path: Path
) -> None:
    course = Class(tmp_path, slurm, STUDENTS[:1])
    jobs = course.submit(tasks=1)
    until("a notebook to be begun", course.at_work)
    slurm.say("scancel", jobs[1])
    until("the end of all jobs", lambda: slurm.over(jobs))
    (row,) = course.rows().values()
    assert row["status"] == "not graded: it has not been run yet", course.said()
    assert slurm.states(jobs[2]) == [("FAILED", "1:0")]
    # A queue that cannot be made ends all three, and touches nothing.
    before = (course.out / "grades.csv").stat().st_mtime_ns
    jobs = course.submit("--due", "tomorrow", tasks=1)
    until("the end of all jobs", lambda: slurm.over(jobs))
    assert [slurm.states(job)[0][0] for job in jobs] == ["FAILED", "CANCELLED", "CANCELLED"]
    assert "'tomorrow' is not a time" in course.said()
    assert (course.out / "grades.csv").stat().st_mtime_ns == before
    # The guide's way to work on a queue that was made by hand.
    course.work_by_hand()
    assert list(course.tries().values()) == [2] and not course.at_work()
    assert len(list((course.out / "queue" / "results").iterdir())) == 1


@pytest.mark.parametrize("lacking", ["SUBMISSIONS", "OUT"])
def test_a_setting_that_is_missing_is_named(lacking: str, tmp_path: Path) -> None:
    settings = {"PATH": PATH, "SUBMISSIONS": str(tmp_path), "OUT": str(tmp_path / "out")}
    del settings[lacking]
    ran = subprocess.run(
        [CLUSTER / "grade.sh"], env=settings, capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode != 0 and f"{lacking}: name " in ran.stderr
    assert not list(tmp_path.iterdir())
