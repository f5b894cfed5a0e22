"""Mixture of experts: many MLPs, of which each token passes through one.

A router gives every token to its likeliest expert. Each expert has room for a fixed number of
tokens, its capacity, so that shapes do not depend on the routing; who comes later is dropped and
goes on by the residual stream alone. The auxiliary loss keeps the experts evenly used.
Source: Fedus, Zoph and Shazeer, 2021, arXiv 2101.03961.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import non_negative, positive, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.prediction import estimate
from labcore.memory.model import batches, fresh
from labcore.memory.trials import Trial, adamw, trial
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama
from labcore.models.training import next_token_loss

__all__ = [
    "Counts",
    "ExpertsTrial",
    "Routing",
    "SwitchMLP",
    "balance_loss",
    "capacity_of",
    "count_parameters",
    "estimate_experts",
    "model_balance_loss",
    "route",
    "try_experts",
    "with_experts",
]

FLOAT = 4  # bytes
COEFFICIENT = 0.01  # of the auxiliary loss, the paper's


def capacity_of(tokens: int, experts: int, factor: float) -> int:
    """Tokens for which one expert has room: an equal share times `factor`, rounded up."""
    places = positive_int("tokens", tokens) * positive("capacity factor", factor)
    # 100 tokens for 10 experts at 1.1 are 11 each; in binary 100 * 1.1 / 10 is a hair more.
    return math.ceil(places / positive_int("experts", experts) - 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """Where N tokens go.

    probabilities: at least fp32 [N, E]. expert: int64 [N], the likeliest. gate: its probability
    [N]. slot: int64 [N], how many earlier tokens chose the same expert. kept: bool [N], whether
    that is below capacity.
    """

    probabilities: Tensor
    expert: Tensor
    gate: Tensor
    slot: Tensor
    kept: Tensor
    capacity: int

    @property
    def load(self) -> Tensor:
        """The share of the tokens that chose each expert, dropped ones too: [E]."""
        chosen = F.one_hot(self.expert, self.probabilities.shape[1])
        return chosen.to(self.probabilities.dtype).mean(0)

    @property
    def dropped(self) -> Tensor:
        """The share of the tokens that found no room."""
        return 1 - self.kept.float().mean()


def route(logits: Tensor, *, capacity_factor: float) -> Routing:
    """Each token to its likeliest expert, first come, first served.

    logits: the router's, floating [N, E].
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating [N, E], got {logits.dtype} {tuple(logits.shape)}"
        )
    tokens, experts = logits.shape
    capacity = capacity_of(tokens, experts, capacity_factor)
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    gate, expert = probabilities.max(-1)
    chosen = F.one_hot(expert, experts)
    slot = (chosen.cumsum(0) * chosen).sum(-1) - 1
    return Routing(
        probabilities=probabilities,
        expert=expert,
        gate=gate,
        slot=slot,
        kept=slot < capacity,
        capacity=capacity,
    )


def balance_loss(routing: Routing) -> Tensor:
    """E · Σ load · mean probability over the experts: 1 where both are even, at most E.

    The load has no gradient; what is pushed are the probabilities. Of one layer: joined over the
    layers, loads that are uneven in opposite ways cancel.
    """
    return routing.probabilities.shape[1] * (routing.load * routing.probabilities.mean(0)).sum()


class SwitchMLP(nn.Module):
    """`experts` SwiGLU MLPs in the place of one; weights [E, I, C], [E, I, C] and [E, C, I].

    routing: that of the last forward. The router computes in at least float32, under autocast too.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        experts: int,
        capacity_factor: float = 1.25,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.experts = positive_int("experts", experts)
        self.capacity_factor = positive("capacity_factor", capacity_factor)
        narrow, wide = config.hidden_size, config.intermediate_size
        self.router = nn.Parameter(torch.empty(experts, narrow))
        self.gate_proj = nn.Parameter(torch.empty(experts, wide, narrow))
        self.up_proj = nn.Parameter(torch.empty(experts, wide, narrow))
        self.down_proj = nn.Parameter(torch.empty(experts, narrow, wide))
        self.routing: Routing | None = None
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(0.0, config.initializer_range, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., C]; returns the same shape, zeros for tokens that were dropped."""
        tokens = x.flatten(0, -2)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.to(wide), self.router.to(wide))
        routing = route(logits, capacity_factor=self.capacity_factor)
        self.routing = routing
        slots = self.experts * routing.capacity
        # One slot more, for those who are dropped: no shape depends on how many they are.
        place = torch.where(routing.kept, routing.expert * routing.capacity + routing.slot, slots)
        queues = tokens.new_zeros(slots + 1, tokens.shape[1]).index_copy(0, place, tokens)
        done = self._compute(queues[:slots].unflatten(0, (self.experts, -1))).flatten(0, 1)
        done = torch.cat((done, done.new_zeros(1, done.shape[1])))
        return (done[place] * routing.gate.to(done.dtype)[:, None]).unflatten(0, x.shape[:-1])

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no forward behind it: torch copies no tensor that belongs to a graph."""
        return {**self.__dict__, "routing": None}

    def _compute(self, x: Tensor) -> Tensor:
        """x: [E, capacity, C]; each expert on its own queue."""
        gate, up = x @ self.gate_proj.mT, x @ self.up_proj.mT
        return (F.silu(gate) * up) @ self.down_proj.mT


def with_experts(
    model: Llama, experts: int, *, capacity_factor: float = 1.25, seed: int = 0
) -> Llama:
    """The model, each of its MLPs replaced by fresh experts of the same size, in place.

    Weights are drawn from `seed`; dtype and device are those of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    like = model.embed_tokens.weight
    for layer in model.layers:
        mlp = SwitchMLP(
            model.config, experts=experts, capacity_factor=capacity_factor, generator=generator
        )
        layer.mlp = mlp.to(device=like.device, dtype=like.dtype)
    return model


