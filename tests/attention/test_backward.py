"""The backward kernels in the interpreter: the law, both forms, memory, and what repeats."""

import pytest
import torch

from labcore.attention import Pattern, allowed
from tests.attention.cases import BANDS, draw, draw_tree, error, exact, grads, plain
from tests.attention.kernels import (  # noqa: F401
    Guards,
    guarded,
    needs_interpreter,
    ran,
    spread,
    tile_cases,
)

pytest.importorskip("triton", reason="Triton has no build for this system")

import triton
import triton.language as tl

from labcore.attention import backward
from labcore.attention.backward import flash_backward
from labcore.attention.configs import Config
from labcore.attention.forward import flash_forward

pytestmark = needs_interpreter
SMALL = Config(m=16, n=32), Config(m=32, n=16)  # several tiles of each kind at these lengths


def wanted_grads(leaves, pattern: Pattern, generator, *, of_lse: bool = True):
    """Output gradients, and the gradients of the leaves from float64."""
    wide, out, lse = exact(*leaves, pattern)
    grad_out = torch.randn(out.shape, generator=generator).to(leaves[0].dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).masked_fill(lse == -torch.inf, 0)
    if not of_lse:
        return grad_out, None, grads(out, wide, [grad_out.double()])
    seen = lse > -torch.inf
    given = [grad_out.double(), grad_lse[seen].double()]
    return grad_out, grad_lse, grads([out, lse[seen]], wide, given)


