"""The files that must agree: dependencies, versions, commands, slugs; and what must not be said."""

from __future__ import annotations

import ast
import importlib
import itertools
import pkgutil
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import labcore

ROOT = Path(__file__).resolve().parent.parent
AGREEING = ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", "README.md",
            "CITATION.cff", "CHANGELOG.md", "_toc.yml", "scripts/setup.py", "scripts/matrix.py",
            "LICENSE", "THIRD_PARTY.md")  # fmt: skip
# Machine paths and package servers belong to one machine, not to the course.
PRIVATE = re.compile(
    r"/(?:home|root|Users|work)/\w|/opt/\w+/|file:///opt|files\.pythonhosted|pypi\.org/simple"
    r"|download\.pytorch\.org|--(?:extra-)?index-url\s+http"
)


def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]


def requirements(root: Path) -> dict[str, list[Requirement]]:
    """Every requirement of pyproject by package, labcore's own extras left out."""
    told = project(root)
    groups = (told["dependencies"], *told["optional-dependencies"].values())
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, itertools.chain(*groups)):
        if requirement.name != "labcore":
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def pins(root: Path) -> dict[str, list[Version]]:
    """The versions of each package in constraints.txt: several where Pythons differ."""
    found: dict[str, list[Version]] = {}
    for line in (root / "constraints.txt").read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            version = str(pin.specifier).removeprefix("==")
            found.setdefault(canonicalize_name(pin.name), []).append(Version(version))
    return found


def chosen(root: Path) -> dict[str, list[Version]]:
    """The versions of torch and triton that scripts/setup.py installs."""
    text = (root / "scripts" / "setup.py").read_text("utf-8")
    torch = re.search(r'^TORCH = "(.+)"', text, re.MULTILINE)
    pairs = re.findall(r'"(2\.\d+)": "(3\.[\d.]+)"', text)
    assert torch and pairs, "scripts/setup.py names its versions in another form"
    return {
        "torch": [Version(torch[1]), *(Version(release) for release, _ in pairs)],
        "triton": [Version(triton) for _, triton in pairs],
    }


def dependency_problems(root: Path) -> list[str]:
    """Where pyproject.toml, constraints.txt and environment.yml disagree."""
    problems = []
    locked = pins(root)
    problems += [f"constraints.txt names {n}" for n in ("torch", "triton") if n in locked]
    known = {**locked, **chosen(root)}
    for name, wanted in requirements(root).items():
        if name not in known:
            problems.append(f"{name} has no line in constraints.txt")
        problems += [
            f"{name}=={version} is outside {one.specifier} of pyproject.toml"
            for one in wanted
            for version in known.get(name, ())
            if version not in one.specifier
        ]
    python = SpecifierSet(project(root)["requires-python"])
    conda = yaml.safe_load((root / "environment.yml").read_text("utf-8"))["dependencies"]
    pip = next(part["pip"] for part in conda if isinstance(part, dict))
    version = next(part for part in conda if str(part).startswith("python="))
    if Version(version.removeprefix("python=")) not in python:
        problems.append(f"environment.yml: {version} is outside {python}")
    if pip != ["-c constraints.txt", "torch", "-e .[all]"]:
        problems.append(f"environment.yml installs {pip}, `make course` torch, then -e .[all]")
    setup = (root / "scripts" / "setup.py").read_text("utf-8")
    if '"-e", ".[all]"' not in setup:
        problems.append("scripts/setup.py installs other extras than environment.yml")
    minors = [(3, int(m)) for m in re.findall(r"\(3, (\d+)\)", setup.partition("WANTED")[0])]
    fitting = [(3, m) for m in range(8, 20) if Version(f"3.{m}") in python]
    if minors != fitting:
        problems.append(f"scripts/setup.py takes Python {minors}, pyproject.toml {fitting}")
    return problems


def version_problems(root: Path) -> list[str]:
    """Where the version, the licenses or the names of the commands differ."""
    told = project(root)
    version = told["version"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text("utf-8"))
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    versions = {
        "CITATION.cff": citation["version"],
        "CHANGELOG.md": newest[1] if newest else None,
        "labcore.__version__": labcore.__version__,
    }
    problems = [
        f"{k} says {v}, pyproject.toml {version}" for k, v in versions.items() if v != version
    ]
    if not told["license"] == citation["license"] == "BSD-3-Clause":
        problems.append("pyproject.toml and CITATION.cff name different licenses")
    text = (root / "LICENSE").read_text("utf-8")
    problems += [f"LICENSE lacks {w}" for w in ("BSD-3-Clause", "CC BY 4.0") if w not in text]
    problems += [
        f"{name} is missing" for name in told["license-files"] if not (root / name).is_file()
    ]
    return problems


