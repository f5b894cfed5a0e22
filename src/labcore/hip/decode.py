"""Decode: one query of each sequence against its cache, by `source/step5_decode.hip`.

A sequence's keys are cut into `splits` pieces. The first launch computes attention over each piece
for all query heads of a key head at once; the second combines the pieces. `launches` lays both out,
`decode` runs them on the emulator, `labcore.hip.gpu.Decoder` on a GPU.

Source: Dao, Haziza, Massa and Sizov, 2023, https://pytorch.org/blog/flash-decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from labcore.checks import one_of, positive, positive_int
from labcore.hip.build import DECODE
from labcore.hip.emulate import DTYPES, HEAD_DIMS, Emulated, LaunchCounters, aligned, load
from labcore.hip.mfma import LANES

__all__ = ["Launch", "decode", "launches"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Launch:
    """A kernel's entry, grid, threads per block, and arguments by name in the kernel's order."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    arguments: Mapping[str, Tensor | int | float]


def launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    splits: int,
    scale: float | None,
    block: tuple[int, int],
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Return out, lse and the launches that fill them: two, or none if there are no
    sequences or heads.

    block: query heads and threads per block of the first kernel. The rest is as for `decode`.
    """
    batch, heads, dim = query.shape
    key_heads, k_len = key.shape[1:3]
    scale = dim**-0.5 if scale is None else positive("scale", scale)
    form = f"{DTYPES[query.dtype]}_d{dim}"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty((batch, heads), dtype=torch.float32)
    if not out.numel():  # the grid would have no blocks, which a GPU rejects
        return out, lse, []
    shape = (batch, heads, positive_int("splits", splits))
    piece_out, piece_lse = (query.new_empty(s, dtype=torch.float32) for s in ((*shape, dim), shape))
    group_size, (tile, threads) = heads // key_heads, block
    split = Launch(
        name=f"attention_split_{form}",
        grid=(splits, batch * key_heads, math.ceil(group_size / tile)),
        threads=threads,
        arguments={
            "q": aligned(query),
            "k": aligned(key),
            "v": aligned(value),
            "lengths": lengths.contiguous(),
            "piece_out": piece_out,
            "piece_lse": piece_lse,
            "key_heads": key_heads,
            "k_len": k_len,
            "group_size": group_size,
            "scale": float(scale),
        },
    )
    combine = Launch(
        name=f"attention_combine_{form}",
        grid=(batch * heads, 1, 1),
        threads=LANES,
        arguments={
            "piece_out": piece_out,
            "piece_lse": piece_lse,
            "out": out,
            "lse": lse,
            "splits": splits,
        },
    )
    return out, lse, [split, combine]


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    splits: int = 1,
    scale: float | None = None,
    count: bool = False,
    check: bool = True,
) -> Emulated:
    """Run a decode step on the emulator; out is [B, H, D], lse [B, H].

    query: [B, H, D]; key, value: [B, Hkv, S, D], where Hkv divides H and query head h reads key
    head h // (H / Hkv); all fp16 or all bf16, D = 64 or 128.
    lengths: int32 [B], the number of keys of each sequence; above S, it counts as S. A sequence
    without keys gets zeros, and -inf as lse.
    splits: pieces that each sequence is cut into. scale: factor for q·k, default 1 / sqrt(D).
    count: fill `counters`, of both launches together. check: check the bounds of every access.
    Raises ValueError or TypeError for other tensors.
    """
    check_decode(query, key, value, lengths)
    if query.device.type != "cpu":
        raise ValueError(f"query must be on the CPU for emulation, got {query.device}")
    program = load(DECODE, check=check or count)
    block = program.attention_block(query.dtype, query.shape[-1])
    out, lse, planned = launches(
        query, key, value, lengths, splits=splits, scale=scale, block=block
    )
    total = dict.fromkeys(LaunchCounters.__dataclass_fields__, 0)
    for launch in planned:
        counters = program.launch(
            launch.name,
            grid=launch.grid,
            block=launch.threads,
            arguments=launch.arguments,
            count=count,
        )
        if counters is not None:
            total = {name: total[name] + value for name, value in asdict(counters).items()}
    return Emulated(out=out, lse=lse, counters=LaunchCounters(**total) if count else None)


def check_decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> None:
    """Raise ValueError or TypeError for tensors that the kernels don't support."""
    if query.ndim != 3 or key.ndim != 4:
        raise ValueError(
            "query must be [B, H, D] and key [B, Hkv, S, D], got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    batch, heads, dim = query.shape
    one_of("the head dimension", dim, HEAD_DIMS)
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"query must be float16 or bfloat16, got {query.dtype}")
    key_heads, k_len = key.shape[1:3]
    fits = key.shape == (batch, key_heads, k_len, dim) and value.shape == key.shape
    if not fits or heads % (key_heads or 1) or bool(heads) > bool(key_heads):
        raise ValueError(
            f"key and value must be [{batch}, Hkv, S, {dim}] to match query, where Hkv divides "
            f"{heads}, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if lengths.shape != (batch,) or lengths.dtype != torch.int32:
        raise ValueError(
            f"lengths must be int32 [{batch}], got {lengths.dtype} {tuple(lengths.shape)}"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    for name, tensor in (("key", key), ("value", value), ("lengths", lengths)):
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on query's {query.device}, got {tensor.device}")
