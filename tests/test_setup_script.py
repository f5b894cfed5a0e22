"""scripts/setup.py: each lack is one sentence at the start; an interrupted set-up is mended."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tokenize
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "setup.py"
Usage = namedtuple("Usage", "total used free")
# Hands out a wheel that lies there, so that no build tool has to be fetched.
BACKEND = """
import shutil
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    return Path(shutil.copy("labcore-1-py3-none-any.whl", folder)).name
"""


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
    for name in ("pyproject.toml", "constraints.txt", "scripts/apart.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
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


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 10, 1), (3, 15, 0), (3, 6, 15)])
def test_another_python_is_refused_in_one_sentence(
    script: ModuleType, version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "runs", lambda python: False)
    with pytest.raises(script.Lack) as caught:
        script.require_python(version, False, find=finder())
    here = ".".join(map(str, version))
    assert f"Python 3.11, 3.12, 3.13 or 3.14 is needed, this is {here}" in one_sentence(
        caught.value
    )


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9), (3, 14, 10)])
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
    assert "Python 3.11, 3.12, 3.13 or 3.14 is needed, this is 3." in done.stderr
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
    stamp = script.stamp(checkout, "3.11.7", script.TORCH, index)
    environment.stamp_file.write_text(json.dumps(stamp))
    return environment


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_complete_set_up_is_left_alone_until_a_file_changes(
    script: ModuleType, checkout: Path, name: str
) -> None:
    environment = ready_environment(script, checkout)
    assert environment.ready("", "")
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    assert not environment.ready("", "")


def test_another_index_for_torch_asks_for_a_new_set_up(script: ModuleType, checkout: Path) -> None:
    environment = ready_environment(script, checkout, "https://one.example/cpu")
    assert environment.ready("", "")  # not named again: what was chosen stays
    assert environment.ready("", "https://one.example/cpu")
    assert not environment.ready("", "https://two.example/cuda")


def test_another_torch_asks_for_a_new_set_up(script: ModuleType, checkout: Path) -> None:
    environment = ready_environment(script, checkout)
    assert environment.ready(script.TORCH, "")
    assert not environment.ready("2.15.0", "")


@pytest.mark.parametrize("release", ["2.10.0", "2.16.0", "3", "latest", "2.13"])
def test_a_torch_outside_the_range_is_refused_in_one_sentence(
    script: ModuleType, release: str
) -> None:
    script.require_torch(script.TORCH)
    with pytest.raises(script.Lack, match=re.escape(f"TORCH={release} ")) as caught:
        script.require_torch(release)
    one_sentence(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"files": "x"}'])
def test_a_damaged_stamp_is_no_stamp(script: ModuleType, checkout: Path, text: str) -> None:
    environment = ready_environment(script, checkout)
    environment.stamp_file.write_text(text)
    assert not environment.ready("", "")


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
        script.make(environment, "", "", False)
    assert not environment.ready("", "")
    fails = False
    script.make(environment, "", "", False)
    assert environment.ready("", "")
    everything = next(i for i, call in enumerate(calls) if "-e .[all]" in call)
    assert calls.index("torch") < everything  # first and alone
    assert f"-c {checkout / 'constraints.txt'}" in calls[everything]


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
    script.install_torch(environment, "2.14.1", "https://one.example/cpu", renew=False)
    assert "torch 2.13.0+cpu: 3 MiB" in capsys.readouterr().out
    assert "--dry-run" in calls[0]  # said before the download
    torch = calls[1]
    assert "torch==2.14.1" in torch
    assert torch[torch.index("--index-url") + 1] == "https://one.example/cpu"
    # Its triton, which that index may lack, comes from the usual place.
    assert calls[2:] == ([["install", "triton==3.8.0"]] if sys.platform == "linux" else [])


def wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    """A wheel without code."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_what_installs_the_rest_leaves_torch_as_it_is(
    script: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    """A newer torch that fits the range lies beside, and a package asks for a newer one."""
    shop = checkout / "shop"
    shop.mkdir()
    for version in ("2.13.0+cpu", "2.15.0"):
        wheel(shop, "torch", version)
    wheel(shop, "triton", "3.9.0")
    wheel(shop, "other", "1.0", "Requires-Dist: torch>=2.11\n")
    (checkout / "constraints.txt").write_text("other==1.0\n")
    needs = ["torch>=2.11", "triton>=3.6", 'other; extra == "all"']
    wheel(
        checkout,
        "labcore",
        "1",
        "Provides-Extra: all\n" + "".join(f"Requires-Dist: {n}\n" for n in needs),
    )
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "labcore"\nversion = "1"\n'
        'dynamic = ["dependencies", "optional-dependencies"]\n'
    )
    (checkout / "backend.py").write_text(BACKEND)
    environment = script.Environment(checkout)
    subprocess.run([sys.executable, "-m", "venv", str(environment.folder)], check=True)
    for name, value in {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(shop))
    environment.pip("install", "torch==2.13.0+cpu")
    uv = Path(sys.executable).parent / "uv"
    script.install_rest(
        environment, "2.13.0", find=lambda name: str(uv) if installer == "uv" else None
    )
    listed = subprocess.check_output([environment.python, "-m", "pip", "freeze"], text=True)
    assert "torch==2.13.0+cpu" in listed
    assert "other==1.0" in listed
    assert ("triton" in listed) == (installer == "pip")  # pip has it already; uv never looks


def test_where_uv_fails_pip_takes_over(
    script: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = script.Environment(checkout)
    calls: list[list[str]] = []

    def run(command: list[str]) -> None:
        calls.append(command)
        if command[0] == "/usr/bin/uv":
            raise script.Lack("`uv pip install …` failed.")

    monkeypatch.setattr(environment, "run", run)
    script.install_rest(environment, "2.13.0", find=finder("uv"))
    assert [command[0] for command in calls] == ["/usr/bin/uv", str(environment.python)]


@pytest.mark.parametrize("torch", ["2.11.0", "2.12.1", "2.13.0"])
def test_an_older_torch_gets_what_it_needs(script: ModuleType, checkout: Path, torch: str) -> None:
    older = script.OLDER.get(torch[:4], ())
    lines = {*script.fitting(checkout, torch).read_text().splitlines()}
    locked = {*(checkout / "constraints.txt").read_text().splitlines()}
    assert lines - locked == {*older}
    names = {line.partition("==")[0] for line in older}
    assert {line.partition("==")[0] for line in locked - lines} == names


def test_a_failed_command_shows_its_last_lines(
    script: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('one'); sys.exit('the network is down')"
    with pytest.raises(script.Lack, match="run this again") as caught:
        script.Environment(checkout).run([sys.executable, "-c", code])
    one_sentence(caught.value)
    assert capsys.readouterr().out.split("\n")[:2] == ["one", "the network is down"]


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
    assert "Python 3.11, 3.12, 3.13 or 3.14 is needed and python3 was not found" in done.stderr
