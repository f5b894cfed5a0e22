import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from labcore import device


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh process that inherits nothing of Triton's flag."""
    import os

    clean = {k: v for k, v in os.environ.items() if k != device.INTERPRET}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


needs_triton = pytest.mark.skipif(device.triton_problem() is not None, reason="no Triton here")
needs_cpu_only = pytest.mark.skipif(device.gpu_visible(), reason="a GPU is visible")


def test_auto_on_a_cpu_tensor_is_torch():
    assert device.choose_backend("auto", torch.ones(2), op="f") == "torch"
    assert device.choose_backend("torch", torch.ones(2), op="f") == "torch"


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        device.choose_backend("tritn", torch.ones(2), op="f")


@needs_triton
@needs_cpu_only
def test_triton_on_a_cpu_tensor_is_the_interpreter_here():
    assert device.interpreting()
    assert device.choose_backend("triton", torch.ones(2), op="f") == "triton"


@needs_triton
@needs_cpu_only
def test_triton_imported_too_early_is_said():
    done = python(
        "import triton, torch\nfrom labcore import device\n"
        "assert not device.interpreting()\n"
        "device.choose_backend('triton', torch.ones(2), op='lion')"
    )
    assert done.returncode == 1
    assert "lion: triton was imported before labcore" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


@needs_triton
@needs_cpu_only
def test_a_flag_set_by_a_person_is_left_alone():
    code = "import os, labcore; print(os.environ['TRITON_INTERPRET'])"
    assert python(code, TRITON_INTERPRET="0").stdout.strip() == "0"
    assert python(code).stdout.strip() == "1"


@needs_triton
def test_cpu_tensor_is_refused_with_the_remedy_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_visible", lambda: True)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="backend='triton' .* CPU tensor; move it"):
        device.choose_backend("triton", torch.ones(2), op="f")


@pytest.mark.parametrize(
    ("platform", "words"), [("darwin", "Triton has no build for"), ("linux", "pip install")]
)
def test_without_triton_a_sentence_says_why(monkeypatch, platform, words):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(device.sys, "platform", platform)
    assert words in device.triton_problem()
    assert device.interpreting() is False
    assert "no Triton here" in device.badge()
    with pytest.raises(ValueError, match="use backend='torch'"):
        device.choose_backend("triton", torch.ones(2), op="f")
    assert device.choose_backend("auto", torch.ones(2), op="f") == "torch"


@needs_triton
@pytest.mark.parametrize(
    ("capability", "form", "words"),
    [((7, 5), "torch", "instead of the kernels"), ((8, 0), "triton", "run on the GPU")],
    ids=["T4", "A100"],
)
def test_auto_and_the_badge_agree_on_a_gpu(monkeypatch, capability, form, words):
    monkeypatch.setattr(device, "gpu_visible", lambda: True)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "a GPU")
    machine = device.Hardware(kind="gpu", name="a GPU", cores=2, memory_gib=15.0)
    monkeypatch.setattr(device, "hardware", lambda: machine)
    tensor = SimpleNamespace(device=torch.device("cuda", 0))
    assert device.choose_backend("auto", tensor, op="f") == form
    assert words in device.badge()
    if form == "torch":
        with pytest.raises(ValueError, match="sm_80 or newer.*AMD CDNA, got a GPU"):
            device.choose_backend("triton", tensor, op="f")


def test_badge_names_the_machine_and_torch():
    assert device.hardware().name in device.badge()
    assert torch.__version__ in device.badge()


def test_versions_state_python_and_torch():
    found = device.versions()
    assert found["torch"] == torch.__version__
    assert found["python"].count(".") == 2


def test_environment_switches(clean_environment):
    assert not device.building_book()
    assert not device.strict_claims()
    assert device.seed_from_environment() is None
    clean_environment.setenv("LABCORE_BOOK", "1")
    clean_environment.setenv("LABCORE_STRICT_CLAIMS", "1")
    clean_environment.setenv("LABCORE_SEED", "17")
    assert device.building_book()
    assert device.strict_claims()
    assert device.seed_from_environment() == 17
    clean_environment.setenv("LABCORE_SEED", "x")
    with pytest.raises(ValueError, match="LABCORE_SEED must be a whole number, got 'x'"):
        device.seed_from_environment()


def test_only_device_reads_the_environment():
    from pathlib import Path

    root = Path(device.__file__).parent
    readers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0]
        not in ("labs", "grading", "course", "book", "__main__.py")
        and ("os.environ" in path.read_text() or "os.getenv" in path.read_text())
    }
    # These make the environment of processes that they start, and hip/build.py follows
    # conventions that are not labcore's: CXX and XDG_CACHE_HOME.
    starters = {
        "compile_only/__init__.py",
        "hip/compile.py",
        "processes/child.py",
        "processes/ranks.py",
        "serving/triton/server.py",
    }
    assert readers <= {"device.py", "hip/build.py", *starters}
