"""Matrix instructions: the maps against AMD's own numbers, then the steps that are made of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labcore.attention import Pattern, safe_attention
from labcore.hip import EmulationError, Program, forward, load
from labcore.hip.build import compiler, step_source
from labcore.hip.mfma import INSTRUCTIONS, LANES, element, layout

PUBLISHED = json.loads((Path(__file__).parent / "mfma_layout.json").read_text())["instructions"]
for told in PUBLISHED.values():
    if "matrices" in told:
        told.update({matrix: PUBLISHED[told["matrices"]][matrix] for matrix in "ABD"})
NAMES = list(INSTRUCTIONS)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OPERANDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}

# One kernel an instruction: a lane's items of A, B and C lie side by side at `lane * items`.
PROBE = """
#include "portable.h"
#define PROBE(NAME, T, ITEMS, RESULTS, CALL)                                            \\
  __global__ void NAME(Global<const T> a, Global<const T> b, Global<const float> c,     \\
                       Global<float> d, int lanes) {                                    \\
    Vec<T, ITEMS> x, y;                                                                 \\
    Vec<float, RESULTS> z;                                                              \\
    const int lane = lane_id();                                                         \\
    for (int i = 0; i < ITEMS; ++i) x[i] = a[lane * ITEMS + i];                         \\
    for (int i = 0; i < ITEMS; ++i) y[i] = b[lane * ITEMS + i];                         \\
    for (int i = 0; i < RESULTS; ++i) z[i] = c[lane * RESULTS + i];                     \\
    if (lane >= lanes) return;                                                          \\
    z = CALL;                                                                           \\
    for (int i = 0; i < RESULTS; ++i) d[lane * RESULTS + i] = z[i];                     \\
  }                                                                                     \\
  ENTRY(probe_##NAME, NAME)
PROBE(f16_32, Half, 4, 16, __builtin_amdgcn_mfma_f32_32x32x8f16(x, y, z, 0, 0, 0))
PROBE(f16_16, Half, 4, 4, __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, z, 0, 0, 0))
PROBE(bf16_32, BFloat, 4, 16,
      __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(raw(x), raw(y), z, 0, 0, 0))
PROBE(bf16_16, BFloat, 4, 4,
      __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(raw(x), raw(y), z, 0, 0, 0))
PROBE(f32_32, float, 1, 16, __builtin_amdgcn_mfma_f32_32x32x2f32(x[0], y[0], z, 0, 0, 0))
PROBE(f32_16, float, 1, 4, __builtin_amdgcn_mfma_f32_16x16x4f32(x[0], y[0], z, 0, 0, 0))
"""


@pytest.fixture(scope="module")
def host_compiler() -> None:
    try:
        compiler()
    except RuntimeError as lacking:
        if os.environ.get("CI") == "true":
            pytest.fail(str(lacking))
        pytest.skip(str(lacking))


# ---- the maps ----


@pytest.mark.parametrize("name", NAMES)
def test_the_maps_are_those_of_amds_calculator(name: str) -> None:
    instruction, published = INSTRUCTIONS[name], PUBLISHED[name]
    for matrix in "ABD":
        assert [[list(held) for held in row] for row in layout(instruction, matrix)] == (
            published[matrix]
        )
    assert instruction.flops == published["cdna2"]["flops"] == published["cdna3"]["flops"]


@pytest.mark.parametrize("name", NAMES)
def test_a_result_lies_where_the_next_product_wants_its_operand(name: str) -> None:
    """Why S^T = K Q^T: four registers of S^T are four values of B, for each 4 * groups keys."""
    instruction = INSTRUCTIONS[name]
    half = INSTRUCTIONS["32x32x8_f16" if instruction.tile == 32 else "16x16x16_f16"]
    for lane in range(LANES):
        for register in range(instruction.results):
            piece, item = divmod(register, 4)
            key, query = element(instruction, "D", lane, register)
            assert (key - half.depth * piece, query) == element(half, "B", lane, item)


def test_a_place_that_does_not_exist_is_refused() -> None:
    instruction = INSTRUCTIONS["32x32x8_f16"]
    for matrix, lane, item in [("E", 0, 0), ("A", 64, 0), ("A", 0, 4), ("D", 0, 16)]:
        with pytest.raises(ValueError, match="must be one of"):
            element(instruction, matrix, lane, item)


# ---- the emulated instructions ----


@pytest.fixture(scope="module")
def probe(host_compiler: None) -> Program:
    return load(PROBE)


def run(probe: Program, name: str, a: Tensor, b: Tensor, c: Tensor, lanes: int = LANES) -> Tensor:
    """A B + C by one emulated instruction, the matrices placed as AMD's calculator says."""
    instruction = INSTRUCTIONS[name]
    placed = {}
    for key, matrix, whole in (("a", "A", a), ("b", "B", b), ("c", "D", c)):
        held = instruction.results if matrix == "D" else instruction.operands
        placed[key] = torch.empty(LANES, held, dtype=whole.dtype)
        places = torch.tensor(PUBLISHED[name][matrix])
        placed[key][places[..., 0], places[..., 1]] = whole
    placed["d"] = torch.full((LANES, instruction.results), torch.nan)
    counters = probe.launch(
        f"probe_{name.split('_')[1]}_{instruction.tile}",
        grid=1,
        block=LANES,
        arguments={**placed, "lanes": lanes},
        count=True,
    )
    assert counters is not None
    assert counters.mfma == 1
    places = torch.tensor(PUBLISHED[name]["D"])
    return placed["d"][places[..., 0], places[..., 1]]


