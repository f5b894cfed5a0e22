"""Normalization over parts of a batch: ghost batch normalization, drop-in for torch's."""

from labcore.norm.convert import convert_ghost_batchnorm
from labcore.norm.ghosts import ghost_sizes
from labcore.norm.layers import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d

__all__ = [
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "convert_ghost_batchnorm",
    "ghost_sizes",
]
