"""The server's environment, without its download: which Python it takes, and what it says."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from labcore.serving.triton import environment
from labcore.serving.triton.environment import Environment

LINUX = (platform.system(), platform.machine()) == ("Linux", "x86_64")
needs_linux = pytest.mark.skipif(not LINUX, reason="the server's wheel is for Linux on x86_64")


def python(folder: Path, name: str, **told: Any) -> str:
    """A program that answers the probe as a Python would."""
    answer = {"version": "3.11", "libpython": "system", "venv": True, **told}
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    file.chmod(0o755)
    return str(file)


def test_the_first_python_with_a_stub_and_its_library_is_taken(tmp_path: Path) -> None:
    odd = [
        python(tmp_path, "new", version="3.14"),
        python(tmp_path, "old", version="3.8"),
        python(tmp_path, "static", libpython=""),
        python(tmp_path, "bare", venv=False),
        str(tmp_path / "missing"),
    ]
    good = python(tmp_path, "good", version="3.12", libpython="/a/lib")
    assert environment.interpreter([*odd, good]) == (
        good,
        {"version": "3.12", "libpython": "/a/lib", "venv": True},
    )
    with pytest.raises(RuntimeError) as caught:
        environment.interpreter(odd)
    said = str(caught.value)
    assert "stubs for Python 3.8, 3.9, 3.10, 3.11, 3.12, 3.13" in said
    for words in ("3.14, which has no stub", "3.8, for which numpy 1.26", "lacks libpython3.11",
                  "cannot make environments"):  # fmt: skip
        assert words in said


def test_the_running_python_says_what_it_is() -> None:
    told = environment._ask(sys.executable)
    assert told is not None
    assert told["version"] == f"{sys.version_info[0]}.{sys.version_info[1]}" and told["venv"]


def whole(folder: Path) -> Environment:
    """The files that are looked for, empty."""
    found = Environment(folder=folder, version="3.11", libpython="/a/lib")
    for file in (found.binary, found.stub, folder / "bin" / "python"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    backend = found.root / "backends" / "python"
    backend.mkdir(parents=True)
    (backend / "libtriton_python.so").touch()
    (backend / "__pycache__").mkdir()
    stamp = {"packages": environment.PACKAGES, "version": "3.11", "libpython": "/a/lib"}
    (folder / "labcore.json").write_text(json.dumps(stamp))
    return found


@needs_linux
def test_an_environment_is_whole_or_a_sentence_says_what_to_do(tmp_path: Path) -> None:
    assert "make server" in environment.missing(tmp_path / "none")
    found = whole(tmp_path / "env")
    assert environment.missing(found.folder) == ""
    assert environment.load(found.folder) == found
    found.stub.unlink()
    assert "triton_python_backend_stub is missing" in environment.missing(found.folder)
    stamp = found.folder / "labcore.json"
    stamp.write_text(json.dumps({"packages": ["nvidia-pytriton==0.6.0"], "version": "3.11"}))
    assert "not installed" in environment.missing(found.folder)  # another version is made anew
    stamp.write_text("{")
    assert "not installed" in environment.missing(found.folder)


def test_backends_are_links_to_the_backend_and_its_stub(tmp_path: Path) -> None:
    found = whole(tmp_path / "env")
    for _ in range(2):  # a second start finds the folder there
        made = found.write_backends(tmp_path / "backends")
        names = {file.name: file.resolve() for file in (made / "python").iterdir()}
        assert set(names) == {"libtriton_python.so", "triton_python_backend_stub"}
        assert names["triton_python_backend_stub"] == found.stub.resolve()


def test_the_servers_variables_lead_to_its_own_python(tmp_path: Path) -> None:
    found = Environment(folder=tmp_path, version="3.11", libpython="/a/lib")
    told = found.variables(
        {"PATH": "/bin", "PYTHONPATH": "/elsewhere", "VIRTUAL_ENV": "/elsewhere", "HOME": "/h"}
    )
    assert told["HOME"] == "/h" and not {"PYTHONPATH", "VIRTUAL_ENV"} & set(told)
    assert told["PATH"] == f"{tmp_path}/bin:/bin"
    assert told["LD_LIBRARY_PATH"].split(":") == [
        "/a/lib",
        str(found.site / "nvidia_pytriton.libs"),
    ]


@needs_linux
def test_failed_installation_says_why_and_leaves_no_stamp(
    tmp_path: Path,
) -> None:
    failing = tmp_path / "python"
    answer = {"version": "3.11", "libpython": "system", "venv": True}
    failing.write_text(
        f"#!/bin/sh\n[ \"$1\" = -c ] && echo '{json.dumps(answer)}' && exit 0\n"
        "echo no space left on device >&2\nexit 5\n"
    )
    failing.chmod(0o755)
    said: list[str] = []
    with pytest.raises(RuntimeError, match="no space left on device"):
        environment.install(tmp_path / "env", say=said.append, candidates=[str(failing)])
    assert "MB to download, once" in "".join(said)
    assert environment.missing(tmp_path / "env")
    assert not os.path.exists(tmp_path / "env" / "labcore.json")


@needs_linux
def test_another_python_is_used_if_the_running_one_has_no_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running Python is 3.14; a 3.12 on the PATH is found, and is the one that is used."""
    found = environment.Environment(folder=tmp_path / "env", version="3.12", libpython="")
    pip = tmp_path / "pip"
    pip.write_text(
        "#!/bin/sh\nPATH=/usr/bin:/bin\n"
        f'echo "$@" > {tmp_path}/asked\n'
        f"mkdir -p {found.binary.parent} {found.stub.parent} {found.root}/backends/python\n"
        f"touch {found.binary} {found.stub}\n"
    )
    pip.chmod(0o755)
    answer = json.dumps({"version": "3.12", "libpython": "system", "venv": True})
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    other = bin_ / "python3.12"
    other.write_text(
        f"#!/bin/sh\nPATH=/usr/bin:/bin\n[ \"$1\" = -c ] && echo '{answer}' && exit 0\n"
        f'[ "$2" = venv ] && mkdir -p "$4/bin" && cp {pip} "$4/bin/python"\n'
    )
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", python(tmp_path, "running", version="3.14"))
    monkeypatch.setenv("PATH", str(bin_))  # this machine's own are not seen
    path, told = environment.interpreter()
    assert (path, told["version"]) == (str(other), "3.12")
    said: list[str] = []
    made = environment.install(tmp_path / "env", say=said.append)
    assert made == found and "for Python 3.12" in "".join(said)
    assert (tmp_path / "asked").read_text().split()[-2:] == list(environment.PACKAGES)
    assert environment.missing(tmp_path / "env") == ""

    other.unlink()
    with pytest.raises(RuntimeError, match="stubs for Python 3.8, .*3.13.* is 3.14, which has no"):
        environment.interpreter()


@pytest.mark.parametrize("machine", [("Darwin", "arm64"), ("Windows", "AMD64")])
def test_another_machine_is_told_at_once(
    machine: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: machine[0])
    monkeypatch.setattr(platform, "machine", lambda: machine[1])
    assert "Linux on x86_64" in environment.missing(tmp_path)
    with pytest.raises(RuntimeError, match=f"this is {machine[0]} on {machine[1]}"):
        environment.install(tmp_path / "env")
