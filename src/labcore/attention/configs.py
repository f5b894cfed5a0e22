"""The kernels' tile sizes: one row per head dimension, one column per kind of GPU.

Two resources limit a tile. Shared memory holds `stages` tiles of keys and of values. Registers hold
the scores and the accumulators, and spill if those don't fit. The compile gates check the most
common kernels against both limits. There's no autotuning at run time, so readers, tests and gates
all see the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "DESCRIBED",
    "FORWARD",
    "KEYS",
    "QUERIES",
    "Config",
    "choose",
    "kind_for",
    "kind_of",
    "padded",
]

KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One program's tile, m rows of queries by n rows of keys, and how it's compiled.

    warps: warps of 32 (NVIDIA) or 64 (AMD) lanes that share the tile. stages: how many tiles the
    loop keeps in flight.
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 2

    def options(self) -> dict[str, Any]:
        """Return the settings under the names that the kernels and the compiler use."""
        return {"M": self.m, "N": self.n, "num_warps": self.warps, "num_stages": self.stages}


Table = Mapping[int, Mapping[str, Config]]

# NVIDIA's matrix units have no exact fp32 product. There, each product of a tile is a separate
# instruction whose operands occupy registers for the whole head dimension.
FORWARD: Table = {
    64: {
        "hopper": Config(m=128, n=128, warps=8, stages=2),
        "blackwell": Config(m=128, n=128, warps=8, stages=3),
        "ampere": Config(m=128, n=64, warps=8, stages=3),
        "ada": Config(m=128, n=64, warps=8, stages=2),
        "tree": Config(m=64, n=64, warps=8, stages=2),
        "cdna": Config(m=128, n=32, warps=4, stages=2),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    128: {
        "hopper": Config(m=128, n=64, warps=8, stages=2),
        "ampere": Config(m=128, n=32, warps=8, stages=3),
        "ada": Config(m=64, n=64, warps=8, stages=2),
        "tree": Config(m=64, n=32, warps=8, stages=2),
        "cdna": Config(m=128, n=32, warps=4, stages=2),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    256: {
        "hopper": Config(m=128, n=32, warps=8, stages=3),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=64, n=32, warps=8, stages=2),
        "tree": Config(m=64, n=32, warps=8, stages=2),
        "cdna": Config(m=64, n=16, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
}
# dk and dv: a program keeps a tile of keys and loops over tiles of queries.
KEYS: Table = {
    64: {
        "hopper": Config(m=64, n=128, warps=8, stages=2),
        "ampere": Config(m=32, n=64, warps=8, stages=2),
        "ada": Config(m=32, n=64, warps=8, stages=2),
        "tree": Config(m=32, n=64, warps=8, stages=2),
        "cdna": Config(m=16, n=64, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    128: {
        "hopper": Config(m=32, n=128, warps=8, stages=2),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=32, n=64, warps=8, stages=2),
        "tree": Config(m=32, n=64, warps=8, stages=2),
        "cdna": Config(m=16, n=64, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    256: {
        "hopper": Config(m=32, n=128, warps=8, stages=2),
        "ampere": Config(m=32, n=32, warps=8, stages=2),
        "ada": Config(m=32, n=32, warps=8, stages=1),
        "tree": Config(m=32, n=32, warps=8, stages=1),
        "cdna": Config(m=16, n=32, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=16, warps=4, stages=1),
    },
}
# dq: a program keeps a tile of queries and loops over tiles of keys.
QUERIES: Table = {
    64: {
        "hopper": Config(m=128, n=64, warps=8, stages=2),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=64, n=64, warps=8, stages=2),
        "tree": Config(m=64, n=32, warps=8, stages=2),
        "cdna": Config(m=64, n=32, warps=4, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    128: {
        "hopper": Config(m=128, n=32, warps=8, stages=2),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=64, n=32, warps=8, stages=2),
        "tree": Config(m=64, n=32, warps=8, stages=2),
        "cdna": Config(m=64, n=32, warps=4, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    256: {
        "hopper": Config(m=64, n=32, warps=8, stages=2),
        "ampere": Config(m=64, n=32, warps=8, stages=2),
        "ada": Config(m=32, n=32, warps=8, stages=1),
        "tree": Config(m=32, n=32, warps=8, stages=1),
        "cdna": Config(m=32, n=16, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=16, n=32, warps=4, stages=1),
    },
}
# The forward kernel of `descriptors`, on Hopper and Blackwell.
DESCRIBED: Mapping[int, Config] = {
    64: Config(m=128, n=128, warps=8, stages=3),
    128: Config(m=128, n=128, warps=8, stages=2),
}
INTERPRETED = Config(m=64, n=64)  # the interpreter's cost is per operation, whatever its size


def padded(head_dim: int) -> int:
    """Return a tile's columns for `head_dim`: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def kind_for(backend: str, major: int, shared_limit: int) -> str:
    """Return the column for a GPU of `backend` with `shared_limit` bytes of memory per block.

    major: NVIDIA's compute capability, 9 for sm_90; not read for AMD's GPUs.
    """
    if backend == "hip":
        return "cdna"
    if shared_limit >= 227 * KIB:
        return "hopper" if major < 10 else "blackwell"
    return "ampere" if shared_limit >= 163 * KIB else "ada"


def kind_of(where: torch.device) -> str:
    """Return the column for the device `where`; "interpreter" for a CPU."""
    if where.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "cdna"
    properties = torch.cuda.get_device_properties(where)
    limit = getattr(properties, "shared_memory_per_block_optin", 0)
    return kind_for("cuda", properties.major, limit)


def choose(
    table: Table, kind: str, head_dim: int, dtype: torch.dtype, *, tree: bool = False
) -> Config:
    """Return the tile for a kind of GPU, D up to 256 and the dtype of the inputs.

    tree: whether a tree decides which keys are seen; its bits take registers, too.
    """
    if kind == "interpreter":
        return INTERPRETED
    row = table[max(64, padded(head_dim))]
    if dtype == torch.float32:
        return row["cdna fp32" if kind == "cdna" else "fp32"]
    if tree and kind != "cdna":
        return row["tree"]
    return row.get(kind, row["hopper"])  # "blackwell" stands only where it differs
