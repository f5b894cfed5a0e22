"""Every step compiles for each gated target within the committed table and the target's limits."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from labcore.hip import __main__ as command
from labcore.hip import compile as hip
from labcore.hip import emulate
from labcore.hip.build import DECODE, SOURCE, STEPS
from tests.hip.compilers import need

TESTS = Path(__file__).parent.parent
TABLE = TESTS / "hip_resources.json"
GATED = [name for name, target in hip.TARGETS.items() if target.gated]
FORMS = [
    f"{dtype}-d{dim}-{mask}"
    for dtype in ("float32", "float16", "bfloat16")
    for dim in (64, 128)
    for mask in ("full", "causal")
]
DECODING = [
    f"{dtype}-d{dim}-{kernel}"
    for dtype in ("float16", "bfloat16")
    for kernel in ("split", "combine")
    for dim in (64, 128)
]
# The first two steps have no form in bf16.
EVERY = [
    f"{name}/{form}"
    for step, name in STEPS.items()
    for form in FORMS
    if step > 2 or not form.startswith("bfloat16")
] + [f"{DECODE.stem}/{form}" for form in DECODING]


@pytest.fixture(scope="module")
def found() -> hip.Resources:
    for target in GATED:
        need(target)
    return hip.measure(GATED)


@pytest.fixture(scope="module")
def table() -> dict:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.long
def test_the_steps_compile_within_the_table_and_the_limits(found, table) -> None:
    assert hip.problems(found, table) == []
    assert list(found) == EVERY
    assert {tuple(targets) for targets in found.values()} == {tuple(GATED)}
    for targets in found.values():
        for name, has in targets.items():
            assert 0 < has["vgprs"] <= 256 and has["agprs"] <= 256 and has["threads"] % 64 == 0
            assert has["lds"] <= hip.TARGETS[name].shared_limit


@pytest.mark.long
def test_the_table_names_no_form_that_is_gone(found, table) -> None:
    assert set(table["forms"]) == set(found)


def test_the_table_holds_what_the_chapter_says_of_the_steps(table) -> None:
    for form, targets in table["forms"].items():
        step = form.split("/")[0]
        for target in GATED:
            has = targets[target]
            straight = step == "step1_straight" or form.endswith("combine")
            assert bool(has["mfma"]) == (not straight and step != "step2_lds"), form
            assert bool(has["lds"]) == (not straight), form
            if step > "step2_lds":
                assert has["spills"] == has["sgpr_spills"] == has["scratch"] == 0, form


@pytest.mark.long
@pytest.mark.parametrize("name", GATED)
def test_decode_has_the_next_tile_on_its_way(name: str, tmp_path: Path) -> None:
    """Its loop reads 16 bytes a lane, four of K and four of V, and never waits for all of them."""
    need(name)
    target, out = hip.TARGETS[name], tmp_path / "out"
    command = [target.program, *target.arguments, f"-I{SOURCE}", DECODE, "-o", out]
    assert hip.call(command).returncode == 0
    kernels = re.findall(r"\n_Z\w*attention_split.*?\.Lfunc_end", out.read_text(), re.DOTALL)
    assert len(kernels) == 4
    for kernel in kernels:
        loop = next(
            body
            for label, body in re.findall(
                r"\n(\.LBB\w+):[^\n]*Inner Loop Header(.*?)\n\.LBB", kernel, re.DOTALL
            )
            if "v_mfma_" in body and label in body
        )
        assert len(re.findall(r"\bglobal_load_dwordx4\b", loop)) == 8
        assert loop.count("global_load_") == 8 and "scratch_" not in loop
        assert min(int(left) for left in re.findall(r"vmcnt\((\d+)\)", loop)) == 4


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("step", STEPS)
def test_the_emulator_merges_accesses_as_the_compiler_does(
    step: int, dim: int, tmp_path: Path, generator
) -> None:
    """One more tile costs a wave the loads of the loop, and LDS the stores that fill a tile."""
    need("gfx942")
    target, out = hip.TARGETS["gfx942"], tmp_path / "out"
    source = SOURCE / f"{STEPS[step]}.hip"
    done = hip.call([target.program, *target.arguments, f"-I{SOURCE}", source, "-o", out])
    assert done.returncode == 0, done.stderr
    text = out.read_text()

    def loop(dtype: str) -> str:
        found = re.search(rf"\n_Z\w*forwardI{dtype}Li{dim}ELb0E.*?\.Lfunc_end", text, re.DOTALL)
        assert found is not None
        return next(block for block in re.split(r"\n\.LBB", found[0]) if "v_exp_f32" in block)

    if step == 1:  # in fp32 a key comes once for the wave, by scalar loads
        assert "s_load_dwordx16" in loop("f") and "global_load" not in loop("f")
    loads = len(re.findall(r"\b(?:global_load|ds_read)", loop("DF16_")))
    tile = 1 if step == 1 else 64 if (step, dim) == (4, 64) else 32
    shapes = [(1, 1, n, dim) for n in (128, tile, 2 * tile)]
    query, few, many = (torch.randn(shape, generator=generator).half() for shape in shapes)
    field = "merged_transactions" if step == 1 else "merged_lds"
    one, two = (
        getattr(emulate.forward(query, x, x, step=step, count=True).counters, field)
        for x in (few, many)
    )
    # Blocks of 128 queries, but 64 in step 3 at D = 64.
    waves = {1: 2, 2: 2, 3: 128 * 4 // (64 if dim == 64 else 128), 4: 4}[step]
    # Stores of a wave: steps 2 and 3 fill a tile of K and of V by 64 halves a time; step 4 has
    # half of its waves store 4 vectors of K and the other half 4 pairs of V.
    fill = {1: 0, 2: tile * dim // 64, 3: 2 * tile * dim // 256, 4: 4}[step]
    assert two - one == waves * (loads * (tile if step == 2 else 1) + fill)


def needs(**changes: int) -> hip.Resources:
    has = {
        **{"vgprs": 120, "agprs": 32, "sgprs": 40, "spills": 0, "sgpr_spills": 0, "scratch": 0},
        **{"lds": 16384, "occupancy": 3, "mfma": 8, "threads": 256},
    }
    return {"step3_mfma/float16-d64-full": {"gfx942": {**has, **changes}}}


@pytest.fixture
def same_compiler(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(hip, "compiler_of", lambda target: f"{target}'s compiler 1")
    return {"compilers": {"gfx942": "gfx942's compiler 1"}, "forms": needs()}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spills": 1}, "1 spills, and the table has 0"),
        ({"scratch": 16}, "16 scratch, and the table has 0"),
        ({"sgpr_spills": 2}, "2 scalar spills, and the table has 0"),
        ({"vgprs": 132}, "164 registers, and the table has 152"),
        ({"agprs": 48}, "168 registers, and the table has 152"),
        ({"lds": 17204}, "17204 bytes of LDS, and the table has 16384"),
        ({"mfma": 0}, "no matrix instruction, and the table has 8"),
        ({"occupancy": 2}, "2 waves on a SIMD, and the table has 3"),
    ],
)
def test_a_form_that_needs_more_is_named(same_compiler, changes, sentence: str) -> None:
    assert hip.problems(needs(), same_compiler) == []
    (wrong,) = hip.problems(needs(**changes), same_compiler)
    assert wrong == f"step3_mfma/float16-d64-full on gfx942: {sentence}"


def test_growth_below_five_percent_passes(same_compiler) -> None:
    assert hip.problems(needs(vgprs=124, lds=17203, mfma=4), same_compiler) == []


def test_another_compiler_may_allocate_otherwise_but_not_spill(same_compiler) -> None:
    table = {**same_compiler, "compilers": {"gfx942": "another"}}
    assert hip.problems(needs(vgprs=200, occupancy=2, sgpr_spills=9), table) == []
    assert len(hip.problems(needs(spills=1), table)) == 1
    assert len(hip.problems(needs(mfma=0), table)) == 1


def test_lds_beyond_a_blocks_limit_is_named_despite_the_table(same_compiler) -> None:
    table = {**same_compiler, "forms": needs(lds=65540)}
    (wrong,) = hip.problems(needs(lds=65540), table)
    assert "65540 bytes of LDS" in wrong and " 65536; use a smaller tile" in wrong
    table["forms"] = needs(lds=65536)
    assert hip.problems(needs(lds=65536), table) == []


def test_a_form_outside_the_table_and_one_that_is_gone_are_named(same_compiler) -> None:
    (wrong,) = hip.problems(needs(), {**same_compiler, "forms": {}})
    assert "not in the table; rewrite it with --write" in wrong
    (wrong,) = hip.problems({}, same_compiler)
    assert "in the table and not compiled" in wrong


def test_nvidia_is_reported_and_not_held(same_compiler) -> None:
    found = needs()
    found["step1_straight/float32-d64-full"] = {
        "sm_90": {"vgprs": 255, "spills": 400, "scratch": 400, "lds": 0}
    }
    assert hip.problems(found, same_compiler) == []
    assert any("sm_90" in row and " 255 " in row for row in hip.rows(found))


def test_registers_of_both_kinds_share_one_file() -> None:
    assert hip.registers({"vgprs": 101, "agprs": 27}) == 131
    assert hip.registers({"vgprs": 101, "agprs": 0}) == 101


def test_a_missing_compiler_is_said_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    sentence = r"gfx942 .* clang\+\+-19, .*apt install clang-19"
    with pytest.raises(RuntimeError, match=sentence):
        hip.measure(["gfx942"])
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must compile for every gated target"):
        need("gfx942")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=sentence):
        need("gfx942")
    with pytest.raises(ValueError, match="target must be one of .*did you mean 'gfx942'"):
        hip.missing("gfx943")


PLANTED = """
#define G __attribute__((global))
template <typename T, int D, bool CAUSAL>
G __attribute__((amdgpu_flat_work_group_size(1, 64))) void attention_forward(float* x) {
  BODY
}
template G void attention_forward<float, 64, true>(float*);
"""
EVERY_REGISTER = ", ".join(f'"v{n}", "a{n}"' for n in range(256))
BODIES = {
    # A value that outlives an instruction which leaves no register alone.
    "spills": "float y = x[__builtin_amdgcn_workitem_id_x()];"
    f'asm volatile("" ::: {EVERY_REGISTER}); x[9] = y;',
    "matrix instructions": "typedef float four __attribute__((ext_vector_type(4))); four c = {};"
    "c = __builtin_amdgcn_mfma_f32_16x16x4f32(x[0], x[1], c, 0, 0, 0); x[2] = c[0];",
    "lds": "__attribute__((shared)) static float tile[70000]; tile[int(x[0])] = 1;"
    "x[1] = tile[int(x[2])];",
}


@pytest.mark.long
def test_what_the_compiler_says_is_read_back(tmp_path: Path) -> None:
    need("gfx942")
    for what, body in BODIES.items():
        (tmp_path / "step9_planted.hip").write_text(PLANTED.replace("BODY", body))
        try:
            (has,) = hip.measure(["gfx942"], folder=tmp_path)[
                "step9_planted/float32-d64-causal"
            ].values()
        except RuntimeError as error:
            assert what == "lds" and "local memory" in str(error)
            continue
        assert has["threads"] == 64
        assert (has["spills"] > 0) == (has["scratch"] > 0) == (what == "spills"), (what, has)
        assert has["mfma"] == (what == "matrix instructions")


SYMBOL = "_Z17attention_forwardIfLi64ELb0EEvPf"
AMD_REPORT = f"remark: Function Name: {SYMBOL}\n" + "".join(
    f"remark:     {name}: 3\n"
    for name in (
        *("TotalSGPRs", "VGPRs", "AGPRs", "ScratchSize [bytes/lane]", "SGPRs Spill"),
        *("Occupancy [waves/SIMD]", "VGPRs Spill", "LDS Size [bytes/block]"),
    )
)
ASSEMBLY = (
    f"\n{SYMBOL}:\n  v_mfma_f32\n.Lfunc_end0:\namdhsa.kernels:\n  - .max_flat_workgroup_size: 256\n"
    f"    .name: {SYMBOL}\n"
)
PTXAS_REPORT = f"""ptxas info : Compiling entry function '{SYMBOL}' for 'sm_90'
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info : Used 40 registers, 384 bytes cmem[0]
"""


def test_report_with_changed_wording_is_an_error_not_a_zero() -> None:
    (has,) = hip._read_amd(AMD_REPORT, ASSEMBLY).values()
    assert has["vgprs"] == has["lds"] == 3 and (has["mfma"], has["threads"]) == (1, 256)
    with pytest.raises(RuntimeError, match="report of float32-d64-full must give lds, got none"):
        hip._read_amd(AMD_REPORT.replace("LDS Size", "Local memory"), ASSEMBLY)
    with pytest.raises(RuntimeError, match="must give threads, got none"):
        hip._read_amd(AMD_REPORT, ASSEMBLY.replace("max_flat", "largest_flat"))
    (has,) = hip._read_ptxas(PTXAS_REPORT).values()
    assert has == {"vgprs": 40, "spills": 4, "scratch": 0, "lds": 0}
    with pytest.raises(RuntimeError, match="must give vgprs, got none"):
        hip._read_ptxas(PTXAS_REPORT.replace("Used 40 registers", "40 registers used"))


@pytest.mark.long
def test_a_step_without_a_form_is_an_error(tmp_path: Path) -> None:
    need("gfx942")
    (tmp_path / "step9_planted.hip").write_text("int nothing;\n")
    with pytest.raises(RuntimeError, match=r"step9_planted.hip must name a kernel .*, got"):
        hip.measure(["gfx942"], folder=tmp_path)


@pytest.mark.long
def test_step_that_does_not_compile_is_named_with_the_error(tmp_path: Path) -> None:
    need("gfx942")
    (tmp_path / "step9_planted.hip").write_text("int f() { return nothing; }\n")
    with pytest.raises(RuntimeError, match="step9_planted.hip must compile .*gfx942.*nothing"):
        hip.measure(["gfx942"], folder=tmp_path)


@pytest.mark.long
def test_nvcc_reads_the_same_sources(tmp_path: Path) -> None:
    if hip.missing("sm_90"):
        pytest.skip(hip.missing("sm_90"))
    (tmp_path / "step1_straight.hip").write_bytes((SOURCE / "step1_straight.hip").read_bytes())
    (tmp_path / "step9_matrix.hip").write_text("// __builtin_amdgcn_mfma_f32_16x16x4f32\n")
    found = hip.measure(["sm_90"], folder=tmp_path)
    assert set(found) == {form for form in EVERY if form.startswith("step1")}
    assert all(0 < targets["sm_90"]["vgprs"] <= 255 for targets in found.values())


def test_triton_stands_beside_the_last_step(table) -> None:
    triton = json.loads((TESTS / "kernel_resources.json").read_text(encoding="utf-8"))
    rows = hip.beside_triton(table, triton)
    assert {(row["target"], row["form"].split("/")[0]) for row in rows} == {
        (target, "step4_tuned") for target in GATED
    }
    assert {row["form"].split("/")[1] for row in rows} >= {
        "bfloat16-d64-full",
        "bfloat16-d128-causal",
    }
    for row in rows:
        ours = table["forms"][row["form"]][row["target"]]
        assert row["registers"][0] == hip.registers(ours) and row["mfma"][0] == ours["mfma"]
        theirs = triton["kernels"][row["kernel"]][row["target"]]
        assert row["lds"][1] == theirs["shared"]
    without = copy.deepcopy(table)
    del without["forms"]["step4_tuned/bfloat16-d64-full"]
    assert len(hip.beside_triton(without, triton)) == len(rows) - len(GATED)


def test_check_fails_where_the_table_allows_less(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    same_compiler,
) -> None:
    monkeypatch.setattr(hip, "missing", lambda target: None)
    monkeypatch.setattr(hip, "measure", lambda: needs())
    file = tmp_path / "table.json"
    assert command.main(["--write", str(file), "--check", str(file)]) == 0
    assert json.loads(file.read_text()) == same_compiler
    file.write_text(json.dumps({**same_compiler, "forms": needs(vgprs=100)}))
    capsys.readouterr()
    assert command.main(["--check", str(file)]) == 1
    assert "152 registers, and the table has 132" in capsys.readouterr().out
    monkeypatch.setattr(hip, "missing", lambda target: f"{target} lacks")
    assert command.main(["--check", str(file)]) == 2
    assert capsys.readouterr().err == "labcore.hip: gfx90a lacks; gfx942 lacks\n"
