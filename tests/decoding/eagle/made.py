"""Heads with random parameters, beside random backbones."""

from __future__ import annotations

import torch

from labcore.decoding.eagle import EagleHead
from labcore.models import Llama
from tests.models.shapes import CONFIGS, model_of

SHAPES = ("plain", "grouped", "one-key-head", "tied", "wide-heads", "scaled")


def made(shape: str, generator: torch.Generator, size: float = 0.2) -> tuple[Llama, EagleHead]:
    """A backbone, and a head none of whose parameters has the value that it starts with."""
    backbone = model_of(CONFIGS[shape], generator)
    head = EagleHead(backbone)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return backbone, head.eval()
