"""What a reader of the memory figures can choose, and how bytes are written."""

from __future__ import annotations

import math
from collections.abc import Mapping

from labcore.attention.traffic import GPUS
from labcore.memory.levers import Card
from labcore.models import LlamaConfig
from labcore.parallel.cost import LINKS
from labcore.ui.theme import PALETTE

__all__ = [
    "CAPACITIES",
    "CARDS",
    "CHECKPOINTING",
    "COLORS",
    "MODELS",
    "OPTIMIZERS",
    "SERVED",
    "in_bytes",
    "verdict",
]

COLORS = {
    "parameters": PALETTE["gray"],
    "gradients": PALETTE["sky"],
    "optimizer": PALETTE["vermillion"],
    "activations": PALETTE["blue"],
    "workspace": PALETTE["orange"],
}
CAPACITIES = (16, 24, 80, 141)  # GB on the labels of common GPUs


def _llama(
    width: int, wide: int, layers: int, heads: int, kv_heads: int, *, words: int, longest: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=longest,
    )


_SECOND = {"words": 32_000, "longest": 4096}
_THIRD = {"words": 128_256, "longest": 131_072}
MODELS = {  # the shapes of TinyLlama and of Llama 2
    "1.1B": _llama(2048, 5632, 22, 32, 4, **_SECOND),
    "7B": _llama(4096, 11008, 32, 32, 32, **_SECOND),
    "13B": _llama(5120, 13824, 40, 40, 40, **_SECOND),
    "70B": _llama(8192, 28672, 80, 64, 8, **_SECOND),
}
SERVED = {
    "Llama 2 7B": MODELS["7B"],
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 8, **_THIRD),
    "Llama 3.1 70B": _llama(8192, 28672, 80, 64, 8, **_THIRD),
}
OPTIMIZERS = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "lion": "Lion",
    "adafactor": "Adafactor",
    "sm3": "SM3",
    "adamw8bit": "AdamW, 8 bits",
}
CHECKPOINTING: Mapping[str, int | str | None] = {
    "none": None,
    "selective": "selective",
    "every 4 layers": 4,
    "every layer": 1,
}
CARDS = {
    name: Card(
        gpu=GPUS[name],
        fp32=fp32,
        link=LINKS[link].bandwidth,
        host=LINKS[host].bandwidth,
        network=network * 1e9 / 8,
        main=channels * transfers * 8e6,
    )
    for name, fp32, link, host, network, channels, transfers in (
        ("RTX 4090", 82.6e12, "PCIe 4.0 x16", "PCIe 4.0 x16", 200, 2, 5600),
        ("A100", 19.5e12, "NVLink 3", "PCIe 4.0 x16", 200, 16, 3200),
        ("H100", 67e12, "NVLink 4", "PCIe 5.0 x16", 400, 16, 4800),
        ("H200", 67e12, "NVLink 4", "PCIe 5.0 x16", 400, 16, 4800),
    )
}
"""Cards with their links, by the data sheets that `GPUS` and `LINKS` name.

The servers are DGX A100, H100 and H200: Gb/s of the network per GPU, then channels of main memory,
8 per socket, and millions of transfers of 8 bytes per second. The RTX 4090 is in a desktop with two
channels of DDR5-5600, and has the network of the A100.
"""


def in_bytes(count: float) -> str:
    """Format bytes with 3 digits and a unit."""
    power = min(4, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def verdict(peak: float, capacity: float) -> str:
    """Say whether a peak fits into a card, both in bytes."""
    fits = "fits" if peak <= capacity else "does not fit"
    return f"Peak {in_bytes(peak)} of {in_bytes(capacity)}: {fits}"
