"""Which form of a model runs on a CPU: the fused one wherever it gives the model's own outputs.

A fused form copies the weights, so it's made again once the model has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from labcore.models.fused import FusedLlama
from labcore.models.llama import Llama

__all__ = ["MOST_WEIGHTS", "SharedForms", "fused_form", "why_not_fused"]

MOST_WEIGHTS = 2**28
"""The most weights of a model that are copied unless asked for: 1 GiB in fp32."""

_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.Sequential)
_WIDTH = 4096  # weights that are summed into one number

Model = TypeVar("Model", bound=nn.Module)
Form = TypeVar("Form")


def why_not_fused(model: nn.Module, family: type[nn.Module] = Llama) -> str:
    """Return why a model has no fused form, or "".

    It must be whole, in fp32 on the CPU, and unchanged: without hooks or replaced modules.
    family: the class whose file defines all of the model's modules, except for PyTorch's own.
    """
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            return f"it's on {parameter.device} in {parameter.dtype}, not on the CPU in float32"
    for name, module in model.named_modules():
        name = name or "the model"
        if type(module) not in _PLAIN and type(module).__module__ != family.__module__:
            return f"{name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has hooks"
        if "forward" in vars(module):
            return f"{name} has a forward of its own"
    if isinstance(model, Llama) and len(model.layers) != model.config.num_hidden_layers:
        layers = model.config.num_hidden_layers
        return f"it has {len(model.layers)} layers, its config says {layers}"
    return ""


class _Shared(NamedTuple, Generic[Form]):
    form: Form
    marks: list[tuple[object, ...]]
    sums: list[Tensor]


class SharedForms(Generic[Model, Form]):
    """One form per model, shared by all callers while the model's weights stay the same.

    make: builds the form, which must not refer to the model. A form is dropped with its model.
    Version counters tell of every change that PyTorch counts, however small. Products of the
    weights with random numbers tell of the others: replaced tensors, and writes to `weight.data`.
    Source of the products: Freivalds, 1977, "Probabilistic machines can use less running time".
    """

    def __init__(self, make: Callable[[Model], Form]) -> None:
        self._make = make
        self._shared: WeakKeyDictionary[Model, _Shared[Form]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @torch.inference_mode()
    def of(self, model: Model, others: Sequence[Tensor] = ()) -> Form:
        """Return the form of a model; others: tensors that it also uses, besides its parameters."""
        read = [*model.parameters(), *others]
        with self._lock:
            marks, sums = [_mark(one) for one in read], _sums(read)
            known = self._shared.get(model)
            if known is None or known.marks != marks or not _same(known.sums, sums):
                known = self._shared[model] = _Shared(self._make(model), marks, sums)
            return known.form


def _mark(tensor: Tensor) -> tuple[object, ...]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.shape, tensor.stride(), version


def _sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return products of all numbers with random ones, which are always the same."""
    found: list[Tensor] = []
    for tensor in tensors:
        row = tensor.detach().flatten()
        whole = len(row) // _WIDTH
        factors = _factors(max(whole, _WIDTH))
        found.append(factors[:whole] @ row[: whole * _WIDTH].view(whole, _WIDTH))
        rest = row[whole * _WIDTH :]
        found.append(factors[: len(rest)] @ rest)
    return found


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others))  # a NaN differs from itself, so the form is remade


_DRAWN = [torch.empty(0)]


def _factors(count: int) -> Tensor:
    """Return the first random factors, at least `count` of them: fp32."""
    if count > len(_DRAWN[0]):
        _DRAWN[0] = torch.randn(2 * count, generator=torch.Generator().manual_seed(0))
    return _DRAWN[0]


_FUSED: SharedForms[Llama, FusedLlama] = SharedForms(FusedLlama)


def fused_form(model: Llama, *, most: int | None = MOST_WEIGHTS) -> FusedLlama | None:
    """Return the fused form of a model as it is now, or None if `why_not_fused` gives a reason.

    The form keeps the weights that it was made from, so ask again after a change.
    most: None is returned for a model of more weights; a `most` of None sets no limit.
    """
    if why_not_fused(model):
        return None
    if most is not None and sum(parameter.numel() for parameter in model.parameters()) > most:
        return None
    return _FUSED.of(model)