def check(leaves, pattern: Pattern, generator, *, fused: bool = False, **chosen) -> None:
    grad_out, grad_lse, wanted = wanted_grads(leaves, pattern, generator)
    out, lse = flash_forward(*leaves, pattern=pattern)
    ours = flash_backward(
        grad_out, *leaves, out, lse, pattern=pattern, grad_lse=grad_lse, fused=fused, **chosen
    )
    for mine, theirs in zip(ours, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert error(mine, theirs) < 2e-5


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_pattern_follows_the_law(band, generator, ran) -> None:  # noqa: F811
    shape = {"batch": 1, "heads": 1, "q_len": 45, "k_len": 60}
    leaves = draw(generator, **shape, dtype=torch.float32)
    check(leaves, Pattern(scale=0.4, **band), generator, config=SMALL)
    assert ran == ["forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"]


@pytest.mark.parametrize("kind", ["ampere", "hopper"])  # the latter computes dq transposed
@pytest.mark.parametrize("band", [BANDS[1], BANDS[6], {"window": (40, 20)}], ids=str)
def test_the_fused_form_follows_it_too(
    band, kind: str, generator, ran, monkeypatch,  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(backward, "kind_of", lambda _: kind)
    leaves = draw(generator, batch=1, heads=1, q_len=75, k_len=45, dim=20, dtype=torch.float32)
    check(leaves, Pattern(scale=0.4, **band), generator, fused=True, config=SMALL)
    assert ran == ["forward_kernel", "delta_kernel", "dkdv_kernel"]


@pytest.mark.parametrize("length", [1, 31, 128])
def test_awkward_lengths(length: int, generator) -> None:
    leaves = draw(generator, batch=1, heads=1, q_len=length, dtype=torch.float32)
    check(leaves, Pattern(scale=0.25, is_causal=True), generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_within_three_times_the_error_of_plain_torch(dtype, generator) -> None:
    leaves = draw(generator, batch=1, q_len=100, dim=32, dtype=dtype)
    pattern = Pattern(scale=32**-0.5, is_causal=True)
    grad_out, _, wanted = wanted_grads(leaves, pattern, generator, of_lse=False)
    out, lse = flash_forward(*leaves, pattern=pattern)
    ours = flash_backward(grad_out, *leaves, out, lse, pattern=pattern)
    theirs = grads(plain(*leaves, pattern), leaves, [grad_out])
    for mine, other, exactly in zip(ours, theirs, wanted, strict=True):
        assert mine.dtype == dtype
        assert error(mine, exactly) <= 3 * error(other, exactly)


def test_repeated_runs_agree_bit_for_bit(generator) -> None:
    leaves = draw(generator, batch=1, kv_heads=1, q_len=70, dtype=torch.float16)
    pattern = Pattern(scale=0.25, window=(30, 20))
    grad_out = torch.randn(leaves[0].shape, generator=generator).half()
    out, lse = flash_forward(*leaves, pattern=pattern)
    one, two = (flash_backward(grad_out, *leaves, out, lse, pattern=pattern) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_nothing_is_read_or_written_outside(generator, monkeypatch) -> None:
    guards = Guards()
    monkeypatch.setattr(backward, "new_heads", guards)
    leaves = draw(generator, batch=1, kv_heads=1, q_len=31, k_len=63, dim=20, dtype=torch.float32)
    leaves = tuple(guarded(x) for x in leaves)
    for fused, kind in ((False, "interpreter"), (True, "interpreter"), (True, "hopper")):
        monkeypatch.setattr(backward, "kind_of", lambda _, kind=kind: kind)
        check(leaves, Pattern(scale=0.3, window=(9, 20)), generator, fused=fused, config=SMALL)
    assert guards.intact()


@pytest.mark.parametrize("band", [BANDS[0], BANDS[6]], ids=str)
def test_dk_and_dv_in_a_launch_each(band, generator, ran) -> None:  # noqa: F811
    leaves = draw(generator, batch=1, q_len=45, k_len=75, dim=80, dtype=torch.float32)
    wide = Config(m=16, n=64, warps=1)  # 2 * 64 * 128 sums in 32 threads
    check(leaves, Pattern(scale=0.2, **band), generator, config=(wide, SMALL[1]))
    assert ran == ["forward_kernel", "delta_kernel", "dkdv_kernel", "dkdv_kernel", "dq_kernel"]


def test_heads_that_share_keys_add_up(generator) -> None:
    leaves = draw(generator, batch=1, heads=6, kv_heads=2, q_len=17, k_len=40, dtype=torch.float32)
    check(leaves, Pattern(scale=0.25), generator)


def test_the_fused_form_refuses_what_it_would_spill(generator) -> None:
    query, key, value = draw(generator, q_len=3, dim=130, dtype=torch.float32)
    with pytest.raises(ValueError, match="up to 128, past which it spills registers, got 130"):
        flash_backward(
            query, query, key, value, query, query[..., 0], pattern=Pattern(scale=1.0), fused=True
        )


def test_any_strides(generator) -> None:
    heads = draw(generator, heads=1, q_len=33, dtype=torch.float32)
    joined = torch.stack([x.detach().transpose(1, 2) for x in heads], dim=2)  # [B, T, 3, H, D]
    query, key, value = (x.transpose(1, 2) for x in joined.unbind(2))
    pattern = Pattern(scale=0.3)
    out, lse = flash_forward(query, key, value, pattern=pattern)
    ones = torch.ones(()).expand(out.shape)  # what out.sum().backward() hands on
    wide, theirs, _ = exact(query, key, value, pattern)
    wanted = grads(theirs, wide, [ones.double()])
    ours = flash_backward(ones, query, key, value, out, lse, pattern=pattern)
    assert max(error(a, b) for a, b in zip(ours, wanted, strict=True)) < 1e-5


def test_packed_sequences_are_what_they_are_alone(generator) -> None:
    q_lens, k_lens = [5, 0, 40, 17], [33, 4, 0, 17]
    sums = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (q_lens, k_lens)]
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 62, "k_len": 54}
    leaves = draw(generator, **shape, dtype=torch.float32)
    pattern = Pattern(scale=0.4, is_causal=True, bottom_right=True)
    lengths = {"cu_q": sums[0], "cu_k": sums[1], "max_q": 40, "max_k": 33}
    out, lse = flash_forward(*leaves, pattern=pattern, **lengths)
    grad_out = torch.randn(out.shape, generator=generator)
    ours = flash_backward(grad_out, *leaves, out, lse, pattern=pattern, **lengths)
    for i in range(4):
        mine = slice(sums[0][i], sums[0][i + 1])
        keys = slice(sums[1][i], sums[1][i + 1])
        parts = [x[:, :, s] for x, s in zip(ours, (mine, keys, keys), strict=True)]
        if q_lens[i] and k_lens[i]:
            alone = [x[:, :, s] for x, s in zip(leaves, (mine, keys, keys), strict=True)]
            wide, theirs, _ = exact(*alone, pattern)
            wanted = grads(theirs, wide, [grad_out[:, :, mine].double()])
            assert max(error(a, b) for a, b in zip(parts, wanted, strict=True)) < 1e-5
        else:
            assert all((x == 0).all() for x in parts)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 1, 5, 16), (1 << 30, 16, 16, 1)),
        ((1, 3, 5, 16), (16, 1 << 30, 16, 1)),
        ((1, 1, 385, 16), (16, 16, 5_592_416, 1)),  # a tile of 128 begins past 2^31
    ],
    ids=["batch", "head", "row"],
)
def test_offsets_past_31_bits(shape, strides, generator) -> None:
    tensors = [torch.randn(shape, generator=generator).half() for _ in range(4)]
    far = [spread(x, strides) for x in tensors]
    pattern, tile = Pattern(scale=0.25, window=(3, 3)), Config(m=128, n=128)
    found = []
    for grad_out, *inputs in (tensors, far):
        out, lse = flash_forward(*inputs, pattern=pattern, config=tile)
        grads_of = flash_backward(grad_out, *inputs, out, lse, pattern=pattern, config=(tile, tile))
        found.append((out, lse, *grads_of))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_trees(fused: bool, generator) -> None:
    tree = draw_tree(generator, batch=2, nodes=37, padding=(0, 5))
    leaves = draw(generator, heads=1, q_len=37, k_len=67, dtype=torch.float32)
    check(leaves, Pattern(scale=0.4, tree=tree), generator, fused=fused, config=SMALL)


