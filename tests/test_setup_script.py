"""scripts/setup.py: each lack is one sentence at the start; an interrupted set-up is mended."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tokenize
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "setup.py"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("course_setup", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the script reads."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def finder(*names: str) -> Callable[[str], str | None]:
    """A `shutil.which` for a machine that has these programs only."""
    return lambda name: f"/usr/bin/{name}" if name in names else None


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text.endswith(".")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 10, 1), (3, 13, 0), (3, 6, 15)])
def test_another_python_is_refused_in_one_sentence(
    script: ModuleType, version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "runs", lambda python: False)
    with pytest.raises(script.Lack) as caught:
        script.require_python(version, False, find=finder())
    here = ".".join(map(str, version))
    assert f"Python 3.11 or 3.12 is needed, this is {here}" in one_sentence(caught.value)


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9)])
def test_a_fitting_python_is_used(script: ModuleType, version: tuple[int, int, int]) -> None:
    assert script.require_python(version, False, find=finder()) is None


def test_a_fitting_python_beside_an_old_one_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "runs", lambda python: python == "/usr/bin/python3.12")
    found = script.require_python((3, 9, 2), False, find=finder("python3.11", "python3.12"))
    assert found == "/usr/bin/python3.12"
    with pytest.raises(script.Lack, match="PYTHON=<its path>"):  # PYTHON was the person's choice
        script.require_python((3, 9, 2), True, find=finder("python3.11", "python3.12"))


def test_the_script_parses_on_old_pythons() -> None:
    """Its own sentence about the version must be what an old Python prints."""
    text = SCRIPT.read_text("utf-8")
    compile(text, str(SCRIPT), "exec", dont_inherit=True)
    import ast

    ast.parse(text, feature_version=(3, 7))
    names = {t.string for t in tokenize.generate_tokens(io.StringIO(text).readline)}
    assert not names & {":=", "match", "tomllib", "dataclass"}


def test_an_old_python_really_says_so(checkout: Path) -> None:
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.[6-9]*/bin/python3"))
    names = [shutil.which(f"python3.{minor}") for minor in (6, 7, 8, 9, 10)]
    starts = [
        str(path)
        for path in (*pyenv, *filter(None, names))
        if subprocess.run([path, "-V"], capture_output=True).returncode == 0
    ]
    if not starts:
        pytest.skip("no Python before 3.11 is on this machine")
    for python in starts:
        check_refusal(python, checkout)


def check_refusal(python: str, checkout: Path) -> None:
    call = [python, str(checkout / "scripts" / "setup.py")]
    done = subprocess.run(
        call, env={"PYTHON": python, "PATH": "/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Python 3.11 or 3.12 is needed, this is 3." in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_python_without_venv_is_said(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script.require_venv()
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(script.Lack, match="apt install python3-venv") as caught:
        script.require_venv()
    one_sentence(caught.value)


def test_a_full_disk_is_said_with_both_numbers(script: ModuleType, tmp_path: Path) -> None:
    free = int(1.2 * 1024**3)
    with pytest.raises(
        script.Lack, match=r"3\.5 GiB .* are needed in .*, 1\.2 GiB are free"
    ) as caught:
        script.require_disk(tmp_path, usage=lambda folder: Usage(0, 0, free))
    one_sentence(caught.value)
    assert script.require_disk(tmp_path, usage=lambda folder: Usage(0, 0, 4 * 1024**3)) is None


def test_a_port_in_use_is_said_with_the_next_one(script: ModuleType) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            script.Lack, match=f"port {port} .* is in use.*PORT={port + 1}"
        ) as caught:
            script.require_port("127.0.0.1", port)
        one_sentence(caught.value)
    assert script.require_port("127.0.0.1", port) is None


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_none_is_said(script: ModuleType, host: str) -> None:
    with pytest.raises(script.Lack, match=f"HOST={host} is no address") as caught:
        script.require_port(host, 8888)
    one_sentence(caught.value)


def test_a_compiler_is_needed_on_a_gpu_and_a_note_elsewhere(
    script: ModuleType, tmp_path: Path
) -> None:
    find = finder("git")
    (note,) = script.notes(find, devices=())
    assert "C++ compiler (g++) missing" in note
    assert "apt install git make g++ python3-venv python3-dev" in note
    gpu = tmp_path / "gpu"
    gpu.touch()
    with pytest.raises(script.Lack, match="which the GPU's kernels need") as caught:
        list(script.notes(find, devices=(str(gpu),)))
    one_sentence(caught.value)


def test_missing_headers_and_git_are_said(script: ModuleType, tmp_path: Path) -> None:
    assert script.compiler_lack(finder("g++"), include=tmp_path) == "Python's headers (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert script.compiler_lack(finder("g++"), include=tmp_path) is None
    assert any("git is missing" in note for note in script.notes(finder("g++"), devices=()))


def ready_environment(script: ModuleType, checkout: Path, index: str = "") -> object:
    """An environment whose stamp says that it is complete."""
    environment = script.Environment(checkout)
    environment.folder.mkdir()
    stamp = script.stamp(checkout, "3.11.7", index)
    environment.stamp_file.write_text(json.dumps(stamp))
    return environment


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_complete_set_up_is_left_alone_until_a_file_changes(
    script: ModuleType, checkout: Path, name: str
) -> None:
    environment = ready_environment(script, checkout)
    assert environment.ready("")
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    assert not environment.ready("")


def test_another_index_for_torch_asks_for_a_new_set_up(script: ModuleType, checkout: Path) -> None:
    environment = ready_environment(script, checkout, "https://one.example/cpu")
    assert environment.ready("")  # not named again: what was chosen stays
    assert environment.ready("https://one.example/cpu")
    assert not environment.ready("https://two.example/cuda")


@pytest.mark.parametrize("text", ["", "{", '{"files": "x"}'])
def test_a_damaged_stamp_is_no_stamp(script: ModuleType, checkout: Path, text: str) -> None:
    environment = ready_environment(script, checkout)
    environment.stamp_file.write_text(text)
    assert not environment.ready("")


def package(site: Path, name: str) -> Path:
    """An installed package of one file."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("x = 1\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(
        f"{name}/__init__.py,sha256=abc,6\n{name}-1.0.dist-info/RECORD,,\n"
    )
    return info


