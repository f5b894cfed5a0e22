"""How large the kernels' tiles are: a row for each head dimension, a column for each kind of GPU.

Two things bound a tile. Shared memory holds `stages` tiles of keys and of values; registers hold
the scores and what is summed, and what does not fit there spills. The compile gates hold the
commonest forms to both. There is no search at run time: reader, tests and gates see one choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FORWARD", "KEYS", "QUERIES", "Config", "choose", "kind_for", "kind_of", "padded"]

KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One program's tile: m rows of queries by n rows of keys, and how it is compiled.

    warps: warps of 32 (NVIDIA) or 64 (AMD) lanes that share the tile. stages: how many tiles of the
    walk are on their way at once.
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 2

    def options(self) -> dict[str, Any]:
        """The kernels' and the compiler's arguments of these names."""
        return {"M": self.m, "N": self.n, "num_warps": self.warps, "num_stages": self.stages}


Table = Mapping[int, Mapping[str, Config]]

# NVIDIA's matrix units have no exact fp32 product: there each of a tile's is an instruction of its
# own, whose operands stand in registers for the whole head dimension.
FORWARD: Table = {
    64: {
        "hopper": Config(m=128, n=128, warps=8, stages=3),
        "ampere": Config(m=128, n=64, warps=8, stages=3),
        "ada": Config(m=128, n=64, warps=8, stages=2),
        "cdna": Config(m=128, n=32, warps=4, stages=2),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    128: {
        "hopper": Config(m=128, n=64, warps=8, stages=3),
        "ampere": Config(m=128, n=32, warps=8, stages=3),
        "ada": Config(m=64, n=64, warps=8, stages=2),
        "cdna": Config(m=128, n=32, warps=4, stages=2),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    256: {
        "hopper": Config(m=128, n=32, warps=8, stages=3),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=64, n=32, warps=8, stages=2),
        "cdna": Config(m=64, n=32, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
}
# dk and dv: a tile of keys stays, tiles of queries come by.
KEYS: Table = {
    64: {
        "hopper": Config(m=64, n=128, warps=8, stages=2),
        "ampere": Config(m=32, n=64, warps=8, stages=2),
        "ada": Config(m=32, n=64, warps=8, stages=2),
        "cdna": Config(m=16, n=64, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    128: {
        "hopper": Config(m=64, n=128, warps=8, stages=2),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=32, n=64, warps=8, stages=2),
        "cdna": Config(m=16, n=64, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    256: {
        "hopper": Config(m=32, n=32, warps=8, stages=2),
        "ampere": Config(m=32, n=64, warps=8, stages=1),
        "ada": Config(m=32, n=32, warps=8, stages=1),
        "cdna": Config(m=16, n=32, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=16, warps=4, stages=1),
    },
}
# dq: a tile of queries stays, tiles of keys come by.
QUERIES: Table = {
    64: {
        "hopper": Config(m=128, n=64, warps=8, stages=2),
        "ampere": Config(m=64, n=64, warps=4, stages=2),
        "ada": Config(m=64, n=64, warps=4, stages=2),
        "cdna": Config(m=64, n=32, warps=4, stages=1),
        "fp32": Config(m=16, n=16, warps=4, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    128: {
        "hopper": Config(m=128, n=64, warps=8, stages=2),
        "ampere": Config(m=64, n=64, warps=8, stages=2),
        "ada": Config(m=64, n=32, warps=8, stages=2),
        "cdna": Config(m=64, n=32, warps=4, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=32, n=32, warps=4, stages=1),
    },
    256: {
        "hopper": Config(m=64, n=32, warps=8, stages=2),
        "ampere": Config(m=64, n=32, warps=8, stages=2),
        "ada": Config(m=32, n=32, warps=8, stages=1),
        "cdna": Config(m=32, n=16, warps=8, stages=1),
        "fp32": Config(m=16, n=16, warps=8, stages=1),
        "cdna fp32": Config(m=16, n=32, warps=4, stages=1),
    },
}
INTERPRETED = Config(m=64, n=64)  # the interpreter counts operations, whatever their size


def padded(head_dim: int) -> int:
    """Columns of a tile for `head_dim`: the power of two from 16 on that holds it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def kind_for(backend: str, shared_limit: int) -> str:
    """The column for a GPU of `backend` whose blocks may use `shared_limit` bytes of memory."""
    if backend == "hip":
        return "cdna"
    if shared_limit >= 227 * KIB:
        return "hopper"
    return "ampere" if shared_limit >= 163 * KIB else "ada"


def kind_of(where: torch.device) -> str:
    """The column that `where` reads; "interpreter" for a CPU."""
    if where.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "cdna"
    properties = torch.cuda.get_device_properties(where)
    return kind_for("cuda", getattr(properties, "shared_memory_per_block_optin", 0))


def choose(table: Table, kind: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The tile for a kind of GPU, D up to 256 and the dtype of the inputs."""
    if kind == "interpreter":
        return INTERPRETED
    if dtype == torch.float32:
        kind = "cdna fp32" if kind == "cdna" else "fp32"
    return table[max(64, padded(head_dim))][kind]
