"""The launcher of the fused path: one Triton launch updates a list of tensors.

Tensors are grouped by dtypes, alignment (an address that is not a multiple of 16 makes every load
scalar) and step count, so a typical model takes one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from labcore import device
from labcore.optim.chunked import is_dense

Item: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor]]
OPERANDS = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
INTERPRETED = 1 << 14  # the interpreter takes milliseconds per tile of any size


@dataclass(kw_only=True, slots=True)
class Launch:
    """The tensors of one launch."""

    key: Any
    operands: list[dict[str, Tensor]]  # for each tensor, some of OPERANDS with equal strides
    steps: list[Tensor]  # each tensor's step count, including this step; empty if not kept
    returns: list[tuple[Tensor, Tensor]]  # parameter, and the dense copy updated instead
    aligned: bool

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constant arguments that depend on the tensors."""
        import triton.language as tl

        names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        first = self.operands[0]
        return {
            "P": names[first["param"].dtype],
            "G": names[first["grad"].dtype],
            "S": names[first["exp_avg"].dtype],
            "HAS_MASTER": "master" in first,
            "ALIGNED": self.aligned,
        }


@dataclass(kw_only=True, slots=True)
class _Kept:
    """A launch's tables on the device, and what they were made from."""

    numels: list[int]
    blocks: Tensor  # int32 [programs, 2]: tensor, and block in it
    addresses: list[list[int]]
    table: Tensor  # int64 [6, tensors]: an address per operand, and the number of elements


class Tables:
    """Tables of addresses and blocks, on the device.

    Gradients move when they are allocated anew. Their addresses are then copied over the old ones,
    so the tables themselves never move, as a captured graph requires. Blocks depend on sizes only.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, _Kept] = {}

    def get(self, launch: Launch, block: int) -> tuple[Tensor, Tensor]:
        """Return `table` and `blocks`; see `kernels`."""
        numels = [operands["param"].numel() for operands in launch.operands]
        addresses = [[_address(o, name) for o in launch.operands] for name in OPERANDS]
        where = launch.operands[0]["param"].device
        kept = self._kept.get(launch.key)
        if kept is None or kept.numels != numels:
            counts = torch.tensor([-(-numel // block) for numel in numels])
            tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
            first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
            blocks = torch.stack([tensor, torch.arange(len(tensor)) - first], dim=1)
            kept = self._kept[launch.key] = _Kept(
                numels=numels,
                blocks=blocks.to(torch.int32).to(where),
                addresses=[],
                table=torch.empty(len(OPERANDS) + 1, len(numels), dtype=torch.int64, device=where),
            )
        if kept.addresses != addresses:
            rows = torch.tensor([*addresses, numels])
            # PyTorch keeps pinned memory until the copy has read it.
            rows = rows.pin_memory() if where.type == "cuda" else rows
            kept.table.copy_(rows, non_blocking=True)
            kept.addresses = addresses
        return kept.table, kept.blocks


def lion_step(
    items: Sequence[Item],
    tables: Tables,
    *,
    lr: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    weight_decay: float,
    capturable: bool,
    **choices: Any,
) -> None:
    """Take one Lion step. Arguments are as in `rules.lion`, or tensors if capturable.

    choices: maximize, stochastic, generator.
    """
    from labcore.optim import kernels

    for launch in _launches(items, capturable):
        scalars = [lr, 1 - lr * weight_decay, 1 - beta1, 1 - beta2]
        _run(kernels.lion_kernel, launch, tables, scalars, capturable=capturable, **choices)


def adamw_step(
    items: Sequence[Item],
    tables: Tables,
    *,
    lr: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    eps: float,
    weight_decay: float,
    eps_mode: str,
    eps_root: float,
    capturable: bool,
    **choices: Any,
) -> None:
    """Take one AdamW step; arguments as in `rules.adamw`, or tensors if capturable; no "atan2"."""
    from labcore.optim import kernels

    if eps_mode == "inside":
        eps, eps_root = 0.0, eps
    steps = [state["step"] for _, _, state in items]
    torch._foreach_add_(steps, 1)
    for launch in _launches(items, capturable):
        count: float | Tensor
        # Use float64, because 1 − beta^t loses most of its digits in float32 for small t.
        count = torch.stack(launch.steps).double() if capturable else float(launch.steps[0])
        scalars = [
            lr / (1 - beta1**count),
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / (1 - beta2**count),
            eps,
            eps_root,
        ]
        _run(kernels.adamw_kernel, launch, tables, scalars, capturable=capturable, **choices)


def _launches(items: Sequence[Item], capturable: bool) -> list[Launch]:
    """Group items into launches. With capturable, step counts aren't read, so they don't split."""
    launches: dict[Any, Launch] = {}
    for param, grad, state in items:
        if param.numel() == 0:
            continue
        operands = {"param": param, "grad": grad}
        operands |= {name: value for name, value in state.items() if name in OPERANDS}
        like = state["exp_avg"]
        operands = {name: _laid_out(value, like) for name, value in operands.items()}
        aligned = all(value.data_ptr() % 16 == 0 for value in operands.values())
        dtypes = tuple((name, value.dtype) for name, value in operands.items())
        count = float(state["step"]) if "step" in state and not capturable else 0.0
        parts = (param.device, dtypes, aligned, count)
        launch = launches.get(parts)
        if launch is None:
            # Leave the count out of the tables' key, because it changes at every step.
            key = (*parts[:3], sum(other[:3] == parts[:3] for other in launches))
            launch = Launch(key=key, operands=[], steps=[], returns=[], aligned=aligned)
            launches[parts] = launch
        launch.operands.append(operands)
        if "step" in state:
            launch.steps.append(state["step"])
        if operands["param"] is not param:
            launch.returns.append((param, operands["param"]))
    return list(launches.values())


def _run(
    kernel: Any,
    launch: Launch,
    tables: Tables,
    scalars: list[Any],
    *,
    capturable: bool,
    maximize: bool,
    stochastic: bool,
    generator: torch.Generator | None,
) -> None:
    from labcore.optim.kernels import BLOCK, TILE, WARPS

    block, tile = (INTERPRETED, INTERPRETED) if device.interpreting() else (BLOCK, TILE)
    table, blocks = tables.get(launch, block)
    tensors = len(launch.operands)
    on_device = table  # never read unless capturable
    if capturable:
        one = torch.ones(tensors, dtype=torch.float64, device=table.device)
        on_device = torch.stack([one * value for value in scalars], dim=1).float()
        scalars = [0.0] * len(scalars)
    seed = 0
    if stochastic:
        where = generator.device if generator is not None else "cpu"
        seed = int(torch.randint(1 << 30, (), generator=generator, device=where))
    # As on a GPU, inf − inf gives NaN without a warning.
    with torch.cuda.device_of(table), np.errstate(all="ignore"):
        kernel[(len(blocks),)](
            table,
            blocks,
            on_device,
            tensors,
            *scalars,
            seed,
            **launch.constants(),
            MAXIMIZE=maximize,
            STOCHASTIC=stochastic and launch.operands[0]["param"].dtype == torch.bfloat16,
            ON_DEVICE=capturable,
            BLOCK=block,
            TILE=tile,
            num_warps=WARPS,
        )
    # Autograd does not see the kernel's in-place writes.
    torch.autograd.graph.increment_version([operands["param"] for operands in launch.operands])
    for param, copy in launch.returns:
        param.copy_(copy)


def _address(operands: dict[str, Tensor], name: str) -> int:
    return operands[name].data_ptr() if name in operands else 0


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, or a copy of it in the dense layout of `like`."""
    if tensor.stride() == like.stride() and is_dense(tensor):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
