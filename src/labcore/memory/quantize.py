"""Weights in eight or four bits: each weight becomes a code, and each row or group shares a scale.

A weight-only layer stores codes and rounds nothing else: it multiplies with the dequantized
weights, which exist for one layer at a time. `Scheme` is the implementation to read, `Torchao` the
library to use; `convert` takes either.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from labcore.checks import finite, floating, one_of, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.shapes import parameter_shapes
from labcore.memory.model import held_out_loss, held_out_rows
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama
from labcore.timing import Timing, measure

__all__ = [
    "INT4",
    "INT8",
    "Quantized",
    "QuantizedLinear",
    "QuantizedPrice",
    "Scheme",
    "Torchao",
    "convert",
    "pack",
    "quantize",
    "quantized_bytes",
    "quantized_price",
    "stored_bytes",
    "unpack",
]

SCALE = 4  # bytes: scales and lows are float32
TIMED_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How to turn a weight [O, I] into codes.

    bits: 8, or 4 with two codes per byte.
    group_size: adjacent weights in a row that share a scale; None is the whole row, an output
    channel. It must divide I, and be even with 4 bits.
    symmetric: codes from -127 to 127 (-7 to 7) times a scale, so 0 stays 0. Otherwise codes from 0
    to 255 (15) times a scale, plus the group's lowest weight, which must be stored too.
    """

    bits: int = 8
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        one_of("bits", self.bits, (8, 4))
        if self.group_size is not None:
            positive_int("group_size", self.group_size)

    def groups(self, inputs: int, name: str = "weight") -> int:
        """Return the groups per row of `inputs` weights. Raises ValueError if they don't fit."""
        size = inputs if self.group_size is None else self.group_size
        if not inputs or inputs % size:
            raise ValueError(
                f"group_size must divide the rows of {name}, got {size} for {inputs} inputs; "
                "choose a divisor or keep that layer"
            )
        if self.bits == 4 and size % 2:
            raise ValueError(
                f"group_size must be even where two codes share a byte, got {size} for {name}; "
                "choose an even size or 8 bits"
            )
        return inputs // size

    def bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of the codes and scales of a weight [outputs, inputs] of any dtype."""
        numbers = 1 if self.symmetric else 2
        codes = outputs * inputs * self.bits // 8
        return codes + outputs * self.groups(inputs) * numbers * SCALE

    def check(self, name: str, weight: Tensor) -> None:
        """Raise ValueError for a weight [O, I] whose rows aren't a whole number of groups."""
        self.groups(weight.shape[1], name)

    def apply(self, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
        """Replace each layer by a `QuantizedLinear`, and remove it from `linears`."""
        for name in list(linears):
            model.set_submodule(name, QuantizedLinear(linears.pop(name), self))


INT8 = Scheme()
INT4 = Scheme(bits=4, group_size=32, symmetric=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """The codes of a weight [O, I] with G groups per row.

    codes: int8 [O, I]; uint8 [O, I] if asymmetric; uint8 [O, I / 2] for 4 bits.
    scales: float32 [O, G], the step from one code to the next.
    lows: float32 [O, G], the weight that code 0 represents; None for a symmetric scheme.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    scheme: Scheme

    def dequantize(self) -> Tensor:
        """Return the weights that the codes represent: float32 [O, I], a new tensor."""
        wide = (self.codes if self.scheme.bits == 8 else unpack(self.codes)).float()
        if self.scheme.bits == 4 and self.scheme.symmetric:
            wide -= 8
        groups = wide.unflatten(1, (self.scales.shape[1], -1))
        groups *= self.scales.unsqueeze(-1)
        if self.lows is not None:
            groups += self.lows.unsqueeze(-1)
        return wide

    def expected_rms(self) -> float:
        """Return the RMS error to expect if errors are uniform within ±half a step: step / √12."""
        return math.sqrt(self.scales.double().square().mean().item() / 12)


def pack(codes: Tensor) -> Tensor:
    """Pack two codes per byte: uint8 [O, I] of 0 to 15, I even -> uint8 [O, I / 2].

    An even column goes into the low four bits, the odd column after it into the high four.
    Raises ValueError for other codes, which would spill into their neighbors.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] % 2 or (codes > 15).any():
        raise ValueError(
            f"codes must be uint8 [O, I] of 0 to 15 with I even, got {codes.dtype} "
            f"{tuple(codes.shape)} up to {codes.max().item() if codes.numel() else 'none'}; "
            "quantize to 4 bits first"
        )
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`: uint8 [O, I / 2] -> uint8 [O, I]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


@torch.no_grad()
def quantize(weight: Tensor, scheme: Scheme) -> Quantized:
    """Return the nearest codes for a weight [O, I]; no weight is off by more than half a step.

    Half a step is the group's largest magnitude / 254 (/ 14 for 4 bits), or, if asymmetric, its
    range / 510 (/ 30). float32 rounding adds to that. Asymmetric codes are exact for a group of
    equal weights.
    weight: float; computed in float32. Raises ValueError for NaN, infinity (including float64
    numbers beyond float32's range), or rows that aren't a whole number of groups.
    """
    finite("weight", floating("weight", weight).float())
    if weight.dim() != 2:
        raise ValueError(f"weight must be [outputs, inputs], got shape {tuple(weight.shape)}")
    wide = weight.float().unflatten(1, (scheme.groups(weight.shape[1]), -1))
    if scheme.symmetric:
        most = 2 ** (scheme.bits - 1) - 1
        least, lows = -most, None
        scales = wide.abs().amax(-1) / most
    else:
        least, most = 0, 2**scheme.bits - 1
        lows = wide.amin(-1)
        scales = (wide.amax(-1) - lows) / most
        wide = wide - lows.unsqueeze(-1)
    # A scale of 0 means that any other step will do; 0 / 0 has no code.
    steps = torch.where(scales == 0, 1.0, scales)
    codes = (wide / steps.unsqueeze(-1)).round_().clamp_(least, most).flatten(1)
    if scheme.bits == 8:
        codes = codes.to(torch.int8 if scheme.symmetric else torch.uint8)
    else:
        codes = pack((codes + 8 if scheme.symmetric else codes).to(torch.uint8))
    return Quantized(codes=codes, scales=scales, lows=lows, scheme=scheme)


class _Product(torch.autograd.Function):
    """x [..., I] -> [..., O]. The backward dequantizes again, so no weight waits for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight.to(grad.dtype), None


class QuantizedLinear(nn.Module):
    """A linear layer that stores its weight as codes: x [..., I] -> [..., O].

    The forward dequantizes the weight in float32, casts it to the layer's dtype, multiplies, and
    frees it, so one layer at a time needs workspace. The input gets a gradient and the weight
    doesn't, so small adapters can be trained next to it. The scales are buffers, which
    `.to(torch.bfloat16)` would round, so choose the model's dtype before you convert it.

    linear: the layer to replace. Its bias doesn't change.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.scheme, self.dtype = scheme, linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        quantized = quantize(linear.weight, scheme)
        self.register_buffer("codes", quantized.codes)
        self.register_buffer("scales", quantized.scales)
        self.register_buffer("lows", quantized.lows)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, [O, I] in the layer's dtype; recomputed on each access."""
        kept = Quantized(codes=self.codes, scales=self.scales, lows=self.lows, scheme=self.scheme)
        return kept.dequantize().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to [..., O], in the dtype of x."""
        product: Tensor = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias

    def extra_repr(self) -> str:
        """Return what `print` shows for the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"


TORCHAO_GROUPS, TORCHAO_ROWS = (32, 64, 128), 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchao:
    """torchao's quantization, the library to use in practice.

    method: "int8" stores weights in 8 bits, symmetric per row. "int8 dynamic" also rounds each
    token's activations to 8 bits and multiplies integers, with one bit less where the CPU's 8-bit
    products would overflow (no VNNI). "int4" stores weights in 4 bits per group, as `INT4` does.
    group_size: for "int4", 32, 64 or 128.

    "int4" is torchao's prototype for CPUs, on torch's own kernel. The other int4 forms of torchao
    0.18 need a GPU or another library, and `IntxWeightOnlyConfig` spends a whole byte on a 4-bit
    code.
    """

    method: str = "int8"
    group_size: int = 32

    def __post_init__(self) -> None:
        one_of("method", self.method, ("int8", "int8 dynamic", "int4"))
        one_of("group_size", self.group_size, TORCHAO_GROUPS)

    def bytes(self, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes that torchao stores for a weight [outputs, inputs] of `dtype`.

        Raises ValueError for a shape that torchao would refuse.
        """
        self._fit("weight", outputs, inputs)
        if self.method == "int4":  # scale and zero in the weight's dtype
            groups = outputs * (inputs // self.group_size)
            return outputs * inputs // 2 + groups * 2 * dtype.itemsize
        return outputs * inputs + outputs * (SCALE + 1)  # a float32 scale and an int8 zero

    def check(self, name: str, weight: Tensor) -> None:
        """Raise ValueError for a weight [O, I] that torchao would refuse or silently skip."""
        self._fit(name, *weight.shape)
        if self.method == "int4" and weight.device.type != "cpu":
            raise ValueError(
                f"torchao's int4 runs on a CPU here, got {name} on {weight.device}; move the model"
            )

    def _fit(self, name: str, outputs: int, inputs: int) -> None:
        if self.method == "int4" and (inputs % self.group_size or outputs % TORCHAO_ROWS):
            raise ValueError(
                f"torchao's int4 needs a multiple of {self.group_size} inputs (group_size) and a "
                f"multiple of {TORCHAO_ROWS} outputs, got {(outputs, inputs)} for {name}; "
                "choose another group_size or keep that layer"
            )

    def apply(self, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
        """Replace each layer's weight by a torchao tensor."""
        library = _torchao()
        if self.method == "int4":
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

            settings = PrototypeInt4WeightOnlyConfig(
                group_size=self.group_size, set_inductor_config=False
            )
        elif self.method == "int8":
            settings = library.Int8WeightOnlyConfig(set_inductor_config=False)
        else:
            from torchao.utils import should_reduce_range

            device = next(iter(linears.values())).weight.device
            settings = library.Int8DynamicActivationInt8WeightConfig(
                set_inductor_config=False, reduce_range=should_reduce_range(device)
            )
        library.quantize_(model, settings, filter_fn=lambda _, name: name in linears)


def _torchao() -> ModuleType:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on a CPU it warns that GPU libraries don't load
    try:
        import torchao.quantization
    except ImportError as missing:
        raise RuntimeError(
            "Torchao needs torchao, which is not installed; run pip install 'torchao>=0.18,<0.19', "
            "or convert with a Scheme"
        ) from missing
    finally:
        logging.disable(before)
    return torchao.quantization


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
