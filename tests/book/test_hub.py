"""The values for JupyterHub: keys the chart knows, and what the Python in them does.

With Z2JH_SCHEMA=<folder>/values.schema.yaml, the chart's values.yaml and Chart.yaml beside it, the
whole schema judges; without it the facts that were kept of it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jupyter_server.serverapp import ServerApp
from nbgrader.auth import Authenticator
from nbgrader.coursedir import CourseDirectory
from nbgrader.exchange.default import (
    Exchange,
    ExchangeCollect,
    ExchangeFetchAssignment,
    ExchangeSubmit,
)
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from labcore.grading.intake.submissions import find
from labcore.grading.sandbox import Limits
from labcore.labs.nbgrader_settings import open_gradebook
from labcore.labs.releases import release_path
from tests.book import hub_schema
from tests.book_fixtures import ROOT

pytestmark = pytest.mark.long

SCHEMA = os.environ.get("Z2JH_SCHEMA")
COURSE = "llm"


@pytest.fixture
def values() -> dict[str, Any]:
    found = hub_schema.read(hub_schema.VALUES)
    assert isinstance(found, dict)
    return found


def by_facts(values: dict[str, Any]) -> list[str]:
    facts = json.loads(hub_schema.FACTS.read_text(encoding="utf-8"))
    return list(hub_schema.problems_by_facts(values, facts["keys"]))


def by_schema(values: dict[str, Any]) -> list[str]:
    return list(hub_schema.problems_by_schema(values, Path(str(SCHEMA))))


JUDGES = [by_facts, by_schema] if SCHEMA else [by_facts]
Judge = Callable[[dict[str, Any]], list[str]]


@pytest.mark.parametrize("judge", JUDGES)
def test_every_key_is_the_charts(judge: Judge, values: dict[str, Any]) -> None:
    assert judge(values) == []


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cull.timeOut", 3600),
        ("singleuser.memory.limits", "6G"),
        ("singleuser.profileLists", []),
        ("culling", {"enabled": True}),
        ("cull.enabled", "yes"),
        ("hub.activeServerLimit", "220"),
        ("hub.extraConfig", "c = 1"),
        ("singleuser.profileList", {"cpu": {}}),
    ],
)
def test_a_wrong_key_or_type_is_seen(
    judge: Judge, values: dict[str, Any], path: str, value: object
) -> None:
    planted = copy.deepcopy(values)
    *above, last = path.split(".")
    table = planted
    for key in above:
        table = table[key]
    table[last] = value
    found = judge(planted)
    assert found and all(path.rpartition(".")[0] in line for line in found), found


def test_the_kept_facts_are_those_of_the_schema(values: dict[str, Any]) -> None:
    if SCHEMA is None:
        pytest.skip("Z2JH_SCHEMA names no schema of the chart")
    facts = json.loads(hub_schema.FACTS.read_text(encoding="utf-8"))
    assert facts["keys"] == hub_schema.derive(hub_schema.read(Path(SCHEMA)), values)
    planted = {"hub": {"activeServerLimit": 1, "activeServers": 1}}
    with pytest.raises(ValueError, match=r"hub\.activeServers: the schema knows no such key"):
        hub_schema.derive(hub_schema.read(Path(SCHEMA)), planted)


def hook(values: dict[str, Any]) -> Callable[[Any], None]:
    """What the hub calls before it starts somebody's pod."""
    c = Config()
    exec(values["hub"]["extraConfig"]["10-class-volume"], {"c": c})
    made: Callable[[Any], None] = c.KubeSpawner.pre_spawn_hook
    return made


def spawner(name: str, *groups: str, form: type = dict) -> Any:
    home = {"name": "volume-x", "mountPath": "/theirs"}
    return SimpleNamespace(
        user=SimpleNamespace(name=name, groups=[SimpleNamespace(name=one) for one in groups]),
        image="registry.example.org/labcore:1",
        environment={"KEPT": "1"},
        volume_mounts={"home": home} if form is dict else [home],
        init_containers={} if form is dict else [],
    )


