"""Occupancy against AMD's published table and against what the compilers themselves report."""

import json
import re
from pathlib import Path

import pytest

from labcore.hip import compile as hip
from labcore.hip.occupancy import LIMITS, Occupancy, occupancy
from tests.hip.compilers import need

TABLE = Path(__file__).parent.parent / "hip_resources.json"
FREE = {"lds": 0, "threads": 256}
COMPILED = ("gfx90a", "gfx942")  # by the compilers of the table; gfx950 is too new for them

# Waves of one SIMD -> the most registers of a lane. Source: AMD, "Register pressure in AMD CDNA2
# GPUs", GPUOpen, 2023.
PUBLISHED = {8: 64, 7: 72, 6: 80, 5: 96, 4: 128, 3: 168, 2: 256}


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize(("waves", "most"), PUBLISHED.items())
def test_registers_bound_as_published(arch: str, waves: int, most: int) -> None:
    assert occupancy(arch, vgprs=most, **FREE).waves_per_simd == waves
    if most < 256:
        assert occupancy(arch, vgprs=most + 1, **FREE).waves_per_simd == waves - 1
    full = occupancy(arch, vgprs=256, agprs=256, **FREE)
    assert (full.waves_per_simd, full.bound_by) == (1, ("registers",))


def test_accumulation_registers_start_at_a_multiple_of_four() -> None:
    assert occupancy("gfx90a", vgprs=100, agprs=28, **FREE).waves_per_simd == 4
    assert occupancy("gfx90a", vgprs=101, agprs=27, **FREE).waves_per_simd == 3
    assert occupancy("gfx90a", vgprs=101, agprs=0, **FREE).waves_per_simd == 4


