"""Ghost batch normalization, over parts of a batch: a drop-in replacement for torch's BatchNorm."""

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
