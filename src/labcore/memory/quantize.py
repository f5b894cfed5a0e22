"""Weights in eight or four bits: a number becomes a code, a row or a group of a row one scale.

A weight-only layer keeps the codes and rounds nothing else: its product runs on the weights that
the codes stand for, widened for one layer at a time. `Scheme` is the form to read, `Torchao` the
library to use; `convert` takes either.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from labcore.checks import finite, floating, one_of, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.part import parameter_shapes
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
    """How one weight [O, I] becomes codes.

    bits: 8, or 4: two codes to a byte.
    group_size: neighbours in a row that share a scale; None is the whole row, an output channel.
    It must divide I, and with 4 bits be even.
    symmetric: codes from -127 to 127 (from -7 to 7) times a scale, so 0 stays 0; else codes from 0
    to 255 (15) times a scale, above the group's lowest weight, which costs one number more.
    """

    bits: int = 8
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        one_of("bits", self.bits, (8, 4))
        if self.group_size is not None:
            positive_int("group_size", self.group_size)

    def groups(self, inputs: int, name: str = "weight") -> int:
        """Groups in a row of `inputs` weights. Raises ValueError where they do not fit."""
        size = inputs if self.group_size is None else self.group_size
        if not inputs or inputs % size:
            raise ValueError(
                f"group_size must divide the rows of {name}, got {size} for {inputs} inputs; "
                "choose a divisor or keep that layer"
            )
        if self.bits == 4 and size % 2:
            raise ValueError(
                f"group_size must be even where two codes share a byte, got {size} for {name}; "
                "choose an even one or 8 bits"
            )
        return inputs // size

    def bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of the codes and scales of a weight [outputs, inputs], whatever its dtype was."""
        numbers = 1 if self.symmetric else 2
        codes = outputs * inputs * self.bits // 8
        return codes + outputs * self.groups(inputs) * numbers * SCALE

    def check(self, name: str, weight: Tensor) -> None:
        """ValueError for a weight [O, I] whose rows the groups do not fill."""
        self.groups(weight.shape[1], name)

    def apply(self, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
        """Put a `QuantizedLinear` into each layer's place, and take that layer out of `linears`."""
        for name in list(linears):
            model.set_submodule(name, QuantizedLinear(linears.pop(name), self))


INT8 = Scheme()
INT4 = Scheme(bits=4, group_size=32, symmetric=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """The codes of a weight [O, I] in G groups a row.

    codes: int8 [O, I], uint8 [O, I] without symmetry, uint8 [O, I / 2] for 4 bits.
    scales: float32 [O, G], the step from one code to the next.
    lows: float32 [O, G], what code 0 stands for; None for a symmetric scheme.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None
    scheme: Scheme

    def dequantize(self) -> Tensor:
        """The weights that the codes stand for: float32 [O, I], a new tensor."""
        wide = (self.codes if self.scheme.bits == 8 else unpack(self.codes)).float()
        if self.scheme.bits == 4 and self.scheme.symmetric:
            wide -= 8
        groups = wide.unflatten(1, (self.scales.shape[1], -1))
        groups *= self.scales.unsqueeze(-1)
        if self.lows is not None:
            groups += self.lows.unsqueeze(-1)
        return wide

    def expected_rms(self) -> float:
        """The error's expected root mean square: of a uniform one, ±half a step: step / √12."""
        return math.sqrt(self.scales.double().square().mean().item() / 12)


def pack(codes: Tensor) -> Tensor:
    """Two codes to a byte: uint8 [O, I] of 0 to 15, I even -> uint8 [O, I / 2].

    An even column goes into the low four bits, the odd one after it into the high four.
    Raises ValueError for other codes: they would run into their neighbours.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] % 2 or (codes > 15).any():
        raise ValueError(
            f"codes must be uint8 [O, I] of 0 to 15 with I even, got {codes.dtype} "
            f"{tuple(codes.shape)} up to {codes.max().item() if codes.numel() else 'none'}; "
            "quantize to 4 bits first"
        )
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """What `pack` packed: uint8 [O, I / 2] -> uint8 [O, I]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


@torch.no_grad()
def quantize(weight: Tensor, scheme: Scheme) -> Quantized:
    """Codes of a weight [O, I], each the nearest, so that no weight errs by more than half a step.

    That is the group's largest magnitude / 254 (/ 14 for 4 bits), without symmetry its range / 510
    (/ 30), besides float32's own rounding. A group of equal weights is exact without symmetry.
    weight: float; computed in float32. Raises ValueError for NaN, infinity (a float64 number beyond
    float32's range is one), or rows that the groups do not fill.
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
    # In a group of equal weights any step will do but 0: 0 / 0 has no code.
    steps = torch.where(scales == 0, 1.0, scales)
    codes = (wide / steps.unsqueeze(-1)).round_().clamp_(least, most).flatten(1)
    if scheme.bits == 8:
        codes = codes.to(torch.int8 if scheme.symmetric else torch.uint8)
    else:
        codes = pack((codes + 8 if scheme.symmetric else codes).to(torch.uint8))
    return Quantized(codes=codes, scales=scales, lows=lows, scheme=scheme)


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is kept as codes: x [..., I] -> [..., O].

    A forward widens its codes to float32 and the layer's dtype, multiplies, and lets them go:
    workspace for one layer at a time. The input has gradients, the weight none, so small adapters
    can be trained beside it. The scales are buffers: `.to(torch.bfloat16)` would round them, so
    choose the model's dtype before converting it.

    linear: the layer to take over. Its bias stays as it is.
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
        """The weights behind the codes, [O, I] in the layer's dtype; made anew each time."""
        kept = Quantized(codes=self.codes, scales=self.scales, lows=self.lows, scheme=self.scheme)
        return kept.dequantize().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O], in the dtype of x."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"


TORCHAO_GROUPS, TORCHAO_ROWS = (32, 64, 128), 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchao:
    """torchao's quantization, the library that a user would take.

    method: "int8" keeps weights in 8 bits, symmetric by row; "int8 dynamic" rounds each token's
    activations to 8 bits too and multiplies integers, with one bit less where the CPU's 8-bit
    products would overflow (no VNNI); "int4" keeps weights in 4 bits by groups, as `INT4` does.
    group_size: for "int4", 32, 64 or 128.

    "int4" is torchao's prototype for CPUs, on torch's own kernel: the other int4 forms of 0.18
    need a GPU or a library more, and `IntxWeightOnlyConfig` spends a whole byte on a 4-bit code.
    """

    method: str = "int8"
    group_size: int = 32

    def __post_init__(self) -> None:
        one_of("method", self.method, ("int8", "int8 dynamic", "int4"))
        one_of("group_size", self.group_size, TORCHAO_GROUPS)

    def bytes(self, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of what torchao keeps of a weight [outputs, inputs] of `dtype`.

        Raises ValueError for a shape that it would refuse.
        """
        self._fit("weight", outputs, inputs)
        if self.method == "int4":  # scale and zero in the weight's dtype
            groups = outputs * (inputs // self.group_size)
            return outputs * inputs // 2 + groups * 2 * dtype.itemsize
        return outputs * inputs + outputs * (SCALE + 1)  # a float32 scale and an int8 zero

    def check(self, name: str, weight: Tensor) -> None:
        """ValueError for a weight [O, I] that torchao would refuse, or pass over in silence."""
        self._fit(name, *weight.shape)
        if self.method == "int4" and weight.device.type != "cpu":
            raise ValueError(
                f"torchao's int4 runs on a CPU here, got {name} on {weight.device}; move the model"
            )

    def _fit(self, name: str, outputs: int, inputs: int) -> None:
        if self.method == "int4" and (inputs % self.group_size or outputs % TORCHAO_ROWS):
            raise ValueError(
                f"torchao's int4 takes rows of a multiple of {self.group_size} (group_size) and a "
                f"multiple of {TORCHAO_ROWS} outputs, got {(outputs, inputs)} for {name}; "
                "choose another group_size or keep that layer"
            )

    def apply(self, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
        """Put a tensor of torchao's into the place of each layer's weight."""
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
    logging.disable(logging.WARNING)  # on a CPU it reports that its GPU libraries do not load
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
    """Quantize the weights of every nn.Linear of `model`, in place, one layer after the other.

    keep: names of layers that stay as they are, such as "lm_head". Embeddings and norms stay too.
    A `Scheme` puts a `QuantizedLinear` into the layer's place, `Torchao` a tensor of torchao's into
    its weight; neither trains. Raises, before anything is changed, ValueError for a layer that the
    scheme does not fit or that is not finite, a name that is no layer, or a model without layers to
    quantize; RuntimeError where torchao is missing.
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
    """Bytes of the parameters of `Llama(config)` in `dtype` after `convert`; None: before it."""
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
    """Bytes of the distinct storages behind parameters and buffers, those of torchao's included."""
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

    predicted, stored: bytes of the parameters. loss: held out, in nats a byte.
    seconds: of a forward of 8 rows of 256 bytes.
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
    """Bytes, loss and time of a copy of `model` after `convert`; with None, of the model itself."""
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
