"""The loss of a language model without its logits: head and cross entropy, chunk by chunk.

Source: Hsu et al., 2024, arXiv 2410.10989 (Liger Kernel), whose chunks these are. Wijmans et al.,
2024, arXiv 2411.09009 (Cut Cross-Entropy), compute even a chunk's logits in pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from labcore.checks import positive_int

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int = 256
) -> Tensor:
    """Return the summed cross entropy of `hidden @ weight.T` in nats: a scalar in fp32 or wider.

    hidden: float [N, C]. weight: [V, C], the head's. targets: int64 [N]; -100 is ignored.
    chunk: rows whose logits exist at a time. The forward computes the gradients too, so that no
    logits wait for the backward; what it keeps has the sizes of hidden and weight.
    Raises ValueError for shapes that don't fit.
    """
    positive_int("chunk", chunk)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, C] and weight [V, C], got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}; flatten rows and tokens first"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets must be [N] with N = {hidden.shape[0]}, got {tuple(targets.shape)}"
        )
    loss: Tensor = LinearCrossEntropy.apply(hidden, weight, targets, chunk)
    return loss


class LinearCrossEntropy(torch.autograd.Function):
    """The gradients come with the forward; see `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        """Return the loss, and keep the gradients for a slope of 1."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=wide)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            counted = targets[part] != IGNORED
            rows, chosen = hidden[part], targets[part].masked_fill(~counted, 0).unsqueeze(1)
            logits = (rows @ weight.T).to(wide)
            logits -= logits.logsumexp(1, keepdim=True)
            loss -= logits.gather(1, chosen).squeeze(1).masked_fill(~counted, 0).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            slopes = logits.exp_()  # softmax minus one-hot is the gradient of the logits
            slopes.scatter_add_(1, chosen, slopes.new_full(chosen.shape, -1.0))
            slopes = slopes.mul_(counted.unsqueeze(1)).to(weight.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = slopes @ weight
            if weight_grad is not None:
                if weight_grad.dtype == rows.dtype:
                    weight_grad.addmm_(slopes.T, rows)  # without another [V, C]
                else:
                    weight_grad += slopes.T @ rows
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        ctx.gradients = [hidden_grad, weight_grad]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Scale the kept gradients, in place."""
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy allows one backward, which scales its gradients in place, "
                "got a second; compute the loss again"
            )
        (hidden_grad, weight_grad), ctx.gradients = ctx.gradients, None
        for one in (hidden_grad, weight_grad):
            if one is not None:
                one *= grad
        return hidden_grad, weight_grad, None, None
