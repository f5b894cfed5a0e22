"""How large the gradients of a language model are, weight by weight, for batches of several sizes.

If the gradient of one batch of B tokens is a signal s plus noise of variance n²/B, its mean square
is s² + n²/B (McCandlish et al., 2018, arXiv 1812.06162). Where noise dominates, the root falls as
1/√B, and no faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.models.llama import Llama
from labcore.models.training import next_token_loss

__all__ = [
    "BINS",
    "DECADES",
    "GradientSizes",
    "histogram",
    "layers",
    "measure",
    "predict_rms",
    "share_kept",
    "sizes_of",
]

BINS = tuple(-13 + 0.25 * n for n in range(53))
"""The edges of the histograms' bins: log10 of a size, from 1e-13 to 1."""
DECADES = tuple(float(f"1e-{power}") for power in range(15, 2, -1))
"""The epsilons from 1e-15 to 1e-3 that a description compares with the weights."""


def layers(model: Llama) -> dict[str, list[nn.Parameter]]:
    """Return the parameters by layer, from the embedding on, and all of them under "all".

    A tied head belongs to the embedding. The gains of the norms in a layer belong to that layer.
    """
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        place = {"embed_tokens": "embedding", "lm_head": "head", "norm": "last norm"}.get(parts[0])
        found.setdefault(place or f"layer {int(parts[1]) + 1}", []).append(parameter)
    return {**found, "all": list(model.parameters())}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientSizes:
    """The mean squared gradient of each weight, by the tokens of a batch.

    squares: tokens per batch -> layer -> fp64 [weights of the layer], a mean over the batches.
    batches: tokens per batch -> how many batches that size has.
    """

    squares: Mapping[int, Mapping[str, Tensor]]
    batches: Mapping[int, int]

    def rms(self, layer: str = "all") -> dict[int, float]:
        """Return the root mean square of a layer's gradient, by the tokens of a batch."""
        one_of("layer", layer, next(iter(self.squares.values())))
        return {
            batch: squares[layer].mean().sqrt().item() for batch, squares in self.squares.items()
        }

    def roots(self, batch: int, layer: str = "all") -> Tensor:
        """Return the root of each weight's mean squared gradient, fp64 [weights of the layer].

        It's where the root of Adam's second moment would settle at that batch size.
        """
        squares = self.squares[one_of("batch", batch, self.squares)]
        return squares[one_of("layer", layer, squares)].sqrt()


def measure(model: Llama, rows: Tensor, *, joined: Sequence[int]) -> GradientSizes:
    """Measure the gradient of the mean next-token loss over batches of several sizes.

    rows: tokens [N, B, T + 1], N pieces of B rows. joined: how many pieces in a row make a batch;
    every size uses the same pieces, so N must be a multiple of each. The gradient of a batch is the
    mean of its pieces' gradients. Existing gradients of the model are cleared.
    Raises ValueError if N is no multiple.
    """
    if rows.dim() != 3 or rows.is_floating_point():
        raise ValueError(
            f"rows must be integers [N, B, T + 1], got {rows.dtype} {tuple(rows.shape)}"
        )
    for many in joined:
        if rows.shape[0] % positive_int("joined", many):
            raise ValueError(
                f"the {rows.shape[0]} pieces must be a multiple of joined, got {many}; "
                "pass more pieces or a smaller number"
            )
    parameters = list(model.parameters())
    sums = {many: [torch.zeros_like(p) for p in parameters] for many in joined}
    squares = {
        many: [torch.zeros_like(p, dtype=torch.float64) for p in parameters] for many in joined
    }
    tokens = rows.shape[1] * (rows.shape[2] - 1)
    for number, piece in enumerate(rows.to(parameters[0].device), 1):
        model.zero_grad(set_to_none=True)
        loss, count = next_token_loss(model, piece)
        (loss / count).backward()
        for many in joined:
            for total, square, parameter in zip(sums[many], squares[many], parameters, strict=True):
                if parameter.grad is not None:
                    total += parameter.grad
                if number % many == 0:
                    square += (total.double() / many).square() * (many / len(rows))
                    total.zero_()
    model.zero_grad(set_to_none=True)
    place = {id(parameter): n for n, parameter in enumerate(parameters)}
    parts = layers(model)
    return GradientSizes(
        squares={
            many * tokens: {
                name: torch.cat([squares[many][place[id(p)]].flatten() for p in part])
                for name, part in parts.items()
            }
            for many in joined
        },
        batches={many * tokens: len(rows) // many for many in joined},
    )


def predict_rms(rms: Mapping[int, float], batch: float) -> float:
    """Predict a gradient's RMS at `batch` tokens from the RMS of the two smallest batches.

    rms: tokens per batch -> RMS, for at least two sizes. A negative estimate of s² counts as 0.
    """
    positive("batch", batch)
    if len(rms) < 2:
        raise ValueError(f"rms must have at least two batch sizes, got {sorted(rms)}")
    one, other = sorted(rms)[:2]
    noise = (rms[one] ** 2 - rms[other] ** 2) / (1 / one - 1 / other)
    signal = max(rms[one] ** 2 - noise / one, 0.0)
    return math.sqrt(signal + noise / batch)


def share_kept(roots: Tensor, eps: float) -> float:
    """Return the mean share r/(r + eps) of an update that eps leaves, over weights with r > 0.

    roots: the root second moments r, at least 0, of any shape. NaN if all are 0.
    """
    non_negative("eps", eps)
    moved = roots[roots > 0].double()
    return (moved / (moved + eps)).mean().item() if len(moved) else math.nan


def histogram(roots: Tensor | Iterable[float]) -> list[float]:
    """Return the share of weights in each of BINS by log10 of their root second moment.

    The first bin also has what is smaller, zeros among them, and the last what is larger.
    """
    sizes = torch.as_tensor(roots, dtype=torch.float64).clamp(min=10 ** BINS[0]).log10()
    places = ((sizes - BINS[0]) / 0.25).long().clamp(max=len(BINS) - 2)
    counts = torch.bincount(places, minlength=len(BINS) - 1).double()
    return (counts / counts.sum()).tolist()


def sizes_of(
    roots: Mapping[str, Tensor], epsilons: Sequence[float] = DECADES
) -> dict[str, dict[str, Any]]:
    """Describe the weights' root second moments by layer, for a record.

    roots: layer -> [weights]. The result has, by layer, the RMS, the share of weights below each
    eps, the mean share of an update that each eps leaves, and the histogram.
    """
    return {
        name: {
            "rms": root.square().mean().sqrt().item(),
            "below": {f"{eps:g}": (root < eps).double().mean().item() for eps in epsilons},
            "kept": {f"{eps:g}": round(share_kept(root, eps), 6) for eps in epsilons},
            "histogram": [round(share, 5) for share in histogram(root)],
        }
        for name, root in roots.items()
    }
