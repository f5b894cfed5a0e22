"""The server's environment, without its download: which Python it takes, and what it says."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from labcore.serving.triton import environment

LINUX = (platform.system(), platform.machine()) == ("Linux", "x86_64")
needs_linux = pytest.mark.skipif(not LINUX, reason="the server's wheel is for Linux on x86_64")


def python(folder: Path, name: str, said: str = "") -> str:
    """A program that answers the probe as a Python would: with a folder, or with an error."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{said or 'echo /a/lib'}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH; the running Python is 3.14."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))  # this machine's own are not seen
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "14", "0"))
    return folder


def test_the_first_python_with_a_stub_and_its_library_is_taken(bin_: Path) -> None:
    python(bin_, "python3.8")
    python(bin_, "python3.13")
    python(bin_, "python3.12", "echo 'OSError: libpython3.12.so.1.0: no such file' >&2; exit 1")
    python(bin_, "python3.11", "echo \"No module named 'ensurepip'\" >&2; exit 1")
    with pytest.raises(RuntimeError) as caught:
        environment.interpreter()
    said = str(caught.value)
    assert "needs Python 3.12, 3.11, 3.10, 3.9 with its library" in said
    for words in ("is 3.14", "OSError: libpython3.12", "No module named 'ensurepip'"):
        assert words in said
    good = python(bin_, "python3.10")
    assert environment.interpreter() == (good, "3.10", "/a/lib")


def test_the_probe_takes_the_running_python_or_says_why_not() -> None:
    probe = [sys.executable, "-c", environment.PROBE]
    told = subprocess.run(probe, capture_output=True, text=True)
    assert not told.returncode or "Error: " in told.stderr.splitlines()[-1]
    lacking = "import sys; sys.version_info = (3, 99); " + environment.PROBE
    told = subprocess.run([*probe[:2], lacking], capture_output=True, text=True)
    assert told.returncode and "libpython3.99.so.1.0" in told.stderr.splitlines()[-1]


def whole(folder: Path) -> tuple[Path, Path]:
    """The files that are looked for, empty; the folder of the server's files, and its stub."""
    root = folder / "lib" / "python3.12" / "site-packages" / "pytriton" / "tritonserver"
    stub = root / "python_backend_stubs" / "3.12" / "triton_python_backend_stub"
    for file in (root / "bin" / "tritonserver", stub, root / "backends" / "python" / "any.so"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    stamp = {"packages": environment.PACKAGES, "version": "3.12", "libpython": "/a/lib"}
    (folder / "labcore.json").write_text(json.dumps(stamp))
    return root, stub


@needs_linux
def test_an_environment_is_whole_or_a_sentence_says_what_to_do(tmp_path: Path) -> None:
    assert "make server" in environment.missing(tmp_path / "none")
    root, stub = whole(tmp_path)
    assert environment.missing(tmp_path) == ""
    found = environment.load(tmp_path)
    assert (found.binary, found.backends) == (root / "bin" / "tritonserver", root / "backends")
    linked = root / "backends" / "python" / stub.name
    assert linked.resolve() == stub.resolve()
    assert environment.load(tmp_path) == found  # a second start finds the link there
    stub.unlink()
    assert "not completely" in environment.missing(tmp_path)
    whole(tmp_path)
    stamp = tmp_path / "labcore.json"
    stamp.write_text(json.dumps({"packages": ["nvidia-pytriton==0.6.0"], "version": "3.12"}))
    assert "not installed" in environment.missing(tmp_path)  # another version is made anew
    stamp.write_text("{")
    assert "not installed" in environment.missing(tmp_path)


@needs_linux
def test_the_servers_variables_lead_to_its_own_python(tmp_path: Path) -> None:
    root, _ = whole(tmp_path)
    told = environment.load(tmp_path).variables(
        {"PATH": "/bin", "PYTHONPATH": "/elsewhere", "VIRTUAL_ENV": "/elsewhere", "HOME": "/h"}
    )
    assert told["HOME"] == "/h" and not {"PYTHONPATH", "VIRTUAL_ENV"} & set(told)
    assert told["PATH"] == f"{tmp_path}/bin:/bin"
    assert told["LD_LIBRARY_PATH"] == f"/a/lib:{root.parents[1]}/nvidia_pytriton.libs"


@needs_linux
def test_failed_installation_says_why_and_leaves_no_stamp(
    tmp_path: Path, bin_: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python(bin_, "python3.12", '[ "$1" = -c ] && exit 0; echo no space left on device >&2; exit 5')
    with pytest.raises(RuntimeError, match=r"python3.12 -m venv .* failed; fix the cause"):
        environment.install(tmp_path / "env")
    said = capfd.readouterr()
    assert "MB to download, once" in said.out and "no space left on device" in said.err
    assert environment.missing(tmp_path / "env")


@needs_linux
def test_another_python_makes_the_environment(
    tmp_path: Path, bin_: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The running Python is 3.14; a 3.12 on the PATH is found, and is the one that is used."""
    whole(tmp_path / "made")
    (tmp_path / "made" / "labcore.json").unlink()
    pip = python(tmp_path, "pip", f'echo "$@" > {tmp_path}/asked')
    make = f'mkdir -p "$4" && cp -r {tmp_path}/made/lib "$4" && mkdir "$4/bin"'
    make += f' && cp {pip} "$4/bin/python"'
    path = "PATH=/usr/bin:/bin"
    python(bin_, "python3.12", f'{path}\n[ "$1" = -c ] && exit 0\n[ "$2" = venv ] && {make}')
    environment.install(tmp_path / "env")
    assert "for Python 3.12" in capsys.readouterr().out
    assert (tmp_path / "asked").read_text().split()[-2:] == list(environment.PACKAGES)
    assert environment.missing(tmp_path / "env") == ""


@needs_linux
@pytest.mark.parametrize("kept", ["notes.txt", "pyvenv.cfg"])
def test_a_folder_with_other_things_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Somebody's files, and the environment that this runs in."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / kept).touch()
    with pytest.raises(RuntimeError, match="must be empty or the server's own environment"):
        environment.install(tmp_path)
    assert (tmp_path / kept).exists()


@pytest.mark.parametrize("machine", [("Darwin", "arm64"), ("Windows", "AMD64")])
def test_another_machine_is_told_at_once(
    machine: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: machine[0])
    monkeypatch.setattr(platform, "machine", lambda: machine[1])
    assert "Linux on x86_64" in environment.missing(tmp_path)
    with pytest.raises(RuntimeError, match=f"this is {machine[0]} on {machine[1]}"):
        environment.install(tmp_path / "env")
