"""The cost of attention: FLOPs, exponentials, bytes moved and stored, and the time on a GPU.

`counts` counts, and `gpus` turns counts into times.
"""

from labcore.attention.traffic.counts import (
    Shape,
    compulsory_bytes,
    decode_bytes,
    exponentials,
    flash_bytes,
    flops,
    forward_peak_bytes,
    kept_bytes,
    largest_block,
    live_tiles,
    naive_bytes,
    sram_bytes,
)
from labcore.attention.traffic.gpus import GPUS, Gpu, Roofline, roofline

__all__ = [
    "GPUS",
    "Gpu",
    "Roofline",
    "Shape",
    "compulsory_bytes",
    "decode_bytes",
    "exponentials",
    "flash_bytes",
    "flops",
    "forward_peak_bytes",
    "kept_bytes",
    "largest_block",
    "live_tiles",
    "naive_bytes",
    "roofline",
    "sram_bytes",
]
