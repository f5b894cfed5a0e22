"""Data orders, their effect on batches, and loss spikes traced back to their data."""

from labcore.shuffling.correlation import (
    LabelEntropy,
    autocorrelation,
    design_effect,
    intraclass_correlation,
    label_entropy,
    per_sample_gradients,
    predicted_design_effect,
)
from labcore.shuffling.files import FileRows
from labcore.shuffling.loader import ResumableLoader
from labcore.shuffling.orders import (
    BlockShuffle,
    BufferShuffle,
    FullShuffle,
    Order,
    Sequential,
    ShardInterleave,
    shards_of,
)
from labcore.shuffling.shards import TarShard, read_shards, write_shards
from labcore.shuffling.spikes import LossSpikeDetector, Spike
from labcore.shuffling.streams import StreamRows

__all__ = [
    "BlockShuffle",
    "BufferShuffle",
    "FileRows",
    "FullShuffle",
    "LabelEntropy",
    "LossSpikeDetector",
    "Order",
    "ResumableLoader",
    "Sequential",
    "ShardInterleave",
    "Spike",
    "StreamRows",
    "TarShard",
    "autocorrelation",
    "design_effect",
    "intraclass_correlation",
    "label_entropy",
    "per_sample_gradients",
    "predicted_design_effect",
    "read_shards",
    "shards_of",
    "write_shards",
]
