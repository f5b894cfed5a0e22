"""Embedding, head and loss over a vocabulary that is split across ranks.

Letters: N ranks, B rows, T tokens, C hidden_size, V vocabulary.
Source: Shoeybi et al., 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of
from labcore.parallel.layers import ColumnParallelLinear, check_kind, own_copy
from labcore.parallel.regions import (
    copy_to_ranks,
    gather_from_ranks,
    part,
    rank_and_size,
    reduce_from_ranks,
    scatter_sequence,
)

__all__ = [
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
]


class VocabParallelEmbedding(nn.Module):
    """An embedding split across ranks, V / N rows each; a rank returns zeros for others' tokens.

    tokens: integers [...]; returns [..., width] on every rank, the sum over the ranks.
    sequence_parallel: tokens [B, T] become [B, T / N, width], this rank's tokens of the sum.
    group, weights: as for ColumnParallelLinear.
    Raises ValueError if N doesn't divide the vocabulary or, with sequence_parallel, T.
    """

    cuts: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        sequence_parallel: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        part("vocab_size", vocab, group)  # raises before the whole table is drawn
        self._take(nn.Embedding(vocab, width, device=device, dtype=dtype))

    @classmethod
    def of(
        cls, embedding: nn.Embedding, group: dist.ProcessGroup | None = None, **options: Any
    ) -> Self:
        """Return this rank's rows of a whole embedding, copied; options: those of the class.

        Raises TypeError unless embedding is an `nn.Embedding`, and ValueError for one with
        padding_idx, max_norm, scale_grad_by_freq or sparse, which the divided one doesn't support.
        """
        check_kind("embedding", embedding, nn.Embedding)
        asked = [
            name
            for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
            if not (getattr(embedding, name) is None or getattr(embedding, name) is False)
        ]
        if asked:
            raise ValueError(
                f"embedding must be a plain table, got one with {', '.join(asked)}; make it "
                "without them, or don't divide it"
            )
        vocab, width = embedding.num_embeddings, embedding.embedding_dim
        made = cls(vocab, width, group=group, device="meta", **options)
        made._take(embedding)
        return made.train(embedding.training)

    def _take(self, whole: nn.Embedding) -> None:
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        mine = part("vocab_size", whole.num_embeddings, self.group)
        self.weight = own_copy(whole.weight, (mine,))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map integer tokens [...] to [..., width]; of [B, T], only T / N tokens if divided.

        A number outside the vocabulary raises as in `nn.Embedding`: IndexError on a CPU.
        """
        index, mine = _own_index(tokens, self.num_embeddings, self.group)
        found = F.embedding(index, self.weight).masked_fill(~mine[..., None], 0)
        leave = scatter_sequence if self.sequence_parallel else reduce_from_ranks
        return leave(found, self.group)

    def extra_repr(self) -> str:
        """Show the whole table's sizes and the number of ranks."""
        ranks = rank_and_size(self.group)[1]
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={ranks}"


def _own_index(
    tokens: Tensor, vocab: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return each token's row in this rank's part of a table, and whether it's there; both [...].

    Another rank's token gets row 0. A number outside the vocabulary gets a row that no part has, so
    the lookup raises as in one process, without waiting for the device here.
    """
    rows = part("vocab_size", vocab, group)
    mine = (tokens >= rows.start) & (tokens < rows.stop)
    beyond = tokens.div(vocab, rounding_mode="floor") * (rows.stop - rows.start)
    return torch.where(mine, tokens - rows.start, beyond), mine


def vocab_parallel_logits(
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    gather_output: bool = True,
) -> Tensor:
    """Return logits from this rank's rows of a head, or of an embedding that is also the head.

    hidden: [..., C], the same on every rank; weight: [V / N, C]; bias: [V / N].
    Returns [..., V] on every rank, or [..., V / N] with gather_output=False.
    """
    logits = F.linear(copy_to_ranks(hidden, group), weight, bias)
    return gather_from_ranks(logits, group) if gather_output else logits


class VocabParallelHead(ColumnParallelLinear):
    """A head split across ranks, V / N rows each: a column layer, gathered by default.

    hidden [..., width] becomes [..., V] on every rank, or [..., V / N] with gather_output=False.
    `vocab_parallel_cross_entropy` then computes the loss by sending three numbers per token.
    Raises ValueError for a vocabulary that N doesn't divide.
    """

    def __init__(
        self,
        width: int,
        vocab: int,
        *,
        bias: bool = False,
        gather_output: bool = True,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        part("vocab_size", vocab, group)
        super().__init__(
            width,
            vocab,
            bias=bias,
            gather_output=gather_output,
            group=group,
            device=device,
            dtype=dtype,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden [..., width] to [..., V], or to [..., V / N] if the logits stay divided."""
        return vocab_parallel_logits(
            hidden, self.weight, self.group, bias=self.bias, gather_output=self.gather_output
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy, in nats, of logits that no rank holds whole.

    Each rank sends a maximum, a sum and one logit per token instead of V / N logits.
    logits: [..., V / N], this rank's part; labels: integers [...], the same on every rank.
    reduction: "mean" over the labels that aren't ignore_index, "sum" or "none" ([...]).
    Returns the loss on every rank, in at least fp32. A label outside the vocabulary raises as in
    one process. Raises ValueError for shapes that don't match, TypeError for labels that aren't
    integers.
    """
    one_of("reduction", reduction, ("mean", "sum", "none"))
    if labels.is_floating_point():
        raise TypeError(f"labels must be integers, got {labels.dtype}; pass token ids")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have shape {tuple(logits.shape[:-1])} for logits of shape "
            f"{tuple(logits.shape)}, got {tuple(labels.shape)}"
        )
    ranks = rank_and_size(group)[1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = wide.detach().amax(-1)
    if ranks > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = wide - top[..., None]
    total = reduce_from_ranks(shifted.exp().sum(-1), group)
    counted = labels != ignore_index
    index, mine = _own_index(labels.where(counted, 0), logits.shape[-1] * ranks, group)
    own = shifted.gather(-1, index.long()[..., None]).squeeze(-1).masked_fill(~mine, 0)
    losses = (total.log() - reduce_from_ranks(own, group)).masked_fill(~counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()
