"""Run a HIP kernel on the CPU: threads as fibers, barriers, LDS and 64-lane wavefronts.

`forward` runs a step of the FlashAttention port. `load` loads any kernel that uses the names in
`source/portable.h`. The counters apply the hardware's rules to the memory accesses in the source
(`source/cpu_check.h`). Timings on the emulator say nothing about a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labcore.checks import one_of, positive
from labcore.hip.build import library, source_name, step_source

__all__ = ["Emulated", "EmulationError", "LaunchCounters", "Program", "forward", "load"]

Size = int | Sequence[int]

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128)
# A library has a single emulated machine, and ctypes releases the GIL during a call.
_ONE_LAUNCH = threading.Lock()


class EmulationError(RuntimeError):
    """A fault that a GPU wouldn't report; the message names block, thread and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCounters:
    """Counts for a launch, treating each access in the source as one instruction of a wavefront.

    lds_accesses: LDS instructions.
    lds_conflicts: their cycles beyond those of conflict-free accesses.
    transactions: distinct 64-byte segments of global memory, summed over instructions; caches
    aren't modeled.
    bytes: bytes of global memory that lanes requested.
    barriers: barriers, counted once per block.
    mfma: matrix instructions.

    A compiler merges narrow accesses to neighbors into one of up to 16 bytes, and LDS accesses of 4
    or 8 bytes into pairs. By these rules:

    merged_lds: LDS instructions, without shuffles.
    merged_transactions, merged_lines: distinct segments of 64 and of 128 bytes; the latter are the
    cache lines of CDNA3.
    """

    lds_accesses: int
    lds_conflicts: int
    transactions: int
    bytes: int
    barriers: int
    mfma: int
    merged_lds: int
    merged_transactions: int
    merged_lines: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Emulated:
    """The result of `forward`, or of `labcore.hip.decode.decode`.

    out: the query's shape and dtype, [B, H, T, D] or [B, H, D]. lse: fp32, without the D, natural
    logarithm.
    counters: None unless requested.
    """

    out: Tensor
    lse: Tensor
    counters: LaunchCounters | None


class _Report(ctypes.Structure):
    # The fields of cpu.h's Report.
    _fields_ = [
        ("counting", ctypes.c_int64),
        *[(field.name, ctypes.c_int64) for field in fields(LaunchCounters)],
        ("message", ctypes.c_char * 512),
    ]


class _Memory(ctypes.Structure):
    # A Global as passed to a checked kernel; a plain kernel and a GPU read only the first word.
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("element", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
    ]


