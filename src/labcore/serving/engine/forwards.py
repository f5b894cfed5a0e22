"""The forwards of a step: rows of tokens in, logits out, keys and values into the pages.

Letters: B rows of a forward, T tokens of it, V vocabulary, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labcore.models import Llama, pad_rows
from labcore.parallel import GraphedDecoder
from labcore.serving.cache.paged import PagedCache
from labcore.serving.engine.fused import FusedPages

__all__ = ["Forwards", "Reading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a forward reads for one request.

    blocks: the request's, in order. start: tokens of it that the cache holds. tokens: those to
    read. parents: of a tree of tokens, the node before each (-1: the prefix); None for a chain.
    """

    blocks: Sequence[int]
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


class Forwards:
    """A model with the cache that its requests share, and the graphs of its decode steps.

    model: a `Llama`, whole or divided by `parallelize`. cache: with `bind` and `first_rows`.
    graphs: decode steps of one token a row as CUDA graphs (on a CPU the same steps one by one).
    fused: forwards by `FusedPages`, from copies of the weights.
    """

    def __init__(
        self, model: Llama, cache: PagedCache, *, graphs: bool, fused: bool = False
    ) -> None:
        self.model, self.cache = model, cache
        self._fused = FusedPages(model) if fused else None
        self.device: torch.device = model.norm.weight.device
        self.rows = int(cache.lengths.shape[0])
        self._views: dict[int, PagedCache] = {}
        self._graphed: GraphedDecoder | None = None
        if graphs:
            sizes = {self.rows, *(2**power for power in range(self.rows.bit_length()))}
            self._graphed = GraphedDecoder(model, cache, batches=sorted(sizes))
            if self.device.type == "cuda":
                self._graphed.capture()  # now, rather than in the first requests' time

    @property
    def fused(self) -> bool:
        """Whether forwards are those of `FusedPages`."""
        return self._fused is not None

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Reading]) -> tuple[Tensor, Tensor]:
        """Read chunks of prompts: logits [B, 1, V] and hidden [B, C] at the last token of each."""
        if self._fused is not None:
            logits, hidden = self._fused.read(self._bound(rows), cache=self._view(rows), last=True)
            return logits, hidden[:, 0]
        tokens, counts = pad_rows(self._bound(rows), device=self.device)
        out = self.model(tokens, counts=counts, cache=self._view(rows))
        last = counts.long() - 1
        places = torch.arange(len(rows), device=self.device)
        return out.logits[places, last][:, None], out.hidden[places, last]

    @torch.inference_mode()
    def decode(self, rows: Sequence[Reading]) -> tuple[Tensor, Tensor | None]:
        """Read the last token of each row and what is drafted behind it.

        Returns logits [B, T, V], and hidden [B, T, C] unless a graph was replayed.
        """
        read, width = self._bound(rows), max(len(row.tokens) for row in rows)
        if self._graphed is not None and width == 1:
            tokens = torch.tensor([row.tokens[0] if row.tokens else 0 for row in rows])
            active = None
            if not all(row.tokens for row in rows):
                active = torch.tensor([bool(row.tokens) for row in rows]).to(self.device)
            logits = self._graphed(tokens.to(self.device), active=active)
            self.cache.take_back()  # a check of addresses lent the buffers, and nobody filled them
            return logits[:, None], None
        parents = None
        if any(row.parents is not None for row in rows):
            parents = [_padded_parents(row, width) for row in rows]
        if self._fused is not None:
            return self._fused.read(read, cache=self._view(rows), parents=parents)
        tokens, counts = pad_rows(read, device=self.device)
        tree = None
        if parents is not None:
            tree = torch.tensor(parents, dtype=torch.int32).to(self.device)
        out = self.model(tokens, counts=counts, cache=self._view(rows), tree=tree)
        return out.logits, out.hidden

    @torch.inference_mode()
    def keep(self, row: int, slots: Sequence[int]) -> None:
        """Of a row's tokens in the last decode keep those at `slots`, in that order."""
        self.cache.keep(row, slots)

    def close(self) -> None:
        """Destroy the graphs."""
        if self._graphed is not None:
            self._graphed.close()

    def _bound(self, rows: Sequence[Reading]) -> list[Sequence[int]]:
        """Their tokens; the cache's first rows are made these."""
        counts = [len(row.tokens) for row in rows]
        self.cache.bind([(row.blocks, row.start) for row in rows], counts)
        return [row.tokens for row in rows]

    def _view(self, rows: Sequence[Reading]) -> PagedCache:
        """The cache's first rows, as many as these."""
        batch = len(rows)
        if batch not in self._views:
            self._views[batch] = self.cache.first_rows(batch)
        return self._views[batch]


def _padded_parents(row: Reading, width: int) -> list[int]:
    """The parents of a row's tokens, of which the first is the row's last token: [width]."""
    count = len(row.tokens)
    if row.parents is None:
        chain = list(range(-1, count - 1))
    else:
        chain = [-1, *(parent + 1 for parent in row.parents)]
    return chain + [-2] * (width - count)
