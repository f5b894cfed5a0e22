"""The base class of Adafactor, SM3 and AdamW8bit, whose state is smaller than the parameter.

Their rules read a whole tensor, so the flat pieces and buckets of `chunked` don't work for them. On
a CPU, each tensor is processed in blocks of rows, so no temporary is as large as the parameter.
"""

import math
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from labcore.optim.chunked import CHUNK
from labcore.optim.precision import compute_dtype
from labcore.optim.shell import Item, Shell

SMALL = 1 << 15  # up to this size, whole-tensor operations cost less than blocks
# Settings that Shell checks and these optimizers don't have, with values that pass.
ABSENT = {
    "betas": (0.0, 0.0),
    "foreach": None,
    "fused": None,
    "capturable": False,
    "state_dtype": None,
}
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]  # state name: shape, dtype


def layout_bytes(layout: Layout) -> int:
    """Return the bytes of a state with these shapes and dtypes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())


class TensorShell(Shell):
    """State, checks and paths of an optimizer that processes one tensor at a time.

    A subclass defines its rule, its state's layout and two fast implementations: a step over one
    tensor in blocks, and a step by torch's _foreach operations.
    """

    neutral: ClassVar[dict[str, Any]] = {
        "maximize": False,
        "foreach": None,
        "master_weights": False,
        "stochastic_rounding": False,
        "nonfinite": "propagate",
    }

    def _layout(self, group: dict[str, Any], param: Tensor) -> Layout:
        """Return names, shapes and dtypes of a parameter's state, including the step count."""
        raise NotImplementedError

    def _block_step(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Take one step of a parameter with at least one element, on a CPU."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group({**ABSENT, **group})

    def _check_param(self, group: dict[str, Any], param: Tensor) -> None:
        if param.is_complex():
            raise ValueError(
                f"{type(self).__name__} needs real parameters, got {param.dtype}; "
                "use Lion or AdamW for complex ones"
            )
        super()._check_param(group, param)

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        state = {}
        for name, (shape, dtype) in self._layout(group, param).items():
            # The count stays on the host, where reading it costs no wait.
            where = "cpu" if name == "step" else param.device
            state[name] = torch.zeros(shape, dtype=dtype, device=where)
        if group["master_weights"] and param.dtype in (torch.bfloat16, torch.float16):
            state["master"] = param.detach().to(torch.float32, copy=True)
        return state

    def _saved_layout(
        self,
        group: dict[str, Any],
        param: Tensor,
        entry: dict[str, Any],  # noqa: ARG002 (for SM3, whose entries differ)
    ) -> Layout:
        """Return the layout that a parameter's saved state must have."""
        return self._layout(group, param)

    def _check_loaded(self, saved: dict[str, Any]) -> None:
        for theirs, ours in zip(saved["param_groups"], self.param_groups, strict=False):
            for key, param in zip(theirs["params"], ours["params"], strict=False):
                entry = saved["state"].get(key)
                if not entry:
                    continue
                came = {
                    name: tuple(torch.as_tensor(value).shape)
                    for name, value in entry.items()
                    if name != "master"
                }
                layout = self._saved_layout({**ABSENT, **ours, **theirs}, param, entry)
                wanted = {name: shape for name, (shape, _) in layout.items()}
                if came != wanted:
                    raise ValueError(
                        f"{type(self).__name__} keeps {wanted} for a parameter of shape "
                        f"{tuple(param.shape)}, got a state with {came}; load a state dict saved "
                        "by the same kind of optimizer for the same shapes and settings"
                    )

    def _step_group(
        self,
        index: int,  # noqa: ARG002 (Shell's form)
        group: dict[str, Any],
        params: list[Tensor],
    ) -> None:
        items: list[Item] = []
        for param in params:
            state = self.state[param]
            if not state:
                state.update(self._new_state(group, param))
            if param.grad is not None and param.numel():  # the mean over no elements is NaN
                items.append((param, param.grad, state))
        if group.get("foreach") is not False:
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

    def _by_rule(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        super()._by_rule({**ABSENT, **group}, param, grad, state)


def state_dtype(param: torch.dtype) -> torch.dtype:
    """Return the state's dtype: at least float32, as half-precision running means get stuck."""
    return compute_dtype(param)
