"""What runs on other machines: workflows, a codespace, Binder, pre-commit. Here their files are
held to each other and to what they call."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".github", ".devcontainer", ".binder")
FILES = (".pre-commit-config.yaml", "CITATION.cff", "Makefile", "README.md", "constraints.txt",
         "environment.yml", "pyproject.toml", "scripts/matrix.py", "scripts/setup.py",
         "scripts/gates.py", "tests/book/outputs.py", ".ci/run")  # fmt: skip
USES = re.compile(r"^\s*(?:- )?uses: *(.*)$", re.MULTILINE)
# A tag can be moved to other code by whoever owns the action, a commit cannot.
PINNED = re.compile(r"([\w.-]+/[\w./-]+)@([0-9a-f]{40})  # (v\d+\.\d+\.\d+)")
# What an empty image lacks besides, and a person's Debian has.
CONTAINER = {"ca-certificates"}


def workflows(root: Path) -> dict[str, str]:
    """The text of each workflow by its file's name."""
    paths = sorted((root / ".github" / "workflows").iterdir())
    return {path.name: path.read_text("utf-8") for path in paths}


def steps(text: str) -> list[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]


def action_problems(root: Path) -> list[str]:
    """Actions that are not pinned by a commit, or by two in two places."""
    problems, commits = [], {}
    for name, text in workflows(root).items():
        lines = USES.findall(text)
        if len(lines) != sum("uses" in step for step in steps(text)):
            problems.append(f"{name}: a `uses:` stands in a form that this test does not read")
        for line in lines:
            pin = PINNED.fullmatch(line.strip())
            if pin is None:
                problems.append(f"{name}: {line} is no `<action>@<40 hex digits>  # v1.2.3`")
            elif commits.setdefault(pin[1], pin.groups()) != pin.groups():
                problems.append(f"{name}: {pin[1]} has another commit than elsewhere")
    return problems