def listed(found: Any) -> list[dict[str, Any]]:
    return list(found.values()) if isinstance(found, dict) else found


@pytest.mark.parametrize("form", [dict, list])
def test_a_student_sees_their_own_folder_and_what_is_handed_out(
    values: dict[str, Any], form: type
) -> None:
    pod = spawner("李雷", "students", form=form)
    hook(values)(pod)
    mounts = listed(pod.volume_mounts)
    ofclass = {one["mountPath"]: one for one in mounts if one["name"] == "class"}
    assert len(mounts) == 3 and isinstance(pod.volume_mounts, form)
    assert {path: one["subPath"] for path, one in ofclass.items()} == {
        "/srv/exchange/llm/inbound": "students/李雷/llm/inbound",
        "/srv/exchange/llm/outbound": "outbound",
    }
    assert ofclass["/srv/exchange/llm/outbound"]["readOnly"] is True
    assert pod.environment == {"KEPT": "1"}
    (maker,) = listed(pod.init_containers)
    assert "/class/students/李雷/llm/inbound" in maker["command"]
    names = {one["name"] for one in values["singleuser"]["storage"]["extraVolumes"]}
    assert names == {"class"}


def test_an_instructor_sees_the_whole_volume(values: dict[str, Any]) -> None:
    pod = spawner("kim", "students", "instructors")
    hook(values)(pod)
    whole = [one for one in listed(pod.volume_mounts) if one["mountPath"] == "/srv/class"]
    assert len(whole) == 1 and "subPath" not in whole[0]
    assert pod.environment["LABCORE_INSTRUCTOR"] == "1"
    assert "instructors" in values["hub"]["config"]["JupyterHub"]["load_groups"]


@pytest.mark.parametrize("name", ["..", "a/../b", "", "-x", ".hidden", "a b", "a{username}", "a;b"])
def test_a_name_that_could_leave_its_folder_starts_no_pod(
    values: dict[str, Any], name: str
) -> None:
    pod = spawner(name)
    with pytest.raises(ValueError, match="a user's name must be letters"):
        hook(values)(pod)
    assert len(pod.volume_mounts) == 1 and not pod.init_containers


def loaded(values: dict[str, Any], which: str, folder: Path) -> Config:
    """The configuration file that the values put into every pod."""
    spec = values["singleuser"]["extraFiles"][which]
    path = folder / Path(spec["mountPath"]).name
    path.write_text(spec["stringData"], encoding="utf-8")
    return PyFileConfigLoader(path.name, str(folder)).load_config()


class Volume:
    """The class's volume as a folder, and what a student's pod shows of it."""

    def __init__(self, place: Path, config: Config) -> None:
        self.place, self.config = place, config
        (place / "class" / "outbound").mkdir(parents=True)

    def pod(self, student: str) -> Path:
        """The exchange's root as the mounts make it for one student."""
        own = self.place / "class" / "students" / student / COURSE / "inbound"
        root = self.place / "pods" / student
        own.mkdir(parents=True)
        (root / COURSE).mkdir(parents=True)
        (root / COURSE / "inbound").symlink_to(own)
        (root / COURSE / "outbound").symlink_to(self.place / "class" / "outbound")
        return root

    def run(self, kind: type[Any], root: Path, student: str, home: Path, **more: Any) -> None:
        """One command of nbgrader for the lab lion."""
        config = copy.deepcopy(self.config)
        config.Exchange.root = str(root)
        config.Exchange.cache = str(home / "cache")
        config.Exchange.assignment_dir = str(home)
        config.CourseDirectory.root = str(home)
        course = CourseDirectory(config=config, assignment_id="lion", student_id=student)
        assert course.course_id == COURSE
        kind(
            coursedir=course, authenticator=Authenticator(config=config), config=config, **more
        ).start()

    def collect(self, home: Path) -> None:
        """As the page says: student by student, each from their own folder, to this one."""
        page = (ROOT / "book" / "teaching" / "jupyterhub.md").read_text(encoding="utf-8")
        assert '--CourseDirectory.submitted_directory="$PWD/submitted"' in page
        self.config.CourseDirectory.submitted_directory = str(home / "submitted")
        for own in sorted((self.place / "class" / "students").iterdir()):
            self.run(ExchangeCollect, own, own.name, home, update=True)


