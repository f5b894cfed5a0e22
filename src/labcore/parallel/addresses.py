"""The addresses of a captured step's tensors, and a view of a cache's first rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labcore.models.cache import DenseCache, KVCache

__all__ = ["Addresses", "first_rows"]


class _FirstRows(DenseCache):
    """A view of a cache's first rows, in the same memory.

    It always attends to the whole capacity and never reads from the device, captured or not, so all
    steps launch the same operations.
    """

    def __init__(self, whole: DenseCache, rows: int) -> None:
        self.capacity = whole.capacity
        self._keys = [keys[:rows] for keys in whole._keys]
        self._values = [values[:rows] for values in whole._values]
        self.lengths = whole.lengths[:rows]
        self._starts = whole._starts[:rows]
        self._longest = self._width = 0
        self._lent = True
        self._mask = None

    def _make_room(self, width: int, counts: Tensor) -> None:
        """Do nothing: GraphedDecoder has already checked."""


def first_rows(cache: KVCache, rows: int) -> KVCache:
    """Return a view of the cache's first rows: its `first_rows(n)`, or ours for a DenseCache.

    Raises TypeError for a cache that has no such view.
    """
    if hasattr(cache, "first_rows"):
        return cache.first_rows(rows)
    if type(cache) is DenseCache:  # a subclass would lose its changes
        return _FirstRows(cache, rows)
    have = cache.lengths.shape[0]
    if rows == have:
        return cache
    raise TypeError(
        f"{type(cache).__name__} must have first_rows(n) to run {rows} of its {have} rows; give it "
        f"that method, or pass batches=({have},)"
    )


Address = tuple[int, torch.dtype, torch.Size]


def _address(tensor: Tensor) -> Address:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


class Addresses:
    """Where a model's and a cache's tensors are in memory, because a replay can't notice a move."""

    def __init__(self, model: nn.Module, cache: KVCache) -> None:
        modules = [(path or "model", module) for path, module in model.named_modules()]
        self._children = [
            (f"{path}.{name}", module._modules, name, child)
            for path, module in modules
            for name, child in module._modules.items()
        ]
        tensors: list[tuple[str, Any, Any]] = [
            (f"{path}.{name}", table, name)
            for path, module in modules
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]
        if isinstance(cache, DenseCache):
            for what, stored in (("keys", cache._keys), ("values", cache._values)):
                tensors += [
                    (f"the cache's {what} of layer {layer}", stored, layer)
                    for layer in range(len(stored))
                ]
        self._tensors = [(*one, _address(one[1][one[2]])) for one in tensors]
        self._cache = cache
        self._buffers = {name: _address(tensor) for name, tensor in cache.buffers().items()}

    def moved(self) -> str:
        """Describe the first thing that changed; "" if nothing did."""
        for name, table, key, child in self._children:
            if table.get(key) is not child:
                return f"{name} was replaced by another module"
        # This loop runs for every token, so it builds a message only if something changed.
        for name, table, key, (pointer, dtype, shape) in self._tensors:
            tensor = table[key]
            if tensor is None or tensor.data_ptr() != pointer or tensor.dtype is not dtype:
                return f"{name} {_change(tensor, (pointer, dtype, shape))}"
        buffers = self._cache.buffers()
        for name, address in self._buffers.items():
            if (change := _change(buffers.get(name), address)) is not None:
                return f"the cache's {name} {change}"
        return ""


def _change(tensor: Tensor | None, address: Address) -> str | None:
    if tensor is None:
        return "was taken away"
    if tensor.dtype != address[1]:
        return f"was {address[1]} and is {tensor.dtype}"
    if tensor.data_ptr() != address[0]:
        return "stands at another address"
    return None if tensor.shape == address[2] else f"has another shape, {tuple(tensor.shape)}"
