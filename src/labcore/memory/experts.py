"""Mixture of experts: many MLPs per layer, of which each token uses one.

A router sends every token to its most likely expert. Each expert has room for a fixed number of
tokens, its capacity, so shapes don't depend on the routing. Tokens beyond the capacity are dropped
and continue through the residual stream alone. The auxiliary loss keeps the load even across
experts.
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
    "route_tokens",
    "try_experts",
    "with_experts",
]

FLOAT = 4  # bytes
COEFFICIENT = 0.01  # of the auxiliary loss, the paper's


def capacity_of(tokens: int, experts: int, factor: float) -> int:
    """Return an expert's capacity in tokens: an equal share times `factor`, rounded up."""
    places = positive_int("tokens", tokens) * positive("capacity factor", factor)
    # 100 tokens, 10 experts and a factor of 1.1 give 11; in binary, 100 * 1.1 / 10 is a bit more.
    return math.ceil(places / positive_int("experts", experts) - 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """The routing of N tokens.

    probabilities: at least fp32 [N, E]. expert: int64 [N], the most likely one. gate: its
    probability [N]. slot: int64 [N], how many earlier tokens chose the same expert. kept: bool [N],
    whether the slot is below capacity.
    """

    probabilities: Tensor
    expert: Tensor
    gate: Tensor
    slot: Tensor
    kept: Tensor
    capacity: int

    @property
    def load(self) -> Tensor:
        """The share of tokens that chose each expert, including dropped tokens: [E]."""
        chosen = F.one_hot(self.expert, self.probabilities.shape[1])
        return chosen.to(self.probabilities.dtype).mean(0)

    @property
    def dropped(self) -> Tensor:
        """The share of tokens that were dropped."""
        return 1 - self.kept.float().mean()


def route_tokens(logits: Tensor, *, capacity_factor: float) -> Routing:
    """Route each token to its most likely expert, first come, first served.

    logits: the router's, floating point [N, E].
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [N, E], got {logits.dtype} {tuple(logits.shape)}"
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
    """Return E · Σ load · mean probability over the experts: 1 if both are even, at most E.

    The load has no gradient; only the probabilities are trained. Compute it per layer: in loads
    pooled over layers, opposite imbalances cancel.
    """
    return routing.probabilities.shape[1] * (routing.load * routing.probabilities.mean(0)).sum()


class SwitchMLP(nn.Module):
    """`experts` SwiGLU MLPs in place of one; weights [E, I, C], [E, I, C] and [E, C, I].

    routing: from the last forward. The router computes in at least float32, even under autocast.
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
        """Map x [..., C] to the same shape; dropped tokens give zeros."""
        tokens = x.flatten(0, -2)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.to(wide), self.router.to(wide))
        routing = route_tokens(logits, capacity_factor=self.capacity_factor)
        self.routing = routing
        slots = self.experts * routing.capacity
        # One extra slot takes the dropped tokens, so no shape depends on their number.
        place = torch.where(routing.kept, routing.expert * routing.capacity + routing.slot, slots)
        queues = tokens.new_zeros(slots + 1, tokens.shape[1]).index_copy(0, place, tokens)
        done = self._compute(queues[:slots].unflatten(0, (self.experts, -1))).flatten(0, 1)
        done = torch.cat((done, done.new_zeros(1, done.shape[1])))
        return (done[place] * routing.gate.to(done.dtype)[:, None]).unflatten(0, x.shape[:-1])

    def __getstate__(self) -> dict[str, Any]:
        """Drop the routing from copies: torch can't deep-copy tensors that belong to a graph."""
        return {**self.__dict__, "routing": None}

    def _compute(self, x: Tensor) -> Tensor:
        """Run each expert on its own queue; x: [E, capacity, C]."""
        gate, up = x @ self.gate_proj.mT, x @ self.up_proj.mT
        return (F.silu(gate) * up) @ self.down_proj.mT


def with_experts(
    model: Llama, experts: int, *, capacity_factor: float = 1.25, seed: int = 0
) -> Llama:
    """Replace each MLP of the model by fresh experts of the same size, in place; return the model.

    Weights are drawn from `seed`; dtype and device are the model's.
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
        raise ValueError(
            "the model must have experts and must have run a forward, got no routing; call "
            "with_experts, then the model"
        )
    return made


def model_balance_loss(model: nn.Module) -> Tensor:
    """Return the mean of `balance_loss` over the layers with experts, for their last forward."""
    return torch.stack([balance_loss(routing) for routing in _routings(model)]).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Total parameters, and the active ones that process a single token."""

    total: int
    active: int


def count_parameters(model: nn.Module) -> Counts:
    """Count parameters. A token uses each layer's router and one expert, and everything else."""
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
    """Predict the bytes of a float32 AdamW step: those of `estimate` plus what the experts add.

    Weights, gradients and moments grow with the number of experts, activations only with the
    capacity.
    """
    width, wide, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    matrix, tokens = width * wide, batch * length
    slots = experts * capacity_of(tokens, experts, capacity_factor)
    more = layers * (3 * (experts - 1) * matrix + experts * width) * FLOAT
    # The queues, four MLP rows for each slot beyond the dense MLP's, the results before the gate;
    # the router's probabilities, and int64 indices.
    kept = (slots + 1) * width + 4 * (slots - tokens) * wide + tokens * (width + experts + 1)
    activations = layers * (kept * FLOAT + tokens * 3 * 2 * FLOAT)
    backward = estimate(config, batch=batch, length=length, moment="backward")
    backward = replace(backward, activations=backward.activations + activations)
    step = estimate(config, batch=batch, length=length, moment="step")
    # torch's loop makes two temporaries per matrix and still holds one of the previous matrix.
    workspace = max(step.workspace, 3 * experts * matrix * FLOAT)
    step = replace(step, gradients=step.gradients + more, workspace=workspace)
    found = [
        replace(one, parameters=one.parameters + more, optimizer=one.optimizer + 2 * more)
        for one in (backward, step)
    ]
    return max(found, key=lambda breakdown: breakdown.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsTrial:
    """The result of `try_experts`.

    trial: bytes, seconds, and the loss without the auxiliary loss. busiest: the load of each
    layer's busiest expert in the last batch. dropped: the mean share of dropped tokens in that
    batch.
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
    """Train the chapter's model with `experts` experts per layer, each as large as the dense MLP.

    A token then uses as many parameters as in the dense model, plus a router.
    coefficient: of the auxiliary loss; 0 turns it off.
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
