"""What every clipping function takes and returns, and what it does with NaN and infinity."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from labcore import checks

__all__ = ["POLICIES", "Clipped", "Parameters"]

Parameters: TypeAlias = Tensor | Iterable[Tensor | tuple[str, Tensor]]

POLICIES = ("raise", "skip", "zero")
REAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipped:
    """What was measured and done. Tensors on the first gradient's device: reading them syncs.

    norms [K], float64: before clipping, of each of the K groups that were clipped together.
    coefficients [K], float64: the factor in (0, 1] on each group's gradients; 0 where a step was
    skipped.
    finite [], bool: whether every gradient came without NaN and infinity.
    names: of the groups, in order; sizes: how many of the K entries belong to each name (1, but
    for adaptive clipping, where a parameter has one for each of its units).
    norm_type: the order of the norms.
    """

    norms: Tensor
    coefficients: Tensor
    finite: Tensor
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    norm_type: float = 2.0

    @property
    def norm(self) -> Tensor:
        """[] float64: the norm of everything that was measured, before clipping."""
        if len(self.norms) == 0:
            return self.norms.new_zeros(())
        scale = self.norms.amax()
        scale = torch.where((scale > 0) & torch.isfinite(scale), scale, 1.0)
        return scale * torch.linalg.vector_norm(self.norms / scale, self.norm_type)

    def by_name(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each name its (norms, coefficients), [1] each, [units] for adaptive clipping."""
        norms, factors = self.norms.split(self.sizes), self.coefficients.split(self.sizes)
        return dict(zip(self.names, zip(norms, factors, strict=True), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients as clipping sees them: each once, those that are None left out.

    params, grads [n]: sparse gradients stand here coalesced, and so in `param.grad`.
    parts [n]: the memory that a change goes to: of a complex gradient its real view, of a sparse
    one its values, of a DTensor what this rank holds.
    named: whether every one came with a name. distributed: whether there are DTensors among them.
    readable: whether reading a number costs nothing, so that code may branch on it.
    """

    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    parts: tuple[Tensor, ...]
    named: bool
    readable: bool
    distributed: bool

    @property
    def device(self) -> torch.device:
        """Where norms and coefficients are: the first gradient's device."""
        return self.parts[0].device if self.parts else torch.device("cpu")


def named_pairs(parameters: Parameters) -> Iterator[tuple[str | None, Tensor]]:
    """(name or None, tensor) of each parameter. Raises TypeError for what is no parameter."""
    if isinstance(parameters, nn.Module):
        raise TypeError(
            "parameters must be tensors or (name, tensor) pairs, got a module; "
            "pass model.parameters() or model.named_parameters()"
        )
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    for item in parameters:
        name, param = item if isinstance(item, tuple) else (None, item)
        if not isinstance(param, Tensor):
            raise TypeError(
                f"parameters must be tensors or (name, tensor) pairs, got {type(param).__name__}; "
                "pass model.parameters() or model.named_parameters()"
            )
        yield name, param


def gradients(parameters: Parameters) -> Gradients:
    """Collect what there is to clip; what is reached twice (tied weights) counts once.

    Raises ValueError for two gradients of one name.
    """
    names, params, grads, parts = [], [], [], []
    named, seen = True, set()
    on_cpu, distributed = True, False
    dtensor: Any = dtensor_type()
    for index, (name, param) in enumerate(named_pairs(parameters)):
        grad = param.grad if param.is_leaf else _grad_of_inner(param)
        if grad is None:
            continue
        usual = grad.dtype in REAL and grad.layout is torch.strided and not grad.is_neg()
        if not usual:
            grad = param.grad = _plain(grad)
        # Tied weights are one object; two parameters may share a gradient too.
        if id(grad) in seen:
            continue
        seen.add(id(grad))
        part = grad.detach() if grad.requires_grad else grad
        if dtensor is not None and isinstance(grad, dtensor):
            distributed, part = True, grad.detach().to_local()
        if not usual:
            part = part.values() if part.is_sparse else part
            part = torch.view_as_real(part) if part.is_complex() else part
        on_cpu = on_cpu and part.is_cpu
        named = named and name is not None
        names.append(str(index) if name is None else name)
        params.append(param)
        grads.append(grad)
        parts.append(part)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"a name must belong to one parameter, got two gradients named {twice!r}; for several "
            "models pass named_parameters(prefix=...)"
        )
    return Gradients(
        names=tuple(names),
        params=tuple(params),
        grads=tuple(grads),
        parts=tuple(parts),
        named=named,
        readable=on_cpu and not torch.compiler.is_compiling(),
        distributed=distributed,
    )


def dtensor_type() -> Any:
    """torch's DTensor, or None where there cannot be one: importing its module takes a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    dtensor: Any = dtensor_type()
    return dtensor is not None and isinstance(tensor, dtensor)


def _grad_of_inner(tensor: Tensor) -> Tensor | None:
    with warnings.catch_warnings():  # torch warns when it is asked for the grad of a non-leaf
        warnings.simplefilter("ignore", UserWarning)
        return tensor.grad


def _plain(grad: Tensor) -> Tensor:
    """A gradient whose memory is what it says: sparse rows once each, no lazy sign or conjugate."""
    if grad.layout is torch.strided:
        return grad.resolve_conj().resolve_neg()
    if grad.layout is not torch.sparse_coo:
        raise TypeError(
            f"a gradient must be strided or sparse COO, got {grad.layout}; "
            "convert it with grad.to_sparse_coo()"
        )
    return grad if grad.is_coalesced() else grad.coalesce()


def limit_above_zero(name: str, value: float) -> float:
    """`value` as a float if it is above 0; infinity is allowed and means: measure only."""
    if isinstance(value, float) and value == math.inf:
        return value
    remedy = "pass float('inf') to measure without clipping"
    return float(checks.positive(name, value, remedy))


def policy(value: str) -> str:
    """`value` if it is one of POLICIES."""
    return checks.one_of("nonfinite", value, POLICIES)
