"""ZeRO: weights, gradients and optimizer state sharded over data-parallel processes.

Stage 1 shards the optimizer state, stage 2 also the gradients, and stage 3 also the weights. Stage
1 is torch's ZeroRedundancyOptimizer, which assigns whole parameters to ranks. Stages 2 and 3 are
FSDP2, which splits each parameter by rows. Between steps FSDP2 keeps only shards, even at stage 2.
It gathers a layer's weights for the forward. Stage 2 keeps them until that layer's backward; stage
3 frees them after the forward and gathers them again. Weights outside the layers (embedding, final
norm, head) stay gathered from the forward to the end of the backward in both stages.

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
    """Shard the model and its optimizer over the ranks of the process group; call it on every rank.

    model: the same on every rank; stages 2 and 3 change it in place.
    stage: 0 to 3; 0 is plain data parallelism. Gradients are averaged over the ranks.
    settings: of the optimizer. If an element's update depends on more than that element's own
    history (Adafactor, SM3, 8-bit blocks), the optimizer gives other results on rows of a
    parameter. Stages 2 and 3 need one like AdamW.
    Raises ValueError for another stage, and torch's own errors without a process group.
    """
    if one_of("stage", stage, STAGES) < 2:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if stage == 0:
            return wrapped, optimizer(model.parameters(), **settings)
        # This import and the ones below take a second each.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return wrapped, ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=optimizer, **settings
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = model.embed_tokens.weight.device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers.children():  # iterating would yield checkpointed segments
        fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, optimizer(model.parameters(), **settings)


def held(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Breakdown:
    """Return the bytes of weights, gradients and optimizer state that this process holds.

    Each storage counts once. Of a sharded tensor, only this process's shard counts.
    """
    # ZeroRedundancyOptimizer keeps its shard's state in an inner optimizer.
    states = [getattr(optimizer, "optim", optimizer).state for optimizer in optimizers]
    return Breakdown(
        parameters=_nbytes([*model.parameters(), *model.buffers()]),
        gradients=_nbytes(p.grad for p in model.parameters()),
        optimizer=_nbytes(tree_leaves([list(state.values()) for state in states])),
    )


def _nbytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the distinct storages of the tensors among the leaves."""
    local = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in leaves]
    storages = [tensor.untyped_storage() for tensor in local if isinstance(tensor, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroRun:
    """What one rank measured.

    losses: nats per byte over all ranks' rows, before each step. held: bytes after the last step,
    gradients included. gathered: the most bytes of whole weights held beside the shards while a
    layer computed; 0 in stages 0 and 1, which don't shard weights. seconds: of all steps.
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
    """Train the chapter's model with AdamW on this rank's rows; batch: rows over all ranks.

    Call it on every rank: `processes.run(train_divided, 2, 0, stage=3)`, or the same call in a
    script under torchrun. Raises ValueError for a batch that the ranks can't share equally.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    positive_int("steps", steps)
    if positive_int("batch", batch) % ranks:
        raise ValueError(
            f"batch must be a multiple of the {ranks} ranks, got {batch}; ranks take equal shares"
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