class Program:
    """A built kernel library, returned by `load`."""

    def __init__(self, path: Path, *, name: str, checked: bool) -> None:
        self.path = path
        self.name = name
        self.checked = checked
        self._library = ctypes.CDLL(str(path))

    def launch(
        self,
        name: str,
        *,
        grid: Size,
        block: Size,
        arguments: Mapping[str, Tensor | int | float],
        count: bool = False,
    ) -> LaunchCounters | None:
        """Run the kernel of ENTRY `name` on `grid` blocks of `block` threads each.

        arguments: by name, in the kernel's order. A tensor (contiguous, on the CPU) is passed as a
        Global, which the kernel can write to and errors refer to by name. A number is passed as the
        int or float that the kernel declares.
        count: return the launch's counters; requires a checked program.
        Raises EmulationError for a fault, and ValueError for arguments that don't match the kernel.
        """
        if count and not self.checked:
            raise ValueError(
                "counting needs a checked program, got a plain one; load it with check=True"
            )
        entry = self._function(name, f"add ENTRY({name}, kernel<…>) to it")
        takes = self._function(f"{name}_takes", f"add ENTRY({name}, kernel<…>) to it")
        takes.restype = ctypes.c_char_p
        kinds = takes().decode()
        if len(kinds) != len(arguments):
            raise ValueError(
                f"{name} takes {len(kinds)} arguments, got {len(arguments)}; name each of them"
            )
        values = [
            _argument(key, value, kind)
            for (key, value), kind in zip(arguments.items(), kinds, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        report = _Report(counting=count)
        sizes = _three("grid", grid), _three("block", block)
        with _ONE_LAUNCH:
            failed = entry(*sizes, pointers, ctypes.byref(report))
        if failed:
            raise EmulationError(f"{self.name}: {report.message.decode()}")
        if not count:
            return None
        return LaunchCounters(
            **{field.name: getattr(report, field.name) for field in fields(LaunchCounters)}
        )

    def call(self, name: str, *values: Tensor | int | float) -> None:
        """Call host function `name` of a source that hipify converted from CUDA.

        A tensor is passed as its address, an int as an int, a float as a float. Raises
        EmulationError if a launch fails. Such a kernel's pointers aren't bounds-checked.
        """
        function = self._function(name, f'declare {name} extern "C" in it')
        plain = [
            ctypes.c_void_p(_on_cpu(f"argument {place} of {name}", value).data_ptr())
            if isinstance(value, Tensor)
            else _scalar(f"argument {place} of {name}", value)
            for place, value in enumerate(values, 1)
        ]
        with _ONE_LAUNCH:
            if not function(*plain):
                return
            message = self._library.emulator_message
            message.restype = ctypes.c_char_p
            raise EmulationError(f"{self.name}: {message().decode()}")

    def __contains__(self, name: str) -> bool:
        """Whether the source has an ENTRY or a function `name`."""
        return hasattr(self._library, name)

    def _function(self, name: str, remedy: str) -> Any:
        found = getattr(self._library, name, None)
        if found is None:
            raise ValueError(f"name must be in the source, got {name!r}; {remedy}")
        return found

    def attention_block(self, dtype: torch.dtype, dim: int) -> tuple[int, int]:
        """Return the queries and threads per block for a step of the port."""
        queries, threads = ctypes.c_int(), ctypes.c_int()
        half = dtype.itemsize == 2
        self._library.attention_block(half, dim, ctypes.byref(queries), ctypes.byref(threads))
        return queries.value, threads.value


def load(source: Path | str, *, check: bool = True, wave: int = 64) -> Program:
    """Build (once) and load a kernel: a file, or the text of one that includes "portable.h".

    check: count accesses, and detect out-of-bounds accesses and LDS races between two waves.
    Without it, a wrong kernel may crash the process. Races in global memory, races between lanes of
    one wave, and infinite loops aren't detected.
    wave: lanes per wavefront; 32 runs a kernel written for warps as on NVIDIA.
    """
    return _load(library(source, checked=check, wave=wave), source_name(source), check)


@functools.cache
def _load(path: Path, name: str, checked: bool) -> Program:
    return Program(path, name=name, checked=checked)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    step: int,
    is_causal: bool = False,
    scale: float | None = None,
    count: bool = False,
    check: bool = True,
) -> Emulated:
    """Run attention with one step of the port, emulating every thread.

    query: [B, H, T, D]; key, value: [B, Hkv, S, D], where Hkv divides H and query head h reads key
    head h // (H / Hkv); all fp32, all fp16 or, with steps 3 and 4, all bf16; D = 64 or 128.
    is_causal: query i sees the keys up to i. scale: factor for q·k, default 1 / sqrt(D).
    count: fill `counters`. check: check the bounds of every access; False is faster.
    """
    group_size = _check(query, key, value)
    batch, heads, q_len, dim = query.shape
    k_len = key.shape[2]
    scale = dim**-0.5 if scale is None else positive("scale", scale)
    name = f"attention_forward_{DTYPES[query.dtype]}_d{dim}_{'causal' if is_causal else 'full'}"
    program = load(step_source(step), check=check or count)
    if name not in program:
        raise TypeError(f"query must be float32 or float16 for step {step}, got {query.dtype}")
    queries, threads = program.attention_block(query.dtype, dim)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[:3], dtype=torch.float32)
    if out.numel() == 0:  # the grid would have no blocks, which a GPU rejects
        nothing = LaunchCounters(
            **dict.fromkeys((field.name for field in fields(LaunchCounters)), 0)
        )
        return Emulated(out=out, lse=lse, counters=nothing if count else None)
    counters = program.launch(
        name,
        grid=(math.ceil(q_len / queries), batch * heads),
        block=threads,
        arguments={
            "q": aligned(query),
            "k": aligned(key),
            "v": aligned(value),
            "out": out,
            "lse": lse,
            "q_len": q_len,
            "k_len": k_len,
            "group_size": group_size,
            "scale": float(scale),
        },
        count=count,
    )
    return Emulated(out=out, lse=lse, counters=counters)


