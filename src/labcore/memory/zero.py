"""Weights, gradients and optimizer state divided among processes that train on different rows.

Stage 1 divides the optimizer's state, stage 2 the gradients too, stage 3 the weights too. Stage 1
is torch's ZeroRedundancyOptimizer, which gives whole parameters to ranks; stages 2 and 3 are FSDP2,
which divides each parameter by rows. Between steps FSDP2 keeps only shards at stage 2 as well: it
gathers a layer's weights for the forward, and stage 2 lets them stand until its backward, stage 3
frees them after its forward and gathers them again. What belongs to no layer (embedding, final
norm, head) stands from the forward to the end of the backward in both.

Source: Rajbhandari et al., 2019, arXiv 1910.02054.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from labcore.checks import one_of, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.states import STAGES
from labcore.memory.model import batches, fresh
from labcore.models.llama import Llama
from labcore.models.training import next_token_loss

__all__ = ["ZeroRun", "divide", "held", "train_divided"]


def divide(
    model: Llama,
    stage: int,
    optimizer: type[torch.optim.Optimizer],
    **settings: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, divided among the ranks of the process group; call it in all.

    model: the same on every rank; stages 2 and 3 change it in place.
    stage: 0 to 3; 0 is plain data parallelism. Gradients are means over the ranks.
    settings: of the optimizer. One that looks at more than an element's own history (Adafactor,
    SM3, blocks of 8 bits) is another on rows of a parameter: stages 2 and 3 want one like AdamW.
    Raises ValueError for another stage, and torch's own errors without a process group.
    """
    if one_of("stage", stage, STAGES) < 2:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if stage == 0:
            return wrapped, optimizer(model.parameters(), **settings)
        # This import and those below take a second each.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return wrapped, ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=optimizer, **settings
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = model.embed_tokens.weight.device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers.children():  # iterating over checkpointed layers gives stretches
        fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, optimizer(model.parameters(), **settings)


def held(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Breakdown:
    """Bytes that this process holds of weights, gradients and optimizer state, each storage once.

    Of what is divided among processes, this one's part.
    """
    # ZeroRedundancyOptimizer keeps the state in the optimizer that it makes for its own share.
    states = [getattr(optimizer, "optim", optimizer).state for optimizer in optimizers]
    return Breakdown(
        parameters=_nbytes([*model.parameters(), *model.buffers()]),
        gradients=_nbytes(p.grad for p in model.parameters()),
        optimizer=_nbytes(tree_leaves([list(state.values()) for state in states])),
    )


def _nbytes(leaves: Iterable[Any]) -> int:
    """Of the distinct storages behind the tensors among the leaves."""
    local = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in leaves]
    storages = [tensor.untyped_storage() for tensor in local if isinstance(tensor, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroRun:
    """What one rank saw.

    losses: nats a byte of all ranks' rows before each step. held: bytes when the last step ended,
    gradients still standing. gathered: the most bytes of whole weights that stood beside the
    shards while a layer computed; 0 in stages 0 and 1, which divide none. seconds: of all steps.
    """

    losses: tuple[float, ...]
    held: Breakdown
    gathered: int
    seconds: float


def train_divided(
    seed: int,
    *,
    stage: int,
    steps: int = 3,
    batch: int = 8,
    length: int = 256,
    lr: float = 2e-3,
    dtype: torch.dtype = torch.float32,
) -> ZeroRun:
    """Train the topic's model by AdamW on this process's rows; batch: of all ranks together.

    Call it in all ranks of a group: `processes.run(train_divided, 2, 0, stage=3)`, and the same
    line in a script under torchrun. Raises ValueError for a batch that the ranks cannot share.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    positive_int("steps", steps)
    if positive_int("batch", batch) % ranks:
        raise ValueError(
            f"batch must be a multiple of the {ranks} ranks, got {batch}; each takes as many"
        )
    whole = fresh(seed, dtype=dtype)
    draw = batches(seed, batch=batch, length=length)
    losses: list[float] = []
    gathered = [0]

    def look(*_: object) -> None:
        standing = [p for p in whole.parameters() if not hasattr(p, "to_local")]
        gathered.append(_nbytes(standing) if stage > 1 else 0)

    for number in range(len(whole.layers)):
        whole.get_submodule(f"layers.{number}.mlp").register_forward_hook(look)
    model, optimizer = divide(whole, stage, torch.optim.AdamW, lr=lr)
    begin = time.perf_counter()
    for step in range(steps):
        tokens = draw(step)[0].tensor_split(ranks)[rank]
        optimizer.zero_grad()
        loss, count = next_token_loss(model, tokens)  # type: ignore[arg-type]
        mean = loss / count
        mean.backward()
        optimizer.step()
        shared = mean.detach() / ranks
        dist.all_reduce(shared)
        losses.append(shared.item())
    return ZeroRun(
        losses=tuple(losses),
        held=held(model, optimizer),
        gathered=max(gathered),
        seconds=time.perf_counter() - begin,
    )
