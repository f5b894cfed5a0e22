"""Runs one packed forward per step: on a CPU in the fused form, on a GPU also as CUDA graphs.

Letters: N tokens whose logits are wanted, V vocabulary, C width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from labcore.models import KVCache, Llama
from labcore.models.forms import MOST_WEIGHTS, fused_form, why_not_fused
from labcore.parallel import GraphedDecoder
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.packed import PackedStep

__all__ = ["Runner"]


class Runner:
    """A model and the cache that its requests share.

    graphs: steps of one token per request are replayed as CUDA graphs, captured for batches of 1,
    2, 4 and so on. None means on a GPU. On a CPU, True runs the same steps one operation at a time.
    fused: forwards run as a `FusedLlama`, from copies of the weights. None means wherever that's
    possible, up to 2**28 weights.
    hidden: whether `run` must return hidden states, which a replayed graph doesn't.
    Raises ValueError for options that the model doesn't allow.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedCache,
        *,
        graphs: bool | None = None,
        fused: bool | None = None,
        hidden: bool = False,
    ) -> None:
        if graphs and hidden:
            raise ValueError(
                "graphs must be False with a proposer that may read hidden states, got True; a "
                "replayed step returns only logits"
            )
        graphs = (cache.device.type == "cuda" and not hidden) if graphs is None else graphs
        reason = "graphs replay the model itself" if graphs else why_not_fused(model)
        if fused and reason:
            raise ValueError(
                f"fused must be False for this model, got True: {reason}; leave it out"
            )
        self.model, self.cache = model, cache
        self.fused = None
        if not reason and fused is not False:
            self.fused = fused_form(model, most=None if fused else MOST_WEIGHTS)
        self._graphed: GraphedDecoder | None = None
        if graphs:
            rows = len(cache.lengths)
            sizes = sorted({rows, *(2**power for power in range(rows.bit_length()))})
            self._graphed = GraphedDecoder(model, cast(KVCache, cache), batches=sizes)
            if cache.device.type == "cuda":
                self._graphed.capture()  # now, not during the first requests

    @torch.inference_mode()
    def run(
        self, segments: Sequence[Segment], wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Read all segments at once; return logits [N, V] and hidden [N, C].

        wanted: how many of each segment's tokens, counted from its end, need logits. The result has
        them in the order of the segments. hidden is None if a graph was replayed.
        """
        if self._graphed is not None and all(len(one.tokens) == 1 for one in segments):
            self.cache.bind(segments)
            tokens = self.cache.sent(torch.tensor([one.tokens[0] for one in segments]))
            logits = self._graphed(tokens)
            rows = [row for row, count in enumerate(wanted) if count]
            return (logits if len(rows) == len(segments) else logits[rows]), None
        step = PackedStep(self.cache, segments)
        places = [
            at
            for span, count in zip(step.spans, wanted, strict=True)
            for at in span[len(span) - count :]
        ]
        at = self.cache.sent(torch.tensor(places, dtype=torch.int64))
        if self.fused is not None:
            out = self.fused.rows(step.tokens, step.positions, step.reach, step.mix_fused, at)
        else:
            positions = step.positions[None]
            out = self.model(step.tokens[None], positions=positions, cache=step, logits_at=at)
        return out.logits, out.hidden

    def close(self) -> None:
        """Destroy the graphs, before a process group that they use."""
        if self._graphed is not None:
            self._graphed.close()
