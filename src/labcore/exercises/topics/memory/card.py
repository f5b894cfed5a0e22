"""Simulate a graphics card: torch's caching allocator for tensors without memory.

Operations on torch's meta device have shapes, dtypes, graphs and lifetimes, but no numbers. A
dispatch mode sees when each storage is created and freed, and books it as torch's CUDA allocator
does in its default settings. The rules follow c10/cuda/CUDACachingAllocator.cpp. A block is a
multiple of 512 bytes, cut from a segment of 2 MiB, 20 MiB, or the request's own size. The
allocator takes the smallest block that fits, keeps the rest as another block, and merges free
neighbors. Before it raises an error, it returns all wholly free segments to the driver. It does
not see the memory that a kernel needs inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CONTEXT", "GIB", "MIB", "TOTAL", "Allocator", "Card"]

MIB, GIB = 2**20, 2**30
TOTAL = round(11.63 * GIB)  # a 12 GB card may have this much
CONTEXT = 386 * MIB  # each process needs this besides torch's segments
SPACE = 512
SMALL = MIB  # requests up to this size share segments of 2 MiB
SEGMENTS = (2 * MIB, 20 * MIB)
OWN_SEGMENT = 10 * MIB
ROUND = 2 * MIB
PROCESS = 41200  # this process's id; the other processes have the next ones


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment, linked to its neighbors."""

    address: int
    size: int
    small: bool
    used: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def whole(self) -> bool:
        return self.before is None and self.after is None


def _readable(size: int) -> str:
    """Format bytes as torch does."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size > unit or (size == unit and unit > 1024):
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


class Allocator:
    """torch's caching allocator on a card of TOTAL bytes.

    others: the bytes that each other process uses. allocated, reserved: the bytes of this process
    now. highest: the peak of `allocated` since the caller last set it.
    """

    def __init__(self, others: Sequence[int] = ()) -> None:
        self.others = tuple(others)
        self.allocated = self.reserved = self.highest = 0
        self._free: dict[bool, list[_Block]] = {True: [], False: []}
        self._next = 0

    @property
    def in_use(self) -> int:
        """Bytes of the card that all processes use."""
        return sum(self.others) + CONTEXT + self.reserved

    def allocate(self, size: int) -> _Block:
        """Return a block for `size` > 0 bytes. Raises torch.OutOfMemoryError if it does not fit."""
        size = -(-size // SPACE) * SPACE
        small = size <= SMALL
        fitting = [block for block in self._free[small] if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda one: (one.size, one.address))
            self._free[small].remove(block)
        else:
            block = self._segment(size, small)
        if block.size - size >= (SPACE if small else SMALL + 1):
            self._cut(block, size)
        block.used = True
        self.allocated += block.size
        self.highest = max(self.highest, self.allocated)
        return block

    def release(self, block: _Block) -> None:
        """Free a block that `allocate` returned."""
        self.allocated -= block.size
        block.used = False
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._free[block.small].remove(other)
                self._join(block, other)
        self._free[block.small].append(block)

    def _segment(self, size: int, small: bool) -> _Block:
        wanted = SEGMENTS[0] if small else SEGMENTS[1]
        if size >= OWN_SEGMENT:
            wanted = -(-size // ROUND) * ROUND
        if self.in_use + wanted > TOTAL:
            for pool in self._free.values():
                self.reserved -= sum(block.size for block in pool if block.whole)
                pool[:] = [block for block in pool if not block.whole]
        if self.in_use + wanted > TOTAL:
            raise torch.OutOfMemoryError(self._message(wanted))
        self.reserved += wanted
        self._next += wanted
        return _Block(self._next - wanted, wanted, small)

    def _cut(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._free[block.small].append(rest)

    @staticmethod
    def _join(block: _Block, other: _Block) -> None:
        block.size += other.size
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block

    def _message(self, wanted: int) -> str:
        """Write the error message as torch does since 2.9."""
        theirs = "".join(
            f"Process {PROCESS + number} has {_readable(size)} memory in use. "
            for number, size in enumerate(self.others, 1)
        )
        return (
            f"CUDA out of memory. Tried to allocate {_readable(wanted)}. GPU 0 has a total "
            f"capacity of {_readable(TOTAL)} of which {_readable(TOTAL - self.in_use)} is free. "
            f"{theirs}Including non-PyTorch memory, this process has "
            f"{_readable(CONTEXT + self.reserved)} memory in use. Of the allocated memory "
            f"{_readable(self.allocated)} is allocated by PyTorch, and "
            f"{_readable(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


class Card(TorchDispatchMode):
    """While this mode is active, each new storage on the meta device gets a block of `memory`.

    An operation whose result does not fit raises torch.OutOfMemoryError.
    """

    def __init__(self, memory: Allocator) -> None:
        super().__init__()
        self.memory = memory
        self._held: dict[int, _Block] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._held and storage.nbytes():
            self._held[key] = self.memory.allocate(storage.nbytes())
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.memory.release(self._held.pop(key))
