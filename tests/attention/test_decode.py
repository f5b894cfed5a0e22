"""Decode over paged keys: both forms against one query at a time in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labcore.attention import paged_attention
from tests.attention.kernels import spread
from tests.attention.pages import (
    FORMS,
    causal,
    gap,
    interpreted,
    paths,
    queries,
    scatter,
    truth,
    watched,
)

AWKWARD = [1, 31, 63, 0, 100, 128, 257]
# The first is a chain, the second has two roots and a fork.
TREE = torch.tensor([[-1, 0, 1, 2, 3, 4], [-1, -1, 0, 1, 2, 2]], dtype=torch.int32)
SOFTCAPS = st.none() | st.floats(0.5, 5)


@FORMS
@pytest.mark.parametrize(
    ("page", "heads", "kv_heads", "head_dim", "splits"),
    [(1, 2, 2, 64, 1), (4, 3, 1, 24, 3), (16, 4, 2, 16, 2)],
)
def test_one_token_of_each_sequence(
    backend, page, heads, kv_heads, head_dim, splits, generator, monkeypatch
) -> None:
    ran = watched(monkeypatch)
    held = scatter(AWKWARD, page=page, kv_heads=kv_heads, head_dim=head_dim, generator=generator)
    query = queries(held, heads, 1, generator)
    found = paged_attention(query, *held.tensors(), splits=splits, backend=backend, return_lse=True)
    assert gap(found, truth(query, held, causal(AWKWARD, 1))) < 3e-6
    assert ran == [backend]
    assert found[0][3].eq(0).all() and found[1][3].eq(-math.inf).all()


@FORMS
@pytest.mark.parametrize(
    "choice",
    [{"window": (20, None)}, {"window": (0, 0)}, {"softcap": 2.0}, {"scale": 0.3}, {"splits": 3}],
    ids=str,
)
def test_choices_with_several_tokens_a_sequence(backend, choice, generator, monkeypatch) -> None:
    ran = watched(monkeypatch)
    lengths, tokens = [3, 31, 100, 2], 3  # the last has fewer keys than queries
    held = scatter(lengths, page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 2, tokens, generator)
    found = paged_attention(
        query, *held.tensors(), backend=backend, return_lse=True, **{"splits": 2, **choice}
    )
    left = choice.get("window", (None, None))[0]
    changes = {name: choice[name] for name in ("softcap", "scale") if name in choice}
    assert gap(found, truth(query, held, causal(lengths, tokens, left=left), **changes)) < 3e-6
    assert ran == [backend]


@FORMS
def test_rows_past_their_count_give_zeros(backend, generator) -> None:
    lengths, counts, tokens = [40, 2, 9, 5], [5, 2, 0, 1], 5
    held = scatter(lengths, page=4, kv_heads=2, head_dim=16, generator=generator)
    query = queries(held, 2, tokens, generator)
    query[1, :, 2:] = math.nan
    found = paged_attention(
        query,
        *held.tensors(),
        counts=torch.tensor(counts, dtype=torch.int32),
        return_lse=True,
        backend=backend,
    )
    assert gap(found, truth(query, held, causal(lengths, tokens, counts=counts))) < 3e-6


@FORMS
def test_rows_of_many_tokens_fill_several_tiles(backend, generator) -> None:
    lengths, tokens = [250, 90], 45  # 90 rows a key head, more than a tile has
    held = scatter(lengths, page=16, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 2, tokens, generator)
    counts = [45, 20]
    for choice in ({}, {"window": (170, None)}):
        found = paged_attention(
            query,
            *held.tensors(),
            counts=torch.tensor(counts, dtype=torch.int32),
            return_lse=True,
            backend=backend,
            **choice,
        )
        left = choice.get("window", (None,))[0]
        seen = causal(lengths, tokens, counts=counts, left=left)
        assert gap(found, truth(query, held, seen)) < 3e-6


@FORMS
@pytest.mark.parametrize("splits", [1, 3])
def test_a_node_gets_what_its_own_path_gives(backend, splits, generator, monkeypatch) -> None:
    ran = watched(monkeypatch)
    lengths = [64, 6]  # a whole block, the tree in its end; and a tree without a prefix
    held = scatter(lengths, page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 2, 6, generator)
    found = paged_attention(
        query, *held.tensors(), tree=TREE, splits=splits, backend=backend, return_lse=True
    )
    assert gap(found, truth(query, held, paths(lengths, TREE))) < 3e-6
    assert ran == [backend]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sizes_and_choices(data: st.DataObject) -> None:
    """The torch form; what the kernels do is compared at fixed sizes, the interpreter is slow."""

    def whole(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    generator = torch.Generator().manual_seed(whole(0, 2**31))
    batch, tokens, kv_heads = whole(1, 3), whole(1, 4), whole(1, 2)
    lengths = [whole(0, 40) for _ in range(batch)]
    counts = [whole(0, tokens) for _ in range(batch)] if whole(0, 1) else None
    held = scatter(
        lengths, page=whole(1, 9), kv_heads=kv_heads, head_dim=whole(1, 9), generator=generator
    )
    query = queries(held, kv_heads * whole(1, 3), tokens, generator)
    choice, scores = {"splits": whole(1, 50)}, {"scale": 0.5, "softcap": data.draw(SOFTCAPS)}
    if whole(0, 1):
        parents = [[whole(-1, n - 1) for n in range(tokens)] for _ in range(batch)]
        choice["tree"] = torch.tensor(parents, dtype=torch.int32)
        seen = paths(lengths, choice["tree"], counts=counts)
    else:
        left = data.draw(st.none() | st.integers(0, 40))
        choice["window"] = (left, None)
        seen = causal(lengths, tokens, counts=counts, left=left)
    found = paged_attention(
        query,
        *held.tensors(),
        counts=None if counts is None else torch.tensor(counts, dtype=torch.int32),
        return_lse=True,
        backend="torch",
        **choice,
        **scores,
    )
    assert gap(found, truth(query, held, seen, **scores)) < 3e-6


@FORMS
def test_a_tree_of_more_nodes_than_a_word_has_bits(backend, generator) -> None:
    nodes = 40
    draws = torch.rand(nodes, generator=generator)
    parents = (draws * (torch.arange(nodes) + 1)).long() - 1  # any earlier node or the prefix
    tree = parents.to(torch.int32)[None]
    lengths = [nodes + 50]
    held = scatter(lengths, page=16, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 1, nodes, generator)
    found = paged_attention(query, *held.tensors(), tree=tree, backend=backend, return_lse=True)
    assert gap(found, truth(query, held, paths(lengths, tree))) < 3e-6


@FORMS
def test_padding_of_a_tree_sees_nothing_and_is_not_seen(backend, generator) -> None:
    tree = torch.tensor([[-1, 0, -2, -2], [-1, -1, 1, 0]], dtype=torch.int32)
    lengths, counts = [20, 14], [4, 3]  # padding with slots of its own, and without
    held = scatter(lengths, page=4, kv_heads=1, head_dim=16, generator=generator)
    for page in held.block_table[0, 4:5].tolist():  # slots 16 … 19 of row 0 hold its nodes
        held.key_pages[page, 2:], held.value_pages[page, 2:] = math.nan, math.nan
    query = queries(held, 2, 4, generator)
    found = paged_attention(
        query,
        *held.tensors(),
        tree=tree,
        counts=torch.tensor(counts, dtype=torch.int32),
        backend=backend,
        return_lse=True,
    )
    assert gap(found, truth(query, held, paths(lengths, tree, counts=counts))) < 3e-6
    assert found[0][0, :, 2:].eq(0).all() and found[0][1, :, 3].eq(0).all()


@FORMS
def test_pages_before_the_window_need_not_be_there(backend, generator) -> None:
    held = scatter([100], page=4, kv_heads=1, head_dim=16, generator=generator)
    for tokens in (2, 1):
        query = queries(held, 1, tokens, generator)
        first = 100 - tokens - 9  # the first key that the first query sees
        for pages in (held.key_pages, held.value_pages):
            pages[held.block_table[0, : first // 4].long()] = math.nan
        table = held.block_table.clone()
        table[0, : first // 4] = -1
        found = paged_attention(
            query,
            held.key_pages,
            held.value_pages,
            table,
            held.lengths,
            window=(9, None),
            backend=backend,
            return_lse=True,
        )
        assert gap(found, truth(query, held, causal([100], tokens, left=9))) < 3e-6


@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_errs_no_more_than_twice_plain_torch(backend, dtype, generator) -> None:
    lengths = [63, 128]
    held = scatter(lengths, page=16, kv_heads=1, head_dim=32, generator=generator, dtype=dtype)
    query = queries(held, 2, 2, generator)
    wanted = truth(query, held, causal(lengths, 2))[0]
    found = paged_attention(query, *held.tensors(), splits=2, backend=backend)
    assert found.dtype == dtype
    plain = torch.zeros_like(query)
    for b, length in enumerate(lengths):
        k, v = (x[b].to(dtype).transpose(0, 1) for x in (held.keys, held.values))
        mask = torch.full((2, length), 0.0).triu(length - 1).bool()
        scores = (query[b] @ k.mT / math.sqrt(32)).masked_fill(mask, -math.inf)
        plain[b] = scores.softmax(-1) @ v
    ours, theirs = ((x.double() - wanted).abs().max() for x in (found, plain))
    assert ours <= 2 * theirs + 1e-6


@FORMS
def test_strided_queries_and_pages(backend, generator) -> None:
    held = scatter([37, 64], page=4, kv_heads=2, head_dim=16, generator=generator)
    query = queries(held, 4, 2, generator)
    wanted = paged_attention(query, *held.tensors(), backend=backend)
    fused = torch.full((2, 2, 6, 16), math.nan)  # [B, T, H and others, D]
    fused[:, :, :4] = query.transpose(1, 2)
    # One pool for keys and values, heads before slots, and rows whose last step is not 1.
    pool = torch.stack((held.key_pages, held.value_pages)).transpose(2, 3).contiguous()
    keys, values = pool.transpose(2, 3)
    table = held.block_table.repeat_interleave(2, dim=1)[:, ::2]
    found = paged_attention(
        fused[:, :, :4].transpose(1, 2), keys, values, table, held.lengths, backend=backend
    )
    assert torch.equal(found, wanted)
    wide = torch.stack((query, query), dim=-1)[..., 0]
    found = paged_attention(wide, *held.tensors(), backend=backend)
    assert torch.equal(found, wanted)


@interpreted
def test_the_pieces_are_joined_by_their_weights(generator, monkeypatch) -> None:
    """What the first kernel leaves: each piece's own softmax, -inf for a piece without keys."""
    from labcore.attention import decode

    grids = []
    held = scatter([128, 20], page=16, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 1, 1, generator)

    class Watched:
        def __getitem__(self, grid):
            def launch(*arguments, **keywords):
                grids.append((grid, arguments[3].clone()))
                return kernel[grid](*arguments, **keywords)

            return launch

    kernel = decode.reduce_kernel
    monkeypatch.setattr(decode, "reduce_kernel", Watched())
    found = paged_attention(query, *held.tensors(), splits=2, backend="triton", return_lse=True)
    ((grid, pieces),) = grids
    assert grid == (2,) and pieces.shape == (2, 1, 1, 2)
    assert pieces[0].isfinite().all() and pieces[1, 0, 0].isfinite().tolist() == [True, False]
    assert torch.allclose(pieces.logsumexp(-1), found[1])


