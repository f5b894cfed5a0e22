"""What all clipping functions share: arguments, results, and policies for NaN and infinity."""

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
    """What was measured and done. Its tensors are on the first gradient's device: reading syncs.

    norms [K], float64: the norm of each of the K groups before clipping.
    coefficients [K], float64: the factor in (0, 1] applied to each group's gradients, or 0 if the
    step was skipped.
    finite [], bool: whether all gradients were free of NaN and infinity.
    names: the groups' names, in order. sizes: how many of the K entries belong to each name: 1,
    except for adaptive clipping, where a parameter has one entry per unit.
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
        """[] float64: the norm of all measured gradients together, before clipping."""
        if len(self.norms) == 0:
            return self.norms.new_zeros(())
        scale = self.norms.amax()
        scale = torch.where((scale > 0) & torch.isfinite(scale), scale, 1.0)
        return scale * torch.linalg.vector_norm(self.norms / scale, self.norm_type)

    def by_name(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Map each name to (norms, coefficients): [1] each, or [units] for adaptive clipping."""
        norms, factors = self.norms.split(self.sizes), self.coefficients.split(self.sizes)
        return dict(zip(self.names, zip(norms, factors, strict=True), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """The gradients to clip: each once, without those that are None.

    params, grads [n]: sparse gradients are coalesced, here and in `param.grad`.
    parts [n]: the memory to change: the real view of a complex gradient, the values of a sparse
    one, this rank's shard of a DTensor.
    named: whether every gradient has a name. distributed: whether any is a DTensor.
    readable: whether reading a number costs nothing, so code may branch on it.
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
        """The device of norms and coefficients: the first gradient's."""
        return self.parts[0].device if self.parts else torch.device("cpu")


def named_pairs(parameters: Parameters) -> Iterator[tuple[str | None, Tensor]]:
    """Yield (name or None, tensor) per parameter. Raises TypeError for anything else."""
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
    """Collect the gradients to clip. One that appears twice (tied weights) counts once.

    Raises ValueError if two gradients have the same name.
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
        # Tied weights are one object, and two parameters may also share a gradient.
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
            f"names must be unique, got two gradients named {twice!r}; for several models, pass "
            "named_parameters(prefix=...)"
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
    """Return torch's DTensor, or None if it isn't loaded yet (importing it takes a second)."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_distributed(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor."""
    dtensor: Any = dtensor_type()
    return dtensor is not None and isinstance(tensor, dtensor)


def _grad_of_inner(tensor: Tensor) -> Tensor | None:
    with warnings.catch_warnings():  # reading the grad of a non-leaf warns
        warnings.simplefilter("ignore", UserWarning)
        return tensor.grad


def _plain(grad: Tensor) -> Tensor:
    """Materialize a gradient: coalesce sparse rows, resolve lazy negation and conjugation."""
    if grad.layout is torch.strided:
        return grad.resolve_conj().resolve_neg()
    if grad.layout is not torch.sparse_coo:
        raise TypeError(
            f"a gradient must be strided or sparse COO, got {grad.layout}; "
            "convert it with grad.to_sparse_coo()"
        )
    return grad if grad.is_coalesced() else grad.coalesce()


def limit_above_zero(name: str, value: float) -> float:
    """Return `value` as a float if it is above 0. Infinity means to measure without clipping."""
    if isinstance(value, float) and value == math.inf:
        return value
    remedy = "pass float('inf') to measure without clipping"
    return float(checks.positive(name, value, remedy))


def policy(value: str) -> str:
    """Return `value` if it is one of POLICIES."""
    return checks.one_of("nonfinite", value, POLICIES)