@pytest.mark.parametrize(
    ("needs", "waves", "groups", "bound"),
    [
        ({"vgprs": 64, "lds": 16384, "threads": 256}, 4, 4, ("lds",)),
        ({"vgprs": 128, "lds": 16384, "threads": 256}, 4, 4, ("registers", "lds")),
        ({"vgprs": 24, "lds": 0, "threads": 256}, 8, 8, ("slots",)),
        ({"vgprs": 24, "lds": 0, "threads": 64}, 8, 32, ("slots",)),
        ({"vgprs": 24, "lds": 65536, "threads": 1024}, 4, 1, ("lds",)),
        ({"vgprs": 96, "lds": 0, "threads": 512}, 5, 2, ("registers",)),
        ({"vgprs": 24, "lds": 33000, "threads": 256}, 1, 1, ("lds",)),
        ({"vgprs": 24, "sgprs": 102, "lds": 0, "threads": 256}, 7, 7, ("scalars",)),
    ],
)
def test_what_binds_is_named(needs, waves: int, groups: int, bound: tuple[str, ...]) -> None:
    found = occupancy("gfx942", **needs)
    assert (found.waves_per_simd, found.groups, found.bound_by[:2]) == (
        waves,
        groups,
        bound if waves < 8 else found.bound_by[:2],
    )
    assert waves < 8 or "slots" in found.bound_by
    assert found.waves == found.groups * -(-needs["threads"] // 64)


def test_lds_is_given_out_in_steps_of_512_bytes() -> None:
    fits = 65536 // 6 // 512 * 512
    assert occupancy("gfx942", vgprs=24, lds=fits, threads=64).groups == 6
    assert occupancy("gfx942", vgprs=24, lds=fits + 1, threads=64).groups == 5


def test_a_larger_lds_holds_more_workgroups_in_steps_of_1280_bytes() -> None:
    need = {"vgprs": 24, "threads": 256}
    assert occupancy("gfx950", lds=32 * 1024, **need).waves_per_simd == 4  # 26 steps of 128
    assert occupancy("gfx950", lds=25 * 1280, **need).waves_per_simd == 5
    assert occupancy("gfx942", lds=32 * 1024, **need).waves_per_simd == 2
    assert occupancy("gfx950", lds=160 * 1024, **need).groups == 1
    assert occupancy("gfx950", lds=160 * 1024 + 1, **need).groups == 0


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("steps", [8, 16, 32, 48, 64, 128])
def test_tritons_compiler_allows_as_many_waves_by_lds(arch: str, steps: int) -> None:
    llvm = pytest.importorskip("triton._C.libtriton").llvm
    llvm.init_targets()
    lds = steps * LIMITS[arch].lds_step
    text = f"""
@a = internal addrspace(3) global [{lds} x i8] poison, align 16
define amdgpu_kernel void @k(ptr addrspace(1) %p, i32 %i) #0 {{
  %q = getelementptr i8, ptr addrspace(3) @a, i32 %i
  store i8 1, ptr addrspace(3) %q
  %v = load i8, ptr addrspace(3) %q
  store i8 %v, ptr addrspace(1) %p
  ret void
}}
attributes #0 = {{ "amdgpu-flat-work-group-size"="256,256" }}
"""
    off = [False, False]
    if "canonicalize_gep" in llvm.translate_to_asm.__doc__:  # from Triton 3.9 on
        off.append(False)
    asm = llvm.translate_to_asm(text, "amdgcn-amd-amdhsa", arch, "", [], *off)
    reported = re.search(r"; Occupancy: (\d+)", asm)
    assert reported and f"; LDSByteSize: {lds} " in asm
    assert occupancy(arch, vgprs=8, lds=lds, threads=256).waves_per_simd == int(reported[1])


@pytest.mark.parametrize(
    "needs",
    [
        {"vgprs": 24, "lds": 65537, "threads": 256},
        {"vgprs": 200, "lds": 0, "threads": 1024},
    ],
)
def test_a_workgroup_that_does_not_fit_stands_nowhere(needs) -> None:
    found = occupancy("gfx942", **needs)
    assert (found.waves_per_simd, found.groups, found.waves) == (0, 0, 0)
    assert found.bound_by in {("lds",), ("registers",)}


def test_more_of_a_resource_never_gives_more_waves() -> None:
    for name, values in (
        ("vgprs", range(0, 257, 7)),
        ("agprs", range(0, 257, 7)),
        ("lds", range(0, 70000, 1111)),
    ):
        waves = [
            occupancy("gfx90a", **{"vgprs": 30, "lds": 4096, "threads": 192, name: value}).waves
            for value in values
        ]
        assert waves == sorted(waves, reverse=True), name


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        ({"arch": "gfx906"}, "arch must be one of .*'gfx950', got 'gfx906'"),
        ({"vgprs": 257}, "vgprs must be .* 0 and 256, got 257; .* spills"),
        ({"agprs": -1}, "agprs must be between 0 and 256, got -1"),
        ({"lds": -1}, "lds must be at least 0 bytes, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"threads": 1025}, "threads .* at most 1024, got 1025; .*workgroups"),
    ],
)
def test_what_no_kernel_can_have_is_refused(needs, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        occupancy(**{"arch": "gfx90a", "vgprs": 10, "lds": 0, "threads": 64, **needs})


def as_reported(target: str, found: Occupancy, threads: int, lds: int) -> int:
    """What the target's compiler prints for `found`.

    clang 15, which hipcc calls, takes the waves of a whole compute unit for those of one of its
    four SIMDs where it asks what LDS allows; clang 19 divides.
    """
    if target == "gfx942":
        return found.waves_per_simd
    groups = LIMITS[target].lds // lds if lds else 32
    others = min(found.allowed[name] for name in ("registers", "scalars", "slots"))
    return min(others, max(1, groups * -(-threads // 64)))


def kernel(vgprs: int, agprs: int, lds: int, threads: int) -> str:
    """A kernel that takes just this."""
    last = [f'"v{vgprs - 1}"', *([f'"a{agprs - 1}"'] if agprs else [])]
    tile = f"__attribute__((shared)) static char tile[{lds}];" if lds else ""
    return (
        f"__attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, {threads}))) "
        f"void kernel_{vgprs}_{agprs}_{lds}_{threads}(int* p) {{ {tile} "
        f"{'tile[p[0]] = p[1]; p[2] = tile[p[3]];' if lds else ''} "
        f'asm volatile("" ::: {", ".join(last)}); }}\n'
    )


@pytest.mark.long
@pytest.mark.parametrize("target", COMPILED)
def test_compiler_reports_the_same_for_kernels_of_given_needs(target: str, tmp_path: Path) -> None:
    need(target)
    cases = [(v, a, 0, 256) for v in (24, 64, 65, 80, 81, 128, 129, 169, 256) for a in (0, 3, 100)]
    cases += [(24, 0, lds, t) for lds in (4096, 10240, 16896, 32768, 65536) for t in (64, 256, 512)]
    source = tmp_path / "taken.hip"
    source.write_text("".join(kernel(*case) for case in cases))
    wanted = hip.TARGETS[target]
    headerless = ("-nogpuinc", "-nogpulib")
    command = [wanted.program, *wanted.arguments, *headerless, source, "-o", tmp_path / "taken.s"]
    done = hip.call(command)
    assert done.returncode == 0, done.stderr
    reported = re.findall(
        r"kernel_(\d+)_(\d+)_(\d+)_(\d+).*?Occupancy \[waves/SIMD\]: (\d+)", done.stderr, re.DOTALL
    )
    assert len(reported) == len(cases)
    for v, a, lds, threads, waves in (map(int, row) for row in reported):
        found = occupancy(target, vgprs=v, agprs=a, lds=lds, threads=threads)
        # Later forms of hipcc divide.
        right = {as_reported(target, found, threads, lds), found.waves_per_simd}
        assert waves in right, (v, a, lds, threads)


def test_prediction_agrees_with_every_report_in_the_table() -> None:
    forms = json.loads(TABLE.read_text(encoding="utf-8"))["forms"]
    compared = 0
    for form, targets in forms.items():
        for target in COMPILED:
            if target not in targets:
                continue
            has = targets[target]
            found = occupancy(
                target,
                **{name: has[name] for name in ("vgprs", "agprs", "sgprs", "lds", "threads")},
            )
            assert as_reported(target, found, has["threads"], has["lds"]) == has["occupancy"], form
            compared += 1
    assert compared >= 2