@interpreted
def test_offsets_past_31_bits(generator) -> None:
    held = scatter([9, 20], page=4, kv_heads=3, head_dim=16, generator=generator)
    query = queries(held, 3, 2, generator)
    wanted = paged_attention(query, *held.tensors(), backend="triton")
    heads_first = (64, 16, 1 << 30, 1)  # [Hkv, P, page, D] in memory
    far = [spread(x, heads_first) for x in (held.key_pages, held.value_pages)]
    assert torch.equal(paged_attention(query, *far, *held.tensors()[2:], backend="triton"), wanted)
    query = spread(query, (32, 1 << 30, 16, 1))
    assert torch.equal(paged_attention(query, *held.tensors(), backend="triton"), wanted)


@interpreted
def test_more_pieces_than_are_added_at_a_time(generator) -> None:
    from labcore.attention import decode

    queries, heads, splits, head_dim = 1, 2, 21, 24
    part = torch.randn(queries, heads, splits, head_dim, generator=generator)
    part_lse = 3 * torch.randn(heads, queries, splits, generator=generator)
    part_lse[0, 0, ::4] = -math.inf
    out, lse = torch.empty(queries, heads, head_dim), torch.empty(heads, queries)
    sizes = {"D": head_dim, "D_PAD": 32, "SPLITS_PAD": 32}
    decode.reduce_kernel[(2,)](out, lse, part, part_lse, heads, queries, splits, **sizes)
    weights = part_lse.softmax(-1)[:, 0]
    assert torch.allclose(out[0], torch.einsum("hs,hsd->hd", weights, part[0]), atol=1e-6)
    assert torch.allclose(lse, part_lse.logsumexp(-1), atol=1e-6)


@interpreted
def test_nothing_is_written_outside_the_results(generator, monkeypatch) -> None:
    rooms: list[Tensor] = []
    original = Tensor.new_empty

    def guarded(self: Tensor, size, **keywords) -> Tensor:
        if not isinstance(size, tuple):
            return original(self, size, **keywords)  # the interpreter's own
        size = torch.Size(size)
        room = original(self, (size.numel() + 128,), **keywords).fill_(math.nan)
        rooms.append(room)
        return room[64:-64].view(size)

    held = scatter([31, 0, 70], page=4, kv_heads=1, head_dim=24, generator=generator)
    query = queries(held, 3, 2, generator)
    wanted = truth(query, held, causal([31, 0, 70], 2))
    monkeypatch.setattr(Tensor, "new_empty", guarded)
    for splits, buffers in ((1, 2), (3, 4)):
        rooms.clear()
        found = paged_attention(
            query, *held.tensors(), splits=splits, backend="triton", return_lse=True
        )
        assert len(rooms) == buffers
        for room in rooms:
            assert room[:64].isnan().all() and room[-64:].isnan().all()
            assert not room[64:-64].isnan().any()  # every place has its result
        assert gap(found, wanted) < 3e-6
