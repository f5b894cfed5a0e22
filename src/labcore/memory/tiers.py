"""Storage tiers for offloaded bytes: main memory below a GPU's, a disk below main memory."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Disk", "Host", "Key", "Tier"]

Key = tuple[int, int]  # a group's number, and which of its storages


class Tier(Protocol):
    """Stores bytes for one calling thread. `data` is uint8 [n], with the same n for the same key.

    `write` and `read` return when `data` may be reused. The tiers below raise ValueError for other
    data, and for reading what was never written.
    """

    def write(self, key: Key, data: Tensor) -> None:
        """Store `data` under `key`, replacing what was there."""

    def read(self, key: Key, data: Tensor) -> None:
        """Fill `data` with what was last written under `key`."""

    def close(self) -> None:
        """Free everything."""


class Host:
    """Main memory, pinned for data on a GPU: the tier below a GPU's memory."""

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def write(self, key: Key, data: Tensor) -> None:
        """Store `data` under `key`, replacing what was there."""
        _check_bytes(data)
        if key not in self._kept or self._kept[key].numel() != data.numel():
            self._kept[key] = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=data.is_cuda)
        self._copy(self._kept[key], data)

    def read(self, key: Key, data: Tensor) -> None:
        """Fill `data` with what was last written under `key`."""
        _check_read(key, data, self._kept[key].numel() if key in self._kept else None)
        self._copy(data, self._kept[key])

    def close(self) -> None:
        """Free everything."""
        self._kept.clear()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        device = source.device if source.is_cuda else target.device
        if device.type != "cuda":
            target.copy_(source)
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            target.copy_(source, non_blocking=True)
        self._streams[device].synchronize()


class Disk:
    """An unnamed temporary file that disappears with the process: the tier below main memory.

    folder: where on disk to put it; None is the system's temporary folder. The system may cache the
    file in memory, and reclaims that memory when others need it.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._places: dict[Key, tuple[int, int]] = {}  # offset and size
        self._end = 0

    def write(self, key: Key, data: Tensor) -> None:
        """Store `data` under `key`, replacing what was there."""
        _check_bytes(data)
        left = _memory(data)
        if key not in self._places or self._places[key][1] != len(left):
            self._places[key] = (self._end, len(left))
            self._end += len(left)
        self._file.seek(self._places[key][0])
        while left:
            left = left[self._file.write(left) :]

    def read(self, key: Key, data: Tensor) -> None:
        """Fill `data` with what was last written under `key`."""
        _check_read(key, data, self._places[key][1] if key in self._places else None)
        left = _memory(data)
        self._file.seek(self._places[key][0])
        while left:
            came = self._file.readinto(left)
            if not came:
                raise RuntimeError(
                    f"the offloaded file must hold {self._end} bytes, got {len(left)} too few; "
                    "find out what truncated it"
                )
            left = left[came:]

    def close(self) -> None:
        """Free everything."""
        self._file.close()
        self._places.clear()


def _check_bytes(data: Tensor) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(
            f"data must be contiguous bytes, uint8 [n], got {data.dtype} {tuple(data.shape)}; "
            "pass the bytes of a storage"
        )


def _check_read(key: Key, data: Tensor, written: int | None) -> None:
    _check_bytes(data)
    if written != data.numel():
        came = "nothing was written" if written is None else f"{written} bytes were written"
        raise ValueError(
            f"a read must match what was written, got room for {data.numel()} bytes under {key}, "
            f"where {came}; write first, then read as many bytes"
        )


def _memory(data: Tensor) -> memoryview:
    """Return the memory of uint8 [n] on the CPU; `.numpy()` would stop torch from resizing it."""
    if data.device.type != "cpu":
        raise ValueError(
            f"Disk needs tensors on the CPU, got one on {data.device}; for a GPU use Host()"
        )
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")
