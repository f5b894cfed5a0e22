"""Every step of the port against attention in double precision, and what each step is for."""

import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from labcore.attention import Pattern, safe_attention
from labcore.hip import Emulated, LaunchCounters, forward, load
from labcore.hip.build import SOURCE, STEPS

EVERY = list(STEPS)
DTYPES = [torch.float32, torch.float16]
FORMS = [(step, dtype) for step in EVERY for dtype in DTYPES] + [
    (step, torch.bfloat16) for step in (3, 4)
]
# Queries and keys: less than a tile, just around one, more than one, either of them longer.
LENGTHS = [(1, 1), (1, 129), (31, 100), (63, 63), (100, 31), (129, 129)]


def draw(generator, q_len: int, k_len: int, *, dim=64, heads=2, dtype=torch.float32):
    shapes = [(1, heads, n, dim) for n in (q_len, k_len, k_len)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def holds(
    got: Emulated, query: Tensor, key: Tensor, value: Tensor, *, is_causal, scale, bound=1e-5
) -> None:
    """fp32 to fp32's rounding; 16 bits to twice the error of torch's attention in that dtype."""
    pattern = Pattern(scale=scale, is_causal=is_causal)
    out, lse = safe_attention(query.double(), key.double(), value.double(), pattern=pattern)
    assert got.out.dtype == query.dtype and got.lse.dtype == torch.float32
    error = (got.out.double() - out).abs().max()
    if query.dtype == torch.float32:
        assert error < bound and (got.lse - lse).abs().max() < bound
        return
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )
    assert error <= 2 * (plain.double() - out).abs().max() + 1e-4
    assert (got.lse - lse).abs().max() < 1e-3


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("step", "dtype"), FORMS)
def test_every_step_is_attention(step: int, is_causal, dim, dtype, generator) -> None:
    for q_len, k_len in LENGTHS:
        tensors = draw(generator, q_len, k_len, dim=dim, dtype=dtype)
        got = forward(*tensors, step=step, is_causal=is_causal)
        holds(got, *tensors, is_causal=is_causal, scale=dim**-0.5)


@pytest.mark.parametrize("step", EVERY)
def test_batches_heads_and_strides(step: int, generator) -> None:
    shape = (2, 70, 3, 64)  # a projection's own order: heads inside positions
    query, key, value = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(3))
    got = forward(query, key, value, step=step, is_causal=True, scale=0.3)
    holds(got, query, key, value, is_causal=True, scale=0.3)


@pytest.mark.parametrize(("step", "dtype"), FORMS)
def test_query_heads_of_a_group_read_one_key_head(step: int, dtype, generator) -> None:
    query = torch.randn(2, 6, 70, 64, generator=generator).to(dtype)
    key, value = (torch.randn(2, 2, 45, 64, generator=generator).to(dtype) for _ in range(2))
    got = forward(query, key, value, step=step)
    for each in range(6):
        own = slice(each // 3, each // 3 + 1)
        one = forward(query[:, each : each + 1], key[:, own], value[:, own], step=step)
        assert torch.equal(got.out[:, each], one.out[:, 0])
        assert torch.equal(got.lse[:, each], one.lse[:, 0])


ROUNDS = """
#include "portable.h"
__global__ void rounds(Global<const float> x, Global<BFloat> y, Global<float> back) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  y[i] = BFloat(x[i]);
  const BFloat there = y[i];
  back[i] = there;
}
ENTRY(rounds, rounds)
"""


def test_bf16_is_the_nearest_and_of_two_the_even_one(generator) -> None:
    bits = torch.randint(-(2**31), 2**31, (64 * 50,), generator=generator)
    bits[:640] = bits[:640] >> 16 << 16 | 0x8000  # halfway between two
    bits[640:650] = torch.tensor(
        [0, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800001, 0x7FFFFFFF, -1, 1, 0x8000]
    )
    x = bits.int().view(torch.float32)
    y, back = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x)
    load(ROUNDS).launch("rounds", grid=50, block=64, arguments={"x": x, "y": y, "back": back})
    right = x.bfloat16()
    nan = x.isnan()
    assert nan.any() and y[nan].isnan().all()
    assert torch.equal(y[~nan].view(torch.int16), right[~nan].view(torch.int16))
    assert torch.equal(back[~nan], right[~nan].float()) and back[nan].isnan().all()


@pytest.mark.parametrize("step", EVERY)
def test_large_scores_do_not_overflow(step: int, generator) -> None:
    query, key, value = draw(generator, 40, 70)
    got = forward(100 * query, key, value, step=step)
    # Scores of some hundreds, rounded to 24 bits, are off by as much as their exponentials are.
    holds(got, 100 * query, key, value, is_causal=False, scale=0.125, bound=1e-3)


@pytest.mark.parametrize("step", EVERY)
def test_the_fast_build_gives_the_same_as_the_checked_one(step: int, generator) -> None:
    tensors = draw(generator, 70, 100, dtype=torch.float16)
    for is_causal in (False, True):
        slow = forward(*tensors, step=step, is_causal=is_causal)
        fast = forward(*tensors, step=step, is_causal=is_causal, check=False)
        assert (slow.out - fast.out).abs().max() < 2e-3
        assert (slow.lse - fast.lse).abs().max() < 1e-5


@pytest.mark.parametrize("step", EVERY)
def test_no_queries_are_no_work(step: int) -> None:
    empty, some = torch.zeros(1, 2, 0, 64), torch.zeros(1, 2, 5, 64)
    got = forward(empty, some, some, step=step)
    assert got.out.shape == (1, 2, 0, 64) and got.lse.shape == (1, 2, 0)


def count(generator, step: int, **how) -> LaunchCounters:
    counters = forward(*draw(generator, 128, 128, heads=1, **how), step=step, count=True).counters
    assert counters is not None
    return counters


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_each_step_buys(dim: int, dtype, generator) -> None:
    counters = {step: count(generator, step, dim=dim, dtype=dtype) for step in EVERY}
    straight = counters[1]
    assert straight.lds_accesses == straight.barriers == straight.mfma == 0
    # Two waves read K and V an element an instruction; q and out are a segment a lane.
    rows, waves = 128, 2
    assert straight.transactions >= waves * 2 * rows * dim + 2 * rows * dim
    for step in EVERY[1:]:
        assert counters[step].lds_conflicts == 0
        assert counters[step].lds_accesses > 0 and counters[step].barriers > 0
        assert counters[step].transactions < straight.transactions / 8
    assert counters[2].mfma == 0
    assert all(counters[step].mfma > 0 for step in EVERY[2:])
    assert counters[4].lds_accesses < counters[2].lds_accesses / 10


@pytest.mark.long
def test_the_cuda_original_compiles_for_nvidia(tmp_path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here: install the CUDA toolkit")
    command = ["nvcc", "-arch=sm_80", "-std=c++17", "-c", str(SOURCE / "step0_cuda.cu")]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "step0.o")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
