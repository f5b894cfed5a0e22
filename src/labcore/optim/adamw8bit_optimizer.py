"""AdamW with 8-bit moments: a code per number and a scale per block of numbers.

A block is divided by its largest magnitude, and each number becomes the index of the nearest value
in a map; see `map_8bit`.

`AdamW8bit(..., fused=True)` does all of a step in one Triton kernel. No GPU has run it yet: tests
run it in Triton's interpreter, and compile it for GPUs. `torchao.optim.AdamW8bit` and bitsandbytes
have been used for years. torchao compiles its step for each new shape. On a CPU this needs a C++
compiler and takes minutes; `torch.compiler.set_stance("force_eager")` around its `step` avoids it.
"""

import functools
from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from labcore import checks, device
from labcore.optim import rules
from labcore.optim.chunked import CHUNK
from labcore.optim.fused import Tables, adamw_step
from labcore.optim.fused_8bit import BLOCK_SIZES, adamw8bit_step
from labcore.optim.map_8bit import dynamic_map
from labcore.optim.shell import Item, Layout, check_betas, layout_bytes
from labcore.optim.tensorwise import TensorShell, state_dtype

__all__ = ["AdamW8bit", "dequantize_blocks", "quantize_blocks"]

SMALLEST = 4096  # smaller states stay in float32, as in bitsandbytes and torchao
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the map and the midpoints between its values, where rounding switches."""
    values = dynamic_map(signed=signed).to(device)
    return values, (values[1:] + values[:-1]) / 2


@functools.cache
def _maps(device: torch.device) -> Tensor:
    """Return maps and midpoints for the kernel, signed and then unsigned, float32 [4, 256]."""
    rows = [row for signed in (True, False) for row in _tables(signed, device)]
    return torch.stack([functional.pad(row, (0, 256 - len(row)), value=inf) for row in rows])


def quantize_blocks(
    x: Tensor, *, signed: bool = True, block_size: int = 256
) -> tuple[Tensor, Tensor]:
    """Quantize x [any shape] to codes, uint8 [shape of x], and scales, float32 [number of blocks].

    A block is `block_size` elements in row-major order; the last may be shorter. Its scale is its
    largest magnitude. Each element becomes the nearest value of the map, with an error of at most
    `largest_error` scales. Without a sign, a number above 0 never becomes 0: a zero second moment
    with a nonzero first moment would cause a division by eps. NaN or infinity spoils its block.

    x: floating point, computed in float32. If `signed` is False, numbers below 0 become 0.
    Raises ValueError for a block_size below 1.
    """
    checks.positive_int("block_size", block_size)
    flat = functional.pad(x.reshape(-1).float(), (0, -x.numel() % block_size))
    blocks = flat.view(-1, block_size)
    scales = blocks.abs().amax(1)
    unit = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    _, borders = _tables(signed, x.device)
    codes = torch.bucketize(unit, borders, out_int32=True, right=True)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view(-1)[: x.numel()].view(x.shape), scales


def dequantize_blocks(
    codes: Tensor, scales: Tensor, *, signed: bool = True, block_size: int = 256
) -> Tensor:
    """Restore a float32 tensor [shape of codes] from the output of `quantize_blocks`."""
    values, _ = _tables(signed, codes.device)
    wide = scales.repeat_interleave(block_size)[: codes.numel()]
    return values[codes.int()] * wide.view(codes.shape)


class AdamW8bit(TensorShell):
    """AdamW with both moments in 8 bits.

    State: `exp_avg` and `exp_avg_sq` as uint8 codes [shape of the parameter], with `..._scales`
    float32, one per block: 2.03 bytes per weight instead of 8. Parameters with fewer than 4096
    elements keep float32 moments. A step processes the parameter in pieces: it restores their
    moments, applies `rules.adamw` in float32, and quantizes the moments again. The weight update
    uses the moments before that quantization. This is written to be read; `fused` does the same in
    one Triton launch for all parameters of a dtype, and either can load the other's state.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, at least 0. A one-element tensor is read at every step.
        betas: (beta1, beta2), each in [0, 1).
        eps: added to the root of the second moment, in units of the gradient.
        weight_decay: decoupled weight decay λ, per unit of lr.
        block_size: the number of elements that share a scale; fused needs a power of two from 64
            to 1024.
        maximize: maximize the objective. The gradient itself never changes.
        fused: update by a Triton kernel, in float32; not for float64 parameters.
        master_weights: keep a float32 copy of bfloat16 and float16 parameters in the state.
        stochastic_rounding: round bfloat16 parameters stochastically, without bias.
        generator: the random generator for rounding, on the parameters' device (any if fused);
            None for torch's default. The caller must save its state.
        nonfinite: what to do about a NaN or infinite gradient. "propagate" makes weights NaN,
            "raise" raises RuntimeError before any weight changes, and "skip" skips the parameter's
            step and counts it in `optimizer.skipped`.

    Errors: ValueError and TypeError for settings and complex parameters, RuntimeError for sparse
    gradients. Source: Dettmers et al., arXiv 2110.02861.
    """

    rule = staticmethod(rules.adamw)
    neutral: ClassVar[dict[str, Any]] = {
        **{name: value for name, value in TensorShell.neutral.items() if name != "foreach"},
        "fused": None,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
        maximize: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        generator: torch.Generator | None = None,
        nonfinite: str = "propagate",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block_size": block_size,
            "maximize": maximize,
            "fused": fused,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "nonfinite": nonfinite,
        }
        self._tables = Tables()
        super().__init__(params, defaults, generator)

    @staticmethod
    def state_bytes(
        shape: Sequence[int], dtype: torch.dtype = torch.float32, *, block_size: int = 256
    ) -> int:
        """Return the bytes of state for a parameter of this shape and dtype, without a master."""
        return layout_bytes(_layout(tuple(shape), dtype, block_size))

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        checks.non_negative("eps", group["eps"])
        checks.positive_int("block_size", group["block_size"])
        if group["fused"]:
            checks.one_of("block_size with fused=True", group["block_size"], BLOCK_SIZES)
        super()._check_group(group)

    def _check_param(self, group: dict[str, Any], param: Tensor) -> None:
        super()._check_param(group, param)
        if not group["fused"]:
            return
        if param.dtype == torch.float64:
            raise ValueError(
                "fused computes in float32, got a torch.float64 parameter; use fused=False"
            )
        try:
            device.choose_backend("triton", param, op="AdamW8bit")
        except ValueError as error:
            raise ValueError(f"fused=True cannot run; use fused=False: {error}") from None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables = Tables()

    def _layout(self, group: dict[str, Any], param: Tensor) -> Layout:
        return _layout(tuple(param.shape), param.dtype, group["block_size"])

    def _hyperparameters(self, group: dict[str, Any], *, tensors: bool = False) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        same = {"eps": group["eps"], "weight_decay": group["weight_decay"]}
        return {
            "lr": group["lr"] if tensors else float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            **same,
        }

    def _update(
        self,
        index: int,  # noqa: ARG002 (Shell's form)
        group: dict[str, Any],
        items: list[Item],
    ) -> None:
        items = [item for item in items if item[0].numel()]  # an empty tensor has no blocks
        if group["fused"]:
            self._fused(group, items)
            return
        for item in items:
            self._block_step(group, *item)

    def _fused(self, group: dict[str, Any], items: list[Item]) -> None:
        settings = {
            **self._hyperparameters(group),
            "maximize": group["maximize"],
            "stochastic": group["stochastic_rounding"],
            "generator": self.generator,
        }
        if wide := [item for item in items if "exp_avg_scales" not in item[2]]:
            adamw_step(
                wide, self._tables, eps_mode="outside", eps_root=0.0, capturable=False, **settings
            )
        if narrow := [item for item in items if "exp_avg_scales" in item[2]]:
            size = group["block_size"]
            adamw8bit_step(narrow, self._tables, block_size=size, maps=_maps, **settings)

    def _block_step(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if "exp_avg_scales" not in state:
            self._by_rule(group, param, grad, state)
            return
        step = state["step"].item()
        state["step"] += 1
        for weight, slope, piece in _pieces(param, grad, state, group["block_size"]):
            moments = {
                name: dequantize_blocks(
                    piece[name],
                    piece[f"{name}_scales"],
                    signed=signed,
                    block_size=group["block_size"],
                )
                for name, signed in SIGNED.items()
            }
            if "master" in piece:
                moments["master"] = piece["master"]
            self._apply(group, weight, slope, moments, step)
            for name, signed in SIGNED.items():
                codes, scales = quantize_blocks(
                    moments[name], signed=signed, block_size=group["block_size"]
                )
                piece[name].copy_(codes)
                piece[f"{name}_scales"].copy_(scales)


def _layout(shape: tuple[int, ...], dtype: torch.dtype, block_size: int) -> Layout:
    layout: Layout = {"step": ((), torch.float32)}
    for name in SIGNED:
        if prod(shape) < SMALLEST:
            layout[name] = (shape, state_dtype(dtype))
        else:
            layout[name] = (shape, torch.uint8)
            layout[f"{name}_scales"] = ((-(-prod(shape) // block_size),), torch.float32)
    return layout


def _pieces(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], block_size: int
) -> Iterable[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Yield views of weights, gradients and state in whole blocks, to keep temporaries small.

    Blocks are in row-major order, so a tensor with another memory layout is one piece.
    """
    arrays = {name: value for name, value in state.items() if name != "step"}
    wide = {name: value for name, value in arrays.items() if not name.endswith("_scales")}
    if not all(value.is_contiguous() for value in (param, *wide.values())):
        yield param, grad, arrays
        return
    blocks = max(1, CHUNK // block_size)
    tensors = {"param": param, "grad": grad.reshape(-1), **wide}
    split = {name: value.view(-1).split(blocks * block_size) for name, value in tensors.items()}
    split |= {name: arrays[name].split(blocks) for name in arrays.keys() - wide.keys()}
    for pieces in zip(*split.values(), strict=True):
        piece = dict(zip(split, pieces, strict=True))
        yield piece.pop("param"), piece.pop("grad"), piece