def _routings(model: nn.Module) -> list[Routing]:
    found = [module.routing for module in model.modules() if isinstance(module, SwitchMLP)]
    made = [routing for routing in found if routing is not None]
    if not made:
        raise ValueError("the model must have experts and a forward behind it; see with_experts")
    return made


def model_balance_loss(model: nn.Module) -> Tensor:
    """Mean of `balance_loss` over the layers with experts, of their last forward."""
    return torch.stack([balance_loss(routing) for routing in _routings(model)]).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Parameters in all, and those through which one token passes."""

    total: int
    active: int


def count_parameters(model: nn.Module) -> Counts:
    """A token passes through the router and one expert of each layer, and all the rest."""
    total = sum(p.numel() for p in model.parameters())
    idle = 0
    for module in model.modules():
        if isinstance(module, SwitchMLP):
            matrices = (module.gate_proj, module.up_proj, module.down_proj)
            idle += sum(p.numel() - p[0].numel() for p in matrices)
    return Counts(total=total, active=total - idle)


def estimate_experts(
    config: LlamaConfig,
    *,
    experts: int,
    capacity_factor: float = 1.25,
    batch: int,
    length: int,
) -> Breakdown:
    """Bytes of a step of AdamW in float32: those of `estimate`, and what the experts add.

    Weights, gradients and moments grow with all experts; activations only with the capacity.
    """
    width, wide, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    matrix, tokens = width * wide, batch * length
    slots = experts * capacity_of(tokens, experts, capacity_factor)
    more = layers * (3 * (experts - 1) * matrix + experts * width) * FLOAT
    # The queues, four rows of an MLP for each slot that the dense one does not have, the results
    # before the gate; of the router, probabilities, and indices as int64.
    kept = (slots + 1) * width + 4 * (slots - tokens) * wide + tokens * (width + experts + 1)
    activations = layers * (kept * FLOAT + tokens * 3 * 2 * FLOAT)
    backward = estimate(config, batch=batch, length=length, moment="backward")
    backward = replace(backward, activations=backward.activations + activations)
    step = estimate(config, batch=batch, length=length, moment="step")
    # torch's loop makes two temporaries of a matrix and still has one of the matrix before.
    workspace = max(step.workspace, 3 * experts * matrix * FLOAT)
    step = replace(step, gradients=step.gradients + more, workspace=workspace)
    found = [
        replace(one, parameters=one.parameters + more, optimizer=one.optimizer + 2 * more)
        for one in (backward, step)
    ]
    return max(found, key=lambda breakdown: breakdown.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsTrial:
    """trial: bytes, seconds, loss without the auxiliary one. busiest: of the last batch, the share
    of each layer's busiest expert. dropped: the mean share of tokens without room, there.
    """

    trial: Trial
    counts: Counts
    busiest: tuple[float, ...]
    dropped: float


def try_experts(
    seed: int,
    experts: int,
    *,
    steps: int,
    capacity_factor: float = 1.25,
    coefficient: float = COEFFICIENT,
    batch: int = 8,
    length: int = 256,
) -> ExpertsTrial:
    """Train the topic's model with `experts` experts in each layer, each as large as its MLP.

    A token then passes through as many parameters as in the dense model, and a router.
    coefficient: of the auxiliary loss; 0 leaves the router alone.
    """
    non_negative("coefficient", coefficient)
    model = with_experts(fresh(seed), experts, capacity_factor=capacity_factor, seed=seed)
    optimizer, draw = adamw(model), batches(seed, batch=batch, length=length)

    def step(n: int) -> None:
        optimizer.zero_grad()
        loss, count = next_token_loss(model, *draw(n))
        (loss / count + coefficient * model_balance_loss(model)).backward()
        optimizer.step()

    found = trial(model, optimizer, step, steps=steps)
    last = _routings(model)
    return ExpertsTrial(
        trial=found,
        counts=count_parameters(model),
        busiest=tuple(routing.load.max().item() for routing in last),
        dropped=sum(routing.dropped.item() for routing in last) / len(last),
    )