def operands(name: str, fill: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    instruction, dtype = INSTRUCTIONS[name], OPERANDS[name.split("_")[1]]
    a = torch.full((instruction.tile, instruction.depth), fill, dtype=dtype)
    b = torch.full((instruction.depth, instruction.tile), fill, dtype=dtype)
    return a, b, torch.zeros(instruction.tile, instruction.tile)


@pytest.mark.parametrize("name", NAMES)
def test_an_instruction_multiplies_what_lies_where_amd_says(
    probe: Program, name: str, generator: torch.Generator
) -> None:
    """Integers are exact in every order of summation, so the product has to be equal."""
    a, b, c = operands(name)
    for matrix in (a, b, c):
        matrix.copy_(torch.randint(-9, 10, matrix.shape, generator=generator))
    assert torch.equal(run(probe, name, a, b, c), a.float() @ b.float() + c)


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_rounded_in_the_documented_order(probe: Program, name: str) -> None:
    """16 bits: four products together, then onto C; fp32: one after the other, each 1 lost."""
    instruction = INSTRUCTIONS[name]
    a, b, c = operands(name, 1.0)
    c.fill_(2.0**24)
    gained = instruction.depth if instruction.bits == 16 else 0
    assert (run(probe, name, a, b, c) - 2.0**24).unique().tolist() == [gained]


@pytest.mark.parametrize("name", NAMES)
def test_16_bits_below_their_normal_range_count_as_zero(probe: Program, name: str) -> None:
    instruction = INSTRUCTIONS[name]
    a, b, c = operands(name, 2.0)  # a product of normal numbers, if the operand is taken as it is
    least = torch.finfo(a.dtype).tiny
    for value in (least, least / 2):
        a.fill_(value)
        kept = value if instruction.bits == 32 or value == least else 0.0
        assert (run(probe, name, a, b, c) == 2 * kept * instruction.depth).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_lane_has_to_take_part(probe: Program, name: str) -> None:
    with pytest.raises(EmulationError, match=r"block \(0, 0, 0\), thread.*needs all 64 lanes.* 40"):
        run(probe, name, *operands(name), lanes=40)


# ---- the steps ----


def inputs(
    generator: torch.Generator, dtype: torch.dtype, dim: int, q_len: int, k_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal numbers in both senses: what is below fp16's range counts as zero, tested above."""
    lengths = (q_len, k_len, k_len)
    drawn = (torch.randn(1, 2, length, dim, generator=generator).to(dtype) for length in lengths)
    q, k, v = (x.where(x.abs() >= torch.finfo(dtype).tiny, 0) for x in drawn)
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """Attention as PyTorch computes it when each step is rounded to the inputs' dtype."""
    scores = (q @ k.mT) * pattern.scale
    if pattern.is_causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def excess(out: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> float:
    """How far the error is above the bound; at most 0 where the bound holds.

    The bound is flash-attention's, twice the error of `plain`, both against fp64, and a rounding of
    the result. In fp32 the two add up in orders that have nothing in common: there it is four times
    that error, and a rounding of the largest value that is added up.
    """
    truth, _ = safe_attention(q.double(), k.double(), v.double(), pattern=pattern)
    error = (out.double() - truth).abs().max()
    peer = (plain(q, k, v, pattern).double() - truth).abs().max()
    times, added = (4, v) if q.dtype == torch.float32 else (2, truth)
    return float(error - times * peer - torch.finfo(q.dtype).eps * added.abs().max())


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_step_agrees_with_fp64(
    step: int, dtype: torch.dtype, dim: int, generator: torch.Generator
) -> None:
    lengths = [(1, 1), (1, 129), (31, 63), (63, 31), (100, 129), (129, 100)]
    for is_causal in (False, True):
        for q_len, k_len in lengths:
            q, k, v = inputs(generator, dtype, dim, q_len, k_len)
            pattern = Pattern(scale=dim**-0.5, is_causal=is_causal)
            result = forward(q, k, v, step=step, is_causal=is_causal)
            _, lse = safe_attention(q.double(), k.double(), v.double(), pattern=pattern)
            case = (q_len, k_len, is_causal)
            assert excess(result.out, q, k, v, pattern) <= 0, case
            torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=5e-6)


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_thousands(step: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    q, k, v = inputs(generator, dtype, 64, 63, 100)
    q, k = 16 * q, 16 * k
    result = forward(q, k, v, step=step, scale=1.0)
    double = q.double(), k.double(), v.double()
    truth, lse = safe_attention(*double, pattern=Pattern(scale=1.0))
    assert lse.max() > 2000
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=0)
    # fp32 knows a score s to about eps * s, and a result moves by no more than the scores do.
    rounding = torch.finfo(torch.float32).eps * lse.abs().max() + torch.finfo(dtype).eps
    assert (result.out.double() - truth).abs().max() <= rounding * v.abs().max()


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_what_the_steps_ask_of_the_machine(
    dtype: torch.dtype, dim: int, generator: torch.Generator
) -> None:
    """No cycle is lost to a bank conflict, and the matrix cores do just the two products."""
    q, k, v = inputs(generator, dtype, dim, 256, 64)
    counters = [forward(q, k, v, step=step, count=True).counters for step in (3, 4)]
    for step, counted in zip((3, 4), counters, strict=True):
        assert counted is not None
        assert counted.lds_conflicts == 0
        small = step == 3 and dim == 64
        half = INSTRUCTIONS["16x16x16_f16" if small else "32x32x8_f16"]
        used = INSTRUCTIONS["32x32x2_f32"] if dtype == torch.float32 else half
        assert counted.mfma == 2 * q.shape[1] * 2 * 256 * 64 * dim / used.flops
    assert counters[1].lds_accesses < 0.5 * counters[0].lds_accesses  # type: ignore[union-attr]


# ---- planted mistakes ----

ONE_FORM = "ENTRY(one_form, attention_forward<Half, 64, false>)"


def variant(step: int, *changes: tuple[str, str]) -> Program:
    """A step with some of its text changed, its fp16 form of 64 columns, not causal."""
    text = step_source(step).read_text(encoding="utf-8")
    for old, new in (*changes, ("ATTENTION_ENTRIES\nATTENTION_FORMS(bf16, BFloat)", ONE_FORM)):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return load(text)


def run_variant(program: Program, step: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
    """out, and the cycles lost to bank conflicts."""
    queries = {3: 64, 4: 128}[step]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    arguments = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    counters = program.launch(
        "one_form",
        grid=(-(-q.shape[2] // queries), q.shape[1]),
        block=256,
        arguments={
            **arguments,
            **{"q_len": q.shape[2], "k_len": k.shape[2], "group_size": 1, "scale": 0.125},
        },
        count=True,
    )
    assert counters is not None
    return out, counters.lds_conflicts


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (3, [("STRIDE = D + 4;", "STRIDE = D;")]),
        (4, [("KEY_STRIDE = D + WIDE;", "KEY_STRIDE = D;")]),
    ],
)
def test_without_padding_the_counter_finds_conflicts(
    step: int, changes: list[tuple[str, str]], generator: torch.Generator
) -> None:
    q, k, v = inputs(generator, torch.float16, 64, 31, 63)
    out, conflicts = run_variant(variant(step, *changes), step, q, k, v)
    assert excess(out, q, k, v, Pattern(scale=0.125)) <= 0
    assert conflicts > 0


@pytest.mark.usefixtures("host_compiler")
def test_a_weight_in_another_lanes_place_is_a_wrong_result(generator: torch.Generator) -> None:
    q, k, v = inputs(generator, torch.float16, 64, 31, 63)
    place = "const int j = TILE * t + DEPTH * s + 4 * group;"
    program = variant(3, (place, place.replace("4 * group", "4 * (GROUPS - 1 - group)")))
    out, _ = run_variant(program, 3, q, k, v)
    assert excess(out, q, k, v, Pattern(scale=0.125)) > 0.01


@pytest.mark.usefixtures("host_compiler")
def test_lifted_weights_survive_what_cdna2_takes_for_zero() -> None:
    """A thousand keys with a weight of e^-12 of the largest are 0.6 % of the sum."""
    q, k, v = torch.zeros(1, 1, 31, 64), torch.zeros(1, 1, 1001, 64), torch.ones(1, 1, 1001, 64)
    q[..., 0], k[..., 0, 0], v[..., 0, :] = 8.0, 12.0, 0.0
    half = q.half(), k.half(), v.half()
    truth, _ = safe_attention(q.double(), k.double(), v.double(), pattern=Pattern(scale=0.125))
    lifted = forward(*half, step=3)
    torch.testing.assert_close(lifted.out.double(), truth, rtol=2e-3, atol=0)
    lost, _ = run_variant(variant(3, ("LIFT = 15.0f;", "LIFT = 0.0f;")), 3, *half)
    assert (lost == 0).all()


# ---- the order of blocks ----

PLACES = """
__global__ void places(Global<int> out, int blocks) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i < blocks) out[i] = place_of_block(i, blocks);
}
ENTRY(places, places)
"""


def spread(places: list[int], tiles: int) -> int:
    """Pairs of a head and an XCD that works on it, block i being on XCD i % 8."""
    return len({(place // tiles, block % 8) for block, place in enumerate(places)})


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize(
    ("heads", "tiles"), [(16, 5), (32, 3), (8, 1), (12, 7), (3, 4), (1, 9), (1, 1)]
)
def test_blocks_of_a_head_share_an_xcd(heads: int, tiles: int) -> None:
    text = step_source(4).read_text(encoding="utf-8").replace("ATTENTION_ENTRIES", PLACES)
    blocks = heads * tiles
    out = torch.full((blocks,), -1, dtype=torch.int32)
    grid = -(-blocks // 64)
    load(text).launch("places", grid=grid, block=64, arguments={"out": out, "blocks": blocks})
    places = out.tolist()
    assert sorted(places) == list(range(blocks))  # every block is there, once
    assert spread(places, tiles) <= (heads if heads % 8 == 0 else heads + 7)
    for group in (2, 4):  # query heads that share a key head are neighbors
        if heads % (8 * group) == 0:
            assert spread(places, group * tiles) == heads // group
    if (heads, tiles) == (16, 5):  # in the grid's own order each head is on 5 XCDs
        assert spread(list(range(blocks)), tiles) == 80