def command_problems(root: Path) -> list[str]:
    """Targets that the README names and the Makefile lacks, and the other way round."""
    makefile = (root / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    text = (root / "README.md").read_text("utf-8")
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE))
    problems = [f"README: `make {name}` is no target" for name in sorted(named - targets)]
    helpers = {"help", "setup", "setup-course"}
    problems += [f"README does not name `make {n}`" for n in sorted(targets - named - helpers)]
    return problems


def slug_problems(root: Path) -> list[str]:
    """Where the README's table and _toc.yml disagree about the chapters that are there."""
    text = (root / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", text, re.MULTILINE))
    there = {slug for slug, state in rows.items() if f"book/{slug}.ipynb" in state}
    toc = (root / "_toc.yml").read_text("utf-8")
    listed = re.findall(r"file:\s*book/(\w+)\s*$", toc, re.MULTILINE)
    chapters = {name for name in listed if (root / "book" / f"{name}.ipynb").is_file()}
    problems = [
        f"README: {slug} is there, _toc.yml has no such chapter" for slug in there - chapters
    ]
    problems += [f"_toc.yml: {name} is not in the README's table" for name in chapters - there]
    in_order = [slug for slug in rows if slug in chapters]
    if in_order != [name for name in listed if name in chapters]:
        problems.append("README and _toc.yml order the chapters differently")
    return problems


def corner_problems(root: Path) -> list[str]:
    """Corners that nobody could install, and ends of the ranges that no corner runs."""
    text = (root / "scripts" / "matrix.py").read_text("utf-8")
    corners = re.findall(r'"python": "(3\.\d+)", "torch": "(\d+\.\d+)', text)
    python = SpecifierSet(project(root)["requires-python"])
    torch = [str(version) for version in chosen(root)["torch"][1:]]
    problems = [f"a corner asks for Python {p}" for p, _ in corners if Version(p) not in python]
    problems += [f"a corner asks for torch {t}" for _, t in corners if t not in torch]
    run = {t for _, t in corners}
    return problems + [f"no corner runs torch {t}" for t in (torch[0], torch[-1]) if t not in run]


CHECKS = (
    dependency_problems, version_problems, command_problems, slug_problems, corner_problems,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_agrees(check: Any) -> None:
    assert check(ROOT) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that must agree, to plant a fault in."""
    for name in AGREEING:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "book", tmp_path / "book")
    return tmp_path


PLANTS = [
    ("constraints.txt", r"(?m)^anywidget==.*\n", "", "anywidget has no line in constraints.txt"),
    ("constraints.txt", r"(?m)^numpy==.*$", "numpy==1.26.4", "numpy==1.26.4 is outside"),
    ("constraints.txt", r"\Z", "torch==2.13.0\n", "constraints.txt names torch"),
    ("scripts/setup.py", r'"2\.15": ', '"2.16": ', "torch==2.16 is outside"),
    ("scripts/setup.py", '"3.9.0"', '"3.10.0"', "triton==3.10.0 is outside"),
    ("scripts/matrix.py", '"2.15.0"', '"2.16.0"', "a corner asks for torch 2.16"),
    ("scripts/matrix.py", '"2.15.0"', '"2.14.1"', "no corner runs torch 2.15"),
    ("scripts/matrix.py", '"python": "3.14"', '"python": "3.15"', "a corner asks for Python 3.15"),
    ("environment.yml", "python=3.11", "python=3.10", "python=3.10 is outside"),
    ("environment.yml", r"-e \.\[all\]", "-e .[book]", "environment.yml installs"),
    ("pyproject.toml", r"<3\.15", "<3.16", "scripts/setup.py takes Python"),
    ("CITATION.cff", r"(?m)^version: .*", "version: 9.9.9", "CITATION.cff says 9.9.9"),
    ("CHANGELOG.md", r"(?m)^## \S+", "## 9.9.9", "CHANGELOG.md says 9.9.9"),
    ("LICENSE", "CC BY 4.0", "CC0", "LICENSE lacks CC BY 4.0"),
    ("README.md", "`make check`", "`make chess`", "`make chess` is no target"),
    ("Makefile", r"(?m)^book:", "books:", "`make book` is no target"),
    ("_toc.yml", "book/lion", "book/tiger", "lion is there, _toc.yml has no such chapter"),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant[0]}-{plant[3][:20]}")
def test_a_planted_disagreement_is_named(copy: Path, plant: tuple[str, str, str, str]) -> None:
    name, pattern, replacement, expected = plant
    text = (copy / name).read_text("utf-8")
    changed, count = re.subn(pattern, replacement, text)
    assert count, f"{pattern} is not in {name}"
    (copy / name).write_text(changed, "utf-8")
    problems = [problem for check in CHECKS for problem in check(copy)]
    assert any(expected in problem for problem in problems), problems


def tracked_files() -> list[Path]:
    """The text files that belong to the course: those that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git checkout")
    suffixes = {".png", ".svg", ".woff2"}
    paths = (ROOT / name for name in done.stdout.splitlines())
    return [path for path in paths if path.is_file() and path.suffix not in suffixes]


def test_no_file_names_one_machine_or_one_package_server() -> None:
    files = tracked_files()
    assert len(files) > 50
    here = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path != here and (match := PRIVATE.search(path.read_text("utf-8", "replace")))
    ]
    assert found == []


def test_what_is_made_is_not_kept() -> None:
    """Notebook copies, builds and environments must never be added to the repository."""
    names = [path.relative_to(ROOT).parts[0] for path in tracked_files()]
    assert not {"my", "_build", "dist", "build", ".venv", ".cache"} & set(names)


def test_ci_runs_what_a_person_runs() -> None:
    run = (ROOT / ".ci" / "run").read_text("utf-8")
    assert run.rstrip().endswith("exec make test")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = workflow["jobs"]["test"]["steps"]
    assert any(step.get("run") == ".ci/run" for step in steps)
    assert workflow["jobs"]["publish"]["if"].count("main") == 1


def dead_links(text: str, root: Path) -> list[str]:
    """Relative links and images of a Markdown text that lead to nothing."""
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    local = [target for target in targets if "://" not in target]
    return [target for target in local if not (root / target).exists()]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_into_the_repository_lead_somewhere(name: str) -> None:
    assert dead_links((ROOT / name).read_text(encoding="utf-8"), ROOT) == []
    assert dead_links("![x](book/_assets/none.png) [y](https://a.b/c)", ROOT) == [
        "book/_assets/none.png"
    ]


def hidden_modules(package: ModuleType) -> list[str]:
    """Modules of a package that a function or a class of its face hides."""
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    faces = {name: vars(package).get(name) for name in names}
    return [name for name, value in faces.items() if not isinstance(value, ModuleType | None)]


def packages() -> list[str]:
    """The dotted names of labcore's packages."""
    inits = (ROOT / "src").rglob("labcore/**/__init__.py")
    return sorted(".".join(path.parent.relative_to(ROOT / "src").parts) for path in inits)


@pytest.mark.parametrize("name", packages())
def test_no_face_hides_a_module(name: str) -> None:
    assert hidden_modules(importlib.import_module(name)) == []


def test_a_hidden_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labcore, "checks", len)
    assert hidden_modules(labcore) == ["checks"]


