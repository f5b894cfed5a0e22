"""Slots are bound and read like pages; rows are found wherever they lie."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from labcore.models import KVCache, Llama
from labcore.parallel import GraphedDecoder
from labcore.serving.cache import slots
from labcore.serving.cache.slots import SlotCache
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.serving.paging import CLOSE, Traffic, eager, padded, stored
from tests.serving.test_paged import PARENTS

STALE = math.nan  # what earlier requests left


@pytest.fixture
def model(generator: torch.Generator) -> Llama:
    return model_of(CONFIGS["grouped"], generator).double()


def used(model: Llama, **sizes: int) -> SlotCache:
    cache = SlotCache.of(model, **sizes)
    for pages in stored(cache):
        pages.fill_(STALE)
    return cache


@pytest.fixture
def rectangles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each attention: how many rows of keys it reads, and in which memory."""
    seen: list[tuple[int, int]] = []
    original = slots.attended

    def watch(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        seen.append((len(keys), keys.untyped_storage().data_ptr()))
        return original(q, keys, values, mask)

    monkeypatch.setattr(slots, "attended", watch)
    return seen


@pytest.mark.parametrize(
    ("places", "many", "moved"),
    [
        ([3, 4, 5], 3, False),  # where they lie
        ([5, 3, 4], 3, False),  # the queries go there
        ([6, 1, 3], 6, False),
        ([8, 0, 1], 3, True),  # few rows, far apart
    ],
)
@torch.inference_mode()
def test_rows_are_read_wherever_they_lie(
    places: list[int],
    many: int,
    moved: bool,
    model: Llama,
    generator: torch.Generator,
    rectangles: list[tuple[int, int]],
) -> None:
    cache = used(model, slots=9, capacity=20, rows=4)
    view = cache.first_rows(3)
    assert isinstance(cache, KVCache) and cache.page == 20 and cache.max_pages == 1
    prompt, nodes = (tokens_of(model.config, (3, n), generator) for n in (11, 7))
    lengths = [6, 1, 11]
    cache.bind([([place], 0) for place in places], lengths)
    logits = model(prompt, counts=torch.tensor(lengths), cache=view).logits
    cache.bind([([place], n) for place, n in zip(places, lengths, strict=True)])
    branches = model(nodes, cache=view, tree=PARENTS).logits
    cache.keep(0, [3, 5])
    after = tokens_of(model.config, (3, 1), generator)
    counts = torch.tensor([1, 0, 0])
    follow = model(after, counts=counts, cache=view).logits
    own = {pages.untyped_storage().data_ptr() for pages in stored(cache)}
    assert {(rows, memory not in own) for rows, memory in rectangles} == {(many, moved)}
    for row, length in enumerate(lengths):
        alone = model(prompt[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(logits[row, :length], alone, **CLOSE)
    for row, path in ((0, [3, 5]), (1, [0, 1, 2, 3]), (2, [2, 3, 4])):
        whole = torch.cat((prompt[row, : lengths[row]], nodes[row, path]))
        torch.testing.assert_close(
            branches[row, path], model(whole[None]).logits[0, lengths[row] :], **CLOSE
        )
    whole = torch.cat((prompt[0, :6], nodes[0, [3, 5]], after[0]))
    torch.testing.assert_close(follow[0, 0], model(whole[None]).logits[0, -1], **CLOSE)


@torch.inference_mode()
def test_requests_come_and_go(model: Llama, generator: torch.Generator) -> None:
    cache = used(model, slots=7, capacity=17, rows=4)
    traffic = Traffic(model, cache, generator, poison=STALE)
    for step in range(24):
        traffic.admit()
        traffic.step(told=step % 3 > 0, widest=(1, 5)[step % 2], forward=eager)
    assert traffic.compared >= 24


def test_graphed_steps_are_those_of_the_model(model: Llama, generator: torch.Generator) -> None:
    cache = used(model, slots=6, capacity=17, rows=5)
    traffic = Traffic(model, cache, generator, poison=STALE)
    with GraphedDecoder(model, cache, batches=(2, 8)) as decoder, torch.inference_mode():

        def forward(traffic: Traffic, batch: list, counts: list[int]) -> Tensor:
            if max(counts) > 1:
                return eager(traffic, batch, counts)
            return decoder(padded(batch, counts)[:, 0])[:, None]

        for step in range(16):
            traffic.admit()
            traffic.step(told=False, widest=5 if step % 5 == 0 else 1, forward=forward)
        assert decoder.captured


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="slots must be at least 1"):
        SlotCache(CONFIGS["plain"], slots=0, capacity=3)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        SlotCache(CONFIGS["plain"], slots=2, capacity=0)
