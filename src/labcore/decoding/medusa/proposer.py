"""Medusa as a proposer: one call of the heads fills a fixed tree with tokens.

Letters: B rows, C width, V vocabulary, K heads, N nodes, R ranks.
Source: Cai et al., Medusa, 2024, arXiv 2401.10774.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft, SamplingConfig
from labcore.decoding.medusa.fused import fused_heads
from labcore.decoding.medusa.heads import MedusaHeads
from labcore.decoding.medusa.trees import Tree
from labcore.decoding.rows import check_rows
from labcore.models import LlamaConfig

__all__ = ["Medusa"]


class _Heads(Protocol):
    """What the proposer needs from heads; `MedusaHeads` and `FusedHeads` provide it."""

    heads: int
    config: LlamaConfig

    def __call__(self, hidden: Tensor, count: int | None = None, /) -> Tensor:
        """Return logits [count, B, V] of the first heads from hidden [B, C]."""


class _Cut(NamedTuple):
    """A tree cut at some level. picks: the index of each node's token in a row's [depth * R]."""

    picks: list[int]
    parents: Tensor  # int32 [N]


_NOTHING = Draft.chain([])


class Medusa:
    """Drafts a tree of the heads' most likely tokens, the same tree in every step.

    heads: `MedusaHeads` or `FusedHeads` of the target, with `heads` and `config`; on the device of
    its hidden states. `MedusaHeads` run as `FusedHeads` wherever `fused_heads` gives them.
    tree: which ranks of which heads; head 0 predicts the token after the last one in the context.
    gamma: the tree's levels, the longest path of a draft.
    Nothing is drawn, so q is None at every temperature, and lossless verifiers stay lossless: a
    rejected child's token is removed from p before the next child is tried.
    Raises ValueError for a tree with more levels than heads or ranks beyond the vocabulary.
    """

    def __init__(self, heads: _Heads, tree: Tree) -> None:
        vocab = heads.config.vocab_size
        if tree.depth > heads.heads:
            raise ValueError(
                f"a tree must be at most {heads.heads} levels deep for {heads.heads} heads, got "
                f"{tree.depth}; pass tree.cut({heads.heads})"
            )
        self._ranks = 1 + max(tree.ranks, default=-1)
        if self._ranks > vocab:
            raise ValueError(
                f"ranks must lie below {vocab}, the vocabulary's size, got {self._ranks - 1}"
            )
        self._given, self.tree, self.gamma = heads, tree, tree.depth
        self.reset()
        self._cuts = [self._cut(depth) for depth in range(tree.depth + 1)]

    def reset(self) -> None:
        """Take the weights that the heads have now; `generate` begins with it."""
        given = self._given
        fused = fused_heads(given) if isinstance(given, MedusaHeads) else None
        self.heads: _Heads = fused or given

    def _cut(self, depth: int) -> _Cut:
        tree = self.tree.cut(depth)
        return _Cut(
            [
                level * self._ranks + rank
                for level, rank in zip(tree.depths, tree.ranks, strict=True)
            ],
            torch.tensor(tree.parents, dtype=torch.int32),
        )

    @torch.no_grad()
    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,
    ) -> list[Draft]:
        """Return the tree for each row, down to level max_tokens[b]; see `Proposer`.

        hidden: [B, C], at the token before each context's last. Drafts are empty without it, and
        for a row with a single token, of which the target has read nothing.
        Raises ValueError for hidden with another number of rows.
        """
        check_rows(contexts, samplings, max_tokens, generators)
        drafts = [_NOTHING] * len(contexts)
        if hidden is None:
            return drafts
        if hidden.ndim != 2 or len(hidden) != len(contexts):
            raise ValueError(
                f"hidden must be [B, C] with B = {len(contexts)} rows, got {tuple(hidden.shape)}"
            )
        rows = zip(contexts, max_tokens, strict=True)
        live = [row for row, (context, most) in enumerate(rows) if most and len(context) > 1]
        depth = min(self.tree.depth, max((max_tokens[row] for row in live), default=0))
        if not depth:
            return drafts
        logits = self.heads(hidden if len(live) == len(contexts) else hidden[live], depth)
        best = logits.topk(self._ranks, dim=-1).indices  # [depth, rows, R]
        likeliest = best.transpose(0, 1).flatten(1).tolist()
        for row, tokens in zip(live, likeliest, strict=True):
            cut = self._cuts[min(depth, max_tokens[row])]
            picked = torch.tensor([tokens[pick] for pick in cut.picks])
            drafts[row] = Draft(picked, cut.parents)
        return drafts

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing: the tree is fixed, and the next hidden states show what was accepted."""
