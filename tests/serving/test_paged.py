"""Over pages the model computes what it computes without a cache, and reads no other's tokens."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from labcore import processes
from labcore.models import KVCache, Llama
from labcore.parallel import GraphedDecoder, parallelize
from labcore.parallel.recording import launch_sequence
from labcore.serving.cache import paged
from labcore.serving.cache.paged import PagedCache
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.parallel.small import CONFIG, made
from tests.serving.paging import (
    CLOSE,
    FORMS,
    Traffic,
    bound,
    dense,
    eager,
    padded,
    poisoned,
    scattered,
    stored,
)

PAGES = (1, 3, 16)
CASES = [*product(FORMS, PAGES)]
# A tree, a chain with padding, and several children of the prefix.
PARENTS = torch.tensor(
    [[-1, 0, 0, -1, 1, 3, 1], [-1, 0, 1, 2, -2, -2, -2], [-1, -1, -1, 2, 3, 2, -2]],
    dtype=torch.int32,
)


@pytest.fixture(params=["plain", "grouped", "one-key-head"])
def model(request, generator: torch.Generator) -> Llama:
    return model_of(CONFIGS[request.param], generator).double()


@pytest.fixture
def grouped(generator: torch.Generator) -> Llama:
    return model_of(CONFIGS["grouped"], generator).double()


@pytest.mark.parametrize(("form", "page"), CASES)
@torch.inference_mode()
def test_ragged_chunks_equal_a_dense_cache_and_none(
    form: str, page: int, model: Llama, generator: torch.Generator
) -> None:
    cache = bound(model, generator, page=page, rows=4, capacity=19, form=form)
    twin = dense(model, rows=4, capacity=30)
    rows: list[list[int]] = [[], [], [], []]
    assert isinstance(cache, KVCache) and cache.attention == form
    for counts in ([5, 1, 9, 3], [2, 6, 0, 1], [1, 1, 1, 1], [0, 4, 8, 2], [1, 0, 1, 1]):
        tokens = tokens_of(model.config, (4, max(counts)), generator)
        logits = model(tokens, counts=torch.tensor(counts), cache=cache).logits
        wanted = model(tokens, counts=torch.tensor(counts), cache=twin).logits
        for row, count in enumerate(counts):
            torch.testing.assert_close(logits[row, :count], wanted[row, :count], **CLOSE)
            rows[row] += tokens[row, :count].tolist()
            alone = model(torch.tensor([rows[row]])).logits[0, len(rows[row]) - count :]
            torch.testing.assert_close(logits[row, :count], alone, **CLOSE)
    assert cache.lengths.tolist() == twin.lengths.tolist() == [9, 12, 19, 8]


@pytest.mark.parametrize(("form", "page"), CASES)
@torch.inference_mode()
def test_a_tree_equals_its_dense_twin_and_kept_paths_go_on(
    form: str, page: int, model: Llama, generator: torch.Generator
) -> None:
    counts, paths = torch.tensor([6, 1, 11]), [[3, 5], [0, 1], torch.tensor([2, 3, 4])]
    prompt, nodes, after = (tokens_of(model.config, (3, n), generator) for n in (11, 7, 2))
    caches = (
        bound(model, generator, page=page, rows=3, capacity=18, form=form),
        dense(model, rows=3, capacity=18),
    )
    logits = []
    for cache in caches:
        model(prompt, counts=counts, cache=cache)
        logits.append(model(nodes, cache=cache, tree=PARENTS).logits)
    valid = PARENTS != -2
    torch.testing.assert_close(logits[0][valid], logits[1][valid], **CLOSE)
    for row, path in enumerate(paths):
        caches[0].keep(row, path)
    assert caches[0].lengths.tolist() == [8, 3, 14]
    follow = model(after, cache=caches[0]).logits
    for row, path in enumerate(paths):
        read = torch.cat((prompt[row, : counts[row]], nodes[row, path], after[row]))
        torch.testing.assert_close(follow[row], model(read[None]).logits[0, -2:], **CLOSE)


@pytest.mark.parametrize(("form", "page"), CASES)
@torch.inference_mode()
def test_truncated_rows_forget(
    form: str, page: int, grouped: Llama, generator: torch.Generator
) -> None:
    tokens, after = (tokens_of(grouped.config, (3, n), generator) for n in (10, 4))
    cache = bound(grouped, generator, page=page, rows=3, capacity=14, form=form)
    grouped(tokens, cache=cache)
    cache.truncate(torch.tensor([3, 0, 99]))
    assert cache.lengths.tolist() == [3, 0, 10]
    logits = grouped(after, cache=cache).logits
    for row, kept in enumerate([3, 0, 10]):
        read = torch.cat((tokens[row, :kept], after[row]))
        torch.testing.assert_close(logits[row], grouped(read[None]).logits[0, kept:], **CLOSE)
    cache.keep(1, [])
    assert cache.lengths.tolist() == [7, 0, 14]


@pytest.mark.parametrize(("form", "page"), CASES)
@torch.inference_mode()
def test_requests_that_come_and_go_read_only_their_own(
    form: str, page: int, grouped: Llama, generator: torch.Generator
) -> None:
    """Any order of rows, chunks of any size, drafts given back, pages of others full of NaN."""
    cache = poisoned(grouped, page=page, rows=4, capacity=17, form=form, pages=5 * -(-17 // page))
    traffic = Traffic(grouped, cache, generator, poison=math.nan)
    for step in range(24):
        traffic.admit()
        traffic.step(told=step % 3 > 0, widest=(1, 5)[step % 2], forward=eager)
    assert traffic.compared >= 24
    assert (
        len({block for held in traffic.live for block in held.blocks}) + len(traffic.free)
        == cache.pages
    )


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_counts_are_told_for_one_forward(
    form: str, grouped: Llama, generator: torch.Generator
) -> None:
    tokens = tokens_of(grouped.config, (1, 9), generator)
    cache = poisoned(grouped, page=4, rows=1, capacity=8, form=form)
    cache.bind([([3, 1], 0)], [3])
    parts = [grouped(part, cache=cache).logits for part in tokens[:, :8].split([3, 5], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), grouped(tokens[:, :8]).logits, **CLOSE)
    with pytest.raises(ValueError, match="at most the 8 tokens .* got 9 in row 0"):
        grouped(tokens[:, 8:], cache=cache)


@pytest.mark.parametrize(("form", "page"), CASES)
@torch.inference_mode()
def test_shared_pages_serve_both_rows_and_a_copy_parts_them(
    form: str, page: int, grouped: Llama, generator: torch.Generator
) -> None:
    prompt = tokens_of(grouped.config, (1, 2 * page + page // 2), generator)
    after = tokens_of(grouped.config, (2, 5), generator)
    cache = poisoned(grouped, page=page, rows=2, capacity=3 * page + 5, form=form)
    first, second = scattered(cache, 2, generator)
    length = prompt.shape[1]
    cache.bind([(first, 0)], [length])
    grouped(prompt, cache=cache.first_rows(1))
    before = [pages[first[:3]].clone() for pages in stored(cache)]
    second[:2] = first[:2]  # full pages are shared; one that is not full is copied
    cache.copy_page(first[2], second[2])
    cache.bind([(second, length)], [5])
    parted = grouped(after[1:], cache=cache.first_rows(1)).logits[0]
    for pages, kept in zip(stored(cache), before, strict=True):
        assert torch.equal(pages[first[:3]].nan_to_num(7.0), kept.nan_to_num(7.0))
    cache.bind([(second, length), (first, length)], [0, 5])
    tokens, counts = after[[1, 0]], torch.tensor([0, 5])
    own = grouped(tokens, counts=counts, cache=cache).logits[1]
    for logits, follow in ((parted, after[1]), (own, after[0])):
        read = torch.cat((prompt[0], follow))
        torch.testing.assert_close(logits, grouped(read[None]).logits[0, length:], **CLOSE)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_forward_writes_its_tokens_and_nothing_else(
    form: str, grouped: Llama, generator: torch.Generator
) -> None:
    page, lengths, counts = 3, [4, 0, 9, 2], [3, 0, 1, 7]
    cache = poisoned(grouped, page=page, rows=4, capacity=12, form=form)
    blocks = scattered(cache, 4, generator)
    for pages in stored(cache):
        pages.normal_(generator=generator)
    before = [pages.flatten(0, 1).clone() for pages in stored(cache)]
    cache.bind(list(zip(blocks, lengths, strict=True)))
    tokens = tokens_of(grouped.config, (4, 7), generator)
    grouped(tokens, counts=torch.tensor(counts), cache=cache)
    wanted = {
        blocks[row][place // page] * page + place % page
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        for place in range(length, length + count)
    }
    for pages, old in zip(stored(cache), before, strict=True):
        changed = (pages.flatten(0, 1) != old).any(-1).any(-1)[: cache.pages * page]
        assert set(changed.nonzero().flatten().tolist()) == wanted


@torch.inference_mode()
def test_a_graphs_step_past_a_rows_pages_touches_no_other_row(
    grouped: Llama, generator: torch.Generator
) -> None:
    """Nothing checks a replay, so that what has no room must be lost and not written elsewhere."""
    cache = bound(grouped, generator, page=3, rows=3, capacity=12, form="gathered")
    before = [pages[: cache.pages].clone() for pages in stored(cache)]
    cache.buffers()["lengths"].copy_(torch.tensor([12, 1, 0]))
    cache.block_table[1] = -1
    grouped(tokens_of(grouped.config, (2, 1), generator), cache=cache.first_rows(2))
    for pages, old in zip(stored(cache), before, strict=True):
        assert torch.equal(pages[: cache.pages].nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize("page", PAGES)
def test_graphed_steps_are_those_of_the_model(
    page: int, seed: int, generator: torch.Generator
) -> None:
    """Rows are bound anew between the steps, and one of five rests."""
    model = made(seed).double()
    cache = poisoned(model, page=page, rows=5, capacity=21, form="gathered")
    traffic = Traffic(model, cache, generator, poison=math.nan)
    with GraphedDecoder(model, cache, batches=(1, 2, 4, 8)) as decoder, torch.inference_mode():
        assert decoder.batches == (1, 2, 4, 5)

        def forward(traffic: Traffic, batch: list, counts: list[int]) -> Tensor:
            if max(counts) > 1:
                return eager(traffic, batch, counts)
            return decoder(padded(batch, counts)[:, 0])[:, None]

        for step in range(20):
            traffic.admit()
            traffic.step(told=step % 2 > 0, widest=5 if step % 5 == 0 else 1, forward=forward)
        assert decoder.captured
        cache.bind([([], 0), ([3], 0)])
        out = decoder(torch.tensor([1, 2]), active=torch.tensor([False, True]))
        torch.testing.assert_close(out[1], model(torch.tensor([[2]])).logits[0, 0], **CLOSE)
        assert cache.lengths.tolist() == [0, 1, 0, 0, 0]


@torch.inference_mode()
def test_a_forward_asks_the_device_nothing(
    grouped: Llama, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU paged_attention asks nothing; its torch form, which runs here, does.
    monkeypatch.setattr(paged, "paged_attention", lambda q, *_, **__: torch.zeros_like(q))
    tokens, places = tokens_of(grouped.config, (3, 7), generator), torch.tensor([0, 2])

    def work(cache: PagedCache, blocks: list[list[int]]) -> None:
        cache.bind([(row, 0) for row in blocks], [5, 1, 7])
        grouped(tokens, counts=torch.tensor([5, 1, 7]), cache=cache)
        cache.bind(list(zip(blocks, [5, 1, 7], strict=True)))
        grouped(tokens, cache=cache, tree=PARENTS)
        cache.keep(0, places)
        cache.keep(1, [0, 2])
        cache.truncate(torch.tensor([9, 2, 9]))
        cache.copy_page(0, 1)

    for form in FORMS:
        cache = bound(grouped, generator, page=4, rows=3, capacity=16, form=form)
        blocks = scattered(cache, 3, generator)
        launch_sequence(partial(work, cache, blocks))  # raises where something waits
        assert cache.lengths.tolist() == [7, 2, 9]
        with pytest.raises(RuntimeError, match="must not wait"):
            launch_sequence(cache.lengths.tolist)


def test_a_forward_needs_no_values_at_all() -> None:
    model = Llama(CONFIGS["grouped"], device="meta")
    for form in FORMS:
        cache = PagedCache.of(model, pages=9, page=8, rows=3, max_pages=3, attention=form)
        cache.bind([([row, row + 3], 0) for row in range(3)])
        with torch.no_grad():
            out = model(
                torch.zeros(3, 7, dtype=torch.long, device="meta"),
                cache=cache,
                tree=PARENTS.to("meta"),
            )
        assert out.logits.shape == (3, 7, 37)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_buffers_that_a_caller_fills_are_obeyed(
    form: str, grouped: Llama, generator: torch.Generator
) -> None:
    tokens = tokens_of(grouped.config, (1, 10), generator)
    cache = poisoned(grouped, page=4, rows=1, capacity=12, form=form)
    (blocks,) = scattered(cache, 1, generator)
    cache.bind([(blocks, 0)])
    grouped(tokens[:, :9], cache=cache)
    cache.bind([])
    buffers = cache.buffers()
    buffers["block_table"].copy_(torch.tensor([blocks]))
    buffers["lengths"].fill_(9)
    logits = grouped(tokens[:, 9:], cache=cache).logits
    torch.testing.assert_close(logits[0], grouped(tokens).logits[0, 9:], **CLOSE)
    buffers["lengths"].fill_(12)
    with pytest.raises(ValueError, match="at most the 12 tokens .* got 13 in row 0"):
        grouped(tokens[:, :1], cache=cache)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_pages_serve_a_float32_model(form: str, generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    tokens = tokens_of(model.config, (2, 9), generator)
    cache = PagedCache.of(
        model, pages=8, page=4, rows=2, max_pages=4, dtype=torch.bfloat16, attention=form
    )
    cache.bind([([5, 1, 2], 0), ([0, 7, 3], 0)])
    with torch.no_grad():
        found, wanted = model(tokens, cache=cache).logits, model(tokens).logits
    assert found.dtype == torch.float32
    assert cache.key_pages[0].dtype == torch.bfloat16
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def divided(seed: int) -> list[float]:
    """The largest difference of a divided model over local pages to the whole one without."""
    _, world = processes.rank_and_world()
    whole, generator = made(seed).double(), torch.Generator().manual_seed(seed)
    model = parallelize(made(seed).double())
    gaps = []
    for form in FORMS:
        cache = poisoned(model, page=3, rows=2, capacity=12, form=form)
        cache.bind([(blocks, 0) for blocks in scattered(cache, 2, generator)])
        assert cache.key_pages[0].shape[2] == CONFIG.kv_heads // world
        tokens = tokens_of(CONFIG, (2, 9), generator)
        with torch.inference_mode():
            wanted = whole(tokens).logits
            parts = [model(part, cache=cache).logits for part in tokens.split([6, 1, 2], 1)]
        gaps.append(float((torch.cat(parts, 1) - wanted).abs().max()))
    return gaps


def test_a_divided_model_keeps_its_own_heads(seed: int) -> None:
    for gaps in processes.run(divided, 2, seed):
        assert max(gaps) < 1e-9
