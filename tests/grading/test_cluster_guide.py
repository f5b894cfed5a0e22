"""The manifests for Kubernetes and the guide to grading at scale, as far as reading goes."""

from __future__ import annotations

import copy
import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from labcore.__main__ import parser
from labcore.grading import report
from labcore.labs import variants

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "labs" / "cluster"
GUIDE = ROOT / "book" / "teaching" / "grading_at_scale.md"


def blocks(language: str) -> list[str]:
    """The guide's blocks of code in a language, with its continued lines in one."""
    fenced = rf"^```{language}\n(.*?)^```$"
    found = re.findall(fenced, GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [re.sub(r" \\\n *", " ", block) for block in found]


Manifests = dict[str, Any]
STEPS = ("volume", "prepare", "work", "collect")


def manifests() -> Manifests:
    """By the step at which each is applied."""
    text = (CLUSTER / "kubernetes.yaml").read_text("utf-8")
    return {one["metadata"]["labels"]["step"]: one for one in yaml.safe_load_all(text)}


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


def problems(found: Manifests) -> list[str]:
    """What of the manifests does not fit together, a line each."""
    wrong: list[str] = []

    def must(holds: bool, what: str) -> None:
        if not holds:
            wrong.append(what)

    must(tuple(found) == STEPS, "the steps")
    volume = found["volume"]
    must((volume["apiVersion"], volume["kind"]) == ("v1", "PersistentVolumeClaim"), "volume: kind")
    must(volume["spec"]["accessModes"] == ["ReadWriteMany"], "volume: many nodes write")
    asked, images, users = {}, set(), set()
    for step in STEPS[1:]:
        job, pod = found[step], pod_of(found[step])
        must((job["apiVersion"], job["kind"]) == ("batch/v1", "Job"), f"{step}: kind")
        must(job["metadata"]["name"] == f"grade-{step}", f"{step}: name")
        must(job["spec"]["template"]["metadata"]["labels"] == job["metadata"]["labels"],
             f"{step}: labels")  # fmt: skip
        must(pod["restartPolicy"] == "Never", f"{step}: restartPolicy")
        must(pod["automountServiceAccountToken"] is False, f"{step}: a token of the cluster")
        (container,), (claimed,) = pod["containers"], pod["volumes"]
        (mount,) = container["volumeMounts"]
        must(mount["name"] == claimed["name"], f"{step}: mount")
        must(claimed["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"],
             f"{step}: claim")  # fmt: skip
        must(container["resources"]["limits"]["memory"]
             == container["resources"]["requests"]["memory"], f"{step}: memory")  # fmt: skip
        must(container["securityContext"]["allowPrivilegeEscalation"] is False, f"{step}: rights")
        must(container["command"][1:] == ["-m", "labcore", "grade"], f"{step}: command")
        try:
            asked[step] = parser().parse_args(["grade", *map(str, container["args"])])
        except SystemExit:
            must(False, f"{step}: arguments")
        images.add(container["image"])
        users.add(tuple(pod["securityContext"][key] for key in ("runAsUser", "fsGroup")))
    must(len(images) == 1 and not images.pop().endswith(":latest"), "one image")
    must(len(users) == 1 and users.pop()[0] > 0, "one user, not root")
    if len(asked) == 3:
        prepare, work, collect = asked.values()
        must(prepare.only_queue and prepare.submissions is not None, "prepare: queue alone")
        must(prepare.out is not None and prepare.out == work.work == collect.collect, "one folder")
        must(not work.unsandboxed, "work: sandbox")
    many, pod = found["work"]["spec"], pod_of(found["work"])
    must(many.get("completionMode") == "Indexed", "work: indexed")
    must(many.get("completions", 0) == many.get("parallelism", 1) > 1, "work: many at once")
    security = pod["securityContext"]
    for profile in ("seccompProfile", "appArmorProfile"):
        must(security.get(profile) == {"type": "Unconfined"}, f"work: {profile}")
    unmasked = pod["containers"][0]["securityContext"].get("procMount") == "Unmasked"
    must(unmasked, "work: procMount")
    must(pod.get("hostUsers") is False, "work: hostUsers, which procMount asks for")
    for step in ("prepare", "collect"):
        plain = pod_of(found[step])["securityContext"].keys()
        must(not {"seccompProfile", "appArmorProfile"} & plain, f"{step}: runs no student's code")
    return wrong


def test_the_manifests_agree() -> None:
    assert problems(manifests()) == []


def container_of(found: Manifests, step: str) -> Any:
    return found[step]["spec"]["template"]["spec"]["containers"][0]


PLANTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("many nodes write", lambda f: f["volume"]["spec"].update(accessModes=["ReadWriteOnce"])),
    ("work: kind", lambda f: f["work"].update(apiVersion="v1")),
    ("collect: claim", lambda f: f["collect"]["spec"]["template"]["spec"]["volumes"][0].update(
        persistentVolumeClaim={"claimName": "grades"})),
    ("work: mount", lambda f: container_of(f, "work")["volumeMounts"][0].update(name="class")),
    ("work: arguments", lambda f: container_of(f, "work").update(args=["--wrok", "/grading/out"])),
    ("one folder", lambda f: container_of(f, "collect").update(args=["--collect", "/out"])),
    ("prepare: queue", lambda f: container_of(f, "prepare").update(args=["/class", "--out", "/o"])),
    ("work: sandbox", lambda f: container_of(f, "work")["args"].append("--unsandboxed")),
    ("work: indexed", lambda f: f["work"]["spec"].pop("completionMode")),
    ("work: many", lambda f: f["work"]["spec"].update(parallelism=1)),
    ("work: procMount", lambda f: container_of(f, "work")["securityContext"].pop("procMount")),
    ("work: hostUsers", lambda f: f["work"]["spec"]["template"]["spec"].pop("hostUsers")),
    ("work: seccomp", lambda f: f["work"]["spec"]["template"]["spec"]["securityContext"].pop(
        "seccompProfile")),
    ("one image", lambda f: container_of(f, "work").update(image="registry.example/other:1")),
    ("one user", lambda f: f["collect"]["spec"]["template"]["spec"]["securityContext"].update(
        runAsUser=0)),
    ("prepare: a token", lambda f: f["prepare"]["spec"]["template"]["spec"].update(
        automountServiceAccountToken=True)),
    ("work: rights", lambda f: container_of(f, "work")["securityContext"].update(
        allowPrivilegeEscalation=True)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "plant"), PLANTS, ids=[words for words, _ in PLANTS])
