"""Cross entropy without the logits: the head and the loss in pieces of a few tokens.

The gradient of a sum of cross entropies is softmax minus one-hot, times the head. So one pass over
the pieces gives the loss and both gradients, and only one piece's logits exist at a time. The head
computes what it always computes; nothing is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from labcore.checks import positive_int

__all__ = ["loss_in_pieces"]

IGNORED = -100


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, piece: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows, wanted, out in zip(
            hidden.split(piece), targets.split(piece), by_hidden.split(piece), strict=True
        ):
            scores = (rows @ weight.T).float()
            valid = (wanted != IGNORED)[:, None]
            index = wanted.clamp(min=0)[:, None]
            picked = scores.gather(1, index)
            sums = scores.logsumexp(1, keepdim=True)
            total += ((sums - picked) * valid).sum()
            scores.sub_(sums).exp_().scatter_add_(1, index, -torch.ones_like(picked)).mul_(valid)
            scores = scores.to(rows.dtype)
            torch.mm(scores, weight, out=out)
            if by_weight is not None:
                by_weight.addmm_(scores.T, rows)
        ctx.save_for_backward(by_hidden, by_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        scaled = by_weight if by_weight is None else by_weight.mul_(by)
        return by_hidden.mul_(by), scaled, None, None


def loss_in_pieces(hidden: Tensor, weight: Tensor, targets: Tensor, *, piece: int) -> Tensor:
    """Return the sum of the cross entropies of hidden @ weight.T in nats, fp32, scalar.

    hidden: [N, C]. weight: the head's [V, C] in the same dtype. targets: integers [N]; -100 is not
    predicted. piece: tokens at a time. The gradients are computed in the forward and held until the
    backward, which may run once; the weight's is summed in its own dtype.
    Raises ValueError for a piece below 1. Source: Hsu et al., 2024, arXiv 2410.10989.
    """
    positive_int("piece", piece)
    return _Pieces.apply(hidden, weight, targets, piece)
