"""Small networks of one shape, trained side by side as one: a network per seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of
from labcore.norm.layers import GhostBatchNorm1d

__all__ = ["CLASSES", "DEPTH", "Norm", "Stack"]

Norm = Literal["batch", "layer", "none"]
CLASSES, DEPTH = 10, 2  # outputs, and hidden layers


class Stack(nn.Module):
    """N networks: inputs -> two hidden layers with norm and ReLU -> 10 logits.

    The networks share nothing. Batch normalization works on each channel alone, so one layer with N
    times the channels normalizes all of them, and one matrix product of N matrices replaces N.

    generators: one per network; its weights are drawn from it alone (He et al., arXiv 1502.01852)
    and are the same for every norm. norm: "batch", with ghosts of `ghost` rows or, for None, over
    the whole batch; "layer"; or "none", with biases in the hidden layers instead.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        *,
        inputs: int,
        hidden: int,
        norm: Norm = "batch",
        ghost: int | None = None,
    ) -> None:
        super().__init__()
        self.norm = one_of("norm", norm, get_args(Norm))
        self.size, self.hidden = len(generators), hidden
        widths = [inputs, *[hidden] * DEPTH, CLASSES]
        drawn = [
            [_he(before, after, each) for before, after in itertools.pairwise(widths)]
            for each in generators
        ]
        self.weights = nn.ParameterList(map(torch.stack, zip(*drawn, strict=True)))
        biased = widths[1:] if norm == "none" else widths[-1:]
        self.biases = nn.ParameterList(torch.zeros(self.size, 1, width) for width in biased)
        channels = self.size * hidden
        made: list[nn.Module] = []
        for _ in range(DEPTH):
            if norm == "batch" and ghost is not None:
                made.append(GhostBatchNorm1d(channels, ghost_size=ghost))
            elif norm == "batch":
                made.append(nn.BatchNorm1d(channels))
            elif norm == "layer":
                made.append(_LayerNorms(self.size, hidden))
        self.norms = nn.ModuleList(made)

    def forward(self, x: Tensor, *, whole: bool = False) -> Tensor:
        """Return the logits [N, B, 10] for x [N, B, inputs], rows of network n in x[n].

        whole: normalize by the statistics of all B rows, whatever the mode and the ghosts, and
        leave the running statistics alone.
        """
        plain = iter(self.biases)
        for depth in range(DEPTH):
            x = x @ self.weights[depth]
            x = x + next(plain) if self.norm == "none" else self._normalized(x, depth, whole)
            x = x.relu()
        return torch.baddbmm(next(plain), x, self.weights[DEPTH])

    def _normalized(self, x: Tensor, depth: int, whole: bool) -> Tensor:
        layer = self.norms[depth]
        if not isinstance(layer, nn.BatchNorm1d):
            return layer(x)
        flat = x.transpose(0, 1).reshape(x.shape[1], -1)
        if whole:
            flat = F.batch_norm(flat, None, None, layer.weight, layer.bias, training=True)
        else:
            flat = layer(flat)
        return flat.view(x.shape[1], self.size, self.hidden).transpose(0, 1)

    def member(self, n: int) -> nn.Sequential:
        """Return a copy of network n as ordinary layers of torch and of `labcore.norm`."""
        layers: list[nn.Module] = []
        for depth, weight in enumerate(self.weights):
            biased = self.norm == "none" or depth == DEPTH
            linear = nn.utils.skip_init(nn.Linear, *weight.shape[1:], bias=biased)
            with torch.no_grad():
                linear.weight.copy_(weight[n].t())
                if biased:
                    linear.bias.copy_(self.biases[depth if self.norm == "none" else 0][n, 0])
            layers += [linear, *(self._member_norm(depth, n) if depth < DEPTH else ())]
        return nn.Sequential(*layers).train(self.training)

    def _member_norm(self, depth: int, n: int) -> list[nn.Module]:
        if self.norm == "none":
            return [nn.ReLU()]
        mine = self.norms[depth]
        made: nn.Module = nn.LayerNorm(self.hidden)
        if isinstance(mine, GhostBatchNorm1d):
            made = GhostBatchNorm1d(self.hidden, ghost_size=mine.ghost_size)
        elif isinstance(mine, nn.BatchNorm1d):
            made = nn.BatchNorm1d(self.hidden)
        share = {
            name: value if value.dim() == 0 else value.view(self.size, -1)[n].clone()
            for name, value in mine.state_dict().items()
        }
        made.load_state_dict(share)
        return [made, nn.ReLU()]


def _he(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    return torch.randn(inputs, outputs, generator=generator) * math.sqrt(2 / inputs)


class _LayerNorms(nn.Module):
    """N layer normalizations over [N, B, width], each with weights of its own."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1, width))
        self.bias = nn.Parameter(torch.zeros(size, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize every row of every network."""
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias
