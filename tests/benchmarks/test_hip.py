"""The cases run small: what is counted is what the emulator, the diff and the table say."""

import json
from pathlib import Path

import pytest

from benchmarks import hip as cases
from benchmarks.runner import cases_of
from labcore.hip.emulate import LaunchCounters
from labcore.hip.survey import Project
from tests.benchmarks.measurements import by_quantity


def test_no_case_needs_a_gpu_and_none_records_a_time() -> None:
    assert {case.needs for case in cases_of("hip")} <= {"any", "cpu"}
    assert sum(case.minutes for case in cases_of("hip")) <= 5
    (case,) = (case for case in cases_of("hip") if case.name == "compiled/resources")
    assert not {item.unit for item in case.function()} & {"s", "ms", "us", "GFLOP/s"}


def test_a_ratio_is_the_earlier_step_over_the_later() -> None:
    zero = dict.fromkeys(LaunchCounters.__dataclass_fields__, 0)
    needed = 4 * cases.HEADS * cases.LENGTH**2 * 64
    counts = {
        step: LaunchCounters(
            **{
                **zero,
                "merged_transactions": 60 // step,
                "merged_lds": 12 * step,
                "transactions": 90 // step**2,
            }
        )
        for step in (1, 2)
    }
    counts |= {
        step: LaunchCounters(**{**zero, "merged_lds": 4, "lds_accesses": 4, "lds_conflicts": 2,
                          "mfma": needed // flops})
        for step, flops in ((3, 2 * 16**3), (4, 2 * 32 * 32 * 8))
    }  # fmt: skip
    found = by_quantity(cases.compared(counts, "float16", 64))
    assert found["transactions, as compiled, step 1 over step 2/float16, D 64"].samples == [2]
    assert found["transactions, as written, step 1 over step 2/float16, D 64"].samples == [90 / 22]
    assert found["LDS accesses, as compiled, step 2 over step 3/float16, D 64"].samples == [6]
    assert found["LDS conflicts an access, step 4/float16, D 64"].samples == [0.5]
    for step in (3, 4):
        name = f"products on matrix cores, of those needed, step {step}/float16, D 64"
        assert found[name].samples == [1] and found[name].mode == "simulated"


def test_others_asks_for_the_checkouts_and_counts_by_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LABCORE_CUDA_SOURCES", raising=False)
    (case,) = (case for case in cases_of("hip") if case.name == "port/others")
    assert "karpathy/llm.c at f1e2ace" in case.lacks()
    with pytest.raises(RuntimeError, match="LABCORE_CUDA_SOURCES must name a folder"):
        case.function()
    project = Project(repository="a/b", commit="1", license="MIT", files=("*.cu",))
    monkeypatch.setattr(cases, "PROJECTS", {"own": project})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.cu").write_text("  cudaFree(x);\nint i = lane % 32;\n")
    (tmp_path / "own" / "b.cu").write_text("  cudaFree(y);\n")
    monkeypatch.setenv("LABCORE_CUDA_SOURCES", str(tmp_path))
    (found,) = case.function()
    assert found.quantity == "changed lines that hipify changes/own"
    assert found.details["left"] == 1 and found.details["changed"] >= 2
    assert found.details["license"] == "MIT" and found.details["lines"] == 3
    assert found.details["files"]["b.cu"][::2] == [1, 0]


def test_the_table_is_read_by_target() -> None:
    need = {"vgprs": 160, "agprs": 0, "sgprs": 30, "spills": 0, "sgpr_spills": 0, "scratch": 0,
            "lds": 4096, "occupancy": 3, "mfma": 8, "threads": 256}  # fmt: skip
    bad = {**need, "spills": 2, "mfma": 0, "lds": 9000, "occupancy": 7}
    forms = {"step3_mfma/x": {"gfx90a": need, "gfx942": bad}, "step1_straight/x": {"gfx90a": need}}
    table = {"compilers": {"gfx90a": "a", "gfx942": "b"}, "forms": forms}
    triton = json.loads(cases.TRITON.read_text(encoding="utf-8"))
    found = by_quantity(cases.summarized(table, triton))
    assert found["forms compiled/gfx90a"].samples == [2]
    assert found["largest LDS of a block/gfx942"].samples == [9000]
    assert found["forms on matrix cores that spill/gfx942"].samples == [1]
    assert found["forms on matrix cores that spill/gfx90a"].samples == [0]
    assert found["forms without matrix instruction, steps 3 and 4/gfx942"].samples == [1]
    assert found["occupancies predicted wrong/gfx942"].samples == [1]
    assert found["occupancies predicted wrong/gfx90a"].samples == [0]
    assert {item.mode for item in found.values()} == {"compiled"}