def call_problems(root: Path) -> list[str]:
    """Targets of make and files that are run elsewhere and are not here."""
    makefile = (root / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    container = json.loads((root / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    install = (root / ".devcontainer" / "install.sh").read_text("utf-8").replace("\\\n", " ")
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    told = {
        **{
            name: "\n".join(step.get("run", "") for step in steps(text))
            for name, text in workflows(root).items()
        },
        "devcontainer.json": container["postCreateCommand"],
        "install.sh": re.sub(r"#.*|apt-get install .*", "", install),
        ".pre-commit-config.yaml": "\n".join(
            hook["entry"] for repo in hooks for hook in repo["hooks"]
        ),
    }
    problems = []
    for name, commands in told.items():
        problems += [
            f"{name}: `make {target}` is no target"
            for target in re.findall(r"\bmake ([a-z-]+)", commands)
            if target not in targets
        ]
        problems += [
            f"{name}: {path} is not there"
            for path in re.findall(
                r"(?m)(?:^| )((?:scripts|tests|\.ci|\.devcontainer)/\S+)", commands
            )
            if not (root / path).is_file()
        ]
    return problems


def container_problems(root: Path) -> list[str]:
    """Where the codespace differs from what the README says to a person with Debian."""
    install = (root / ".devcontainer" / "install.sh").read_text("utf-8")
    installed = re.search(r"apt-get install (.*)", install.replace("\\\n", " "))
    readme = re.search(r"apt-get install (.*)", (root / "README.md").read_text("utf-8"))
    setup = re.search(r'PACKAGES = "(.*)"', (root / "scripts" / "setup.py").read_text("utf-8"))
    if installed is None or readme is None or setup is None:
        return ["a list of Debian's packages stands in a form that this test does not read"]
    packages = {word for word in installed[1].split() if not word.startswith("-")}
    problems = [
        f"install.sh installs {sorted(packages)}, {where} names {listed}"
        for where, listed in (("the README", readme[1]), ("scripts/setup.py", setup[1]))
        if packages - CONTAINER != set(listed.split())
    ]
    if install.rstrip().splitlines()[-1] != "make setup":
        problems.append("install.sh does not end with `make setup`")
    port = re.search(r"^PORT \?= (\d+)", (root / "Makefile").read_text("utf-8"), re.MULTILINE)
    container = json.loads((root / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    ports = [str(port) for port in container["forwardPorts"]]
    if port is None or ports != [port[1]] or [*container["portsAttributes"]] != ports:
        problems.append(f"devcontainer.json forwards {ports}, the Makefile's PORT is another")
    return problems


def binder_problems(root: Path) -> list[str]:
    """Where Binder's environment differs from the versions that scripts/setup.py chooses."""
    setup = (root / "scripts" / "setup.py").read_text("utf-8")
    torch = re.search(r'^TORCH = "((\d+\.\d+)\.\d+)"', setup, re.MULTILINE)
    assert torch, "scripts/setup.py names torch in another form"
    triton = re.search(rf'"{re.escape(torch[2])}": "(.+?)"', setup)
    assert triton, "scripts/setup.py names triton in another form"
    own = yaml.safe_load((root / ".binder" / "environment.yml").read_text("utf-8"))
    conda = yaml.safe_load((root / "environment.yml").read_text("utf-8"))
    python = next(part for part in conda["dependencies"] if str(part).startswith("python="))
    pip = ["-c ../constraints.txt", f"triton=={triton[1]}", "-e ..[labs]"]
    wanted = [python, "pip", f"pytorch-cpu={torch[1]}", {"pip": pip}]
    if own["dependencies"] != wanted:
        return [f".binder/environment.yml has {own['dependencies']}, it must be {wanted}"]
    return []


def corner_problems(root: Path) -> list[str]:
    """Where the weekly workflow runs other corners than scripts/matrix.py has."""
    text = (root / "scripts" / "matrix.py").read_text("utf-8")
    corners = set(re.findall(r'^    "(\w+)": \{"python": "([\d.]+)"', text, re.MULTILINE))
    weekly = yaml.safe_load(workflows(root)["versions.yml"])
    rows = weekly["jobs"]["corner"]["strategy"]["matrix"]["include"]
    runs = {(row["corner"], row["python"]) for row in rows}
    odd = sorted(corners ^ runs)
    return [f"versions.yml and scripts/matrix.py differ on the corners {odd}"] if odd else []


def hook_problems(root: Path) -> list[str]:
    """Where pre-commit would run other versions, or fewer gates of text, than `make test`."""
    lines = (root / "constraints.txt").read_text("utf-8").splitlines()
    locked = {line for line in lines if "==" in line}
    repos = yaml.safe_load((root / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    hooks = [hook for repo in repos for hook in repo["hooks"]]
    pins = [pin for hook in hooks for pin in hook.get("additional_dependencies", ())]
    problems = [
        f"pre-commit has {pin}, constraints.txt has not" for pin in pins if pin not in locked
    ]
    gates = (root / "scripts" / "gates.py").read_text("utf-8")
    for command in (("ruff", "check"), ("ruff", "format"), ("codespell",)):
        words = ", ".join(f'"{word}"' for word in command)
        hooked = [hook for hook in hooks if hook["entry"].split()[: len(command)] == [*command]]
        if len(hooked) != 1 or f"({words}" not in gates:
            problems.append(f"`{' '.join(command)}` is not one gate here and one hook there")
    return problems


def release_problems(root: Path) -> list[str]:
    """Where a release could run code with the right to publish, or need a password."""
    jobs = yaml.safe_load(workflows(root)["release.yml"])["jobs"]
    publish = jobs["publish"]
    problems = [
        f"release.yml: {name} may ask for an identity"
        for name, job in jobs.items()
        if name != "publish" and "id-token" in job.get("permissions", {})
    ]
    if publish.get("permissions") != {"id-token": "write"} or publish["environment"] != "pypi":
        problems.append("release.yml: publish needs the environment pypi and id-token alone")
    if any("checkout" in step.get("uses", "") for step in publish["steps"]):
        problems.append("release.yml: publish checks the repository out")
    if "secrets." in workflows(root)["release.yml"]:
        problems.append("release.yml names a secret: trusted publishing needs none")
    return problems


def citation_problems(root: Path) -> list[str]:
    """Where CITATION.cff and pyproject.toml name other authors or keywords."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text("utf-8"))
    same = citation["authors"] == project["authors"] and citation["license"] == project["license"]
    return [] if same else ["CITATION.cff and pyproject.toml name other authors or licenses"]


CHECKS = (action_problems, call_problems, container_problems, binder_problems, corner_problems,
          hook_problems, release_problems, citation_problems)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_runs_elsewhere_agrees(check: Any) -> None:
    assert check(ROOT) == []


PLANTS = [
    ("workflows/ci.yml", r"@[0-9a-f]{40}  # v7\S+", "@v7", "ci.yml: actions/checkout@v7 is no"),
    ("workflows/ci.yml", r"(@[0-9a-f]{40})  # v7\S+", r"\1", "is no `<action>@<40 hex"),
    ("workflows/release.yml", r"checkout@.", "checkout@0", "checkout has another commit"),
    ("workflows/ci.yml", r"uses: (actions/checkout)", r'"uses": \1', "in a form that this test"),
    ("workflows/ci.yml", r"run: make book", "run: make boock", "`make boock` is no target"),
    ("workflows/versions.yml", "scripts/gates", "scripts/gate", "scripts/gate.py is not there"),
    ("workflows/versions.yml", r"gpu, python: \"3.12", r'gpu, python: "3.13', "on the corners"),
    ("workflows/versions.yml", r".*corner: oldest.*\n", "", "on the corners"),
    ("workflows/release.yml", r"(permissions:\n)  contents: read\n\njobs:\n  build:\n",
     "jobs:\n  build:\n    permissions:\n      id-token: write\n", "build may ask for an identity"),
    ("workflows/release.yml", "environment: pypi", "environment: test", "needs the environment"),
    ("workflows/release.yml", "download-artifact@", "checkout@", "publish checks the repository"),
    ("workflows/release.yml", r"dist/\*\n$", "-p ${{ secrets.KEY }}\n", "names a secret"),
    (".devcontainer/install.sh", r"g\+\+ ", "", "install.sh installs"),
    (".devcontainer/install.sh", "make setup", "make test", "does not end with `make setup`"),
    (".devcontainer/install.sh", "make setup", "make set-up", "`make set-up` is no target"),
    (".devcontainer/devcontainer.json", "install.sh", "in.sh", ".devcontainer/in.sh is not there"),
    (".devcontainer/devcontainer.json", "8888", "8889", "forwards ['8889']"),
    ("README.md", "python3-venv ", "", "the README names"),
    ("scripts/setup.py", r'(?m)^TORCH = ".*"', 'TORCH = "2.12.1"', "pytorch-cpu=2.12.1"),
    ("environment.yml", "python=3.11", "python=3.12", ".binder/environment.yml has"),
    (".binder/environment.yml", r"\[labs\]", "[all]", ".binder/environment.yml has"),
    ("constraints.txt", r"(?m)^ruff==.*", "ruff==0.1", "constraints.txt has not"),
    (".pre-commit-config.yaml", "entry: codespell", "entry: typos", "`codespell` is not one gate"),
    (".pre-commit-config.yaml", "outputs.py", "strip.py", "tests/book/strip.py is not there"),
    ("CITATION.cff", "The labcore authors", "Somebody", "name other authors"),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant[0]}-{plant[3][:20]}")
def test_a_planted_fault_is_named(plant: tuple[str, str, str, str], tmp_path: Path) -> None:
    name, pattern, replacement, expected = plant
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    path = tmp_path / (f".github/{name}" if name.startswith("workflows") else name)
    changed, count = re.subn(pattern, replacement, path.read_text("utf-8"))
    assert count, f"{pattern} is not in {name}"
    path.write_text(changed, "utf-8")
    problems = [problem for check in CHECKS for problem in check(tmp_path)]
    assert any(expected in problem for problem in problems), problems


@pytest.mark.skipif(os.name == "nt", reason="Windows marks no file as a program")
def test_the_install_script_is_a_program_that_bash_can_read() -> None:
    script = ROOT / ".devcontainer" / "install.sh"
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_forms_for_issues_have_what_github_asks_for() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path.name
        assert all(part["attributes"]["label"] for part in form["body"]), path.name
    assert [path.stem for path in forms] == ["claim", "fault", "idea"]


def test_dependabot_leaves_the_lock_alone() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text("utf-8"))["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["github-actions"]


@pytest.mark.parametrize(("source", "code"), [("1", 1), ("# NBVAL_CHECK_OUTPUT\n1", 0)])
def test_the_hook_finds_outputs_that_nothing_compares(
    tmp_path: Path, source: str, code: int
) -> None:
    """Run as pre-commit does: by a Python that has nothing installed."""
    cell = {"cell_type": "code", "source": source, "outputs": [{"output_type": "stream"}]}
    cell["execution_count"] = 1
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}), "utf-8")
    hook = [sys.executable, "-I", str(ROOT / "tests" / "book" / "outputs.py"), "a.ipynb"]
    done = subprocess.run(hook, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("a.ipynb: cell 1 has outputs" in done.stdout) == bool(code)