def _check(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Check that the kernels support these tensors; return the query heads per key head."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [B, H, T, D], got shape {tuple(tensor.shape)}")
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be on the CPU for emulation, got {tensor.device}; use {name}.cpu()"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    if query.dtype not in DTYPES:
        raise TypeError(
            f"query must be float32, float16 or bfloat16, got {query.dtype}; convert it with "
            "query.float()"
        )
    batch, heads, _, dim = query.shape
    one_of("the head dimension", dim, HEAD_DIMS)
    key_heads = key.shape[1]
    fits = key.shape == (batch, key_heads, key.shape[2], dim) and value.shape == key.shape
    if not fits or heads % (key_heads or 1) or bool(heads) > bool(key_heads):
        raise ValueError(
            f"key and value must be [{batch}, Hkv, S, {dim}] to match query, where Hkv divides "
            f"{heads}, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.shape[2] == 0:
        raise ValueError("key must hold at least one position, got S = 0")
    return heads // (key_heads or 1)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, copied unless it's contiguous and aligned to 16 bytes."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


# The kernel's argument types, as given by takes() in cpu.h; "?" and "P" are other numbers and
# pointers.
_MEMORY = {"F": torch.float32, "H": torch.float16, "B": torch.bfloat16, "I": torch.int32}
_KINDS = {"f": "a float", "i": "an int", "?": "a number that is neither an int nor a float"}


def _argument(name: str, value: Tensor | int | float, kind: str) -> Any:
    """Convert a value to the kernel's argument type; the kernel itself can't check the type."""
    wanted = _KINDS.get(kind, f"a tensor of {_MEMORY.get(kind, 'the elements it names')}")
    got = value.dtype if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor):
        scalar = _scalar(name, float(value) if kind == "f" and type(value) is int else value)
        if kind not in "if" or (kind == "i" and isinstance(value, float)):
            raise ValueError(f"{name} must be {wanted}, as the kernel declares it, got {got}")
        return scalar
    if kind != "P" and value.dtype != _MEMORY.get(kind):
        raise ValueError(f"{name} must be {wanted}, as the kernel declares it, got {got}")
    _on_cpu(name, value)
    return _Memory(value.data_ptr(), value.numel(), value.element_size(), name.encode())


def _on_cpu(name: str, value: Tensor) -> Tensor:
    if value.device.type != "cpu" or not value.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and on the CPU, got strides {value.stride()} on "
            f"{value.device}; use {name}.cpu().contiguous()"
        )
    return value


def _scalar(name: str, value: int | float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a tensor, an int or a float, got {type(value).__name__}")
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} must fit into a 32-bit int, got {value}")
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


def _three(name: str, size: Size) -> ctypes.Array[ctypes.c_uint]:
    parts = [size] if isinstance(size, int) else list(size)
    if not 1 <= len(parts) <= 3 or not all(isinstance(n, int) and 0 < n < 2**32 for n in parts):
        raise ValueError(f"{name} must be one to three integers from 1 to 2**32 - 1, got {size!r}")
    return (ctypes.c_uint * 3)(*parts, *[1] * (3 - len(parts)))