@pytest.mark.parametrize("damage", ["no record", "no file", "half a file", "leftover", "none"])
def test_what_an_interrupted_pip_left_is_taken_away(
    script: ModuleType, checkout: Path, damage: str
) -> None:
    environment = script.Environment(checkout)
    site = environment.folder / "lib" / "python3.11" / "site-packages"
    whole, hurt = package(site, "whole"), package(site, "hurt")
    if damage == "no record":
        (hurt / "RECORD").unlink()
    elif damage == "no file":
        (site / "hurt" / "__init__.py").unlink()
    elif damage == "half a file":
        (site / "hurt" / "__init__.py").write_text("x")
    elif damage == "leftover":
        (site / "~urt").mkdir()
    script.mend(environment)
    assert whole.is_dir()
    assert hurt.is_dir() == (damage in ("leftover", "none"))
    assert not (site / "~urt").exists()


def test_the_stamp_comes_last(
    script: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip that fails leaves no stamp; running again goes on and then writes it."""
    environment = ready_environment(script, checkout)
    calls: list[str] = []

    def pip(*arguments: str) -> None:
        calls.append(" ".join(arguments))
        if "-e" in arguments and fails:
            raise script.Lack("`pip install …` failed.")

    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment, "version", lambda: "3.11.7")
    monkeypatch.setattr(script, "install_torch", lambda *a, **k: calls.append("torch"))
    fails = True
    with pytest.raises(script.Lack):
        script.make(environment, "", False)
    assert not environment.ready("")
    fails = False
    script.make(environment, "", False)
    assert environment.ready("")
    everything = next(i for i, call in enumerate(calls) if "-e .[all]" in call)
    assert calls.index("torch") < everything  # first and alone
    assert "-c constraints.txt" in calls[everything]


def test_torch_is_asked_for_by_its_pin_and_index(
    script: ModuleType,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = script.Environment(checkout)
    wheel = checkout / "torch.whl"
    wheel.write_bytes(b"x" * 3 * 1024**2)
    calls: list[list[str]] = []

    def pip(*arguments: str) -> None:
        calls.append(list(arguments))
        if "--report" in arguments:
            item = {
                "metadata": {"name": "torch", "version": "2.13.0+cpu"},
                "download_info": {"url": wheel.as_uri()},
            }
            Path(arguments[arguments.index("--report") + 1]).write_text(
                json.dumps({"install": [item]})
            )

    monkeypatch.setattr(environment, "pip", pip)
    script.install_torch(environment, "https://one.example/cpu", renew=False)
    assert "torch 2.13.0+cpu: 3 MiB" in capsys.readouterr().out
    assert "--dry-run" in calls[0]  # said before the download
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().split()
        if line.startswith("torch==")
    ]
    assert pins[0] in calls[-1]
    assert calls[-1][calls[-1].index("--index-url") + 1] == "https://one.example/cpu"


def test_a_large_build_is_checked_against_the_disk(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "wheel_size", lambda address: 3 * 1024**3)
    asked: list[float] = []
    monkeypatch.setattr(script, "require_disk", lambda folder, gib: asked.append(gib))
    torch = {"metadata": {"name": "torch", "version": "2.13.0"}, "download_info": {"url": "x"}}
    script.describe_torch([torch], tmp_path)
    assert asked and asked[0] > 9


def test_two_set_ups_do_not_run_at_once(script: ModuleType, checkout: Path) -> None:
    with (
        script.alone(checkout),
        pytest.raises(script.Lack, match="another set-up runs"),
        script.alone(checkout),
    ):
        pass


def test_make_says_when_there_is_no_python(tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not on this machine")
    done = subprocess.run(
        [make, "-f", str(ROOT / "Makefile"), "setup"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "SHELL": "/bin/sh"} | {"HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Python 3.11 or 3.12 is needed and python3 was not found" in done.stderr
