"""The formulas against counting: every load and store of a plain loop, every pair of a mask."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labcore.attention import Pattern, allowed, traffic
from labcore.attention.traffic import GPUS, Shape, roofline

SIZES = st.integers(1, 9)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    length = draw(SIZES)
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    causal = draw(st.booleans())
    return Shape(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        length=length,
        key_length=length + draw(SIZES) if causal else draw(SIZES),
        head_dim=draw(SIZES),
        dtype_bytes=draw(st.sampled_from([2, 4])),
        is_causal=causal,
    )


def visible(shape: Shape) -> torch.Tensor:
    """bool [T, S] of one head."""
    pattern = Pattern(scale=1.0, is_causal=shape.is_causal, bottom_right=True)
    return allowed(pattern, shape.length, shape.keys)[0, 0]


def tiles(length: int, block: int) -> list[range]:
    return [range(first, min(first + block, length)) for first in range(0, length, block)]


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_products_and_exponentials_are_those_of_the_pairs(shape: Shape) -> None:
    pairs = int(visible(shape).sum()) * shape.batch * shape.heads
    assert shape.pairs == pairs
    one = 2 * shape.head_dim * pairs  # one product: a multiplication and an addition a pair and D
    assert traffic.flops(shape) == 2 * one
    assert traffic.flops(shape, "backward") == 5 * one
    assert traffic.flops(shape, "backward", fused=False) == 7 * one
    assert traffic.exponentials(shape) == traffic.exponentials(shape, "backward") == pairs
    assert traffic.exponentials(shape, "backward", fused=False) == 2 * pairs


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(1, 4), st.integers(1, 4))
def test_the_forward_moves_what_a_loop_over_tiles_moves(shape, block_q, block_k) -> None:
    moved = Counter()
    row, seen = shape.head_dim * shape.dtype_bytes, visible(shape)
    live = 0
    for queries in tiles(shape.length, block_q):
        moved["q, out"] += 2 * len(queries) * row
        moved["lse"] += 4 * len(queries)
        for keys in tiles(shape.keys, block_k):
            if seen[queries.start : queries.stop, keys.start : keys.stop].any():
                live += 1
                moved["k, v"] += 2 * len(keys) * row
    heads = shape.batch * shape.heads
    assert traffic.live_tiles(shape, block_q, block_k) == live
    found = traffic.flash_bytes(shape, block_q=block_q, block_k=block_k)
    assert found == heads * moved.total()
    ungrouped = replace(shape, kv_heads=None)
    assert found >= traffic.compulsory_bytes(ungrouped) or shape.is_causal
    whole = traffic.flash_bytes(ungrouped, block_q=shape.length, block_k=shape.keys)
    assert whole == traffic.compulsory_bytes(ungrouped)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_the_backward_moves_what_its_loops_move(shape, block_q, block_k, fused) -> None:
    row, wide, seen = shape.head_dim * shape.dtype_bytes, shape.head_dim * 4, visible(shape)
    length, moved = shape.length, Counter()
    moved["delta"] = 2 * length * row + 4 * length
    pairs = [
        (queries, keys)
        for queries, keys in itertools.product(tiles(length, block_q), tiles(shape.keys, block_k))
        if seen[queries.start : queries.stop, keys.start : keys.stop].any()
    ]
    for queries, keys in pairs:
        moved["a tile of keys reads"] += len(queries) * (2 * row + 8)
        if fused:
            moved["adds to the gradient of q"] += len(queries) * 2 * wide
        else:
            moved["a tile of queries reads"] += len(keys) * 2 * row
    if fused:
        moved["clears, converts"] = length * (2 * wide + row)
    else:
        moved["queries"] = length * (3 * row + 8)
    keys_once = 4 * shape.batch * shape.shared_heads * shape.keys * row
    wanted = shape.batch * shape.heads * moved.total() + keys_once
    choice = {"block_q": block_q, "block_k": block_k, "fused": fused}
    assert traffic.flash_bytes(shape, "backward", **choice) == wanted


def test_the_naive_form_moves_what_its_operations_move() -> None:
    shape = Shape(batch=2, heads=3, length=5, key_length=7, head_dim=4, dtype_bytes=2)
    q, k = torch.zeros(2, 3, 5, 4).half(), torch.zeros(2, 3, 7, 4).half()
    scores = torch.zeros(2, 3, 5, 7).half()

    def bytes_of(*tensors: torch.Tensor) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    forward = bytes_of(q, k, scores) + bytes_of(scores, scores) + bytes_of(scores, k, q)
    assert traffic.naive_bytes(shape) == forward
    backward = (
        bytes_of(scores, q, k)  # gradient of v from weights and the gradient of out
        + bytes_of(q, k, scores)  # gradient of the weights
        + bytes_of(scores, scores, scores)  # of the scores
        + bytes_of(scores, k, q)  # of q
        + bytes_of(scores, q, k)  # of k
    )
    assert traffic.naive_bytes(shape, "backward") == backward
    # Grouped heads and a causal mask save nothing here.
    grouped = replace(shape, heads=6, kv_heads=3)
    assert traffic.naive_bytes(grouped) == traffic.naive_bytes(replace(shape, heads=6))
    square = replace(shape, key_length=None)
    assert traffic.naive_bytes(replace(square, is_causal=True)) == traffic.naive_bytes(square)


def test_what_waits_for_the_backward_is_what_autograd_keeps() -> None:
    shape = Shape(batch=1, heads=2, length=32, head_dim=8, dtype_bytes=4)
    q, k, v = (torch.randn(1, 2, 32, 8, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (torch.softmax(q @ k.mT, -1) @ v).sum()
    inputs = 3 * shape.query_bytes
    assert sum(kept.values()) - inputs == traffic.kept_bytes(shape, "naive") == 2 * 32 * 32 * 4
    assert traffic.kept_bytes(shape, "flash") == 2 * 32 * (8 * 4 + 4)


def test_memory_grows_with_the_square_and_with_the_length() -> None:
    short = Shape(batch=1, heads=8, length=1024, head_dim=64)
    long = replace(short, length=4096)
    for measure in (traffic.kept_bytes, traffic.forward_peak_bytes):
        assert measure(long, "naive") == 16 * measure(short, "naive")
        assert measure(long, "flash") == 4 * measure(short, "flash")
    assert traffic.forward_peak_bytes(short, "naive") == 2 * 8 * 1024 * 1024 * 2


def test_more_sram_moves_fewer_bytes() -> None:
    shape = Shape(batch=1, heads=1, length=4096, head_dim=64)
    moved = [traffic.flash_bytes(shape, block_q=2**i, block_k=64) for i in range(4, 12)]
    assert moved == sorted(moved, reverse=True)
    # Twice the queries a tile, half the walks over keys and values.
    fixed = 2 * shape.query_bytes + shape.row_bytes
    assert [(m - fixed) * 2**i for i, m in enumerate(moved)] == [moved[0] - fixed] * len(moved)


@pytest.mark.parametrize(
    ("sram", "choice", "block"),
    [
        (64 * 1024, {"head_dim": 64}, 64),  # 5 * 64 rows of 128 bytes are 40 KiB
        (227 * 1024, {"head_dim": 128}, 128),
        (227 * 1024, {"head_dim": 128, "stages": 4}, 64),
        (227 * 1024, {"head_dim": 128, "block_k": 64}, 512),
        (163 * 1024, {"head_dim": 128, "dtype_bytes": 4}, 64),
        (100, {"head_dim": 128}, 0),
    ],
    ids=str,
)
def test_a_block_for_a_given_sram(sram: int, choice: dict, block: int) -> None:
    assert traffic.largest_block(sram, **choice) == block
    same = {"block_k": block, **choice}
    if block:
        assert traffic.sram_bytes(block_q=block, **same) <= sram
        same = {"block_k": 2 * block, **choice}
        assert traffic.sram_bytes(block_q=2 * block, **same) > sram


@pytest.mark.parametrize(
    ("tile", "kib"),
    [
        ({"block_q": 128, "block_k": 128, "head_dim": 64, "stages": 3}, 112),
        ({"block_q": 128, "block_k": 64, "head_dim": 128, "stages": 3}, 128),
    ],
    ids=str,
)
def test_the_forward_kernel_takes_as_much_shared_memory(tile: dict, kib: int) -> None:
    """Both sizes are what Triton 3.7.1 gave the kernel on sm_90."""
    assert traffic.sram_bytes(**tile) == kib * 1024


def test_a_decode_step_reads_the_cache_once() -> None:
    shape = Shape(batch=4, heads=32, kv_heads=8, length=1, key_length=10_000, head_dim=128)
    cache = 2 * 4 * 8 * 10_000 * 128 * 2
    vectors = 2 * 4 * 32 * 128 * 2 + 4 * 32 * 4
    assert traffic.decode_bytes(shape) == cache + vectors
    assert traffic.decode_bytes(shape, 8) == cache + vectors + 2 * 4 * 32 * 8 * 129 * 4


@pytest.mark.parametrize(("head_dim", "together", "in_turn"), [(64, 989, 495), (128, 989, 660)])
def test_hoppers_softmax_takes_as_long_as_the_products_at_64_and_half_as_long_at_128(
    head_dim: int, together: int, in_turn: int
) -> None:
    shape = Shape(batch=4, heads=16, length=8192, head_dim=head_dim)
    found = roofline(shape, GPUS["H200"])
    assert found.flop_rate / 1e12 == pytest.approx(together, abs=1)
    assert found.serial_flop_rate / 1e12 == pytest.approx(in_turn, abs=1)
    assert found.bound == "matmul"
    assert found.softmax == pytest.approx(found.matmul * 64 / head_dim, rel=1e-3)
    # At 1.83 GHz an SM does 4096 16-bit operations a clock: the peak again.
    assert pytest.approx(GPUS["H200"].matmul, rel=1e-3) == 132 * 4096 * 1.83e9


def test_a_softmax_takes_the_longer_of_its_two_units_times() -> None:
    shape = Shape(batch=1, heads=3, length=100, head_dim=64)
    gpu, scores = GPUS["H100"], 3 * 100 * 100
    slots = scores / (gpu.units * gpu.clock)
    assert roofline(shape, gpu).softmax == pytest.approx(slots / 16)
    assert roofline(shape, replace(gpu, fp32=32)).softmax == pytest.approx(slots * 3.5 / 32)


def test_a_roofline_of_the_naive_form_is_memory() -> None:
    shape = Shape(batch=4, heads=16, length=4096, head_dim=64, is_causal=True)
    for gpu in GPUS.values():
        for direction in ("forward", "backward"):
            naive = roofline(shape, gpu, "naive", direction)
            flash = roofline(shape, gpu, "flash", direction)
            assert naive.flops == flash.flops == traffic.flops(shape, direction)
            assert naive.bound == "memory"
            assert naive.seconds == traffic.naive_bytes(shape, direction) / gpu.bandwidth
            assert naive.seconds > flash.seconds
            assert flash.seconds <= flash.serial_seconds <= 2 * flash.seconds
    decode = Shape(batch=1, heads=32, kv_heads=8, length=1, key_length=32_768, head_dim=128)
    assert roofline(decode, GPUS["H100"]).bound == "memory"


def test_peaks_units_and_clocks_fit_each_other() -> None:
    # Dense 16-bit operations a clock and unit, as the architectures' papers state them.
    steps = {"T4": 1024, "A100": 2048, "RTX 4090": 512, "H100": 4096, "H200": 4096}
    steps |= {"MI250X die": 1024, "MI300X": 2048}
    assert set(steps) == set(GPUS)
    for name, gpu in GPUS.items():
        assert name == gpu.name
        assert gpu.matmul == pytest.approx(gpu.units * gpu.clock * steps[name], rel=0.01)
        assert gpu.sram <= 228 * 1024 and gpu.exponentials < gpu.fp32
        assert gpu.sram < gpu.cache < gpu.memory


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"key_length": 7, "is_causal": True}, "key_length must be at least length"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Shape(**{"batch": 1, "heads": 4, "length": 8, "head_dim": 16, **change})


def test_unknown_words_are_refused() -> None:
    shape = Shape(batch=1, heads=1, length=8, head_dim=16)
    with pytest.raises(ValueError, match="direction must be one of"):
        traffic.flops(shape, "sideways")
    with pytest.raises(ValueError, match="form must be one of 'naive', 'flash', got 'flahs'"):
        roofline(shape, GPUS["H100"], "flahs")  # codespell:ignore
