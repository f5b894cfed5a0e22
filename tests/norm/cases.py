"""Shapes and layers that the tests of the layers share, and the reference: a loop of BatchNorm."""

import torch
from torch import Tensor, nn

from labcore.norm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d, ghost_sizes

GHOST = {1: GhostBatchNorm1d, 2: GhostBatchNorm2d, 3: GhostBatchNorm3d}
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
# (dimensions, shape, ghost size): even and ragged, one channel, spatial extent of one.
CASES = [
    (1, (12, 5), 4),
    (1, (13, 5), 4),
    (1, (7, 3), 2),
    (1, (11, 2, 3), 3),
    (2, (10, 3, 4, 2), 5),
    (2, (7, 1, 3, 5), 3),
    (2, (9, 4, 1, 1), 2),
    (2, (5, 3, 2, 3), 1),
    (3, (6, 2, 2, 1, 3), 4),
]


def draw(shape: tuple[int, ...], generator: torch.Generator, dtype=torch.float64) -> Tensor:
    """Values whose mean and spread differ from channel to channel."""
    channels = [1, -1] + [1] * (len(shape) - 2)
    mean = 3 * torch.randn(shape[1], generator=generator).view(channels)
    spread = 0.5 + torch.rand(shape[1], generator=generator).view(channels)
    return (mean + spread * torch.randn(shape, generator=generator)).to(dtype)


def affine(layer: nn.Module, generator: torch.Generator) -> nn.Module:
    """`layer` with weights and running statistics that are not the initial ones."""
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return layer


def loop(layer: nn.Module, x: Tensor, ghost_size: int) -> Tensor:
    """A BatchNorm over the ghosts, one after another."""
    return torch.cat([layer(part) for part in x.split(ghost_sizes(len(x), ghost_size))])


def passed(run, layer: nn.Module, x: Tensor, above: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers after one forward and backward pass."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = run(x)
    out.backward(above)
    found = {"output": out.detach(), "input": x.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return found | {name: b.clone() for name, b in layer.named_buffers()}


def agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Both dictionaries hold the same tensors."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=lambda m, n=name: f"{n}: {m}")
