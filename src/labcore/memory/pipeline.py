"""Pipeline parallelism: layers split over devices, and micro-batches that keep them busy.

Each of p stages has its share of the layers. A batch passes through all stages and back as m
micro-batches. While the pipeline fills and drains, stages are idle. Under GPipe and 1F1B alike,
this bubble takes the share (p - 1) / (m + p - 1) of all stages' time. GPipe keeps the activations
of m micro-batches. 1F1B starts each backward as soon as it can, so stage s keeps at most p - s.

Sources: Huang et al., 2019, arXiv 1811.06965 (GPipe); Narayanan et al., 2021, arXiv 2104.04473
(1F1B and its bubble). The schedules are torch.distributed.pipelining's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.checks import one_of, positive, positive_int
from labcore.memory.accounting.breakdown import Breakdown
from labcore.memory.accounting.meter import Meter
from labcore.memory.model import batches, fresh
from labcore.models.llama import Llama, inverse_frequencies

__all__ = [
    "SCHEDULES",
    "PipelineRun",
    "Stage",
    "StageWork",
    "bubble",
    "idle",
    "in_flight",
    "train_stage",
]

SCHEDULES = ("gpipe", "1f1b")
METERED = 2  # steps; the first creates the optimizer state


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of all stages' time that they spend idle: (p - 1) / (m + p - 1)."""
    positive_int("stages", stages)
    return (stages - 1) / (positive_int("micro_batches", micro_batches) + stages - 1)


def in_flight(stage: int, stages: int, micro_batches: int, *, schedule: str) -> int:
    """Return the most micro-batches whose activations a stage keeps at a time."""
    one_of("schedule", schedule, SCHEDULES)
    one_of("stage", stage, range(positive_int("stages", stages)))
    positive_int("micro_batches", micro_batches)
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