@triton.jit
def row_tiles_kernel(
    cases_ptr, found_ptr, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    case = cases_ptr + 6 * tl.program_id(0)
    n0, q_len, k_len = tl.load(case), tl.load(case + 1), tl.load(case + 2)
    shift, left, right = tl.load(case + 3), tl.load(case + 4), tl.load(case + 5)
    first, hot, cold, stop = backward.row_tiles(
        n0, q_len, k_len, shift, left, right, M, N, LEFT, RIGHT, False
    )
    found = found_ptr + 4 * tl.program_id(0)
    tl.store(found, first)
    tl.store(found + 1, hot)
    tl.store(found + 2, cold)
    tl.store(found + 3, stop)


@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_no_tile_is_left_out_and_none_without_a_mask_needs_one(left, right, seed) -> None:
    cases, patterns = tile_cases(left, right, 16, seed, of_keys=True)
    found = torch.zeros(len(cases), 4, dtype=torch.int32)
    row_tiles_kernel[(len(cases),)](cases, found, M=8, N=16, LEFT=left, RIGHT=right)
    for (n0, q_len, k_len, *_), pattern, tiles in zip(
        cases.tolist(), patterns, found.tolist(), strict=True
    ):
        first, hot, cold, stop = tiles
        seen = allowed(pattern, q_len, k_len)[0, 0, :, n0 : n0 + 16]
        parts = seen.split(8)
        some = [bool(part.any()) for part in parts]
        every = [bool(part.all()) and part.shape == (8, 16) for part in parts]
        assert first <= hot <= cold <= stop
        assert not any(some[:first]) and not any(some[stop:])
        assert all(every[hot:cold])
        assert not any(every[first:hot]) and not any(every[cold:stop])
