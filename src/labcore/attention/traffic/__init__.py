"""The cost of attention: FLOPs, exponentials, bytes moved and stored, and the time on a GPU.

`counts` counts one form by its own convention, `caches` counts both forms by the same one, `gpus`
turns counts into times, and `balance` deals blocks out to programs.
"""

from labcore.attention.traffic.balance import block_costs, busy_share
from labcore.attention.traffic.caches import hbm_bytes, requested_bytes
from labcore.attention.traffic.counts import (
    Direction,
    Form,
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
    "Direction",
    "Form",
    "Gpu",
    "Roofline",
    "Shape",
    "block_costs",
    "busy_share",
    "compulsory_bytes",
    "decode_bytes",
    "exponentials",
    "flash_bytes",
    "flops",
    "forward_peak_bytes",
    "hbm_bytes",
    "kept_bytes",
    "largest_block",
    "live_tiles",
    "naive_bytes",
    "requested_bytes",
    "roofline",
    "sram_bytes",
]
