"""What `Offload` keeps above, predicted from shapes, and what it costs, measured in a short run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.prediction import estimate
from labcore.memory.model import batches, fresh, held_out_loss
from labcore.memory.offload import Offload, OffloadTraffic
from labcore.memory.tiers import Tier
from labcore.memory.zero import held
from labcore.models.config import LlamaConfig
from labcore.models.training import train

__all__ = ["OffloadRun", "offload_run", "offloaded"]


def offloaded(
    config: LlamaConfig, *, dtype: str = "float32", optimizer: str = "adamw"
) -> Breakdown:
    """Predict `Offload.peak` for `Llama(config)` with `blocks=model.layers`.

    The peak has all gradients, and the weights and state of two groups. Activations and workspace
    aren't included; offload doesn't change them.
    dtype, optimizer: as in `estimate`.
    """

    def step(layers: int) -> Breakdown:
        shape = replace(config, num_hidden_layers=layers)
        return estimate(shape, batch=1, length=1, dtype=dtype, optimizer=optimizer, moment="step")

    layers = config.num_hidden_layers
    one, two = step(1), step(2)
    # In a step: everything outside the layers plus the first layer, then pairs of layers.
    pairs = [
        (one.parameters, one.optimizer),
        (two.parameters, 2 * (two.optimizer - one.optimizer)),
    ]
    weights, state = max(pairs[:layers], key=sum)
    return Breakdown(parameters=weights, gradients=step(layers).gradients, optimizer=state)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadRun:
    """losses: nats per byte before each step; held_out: after the last; seconds: of all steps.

    peak: weights, gradients and state above. traffic: of the steps; zeros without offload.
    """

    losses: tuple[float, ...]
    held_out: float
    seconds: float
    peak: Breakdown
    traffic: OffloadTraffic


def offload_run(
    seed: int,
    *,
    steps: int = 20,
    tier: Tier | None = None,
    prefetch: bool = True,
    batch: int = 8,
    length: int = 256,
    lr: float = 2e-3,
) -> OffloadRun:
    """Train the chapter's model with AdamW and its layers in `tier`; None is without offload."""
    model, draw = fresh(seed), batches(seed, batch=batch, length=length)
    adamw = partial(torch.optim.AdamW, lr=lr)
    if tier is None:
        optimizer = adamw(list(model.parameters()))
        begin = time.perf_counter()
        curve = train(model, draw, optimizer, steps=steps, progress=False)
        seconds = time.perf_counter() - begin
        peak, traffic = held(model, optimizer), OffloadTraffic()
    else:
        with Offload(model, model.layers, adamw, tier, prefetch=prefetch) as offload:
            offload.traffic = OffloadTraffic()  # The initial writes aren't part of the steps.
            begin = time.perf_counter()
            curve = train(model, draw, offload, steps=steps, progress=False)  # type: ignore[arg-type]
            seconds, peak, traffic = time.perf_counter() - begin, offload.peak, offload.traffic
    return OffloadRun(
        losses=tuple(curve.losses),
        held_out=held_out_loss(model),
        seconds=seconds,
        peak=peak,
        traffic=traffic,
    )