class Stage(nn.Module):
    """One stage's share of a Llama: the modules themselves, not copies.

    Layers are split as evenly as possible, with one more in earlier stages. The first stage also
    has the embedding, and the last one the final norm and the head.
    model: with an untied head, because a tied one would have to be on two devices.
    """

    def __init__(self, model: Llama, stage: int, stages: int) -> None:
        super().__init__()
        one_of("stage", stage, range(positive_int("stages", stages)))
        config = self.config = model.config
        if config.tie_word_embeddings or stages > config.num_hidden_layers:
            raise ValueError(
                f"a pipeline needs a head that is not tied and a layer for each of {stages} "
                f"stages, got tie_word_embeddings={config.tie_word_embeddings} and "
                f"{config.num_hidden_layers} layers; change the config or pass fewer stages"
            )
        own = torch.arange(config.num_hidden_layers).tensor_split(stages)[stage]
        self.embed_tokens = model.embed_tokens if stage == 0 else None
        self.layers = nn.ModuleDict({str(layer): model.layers[layer] for layer in own.tolist()})
        self.norm = model.norm if stage == stages - 1 else None
        self.lm_head = model.lm_head if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x to the residual stream [B, T, C], or to logits in the last stage.

        x: tokens [B, T] in the first stage, else the stream [B, T, C].
        """
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).float()
        angles = positions[:, None] * inverse_frequencies(self.config, x.device)
        # What a layer reads per forward; all rows have the same positions.
        step = SimpleNamespace(
            cos=angles.cos().to(x.dtype)[None, None],
            sin=angles.sin().to(x.dtype)[None, None],
            cache=None,
            counts=None,
        )
        for layer in self.layers.values():
            x = layer(x, step)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """A stage's forward or backward of one micro-batch.

    kind: "forward" or "backward". begin, end: seconds on the machine's clock.
    """

    kind: str
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRun:
    """What one stage measured.

    losses: nats per byte before each step; empty except on the last stage. works: of each step, in
    the order in which they ran; the meter slows down the first two steps. peak, most: `Meter`'s,
    for this stage. weights: the stage's parameters after the last step, by their names in the whole
    model.
    """

    losses: tuple[float, ...]
    works: tuple[tuple[StageWork, ...], ...]
    peak: Breakdown
    most: Breakdown
    weights: dict[str, Tensor]


def train_stage(
    seed: int,
    *,
    schedule: str,
    micro_batches: int,
    steps: int = 3,
    batch: int = 8,
    length: int = 256,
    lr: float = 2e-3,
    dtype: torch.dtype = torch.float32,
) -> PipelineRun:
    """Train this rank's stage of the chapter's model with AdamW; there is one stage per rank.

    Call it on every rank: `processes.run(train_stage, 2, 0, schedule="1f1b", micro_batches=8)`, or
    the same call in a script under torchrun.
    batch: rows per step, a multiple of micro_batches, which 1F1B needs to be at least the stages.
    Raises ValueError for a batch that can't be divided this way, or another schedule.
    """
    rank, stages = dist.get_rank(), dist.get_world_size()
    one_of("schedule", schedule, SCHEDULES)
    positive_int("steps", steps)
    least = stages if schedule == "1f1b" else 1
    if batch % positive_int("micro_batches", micro_batches) or micro_batches < least:
        raise ValueError(
            f"micro_batches must divide batch={batch}, and be {least} or more for {schedule} on "
            f"{stages} stages, got {micro_batches}"
        )
    part = Stage(fresh(seed, dtype=dtype), rank, stages)
    optimizer = torch.optim.AdamW(part.parameters(), lr=lr)
    done: list[StageWork] = []
    runner = _runner(part, schedule, micro_batches, batch * length, done)
    draw = batches(seed, batch=batch, length=length)
    losses: list[float] = []
    works: list[tuple[StageWork, ...]] = []

    def train_step(number: int) -> None:
        tokens, _ = draw(number)
        parts: list[Tensor] = []
        given = {"target": tokens[:, 1:], "losses": parts} if rank == stages - 1 else {}
        optimizer.zero_grad()
        # torch 2.11 accepts only the strides that it inferred.
        inputs = [tokens[:, :-1].contiguous()] if rank == 0 else []
        runner.step(*inputs, **given, return_outputs=False)
        optimizer.step()
        if parts:
            losses.append(float(torch.stack(parts).detach().sum()))
        works.append(tuple(done))
        done.clear()

    with Meter(part, optimizer) as meter:
        for number in range(min(METERED, steps)):
            train_step(number)
    for number in range(METERED, steps):
        train_step(number)
    return PipelineRun(
        losses=tuple(losses),
        works=tuple(works),
        peak=meter.peak,
        most=meter.most,
        weights={name: p.detach() for name, p in part.named_parameters()},
    )


def _runner(
    part: Stage, schedule: str, micro_batches: int, tokens: int, done: list[StageWork]
) -> Any:
    """Return torch's schedule for this rank's stage, which adds its works to `done`."""
    # This import takes seconds.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(part, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))

    def noted(run: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            output = run(micro_batch, *args, **kwargs)
            end = time.monotonic()
            done.append(StageWork(kind=kind, micro_batch=micro_batch, begin=begin, end=end))
            return output

        return timed

    for name, kind in (("forward_one_chunk", "forward"), ("backward_one_chunk", "backward")):
        setattr(stage, name, noted(getattr(stage, name), kind))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        # Over the step's tokens, so that the micro-batches' losses add up to the step's mean.
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / tokens

    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    return made(stage, micro_batches, loss_fn=loss, scale_grads=False)


def idle(works: Sequence[Sequence[StageWork]], seconds: Mapping[str, float] | None = None) -> float:
    """Return the share of all stages' time, from the first work to the last, that they spend idle.

    works: of one step, one sequence per stage, in the order in which the stage did them.
    seconds: of a forward and of a backward. They replay the order as if every work took this long
    and messages took no time, whatever else the machine was doing. None uses the measured times;
    processes that share cores then count waiting for a core as work.
    Raises ValueError for no works, for seconds of another kind of work, and for an order that
    deadlocks.
    """
    if not any(works):
        raise ValueError("works must hold one work or more, got none; pass those of one step")
    if seconds is not None:
        if set(seconds) != {"forward", "backward"}:
            raise ValueError(
                f"seconds must have the keys 'forward' and 'backward', got {sorted(seconds)}; "
                "pass both"
            )
        works = _replayed(works, {kind: positive(kind, s) for kind, s in seconds.items()})
    done = [work for stage in works for work in stage]
    busy = sum(work.end - work.begin for work in done)
    total = max(work.end for work in done) - min(work.begin for work in done)
    return 1 - busy / (total * len(works))


def _replayed(
    works: Sequence[Sequence[StageWork]], seconds: Mapping[str, float]
) -> list[list[StageWork]]:
    """Run each work as soon as its stage is free and its inputs are there."""
    last = len(works) - 1
    ends: dict[tuple[int, str, int], float] = {}
    done: list[list[StageWork]] = [[] for _ in works]
    while any(len(mine) < len(asked) for mine, asked in zip(done, works, strict=True)):
        before = len(ends)
        for stage, asked in enumerate(works):
            if len(done[stage]) == len(asked):
                continue
            work = asked[len(done[stage])]
            needs = [(stage - 1, "forward", work.micro_batch)] if stage else []
            if work.kind == "backward":
                after = (stage + 1, "backward") if stage < last else (stage, "forward")
                needs = [(*after, work.micro_batch)]
            if all(need in ends for need in needs):
                free = done[stage][-1].end if done[stage] else 0.0
                begin = max([free, *(ends[need] for need in needs)])
                end = begin + seconds[work.kind]
                ends[stage, work.kind, work.micro_batch] = end
                done[stage].append(
                    StageWork(kind=work.kind, micro_batch=work.micro_batch, begin=begin, end=end)
                )
        if len(ends) == before:
            raise ValueError(
                "every work must come after those that it depends on in adjacent stages, got an "
                "order that deadlocks; pass all stages' works of one step"
            )
    return done
