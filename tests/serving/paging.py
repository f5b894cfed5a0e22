"""A pool that hands out scattered pages, and fills with NaN what nobody may read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labcore.models import DenseCache, Llama
from labcore.serving.cache.paged import PagedCache
from tests.models.shapes import tokens_of

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # in double precision: what is left is rounding
FORMS = ("paged", "gathered")


def stored(cache: PagedCache) -> list[Tensor]:
    """Keys and values of all layers: [P + 1, page, Hkv, D]."""
    return [*cache.key_pages, *cache.value_pages]


def poisoned(
    model: Llama, *, page: int, rows: int, capacity: int, form: str, pages: int | None = None
) -> PagedCache:
    """A cache in double precision, NaN in every slot, the page of padding too."""
    most = -(-capacity // page)
    cache = PagedCache.of(
        model,
        pages=rows * most + 3 if pages is None else pages,
        page=page,
        rows=rows,
        max_pages=most,
        attention=form,
    )
    for pages_of_layer in stored(cache):
        pages_of_layer.fill_(math.nan)
    return cache


def scattered(cache: PagedCache, rows: int, generator: torch.Generator) -> list[list[int]]:
    """Pages of random order for each row, as many as a row may have."""
    order = torch.randperm(cache.pages, generator=generator).tolist()
    return [order[row * cache.max_pages :][: cache.max_pages] for row in range(rows)]


def bound(
    model: Llama,
    generator: torch.Generator,
    *,
    page: int,
    rows: int,
    capacity: int,
    form: str,
) -> PagedCache:
    """A poisoned cache whose rows are empty and have all pages that they may have."""
    cache = poisoned(model, page=page, rows=rows, capacity=capacity, form=form)
    cache.bind([(blocks, 0) for blocks in scattered(cache, rows, generator)])
    return cache


def dense(model: Llama, *, rows: int, capacity: int) -> DenseCache:
    dtype = model.norm.weight.dtype
    return DenseCache(model.config, batch=rows, capacity=capacity, dtype=dtype)


@dataclass
class Held:
    """One request of `Traffic`: its tokens, those that the cache has, its pages."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Traffic:
    """Requests of random lengths that share a cache: chunks, steps, drafts and endings, at random.

    Each forward's logits are compared with the model's, of the request alone and without a cache.
    """

    def __init__(
        self, model: Llama, cache: PagedCache, generator: torch.Generator, *, poison: float
    ) -> None:
        self.model, self.cache, self.generator, self.poison = model, cache, generator, poison
        self.free = torch.randperm(cache.pages, generator=generator).tolist()
        self.live: list[Held] = []
        self.compared = 0

    def draw(self, most: int) -> int:
        """1 to `most`."""
        return int(torch.randint(1, most + 1, (1,), generator=self.generator))

    def admit(self) -> None:
        """Another request, while its longest row fits."""
        worst = self.cache.max_pages
        if sum(worst - len(held.blocks) for held in self.live) + worst > len(self.free):
            return
        length = self.draw(self.cache.page * worst - 6)
        tokens = tokens_of(self.model.config, (1, length), self.generator)[0].tolist()
        self.live.append(Held(tokens))

    def end(self, held: Held) -> None:
        """Give its pages back, and leave in them what must never be read."""
        for pages in stored(self.cache):
            pages[held.blocks] = self.poison
        self.free += held.blocks
        self.live.remove(held)

    def step(self, *, told: bool, widest: int, forward: Callable[..., Tensor]) -> None:
        """A forward of some requests in random order: of each the next tokens that it has."""
        order = torch.randperm(len(self.live), generator=self.generator).tolist()
        batch = [self.live[place] for place in order[: self.draw(len(self.cache.lengths))]]
        counts = []
        for held in batch:
            counts.append(min(self.draw(widest), len(held.tokens) - held.computed))
            while len(held.blocks) * self.cache.page < held.computed + counts[-1]:
                held.blocks.append(self.free.pop())
        self.cache.bind([(held.blocks, held.computed) for held in batch], counts if told else None)
        logits = forward(self, batch, counts)
        for row, (held, count) in enumerate(zip(batch, counts, strict=True)):
            held.computed += count
            alone = self.model(torch.tensor([held.tokens[: held.computed]])).logits[0]
            torch.testing.assert_close(logits[row, :count], alone[held.computed - count :], **CLOSE)
            self.compared += count
            dropped = min(self.draw(3) - 1, count - 1)  # as a draft that is not accepted
            held.computed -= dropped
            if held.computed == len(held.tokens):
                if self.draw(4) == 1 or len(held.tokens) >= self.cache.page * self.cache.max_pages:
                    self.end(held)
                else:
                    held.tokens.append(self.draw(self.model.config.vocab_size) - 1)


def padded(batch: Sequence[Held], counts: Sequence[int]) -> Tensor:
    """The next tokens of each request, right-padded: [B, T]."""
    tokens = torch.zeros(len(batch), max(counts), dtype=torch.long)
    for row, (held, count) in enumerate(zip(batch, counts, strict=True)):
        tokens[row, :count] = torch.tensor(held.tokens[held.computed :][:count])
    return tokens


def eager(traffic: Traffic, batch: Sequence[Held], counts: Sequence[int]) -> Tensor:
    """Logits [B, T, V] by a forward over the first rows."""
    view = traffic.cache.first_rows(len(batch))
    return traffic.model(
        padded(batch, counts), counts=torch.tensor(counts, dtype=torch.int32), cache=view
    ).logits
