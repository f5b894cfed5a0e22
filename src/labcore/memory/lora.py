"""LoRA: two thin matrices beside each frozen weight, which may be stored in 4 bits (QLoRA).

Sources: Hu et al., 2021, arXiv 2106.09685; Dettmers et al., 2023, arXiv 2305.14314, whose 4-bit
codes are quantiles of a normal distribution and whose scales are quantized again. Ours are
`memory.INT4`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import positive_int
from labcore.memory.quantization.scheme import QuantizedLinear, Scheme

__all__ = ["PROJECTIONS", "LoRALinear", "add_lora", "merge_lora"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRALinear(nn.Module):
    """A frozen linear layer W plus a trainable update of low rank: x -> W x + alpha / rank · B A x.

    base: nn.Linear or `QuantizedLinear`, [O, I]. a: [rank, I], random. b: [O, rank], zero, so that
    training starts from the base's output.
    """

    def __init__(
        self,
        base: nn.Linear | QuantizedLinear,
        *,
        rank: int,
        alpha: float,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / positive_int("rank", rank)
        device = next(base.buffers(), next(base.parameters(), None)).device  # type: ignore[union-attr]
        dtype = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        bound = 1 / math.sqrt(base.in_features)
        a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(a.to(device, dtype))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to [..., O]."""
        update: Tensor = F.linear(F.linear(x, self.a), self.b)
        result: Tensor = self.base(x)
        return result + self.scale * update

    def merged(self) -> nn.Linear:
        """Return one linear layer that computes the same. A quantized base is a ValueError."""
        if isinstance(self.base, QuantizedLinear):
            raise ValueError(
                "a merged weight has no exact 4-bit codes, got a quantized base; keep the update "
                "beside it, or merge into the full-precision model"
            )
        with torch.no_grad():
            self.base.weight += self.scale * self.b @ self.a
        return self.base


def add_lora(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Collection[str] = PROJECTIONS,
    scheme: Scheme | None = None,
    generator: torch.Generator | None = None,
) -> list[nn.Parameter]:
    """Freeze `model` and put a `LoRALinear` in place of each target; return the new parameters.

    targets: last parts of the names of linear layers. scheme: stores the frozen weights of the
    targets in codes, as QLoRA does. Raises ValueError if no linear layer has such a name.
    """
    found = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and name.rpartition(".")[2] in targets
    }
    if not found:
        raise ValueError(
            f"targets must name linear layers of the model, got {sorted(targets)}; its layers are "
            f"{sorted({name.rpartition('.')[2] for name, _ in _linears(model)})}"
        )
    model.requires_grad_(False)
    trained: list[nn.Parameter] = []
    for name, linear in found.items():
        base = linear if scheme is None else QuantizedLinear(linear, scheme)
        adapted = LoRALinear(base, rank=rank, alpha=alpha, generator=generator)
        model.set_submodule(name, adapted)
        trained += [adapted.a, adapted.b]
    return trained


def merge_lora(model: nn.Module) -> None:
    """Replace each `LoRALinear` by one linear layer, which stays frozen."""
    for name, part in list(model.named_modules()):
        if isinstance(part, LoRALinear):
            model.set_submodule(name, part.merged())


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
