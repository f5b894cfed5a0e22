"""Online softmax and tiles in plain torch: the same numbers, less memory, less work."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labcore.attention import (
    Pattern,
    merge_states,
    online,
    safe_attention,
    tiled_backward,
    tiled_forward,
)
from labcore.attention.pattern import allowed
from tests.attention.cases import BANDS, LENGTHS, draw, draw_tree, error, exact, grads, plain


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles of 32 by 32, so that short lengths need many."""
    monkeypatch.setattr(online, "ROWS", 32)
    monkeypatch.setattr(online, "KEYS", 32)
    return 32


def both_ways(q, k, v, pattern, generator, **lengths):
    """Results of the tiled form and the gradients that random ones of its results give."""
    out, lse = tiled_forward(q, k, v, pattern=pattern, **lengths)
    dy, dl = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse))
    dy, dl = dy.to(out.dtype), dl.masked_fill(lse == -torch.inf, 0).to(lse.dtype)
    back = tiled_backward(dy, q, k, v, out, lse, pattern=pattern, grad_lse=dl, **lengths)
    return (out, lse, *back), (dy, dl)


# -- online softmax


@pytest.mark.parametrize("size", [1, 7, 31, 100])
def test_any_cut_of_the_keys_gives_softmax(size: int, generator: torch.Generator) -> None:
    scores = 30 * torch.randn(3, 5, 100, generator=generator, dtype=torch.float64)
    scores[:, 2, :31] = -torch.inf  # begins with keys that it does not see
    scores[:, 3] = -torch.inf
    scores[:, 4] = scores[:, 4].sort().values  # a new largest score at every step
    values = torch.randn(3, 100, 8, generator=generator, dtype=torch.float64)
    state = None
    for i in range(0, 100, size):
        part = slice(i, i + size)
        state = online.absorb(state, scores[..., part] * online.LOG2E, values[:, part])
    assert state is not None
    out, lse = online.finish(state)
    expected = scores.softmax(-1).nan_to_num(0) @ values
    assert error(out, expected) < 1e-12
    assert error(lse, scores.logsumexp(-1)) < 1e-12
    assert not out[:, 3].any()


def parts(generator: torch.Generator, blind: bool):
    """Leaves, a pattern, and attention of the leaves to three disjoint sets of 50 keys."""
    q, k, v = draw(generator, batch=1, q_len=7, k_len=50, dim=4)
    cuts = [slice(0, 13), slice(13, 14), slice(14, 50)]
    pattern = Pattern(scale=1.0)
    hidden = torch.zeros(7, 50, dtype=torch.bool)
    if blind:
        hidden[1] = True
        hidden[2, 13:] = True
    found = [
        safe_attention(q, k[:, :, c], v[:, :, c], pattern=pattern, attn_mask=~hidden[:, c])
        for c in cuts
    ]
    return (q, k, v), found, safe_attention(q, k, v, pattern=pattern, attn_mask=~hidden)


@pytest.mark.parametrize("blind", [False, True])
def test_parts_merge_into_the_whole_in_any_order(blind: bool, generator: torch.Generator) -> None:
    leaves, found, (out, lse) = parts(generator, blind)
    dy = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    dl = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    dl = dl.masked_fill(lse == -torch.inf, 0)
    truth = grads((out, lse), leaves, (dy, dl))
    for a, b, c in itertools.permutations(found):
        merged = merge_states(*merge_states(*a, *b), *c)
        assert error(merged[0], out) < 1e-12
        assert error(merged[1], lse) < 1e-12
        back = torch.autograd.grad(merged, leaves, (dy, dl), retain_graph=True)
        assert max(error(x, y) for x, y in zip(back, truth, strict=True)) < 1e-12


# -- tiles


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (1, 100), (31, 63), (100, 63), (63, 128)], ids=str)
def test_tiles_give_safe_attention(
    band: dict, size: tuple[int, int], small_tiles: int, generator: torch.Generator
) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=size[0], k_len=size[1], dim=8)
    pattern = Pattern(scale=0.4, **band)
    ours, given = both_ways(q, k, v, pattern, generator)
    leaves, out, lse = exact(q, k, v, pattern)
    truth = (out, lse, *grads((out, lse), leaves, given))
    assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-11


