"""Every launched kernel is registered and compiles for each target within its limits."""

import copy
import json
from pathlib import Path

import pytest

from labcore import compile_only, device

triton = pytest.importorskip("triton", reason=device.triton_problem() or "Triton")

TABLE = Path(__file__).parent / "kernel_resources.json"


@pytest.fixture(scope="module")
def found() -> compile_only.Resources:
    return compile_only.measure()


@pytest.fixture
def table() -> dict:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.long
def test_kernels_compile_within_the_table_and_the_limits(found, table) -> None:
    assert compile_only.problems(found, table) == []
    assert {tuple(targets) for targets in found.values()} == {tuple(compile_only.TARGETS)}
    for targets in found.values():
        assert all(need["registers"] > 0 for need in targets.values())


@pytest.mark.long
def test_the_table_names_no_kernel_that_is_gone(found, table) -> None:
    assert list(table["kernels"]) == list(found)


def test_every_launched_kernel_is_registered() -> None:
    launched = compile_only.launched_kernels()
    registered = {entry.name.split("/")[0] for entry in compile_only.registered()}
    assert {"lion_kernel", "adamw_kernel"} <= set(launched)
    assert set(launched) <= registered


def one(**changes) -> compile_only.Resources:
    need = {"registers": 40, "spills": 0, "matrix": 4, "shared": 1024, "warnings": []}
    return {"k/case": {"sm_89": {**need, **changes}}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spills": 8}, "8 spills, but the table has 0"),
        ({"registers": 43}, "43 registers, but the table has 40"),
        ({"shared": 1076}, "1076 shared, but the table has 1024"),
        ({"matrix": 0}, "no matrix instruction, but the table has 4"),
        ({"warnings": ["C7511 wgmma serialized"]}, "the assembler warns: C7511"),
    ],
)
def test_a_kernel_that_needs_too_much_is_named(changes, sentence: str) -> None:
    version = compile_only._triton_version()
    table = {"triton": version, "kernels": one()}
    assert compile_only.problems(one(), table) == []
    (wrong,) = compile_only.problems(one(**changes), table)
    assert wrong.startswith("k/case on sm_89: ") and sentence in wrong


def test_a_block_that_the_target_cannot_hold_is_named() -> None:
    table = {"triton": compile_only._triton_version(), "kernels": one(shared=101_000)}
    assert compile_only.problems(one(shared=101_376), table) == []
    (wrong,) = compile_only.problems(one(shared=101_377), table)
    assert "101377 bytes of shared memory" in wrong and " 101376; use a" in wrong


def test_growth_below_five_percent_passes() -> None:
    table = {"triton": compile_only._triton_version(), "kernels": one()}
    assert compile_only.problems(one(registers=42, shared=1075), table) == []


def test_a_kernel_outside_the_table_is_named() -> None:
    (wrong,) = compile_only.problems(one(), {"triton": "0", "kernels": {}})
    assert "not in the table" in wrong


def test_registers_are_compared_under_one_version_of_triton_only() -> None:
    table = {"triton": "0.0", "kernels": one()}
    assert compile_only.problems(one(registers=60), table) == []
    assert len(compile_only.problems(one(spills=4), table)) == 1


def test_launches_are_found_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "@triton.jit\ndef helper(x):\n    return x\n"
        "@triton.jit(do_not_specialize=['n'])\ndef used_kernel(x, n):\n    helper(x)\n"
        "@jit\ndef hidden(x):\n    helper(x)\n"
    )
    (tmp_path / "launch.py").write_text(
        "kernels.used_kernel[(1,)](x)\nk = kernels.hidden\nk[(1,)](x)\n"
        "other_kernel[grid](x)\nhandlers['a'](x)\n"
    )
    found = compile_only.launched_kernels(tmp_path)
    assert set(found) == {"used_kernel", "hidden", "other_kernel"}
    assert found["used_kernel"] == "launch.py:1"


def test_a_registration_must_name_every_argument() -> None:
    from labcore.optim.kernels import lion_kernel

    before = copy.copy(compile_only._REGISTRY)
    with pytest.raises(ValueError, match="must name its arguments, got .*BLOCK"):
        compile_only.register(lion_kernel, "wrong", signature={}, constexprs={})
    assert before == compile_only._REGISTRY
