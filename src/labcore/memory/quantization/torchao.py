"""torchao's eight and four bits, the library to use in practice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from labcore.checks import one_of
from labcore.memory.quantization.scheme import SCALE

__all__ = ["Torchao"]

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
