"""The base class of Lion and AdamW, which treat each element of a tensor by itself.

So a step may cut tensors into pieces and join small ones: `foreach` is chunks on a CPU and torch's
`_foreach` operations on a GPU, and `fused` is one compiled pass on a CPU and one Triton launch per
device and dtype on a GPU.
"""

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from labcore import checks, device
from labcore.optim.chunked import Chunk, ChunkedStep, Flat, Update
from labcore.optim.compiled import apply_compiled
from labcore.optim.fused import Tables
from labcore.optim.shell import Item, Layout, Shell, check_betas

STATE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


def by_triton(param: Tensor) -> bool:
    """Return whether `fused` updates this parameter by Triton: not on a CPU.

    `compile_only` and tests replace this function to reach the kernels without a GPU.
    """
    return param.device.type != "cpu"


class ElementwiseShell(Shell):
    """State, checks and paths of an optimizer whose rule acts on each element by itself.

    A subclass defines its rule, moments and hyperparameters, and a fast implementation per path.
    """

    moments: ClassVar[tuple[str, ...]]
    counts_steps: ClassVar[bool]
    choices: ClassVar[tuple[str, ...]] = ()  # hyperparameters that the rule branches on
    neutral: ClassVar[dict[str, Any]] = {
        **Shell.neutral,
        "fused": None,
        "capturable": False,
        "state_dtype": None,
    }

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        generator: torch.Generator | None,
    ) -> None:
        self._plans: dict[int, ChunkedStep] = {}
        self._tables = Tables()
        super().__init__(params, defaults, generator)

    # Defined by subclasses ------------------------------------------------

    def cpu_update(self, group: dict[str, Any]) -> Chunk | None:
        """Return an in-place update of 1-D pieces of one dtype, or None to use the rule."""
        raise NotImplementedError

    def _fused(self, group: dict[str, Any], items: list[Item]) -> None:
        """Take one step by Triton."""
        raise NotImplementedError

    # Groups and state -----------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its settings override the optimizer's and are checked the same way."""
        super().add_param_group(param_group)
        self._plans.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._tables = {}, Tables()

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        checks.one_of("state_dtype", group["state_dtype"], STATE_DTYPES)
        if group["foreach"] and group["fused"]:
            raise ValueError("foreach and fused must not both be True; set only one of them")
        if group["capturable"] and group["nonfinite"] != "propagate":
            raise ValueError(
                "capturable=True never reads a gradient on the host, got "
                f"nonfinite={group['nonfinite']!r}; use nonfinite='propagate'"
            )
        super()._check_group(group)

    def _check_param(self, group: dict[str, Any], param: Tensor) -> None:
        low_precision = group["master_weights"] or group["stochastic_rounding"]
        if param.is_complex() and (
            group["state_dtype"] is not None or low_precision or group["fused"]
        ):
            raise ValueError(
                "state_dtype, master_weights, stochastic_rounding and fused need real "
                f"parameters, got {param.dtype}; leave them at their defaults in its group"
            )
        super()._check_param(group, param)
        if group["fused"]:
            self._check_fused(group, param)

    def _check_fused(self, group: dict[str, Any], param: Tensor) -> None:
        if param.dtype == torch.float64:
            raise ValueError(
                "fused computes in float32, got a torch.float64 parameter; use foreach=True"
            )
        if group["capturable"] and group["stochastic_rounding"]:
            raise ValueError(
                "a captured fused step would always replay the same seed, got "
                "stochastic_rounding=True; use foreach=True, or master_weights=True"
            )
        if by_triton(param):
            try:
                device.choose_backend("triton", param, op=type(self).__name__)
            except ValueError as error:
                raise ValueError(f"fused=True cannot run; use fused=False: {error}") from None

    def _state_dtype(self, group: dict[str, Any], param: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's moments."""
        return group["state_dtype"] or param.dtype

    def _layout(self, group: dict[str, Any], param: Tensor) -> Layout:
        layout: Layout = {"step": ((), torch.float32)} if self.counts_steps else {}
        moment = tuple(param.shape), self._state_dtype(group, param)
        return layout | dict.fromkeys(self.moments, moment)

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
        state = super()._new_state(group, param)
        if self.counts_steps and group["capturable"]:  # a graph replays it
            state["step"] = state["step"].to(param.device)
        return state

    # One step -------------------------------------------------------------

    def _update(self, index: int, group: dict[str, Any], items: list[Item]) -> None:
        if group["fused"]:
            if launched := [item for item in items if by_triton(item[0])]:
                self._fused(group, launched)
            items = [item for item in items if not by_triton(item[0])]
            if not items:  # what follows reads a learning rate on the host
                return
        if group["fused"] or group["foreach"] is not False:
            if all(param.device.type == "cpu" for param, _, _ in items):
                self._chunked(index, group, items)
                return
            if self._foreach(group, _real_items(items)):
                return
        for item in _real_items(items):
            self._by_rule(group, *item, tensors=group["capturable"])

    def _chunked(self, index: int, group: dict[str, Any], items: list[Item]) -> None:
        params, states = [item[0] for item in items], [item[2] for item in items]
        plan = self._plans.get(index)
        if plan is None or not plan.fits(params, states):
            plan = self._plans[index] = ChunkedStep(params, states)
        plan.step(
            Update(
                whole=functools.partial(self._whole, group) if group["fused"] else None,
                chunk=self.cpu_update(group),
                by_rule=functools.partial(self._apply, group),
                store=functools.partial(self._store, group),
                maximize=group["maximize"],
            )
        )

    def _whole(self, group: dict[str, Any], flats: list[Flat], step: float) -> bool:
        """Update vectors of equal dtypes in one compiled pass, or return False to use pieces."""
        if group["stochastic_rounding"] and flats[0][0].dtype == torch.bfloat16:
            return False  # drawing the random bits takes most of the time
        counted = {"step": step} if self.counts_steps else {}
        return apply_compiled(
            type(self).rule,
            flats,
            maximize=group["maximize"],
            choices=self.choices,
            **counted,
            **self._hyperparameters(group),
        )


def _real_items(items: list[Item]) -> list[Item]:
    """View complex tensors as pairs of reals, so that rules act on each component."""
    real = []
    for param, grad, state in items:
        if param.is_complex():
            state = {
                name: torch.view_as_real(value) if value.is_complex() else value
                for name, value in state.items()
            }
            param, grad = torch.view_as_real(param), torch.view_as_real(grad.resolve_conj())
        real.append((param, grad, state))
    return real
