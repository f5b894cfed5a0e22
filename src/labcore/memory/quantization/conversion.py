"""A model's layers converted to a scheme of quantization, and what that saves and costs."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from labcore.checks import finite
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.shapes import parameter_shapes
from labcore.memory.model import held_out_loss, held_out_rows
from labcore.memory.quantization.scheme import Scheme
from labcore.memory.quantization.torchao import Torchao
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama
from labcore.timing import Timing, measure

__all__ = ["QuantizedPrice", "convert", "quantized_bytes", "quantized_price", "stored_bytes"]

TIMED_ROWS = 8


def convert(model: nn.Module, scheme: Scheme | Torchao, *, keep: Collection[str] = ()) -> None:
    """Quantize the weight of every nn.Linear in `model`, in place, one layer at a time.

    keep: names of layers to leave as they are, such as "lm_head". Embeddings and norms also stay. A
    `Scheme` replaces the layer by a `QuantizedLinear`, `Torchao` replaces its weight by a torchao
    tensor; neither is trainable.
    Raises ValueError, before changing anything, for a layer that doesn't fit the scheme or isn't
    finite, a name that isn't a layer, or a model without layers to quantize; RuntimeError if
    torchao isn't installed.
    """
    linears = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    linears = {name: linears[name] for name in _chosen(linears, keep)}
    for name, linear in linears.items():
        finite(f"{name}.weight", linear.weight.float())
        scheme.check(name, linear.weight)
    scheme.apply(model, linears)


def _chosen(names: Collection[str], keep: Collection[str]) -> list[str]:
    if unknown := sorted(set(keep) - set(names)):
        raise ValueError(f"keep must name linear layers of the model, got {unknown}")
    chosen = [name for name in names if name not in keep]
    if not chosen:
        raise ValueError("convert needs a layer of type nn.Linear that is not kept, got none")
    return chosen


def quantized_bytes(
    config: LlamaConfig,
    scheme: Scheme | Torchao | None,
    *,
    keep: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Breakdown:
    """Return the parameter bytes of `Llama(config)` in `dtype` after `convert`; None: before it."""
    shapes = parameter_shapes(config)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    linears = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and name != "embed_tokens.weight"
    ]
    if scheme is not None:
        for name in _chosen(linears, keep):
            outputs, inputs = shapes[f"{name}.weight"]
            if isinstance(scheme, Scheme):
                sizes[f"{name}.weight"] = scheme.bytes(outputs, inputs)
            else:
                sizes[f"{name}.weight"] = scheme.bytes(outputs, inputs, dtype)
    return Breakdown(parameters=sum(sizes.values()))


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of the distinct storages of parameters and buffers, torchao's included."""
    waiting: list[Tensor] = [*model.parameters(), *model.buffers()]
    found: dict[int, int] = {}
    while waiting:
        tensor = waiting.pop()
        if is_traceable_wrapper_subclass(tensor):
            waiting += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedPrice:
    """What a scheme saves and costs.

    predicted, stored: bytes of the parameters. loss: held out, in nats per byte.
    seconds: per forward over 8 rows of 256 bytes.
    """

    predicted: int
    stored: int
    loss: float
    seconds: Timing


@torch.no_grad()
def quantized_price(
    model: Llama,
    scheme: Scheme | Torchao | None,
    *,
    keep: Collection[str] = (),
    repeats: int = 5,
) -> QuantizedPrice:
    """Measure bytes, loss and time of a copy of `model` after `convert`; None: unquantized."""
    tried = copy.deepcopy(model)
    if scheme is not None:
        convert(tried, scheme, keep=keep)
    embedding = model.embed_tokens.weight
    rows = held_out_rows(TIMED_ROWS)[:, :-1].to(embedding.device)
    return QuantizedPrice(
        predicted=quantized_bytes(model.config, scheme, keep=keep, dtype=embedding.dtype).total,
        stored=stored_bytes(tried),
        loss=held_out_loss(tried),
        seconds=measure(lambda: tried(rows), repeats=repeats),
    )