MOST_FILES, MOST_NAMES = 18, 25


def crowded(package: ModuleType) -> list[str]:
    """Where a package has more modules than a folder holds, or more names than a face shows."""
    files = len([*Path(package.__path__[0]).glob("*.py")])
    names = len(getattr(package, "__all__", ()))
    found = [f"{files} files, at most {MOST_FILES}"] if files > MOST_FILES else []
    return found + ([f"{names} names, at most {MOST_NAMES}"] if names > MOST_NAMES else [])


@pytest.mark.parametrize("name", packages())
def test_folders_and_faces_are_small(name: str) -> None:
    assert crowded(importlib.import_module(name)) == []


def test_a_crowd_is_counted(tmp_path: Path) -> None:
    package = ModuleType("full")
    package.__path__, package.__all__ = [str(tmp_path)], [f"n{i}" for i in range(MOST_NAMES + 1)]
    for number in range(MOST_FILES + 1):
        (tmp_path / f"m{number}.py").touch()
    assert crowded(package) == ["19 files, at most 18", "26 names, at most 25"]
    (tmp_path / "m0.py").unlink()
    package.__all__.pop()
    assert crowded(package) == []


def private_imports(code: str) -> list[str]:
    """Private names that the code imports from modules of labcore."""
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom))
    ours = (node for node in nodes if (node.module or "").split(".")[0] == "labcore")
    names = (alias.name for node in ours for alias in node.names)
    return [name for name in names if re.match(r"_[^_]", name)]


def test_no_module_imports_a_private_name_of_another() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    found = {path.name: private_imports(path.read_text("utf-8")) for path in files}
    assert {name: names for name, names in found.items() if names} == {}
    assert private_imports("from labcore.optim.rules import lion, _wide\nimport os") == ["_wide"]