def test_what_does_not_agree_is_found(words: str, plant: Callable[[Any], Any]) -> None:
    wrong = copy.deepcopy(manifests())
    plant(wrong)
    assert any(words in line for line in problems(wrong)), problems(wrong)


CANVAS = """\
\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Lion lab (8731)
    Points Possible,,,,,40
"O'Neil, Anna",4711,s1,anna,"A, B",
李 雷,4712,s2,lei,A,
Never Came,99,s3,never,A,
"Student, Test",,,,,
"""
MOODLE = """\
Identifier,Full name,Email address,Grade,Last modified (grade)
Participant 4711,Anna O'Neil,a@example.org,,-
Participant 4712,李 雷,l@example.org,,"Monday, 2 March 2026, 10:00 AM"
"""


@pytest.mark.parametrize(
    ("place", "exported", "column", "names", "expected"),
    [
        (0, CANVAS, "ID", ("oneilanna_4711", "李雷_4712"), [
            ("O'Neil, Anna", "4711", "anna", "A, B", "17.5", ""),
            ("李 雷", "4712", "lei", "A", "0", ""),
            ("Never Came", "99", "never", "A", "", ""),
        ]),
        (1, MOODLE, "Identifier", ("Anna O'Neil_4711", "李 雷_4712"), [
            ("Participant 4711", "Anna O'Neil", "17.5", "-", "graded"),
            ("Participant 4712", "李 雷", "0", "Monday, 2 March 2026, 10:00 AM",
             "not graded: it is empty"),
        ]),
    ],
)  # fmt: skip
def test_guides_roster_and_columns_fill_a_learning_systems_table(
    place: int, exported: str, column: str, names: tuple[str, str], expected: object, tmp_path: Path
) -> None:
    (script,) = blocks("python")
    (tmp_path / "roster.py").write_text(script, "utf-8")
    (tmp_path / "exported.csv").write_text(exported, "utf-8")
    (tmp_path / "columns.toml").write_text(blocks("toml")[place], "utf-8")
    rows = [
        report.Row(
            student=name, lab="lion", status=status, exercises={"a": points}, worth={"a": 40.0}
        )
        for name, status, points in zip(
            names, ("graded", "not graded: it is empty"), (17.5, 0.0), strict=True
        )
    ]
    report.write_csv(tmp_path / "grades.csv", rows)
    command = [sys.executable, "roster.py", "exported.csv", column, "grades.csv"]
    with (tmp_path / "roster.csv").open("wb") as file:
        subprocess.run(command, cwd=tmp_path, stdout=file, check=True)
    roster = variants.read_table(tmp_path / "roster.csv")
    titles = next(iter(roster.values())).keys()
    labs = {path.name for path in (ROOT / "labs" / "source").iterdir()}
    columns = report.read_columns(tmp_path / "columns.toml", labs, titles)
    report.write_export(tmp_path / "export.csv", rows, columns, roster)
    with (tmp_path / "export.csv").open(encoding="utf-8", newline="") as file:
        assert [tuple(line.values()) for line in csv.DictReader(file)] == expected


def test_every_command_of_the_guide_is_one(tmp_path: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    begin = "-m labcore grade "
    asked = [line.partition(begin)[2].partition("#")[0].split() for line in lines if begin in line]
    assert len(asked) >= 6
    for words in asked:
        parser().parse_args(["grade", *words])
    (cluster,) = [line for line in lines if "grade.sh" in line]
    settings, _, options = cluster.partition("labs/cluster/grade.sh")
    parser().parse_args(["grade", "class", "--only-queue", *options.split()])
    read = re.findall(r"\$\{?([A-Z]{3,})", (CLUSTER / "grade.sh").read_text("utf-8"))
    assert {word.partition("=")[0] for word in settings.split()} <= set(read)
