"""The launcher of the fused path of AdamW8bit: one Triton launch updates a list of tensors.

This is the counterpart of `fused` for 8-bit moments. A launch also has a table of the scales'
addresses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labcore import device
from labcore.optim.fused import INTERPRETED, OPERANDS, Item, Launch, Tables

BLOCK_SIZES = (64, 128, 256, 512, 1024)  # a tile of the kernel has whole blocks
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True, slots=True)
class Launch8bit(Launch):
    """The tensors of one launch, in row-major order as the blocks are. `returns` also has state."""

    scales: list[dict[str, Tensor]]  # of each tensor's moments

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constant arguments that depend on the tensors."""
        import triton.language as tl

        first = self.operands[0]
        p, g, s = (
            getattr(tl, str(first[name].dtype).removeprefix("torch."))
            for name in ("param", "grad", "exp_avg")
        )
        master = "master" in first
        return {"P": p, "G": g, "S": s, "HAS_MASTER": master, "ALIGNED": self.aligned}


def adamw8bit_step(
    items: Sequence[Item],
    tables: Tables,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **choices: Any,
) -> None:
    """Take one AdamW step. Arguments are as in `rules.adamw`.

    choices: block_size, one of BLOCK_SIZES; maps, a function that returns the kernel's maps on a
    device; maximize, stochastic, generator.
    """
    torch._foreach_add_([state["step"] for _, _, state in items], 1)
    for launch in _launches(items):
        count = float(launch.steps[0])
        scalars = [
            lr / (1 - beta1**count),
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / (1 - beta2**count),
            eps,
        ]
        _run(launch, tables, scalars, **choices)


def _launches(items: Sequence[Item]) -> list[Launch8bit]:
    """Group items by device, dtypes, alignment and step count."""
    launches: dict[Any, Launch8bit] = {}
    for param, grad, state in items:
        tensors = {"param": param, "grad": grad, **state}
        rows = {name: value.contiguous() for name, value in tensors.items()}
        operands = {name: rows[name] for name in OPERANDS if name in rows}
        aligned = all(value.data_ptr() % 16 == 0 for value in operands.values())
        dtypes = tuple((name, value.dtype) for name, value in operands.items())
        kind = (param.device, dtypes, aligned)
        parts = (*kind, float(state["step"]))
        if parts not in launches:
            # Leave the count out of the tables' key, because it changes at every step.
            key = (*kind, sum(other[:-1] == kind for other in launches))
            launches[parts] = Launch8bit(
                key=key, operands=[], scales=[], steps=[], returns=[], aligned=aligned
            )
        launch = launches[parts]
        launch.operands.append(operands)
        launch.scales.append({name: rows[f"{name}_scales"] for name in MOMENTS})
        launch.steps.append(state["step"])
        launch.returns += [
            (tensors[name], row)
            for name, row in rows.items()
            if name != "grad" and row is not tensors[name]
        ]
    return list(launches.values())


def _run(
    launch: Launch8bit,
    tables: Tables,
    scalars: list[float],
    *,
    block_size: int,
    maps: Callable[[torch.device], Tensor],
    maximize: bool,
    stochastic: bool,
    generator: torch.Generator | None,
) -> None:
    from labcore.optim.kernels import BLOCK, TILE
    from labcore.optim.kernels_8bit import WARPS, adamw8bit_kernel

    block, tile = (INTERPRETED, INTERPRETED) if device.interpreting() else (BLOCK, TILE)
    table, blocks = tables.get(launch, block)
    scales = Launch(
        key=("scales", launch.key),
        operands=[{"param": each["exp_avg"], **each} for each in launch.scales],
        steps=[],
        returns=[],
        aligned=False,
    )
    seed = 0
    if stochastic:
        where = generator.device if generator is not None else "cpu"
        seed = int(torch.randint(1 << 30, (), generator=generator, device=where))
    # As on a GPU, inf − inf gives NaN without a warning.
    with torch.cuda.device_of(table), np.errstate(all="ignore"):
        adamw8bit_kernel[(len(blocks),)](
            table,
            tables.get(scales, block)[0],
            blocks,
            maps(table.device),
            len(launch.operands),
            *scalars,
            seed,
            **launch.constants(),
            MAXIMIZE=maximize,
            STOCHASTIC=stochastic and launch.operands[0]["param"].dtype == torch.bfloat16,
            BLOCK_SIZE=block_size,
            BLOCK=block,
            TILE=tile,
            num_warps=WARPS,
        )
    # Autograd does not see the kernel's in-place writes.
    torch.autograd.graph.increment_version([operands["param"] for operands in launch.operands])
    for tensor, row in launch.returns:
        tensor.copy_(row)
