"""`python -m labcore doctor`: each lack is said, with the command that mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from labcore import claims, device
from labcore.course import doctor

ROOT = Path(__file__).resolve().parents[2]
Usage = namedtuple("Usage", "total used free")


def named(name: str, root: Path = ROOT) -> doctor.Finding:
    """The one finding of this name."""
    (finding,) = [found for found in doctor.examine(root) if found.name == name]
    return finding


def test_every_lack_comes_with_its_remedy_on_one_line() -> None:
    findings = doctor.examine(ROOT)
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names)) >= 12
    for finding in findings:
        assert "\n" not in str(finding)
        assert finding.fine or finding.mend or finding.name in ("claims", "records")


def test_the_command_ends_with_0_only_when_nothing_is_missing() -> None:
    call = [sys.executable, "-m", "labcore", "doctor"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == ("LACK" in done.stdout), done.stdout + done.stderr
    for word in ("Python", "torch", "GPU", "Triton", "memory", "disk", "Chromium", "versions"):
        assert word in done.stdout


def test_torch_s_build_is_named() -> None:
    assert torch.__version__ in named("torch").text
    assert "built" in named("torch").text


def test_a_missing_package_is_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "anywidget" else real(name)
    )
    found = named("notebooks")
    assert not found.fine
    assert "missing: anywidget" in found.text
    assert "make course" in str(found)
    assert str(found).startswith("LACK")


def test_a_full_disk_and_a_small_memory_are_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 2**28))
    monkeypatch.setattr(doctor, "MEMORY_GIB", 1e6)
    assert not named("disk").fine and "0.2 GiB free" in named("disk").text
    assert not named("memory").fine


def test_programs_of_make_test_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in ("Chromium", "git"):
        found = named(name)
        assert found.fine and str(found).startswith("note")
        assert f"apt install {name.lower()}" in str(found)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_compiler_is_a_lack_only_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(device, "gpu_visible", lambda: gpu)
    (found,) = doctor._compiler()
    assert found.fine is not gpu
    assert "apt install g++" in str(found)


def test_a_gpu_that_torch_does_not_see_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(doctor, "GPU_DEVICES", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(device, "gpu_visible", lambda: False)
    assert "TORCH_INDEX=<address>" in str(named("GPU"))


def test_another_version_than_the_tested_one_is_named(tmp_path: Path) -> None:
    numpy = importlib.metadata.version("numpy")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(
        f"# a comment\nnumpy=={numpy} ; python_version >= '3'\n"
        "numpy==0.0.1 ; python_version < '3'\n"
        f"torch=={torch.__version__.partition('+')[0]}\n"
    )
    assert named("versions", tmp_path).fine  # a build after "+" is a choice, not a version
    constraints.write_text("numpy==0.0.1\nno-such-package==1.0\n")
    found = named("versions", tmp_path)
    assert not found.fine
    assert found.text == f"numpy {numpy} (tested: ==0.0.1)"


def test_a_hosted_machine_without_jupyterlab_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jupyterlab" else real(name)
    )
    monkeypatch.setattr(doctor, "LAB_EXTENSIONS", ("no-such-extension",))
    found = named("notebooks")
    assert found.fine and "JupyterLab itself is not" in found.text


def test_the_corners_that_were_run_are_told_with_how_they_ended(tmp_path: Path) -> None:
    run = {"python": "3.14", "torch": "2.15.0", "date": "2026-11-24", "make check": "FAILED"}
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "corners.json").write_text(
        json.dumps({"newest": run | {"chapters": "passed"}})
    )
    assert named("also run on", tmp_path).text == (
        "Python 3.14 with torch 2.15.0 (2026-11-24: make check FAILED, chapters passed)"
    )


def test_without_a_checkout_there_are_no_tested_versions(tmp_path: Path) -> None:
    assert "versions" not in [finding.name for finding in doctor.examine(tmp_path)]


def test_damaged_claims_are_a_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> dict[str, claims.Claim]:
        raise ValueError("claims.toml is damaged; restore it with git checkout")

    monkeypatch.setattr(claims, "load", damaged)
    found = named("claims")
    assert not found.fine
    assert "restore it with git" in str(found)