def test_a_notebook_goes_out_and_its_last_version_comes_back(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("nobody owns the folder above the mounts")

    monkeypatch.setattr(Exchange, "ensure_root", refused)
    # An earlier grading that lies here does not get what is collected.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "grades" / "course").mkdir(parents=True)
    volume = Volume(tmp_path, loaded(values, "nbgrader", tmp_path))
    shutil.copytree(release_path(ROOT, "lion").parent, tmp_path / "class" / "outbound" / "lion")
    for student in ("anna", "李雷"):
        root, home = volume.pod(student), tmp_path / "homes" / student
        home.mkdir(parents=True)
        volume.run(ExchangeFetchAssignment, root, student, home)
        for answer in ("first", "last"):
            notebook = json.loads((home / "lion" / "lion.ipynb").read_text(encoding="utf-8"))
            notebook["cells"][1]["source"] = f"# {answer} of {student}"
            (home / "lion" / "lion.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
            volume.run(ExchangeSubmit, root, student, home)
    # anna hands something in under another's name; it lies in her own folder and is nobody's.
    inbound = tmp_path / "class" / "students" / "anna" / COURSE / "inbound"
    theirs = next(inbound.glob("anna+lion+*"))
    shutil.copytree(theirs, inbound / theirs.name.replace("anna+", "bo+"))
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    open_gradebook(tmp_path / "grades" / "course")  # nbgrader would need `alembic`
    volume.collect(teacher)
    found = find(teacher / "submitted", {"lion"})
    assert [(one.student, one.lab, one.problem) for one in found] == [
        ("anna", "lion", ""),
        ("李雷", "lion", ""),
    ]
    for one in found:
        assert one.handed_in is not None
        cells = json.loads(one.path.read_text(encoding="utf-8"))["cells"]
        assert cells[1]["source"] == f"# last of {one.student}"


def test_only_instructors_have_the_formgrader(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nbgrader.server_extensions.formgrader"
    for environment, there in (("", False), ("1", True)):
        monkeypatch.setenv("LABCORE_INSTRUCTOR", environment)
        server = ServerApp(config=loaded(values, "server", tmp_path))
        server.find_server_extensions()
        assert bool(server.jpserver_extensions.get(name)) is there
        assert server.jpserver_extensions["nbgrader.server_extensions.assignment_list"]


def test_formgrader_shows_the_gradebook_copied_there(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "db_url" not in loaded(values, "nbgrader", tmp_path).CourseDirectory
    (tmp_path / "grades" / "course").mkdir(parents=True)
    course = loaded(values, "nbgrader", tmp_path).CourseDirectory
    assert course.db_url == f"sqlite:///{tmp_path / 'grades' / 'course' / 'gradebook.db'}"
    assert course.course_id == COURSE


def test_sizes_agree_with_what_they_are_for(values: dict[str, Any]) -> None:
    user = values["singleuser"]
    gib = float(user["memory"]["limit"].removesuffix("G"))
    assert gib * 1024 >= Limits().memory_mib, "what runs in the sandbox must run here"
    assert float(user["memory"]["guarantee"].removesuffix("G")) <= gib
    first, gpu = user["profileList"]
    assert first.get("default") and "kubespawner_override" not in first
    override = gpu["kubespawner_override"]
    assert override["extra_resource_limits"] == {"nvidia.com/gpu": "1"}
    assert {one["key"] for one in override["tolerations"]} >= {"nvidia.com/gpu"}
    claim = yaml.safe_load((ROOT / "labs" / "hub" / "exchange.yaml").read_text("utf-8"))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (volume,) = user["storage"]["extraVolumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize(
    "name", ["labs/hub/values.yaml", "labs/hub/exchange.yaml", "book/teaching/jupyterhub.md"]
)
def test_nobody_is_told_that_it_was_deployed(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8").lower()
    assert "written, not deployed" in " ".join(text[:900].split())