@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_of_the_usual_size(length: int, generator: torch.Generator) -> None:
    q, k, v = draw(generator, batch=1, q_len=length, dim=8)
    pattern = Pattern(scale=0.4, is_causal=True)
    ours, given = both_ways(q, k, v, pattern, generator)
    leaves, out, lse = exact(q, k, v, pattern)
    truth = (out, lse, *grads((out, lse), leaves, given))
    assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-11


@pytest.mark.parametrize("prefix", [0, 1, 31, 100])
def test_tiles_of_a_tree(prefix: int, small_tiles: int, generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=1, q_len=40, k_len=40 + prefix, dim=8)
    tree = draw_tree(generator, batch=2, nodes=40, padding=(0, 35))
    pattern = Pattern(scale=0.4, tree=tree, softcap=3.0)
    ours, given = both_ways(q, k, v, pattern, generator)
    leaves, out, lse = exact(q, k, v, pattern)
    truth = (out, lse, *grads((out, lse), leaves, given))
    assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-11
    assert not ours[0][1, :, 5:].any()


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_packed_sequences_are_each_alone(
    band: dict, small_tiles: int, generator: torch.Generator
) -> None:
    q_lens, k_lens = (1, 0, 63, 31, 5), (7, 9, 63, 100, 0)
    q, k, v = draw(
        generator, batch=1, heads=4, kv_heads=2, q_len=sum(q_lens), k_len=sum(k_lens), dim=8
    )
    cu_q = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
    cu_k = torch.tensor([0, *itertools.accumulate(k_lens)], dtype=torch.int32)
    pattern = Pattern(scale=0.4, **band)
    ours, (dy, dl) = both_ways(q, k, v, pattern, generator, cu_q=cu_q, cu_k=cu_k)
    for i in range(len(q_lens)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        leaves, out, lse = exact(q[:, :, rows], k[:, :, keys], v[:, :, keys], pattern)
        back = grads((out, lse), leaves, (dy[:, :, rows], dl[:, :, rows]))
        spans = (rows, rows, rows, keys, keys)
        mine = [x[:, :, span] for x, span in zip(ours, spans, strict=True)]
        for a, b in zip(mine, (out, lse, *back), strict=True):
            assert error(a, b) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_no_worse_than_plain_sixteen_bit_torch(
    dtype: torch.dtype, length: int, generator: torch.Generator
) -> None:
    q, k, v = draw(generator, heads=2, kv_heads=1, q_len=length, dim=32, dtype=dtype)
    pattern = Pattern(scale=32**-0.5, is_causal=True)
    ours, (dy, _) = both_ways(q, k, v, pattern, generator)
    out, lse, *_ = ours
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    ours = (out, *tiled_backward(dy, q, k, v, out, lse, pattern=pattern))
    leaves, true_out, true_lse = exact(q, k, v, pattern)
    assert error(lse, true_lse) < 1e-5  # the scores are as wide as fp32
    truth = (true_out, *grads(true_out, leaves, [dy.double()]))
    usual = plain(q, k, v, pattern)
    peer = (usual, *grads(usual, (q, k, v), [dy]))
    # Where one key is seen both are right but for the rounding of the result.
    rounding = torch.finfo(dtype).eps
    for factor, a, b, c in zip((2, 3, 3, 3), ours, peer, truth, strict=True):
        assert a.dtype == dtype
        assert error(a, c) <= factor * error(b, c) + rounding


def test_fp32_and_wide_heads(generator: torch.Generator) -> None:
    for dim in (1, 17, 256):
        q, k, v = draw(generator, q_len=63, k_len=100, dim=dim, dtype=torch.float32)
        pattern = Pattern(scale=dim**-0.5, is_causal=True, bottom_right=True)
        ours, given = both_ways(q, k, v, pattern, generator)
        leaves, out, lse = exact(q, k, v, pattern)
        truth = (out, lse, *grads((out, lse), leaves, [x.double() for x in given]))
        assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 2e-5


def test_large_scores_do_not_overflow(generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=100, dtype=torch.float32)
    pattern = Pattern(scale=100.0)
    ours, _ = both_ways(q, k, v, pattern, generator)
    _, out, _ = exact(q, k, v, pattern)
    assert error(ours[0], out) < 1e-3
    assert all(x.isfinite().all() for x in ours)


def test_the_backward_repeats_bit_for_bit(generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=257, dim=32, dtype=torch.float32)
    pattern = Pattern(scale=0.2, is_causal=True)
    out, lse = tiled_forward(q, k, v, pattern=pattern)
    dy = torch.randn(out.shape, generator=generator)
    first, second = (tiled_backward(dy, q, k, v, out, lse, pattern=pattern) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_views_of_any_strides_within_nan(generator: torch.Generator) -> None:
    fused = torch.full((2, 70, 3, 4, 20), torch.nan, dtype=torch.float64)  # [B, T, qkv, H, D]
    inner = fused[:, 3:66, :, :3, 2:18]
    inner.copy_(torch.randn(inner.shape, generator=generator, dtype=torch.float64))
    q, k, v = (inner[:, :, i].transpose(1, 2) for i in range(3))
    one_head = k[:, :1].expand(-1, 3, -1, -1)
    for keys in (k, one_head, k.mT.contiguous().mT):
        pattern = Pattern(scale=0.3, is_causal=True)
        ours, given = both_ways(q, keys, v, pattern, generator)
        leaves, out, lse = exact(q, keys, v, pattern)
        truth = (out, lse, *grads((out, lse), leaves, given))
        assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-11


# -- what tiles are for


class Largest(TorchDispatchMode):
    """The most elements that any operation's result has while this is on."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_no_tensor_grows_with_the_square_of_the_length(generator: torch.Generator) -> None:
    pattern, found = Pattern(scale=0.2, is_causal=True), {}
    for length in (512, 1024):
        q, k, v = draw(generator, batch=1, heads=1, q_len=length, dim=32, dtype=torch.float32)
        with Largest() as seen:
            both_ways(q, k, v, pattern, generator)
        found[length] = seen.elements
    assert found == dict.fromkeys(found, online.TILE)
    with Largest() as seen:  # the same measure sees the scores of the form that keeps them
        safe_attention(q, k, v, pattern=pattern)
    assert seen.elements == 1024**2


@pytest.mark.parametrize("length", [3, 300, 700])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"), [(1, 1, 1), (3, 5, 5), (40, 6, 2), (2, 600, 1)]
)
def test_a_tile_has_all_heads_that_fit_in_the_cache(
    batch: int, heads: int, kv_heads: int, length: int
) -> None:
    query, key = (torch.zeros(batch, n, length, 1) for n in (heads, kv_heads))
    parts = list(online._parts(Pattern(scale=1.0), query, key, None, None))
    for pattern, at_q, at_k in parts:
        query[at_q] += 1
        key[at_k] += 1
        q, k = query[at_q], key[at_k].flatten(0, 1)
        scores = [
            (rows.stop - rows.start) * (span.stop - span.start) * q.shape[0] * q.shape[1]
            for rows, spans in online._tiles(pattern, q, k)
            for span in spans
        ]
        assert max(scores) <= online.TILE or len(k) == 1
    assert bool((query == 1).all() and (key == 1).all())  # each head is in one part
    rows = min(length, max(1, online.ROWS // (heads // kv_heads))) * heads // kv_heads
    whole = batch * kv_heads * rows * min(length, online.KEYS)
    assert (len(parts) == 1) == (whole <= online.TILE or batch * kv_heads == 1)


@pytest.mark.parametrize("band", [b for b in BANDS if b], ids=str)
def test_tiles_that_nothing_sees_are_not_computed(
    band: dict, small_tiles: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, int]] = []
    original = online.base_2_scores

    def counted(rows, keys, *others):
        computed.append((rows.shape[1], keys.shape[1]))
        return original(rows, keys, *others)

    monkeypatch.setattr(online, "base_2_scores", counted)
    q, k, v = draw(generator, batch=1, heads=1, q_len=200, k_len=257, dim=4)
    pattern = Pattern(scale=1.0, **band)
    seen = allowed(pattern, 200, 257)[0, 0]
    both_ways(q, k, v, pattern, generator)
    area = sum(a * b for a, b in computed) / 2  # forward and backward
    assert area == sum(len(rows) * int(rows.any(0).sum()) for rows in seen.split(small_tiles))
    assert area < 200 * 257 or seen.all()
