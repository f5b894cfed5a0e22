"""The base class of Adafactor, SM3 and AdamW8bit, whose state is smaller than the parameter.

Their rules read a whole tensor, so the flat pieces and buckets of `chunked` don't work for them. On
a CPU, each tensor is processed in blocks of rows, so no temporary is as large as the parameter.
"""

from typing import Any

import torch
from torch import Tensor

from labcore.optim.chunked import CHUNK
from labcore.optim.precision import compute_dtype
from labcore.optim.shell import Item, Shell

SMALL = 1 << 15  # up to this size, whole-tensor operations cost less than blocks


class TensorShell(Shell):
    """State, checks and paths of an optimizer that processes one tensor at a time.

    A subclass defines its rule, its state's layout and two fast implementations: a step over one
    tensor in blocks, and a step by torch's _foreach operations.
    """

    def _block_step(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Take one step of a parameter with at least one element, on a CPU."""
        raise NotImplementedError

    def _check_param(self, group: dict[str, Any], param: Tensor) -> None:
        if param.is_complex():
            raise ValueError(
                f"{type(self).__name__} needs real parameters, got {param.dtype}; "
                "use Lion or AdamW for complex ones"
            )
        super()._check_param(group, param)

    def _update(
        self,
        index: int,  # noqa: ARG002 (Shell's form)
        group: dict[str, Any],
        items: list[Item],
    ) -> None:
        items = [item for item in items if item[0].numel()]  # the mean over no elements is NaN
        if group["foreach"] is not False:
            self._together(group, items)
            return
        for item in items:
            self._by_rule(group, *item)

    def _together(self, group: dict[str, Any], items: list[Item]) -> None:
        """Step small tensors in batches, as calls cost more than arithmetic, and big ones alone.

        No batch exceeds `CHUNK` elements, so temporaries are not as large as all parameters.
        """
        batches: dict[object, list[Item]] = {}
        sizes: dict[object, int] = {}
        for param, grad, state in items:
            size = param.numel()
            if size > SMALL and param.device.type == "cpu":
                self._block_step(group, param, grad, state)
                continue
            kind = param.device, param.dtype, grad.dtype
            batch = batches.setdefault(kind, [])
            sizes[kind] = sizes.get(kind, 0) + size
            if batch and sizes[kind] > CHUNK:
                self._batch_step(group, batch)
                batch.clear()
                sizes[kind] = size
            batch.append((param, grad, state))
        for batch in batches.values():
            self._batch_step(group, batch)

    def _batch_step(self, group: dict[str, Any], items: list[Item]) -> None:
        if self._foreach(group, items):
            return
        for item in items:
            on_cpu = item[0].device.type == "cpu"
            (self._block_step if on_cpu else self._by_rule)(group, *item)


def state_dtype(param: torch.dtype) -> torch.dtype:
    """Return the state's dtype: at least float32, as half-precision running means get stuck."""
    return compute_dtype(param)
