"""Layers divided among devices, and micro-batches that keep more than one of them at work.

Stage s of p has its share of the layers; a batch passes as m micro-batches through all stages and
back. While the pipeline fills and empties stages wait: of the time of all of them the share
(p - 1) / (m + p - 1) is this bubble, under GPipe and under 1F1B alike. GPipe keeps the activations
of m micro-batches; 1F1B begins a backward as soon as it can, and stage s keeps p - s at most.

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
    "Work",
    "bubble",
    "idle",
    "in_flight",
    "train_stage",
]

SCHEDULES = ("gpipe", "1f1b")
METERED = 2  # steps; the first makes the optimizer's state


def bubble(stages: int, micro_batches: int) -> float:
    """The share of all stages' time in which they wait: (p - 1) / (m + p - 1)."""
    positive_int("stages", stages)
    return (stages - 1) / (positive_int("micro_batches", micro_batches) + stages - 1)


def in_flight(stage: int, stages: int, micro_batches: int, *, schedule: str) -> int:
    """Micro-batches whose activations a stage keeps when it keeps most."""
    one_of("schedule", schedule, SCHEDULES)
    one_of("stage", stage, range(positive_int("stages", stages)))
    positive_int("micro_batches", micro_batches)
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


class Stage(nn.Module):
    """One stage's share of a Llama: the modules themselves, not copies.

    The layers are divided as evenly as they can be, earlier stages having one more; the first
    stage has the embedding too, the last one the final norm and the head.
    model: with a head of its own: a tied one would have to be on two devices.
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
        """x: tokens [B, T] for the first stage, else the stream [B, T, C]. Stream, or logits."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).float()
        angles = positions[:, None] * inverse_frequencies(self.config, x.device)
        # What a layer reads of a forward; all rows have the same positions.
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
class Work:
    """A stage's forward or backward of one micro-batch.

    kind: "forward" or "backward". begin, end: seconds on the machine's clock.
    """

    kind: str
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRun:
    """What one stage saw.

    losses: nats a byte before each step; empty but on the last stage. works: of each step, in the
    order in which they were done; the meter slows those of the first two. peak, most: `Meter`'s,
    of this stage. weights: the stage's parameters after the last step, by their names in the whole
    model.
    """

    losses: tuple[float, ...]
    works: tuple[tuple[Work, ...], ...]
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
    """Train this process's stage of the topic's model by AdamW; a stage is a rank.

    Call it in all ranks of a group: `processes.run(train_stage, 2, 0, schedule="1f1b",
    micro_batches=8)`, and the same line in a script under torchrun.
    batch: rows of a step, a multiple of micro_batches; 1F1B needs as many of these as stages.
    Raises ValueError for a batch that cannot be divided so, or another schedule.
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
    done: list[Work] = []
    runner = _runner(part, schedule, micro_batches, batch * length, done)
    draw = batches(seed, batch=batch, length=length)
    losses: list[float] = []
    works: list[tuple[Work, ...]] = []

    def train_step(number: int) -> None:
        tokens, _ = draw(number)
        parts: list[Tensor] = []
        given = {"target": tokens[:, 1:], "losses": parts} if rank == stages - 1 else {}
        optimizer.zero_grad()
        # torch 2.11 takes only the strides that it derived.
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


def _runner(part: Stage, schedule: str, micro_batches: int, tokens: int, done: list[Work]) -> Any:
    """torch's schedule for this rank's stage, which leaves what it did in `done`."""
    # This import takes seconds.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(part, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))

    def noted(run: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            output = run(micro_batch, *args, **kwargs)
            end = time.monotonic()
            done.append(Work(kind=kind, micro_batch=micro_batch, begin=begin, end=end))
            return output

        return timed

    for name, kind in (("forward_one_chunk", "forward"), ("backward_one_chunk", "backward")):
        setattr(stage, name, noted(getattr(stage, name), kind))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        # Of all tokens of the step, so that micro-batches add up to its mean.
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / tokens

    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    return made(stage, micro_batches, loss_fn=loss, scale_grads=False)


def idle(works: Sequence[Sequence[Work]], seconds: Mapping[str, float] | None = None) -> float:
    """The share of all stages' time, from the first work to the last, in which they wait.

    works: one step's, a sequence a stage, in the order in which the stage did them.
    seconds: of a forward and of a backward: what the order would give if every work took these
    and messages no time, whatever else the machine had to do. None takes the times as measured;
    processes that share cores then count what they wait for a core as work.
    Raises ValueError for no works, for seconds of another kind of work, and for an order in which a
    work waits for ever.
    """
    if not any(works):
        raise ValueError("works must hold one work or more, got none; pass all stages' of one step")
    if seconds is not None:
        if set(seconds) != {"forward", "backward"}:
            raise ValueError(
                f"seconds must be those of 'forward' and 'backward', got {sorted(seconds)}; "
                "pass both"
            )
        works = _replayed(works, {kind: positive(kind, s) for kind, s in seconds.items()})
    done = [work for stage in works for work in stage]
    busy = sum(work.end - work.begin for work in done)
    total = max(work.end for work in done) - min(work.begin for work in done)
    return 1 - busy / (total * len(works))


def _replayed(works: Sequence[Sequence[Work]], seconds: Mapping[str, float]) -> list[list[Work]]:
    """Each work as soon as its stage is free and what it needs is there."""
    last = len(works) - 1
    ends: dict[tuple[int, str, int], float] = {}
    done: list[list[Work]] = [[] for _ in works]
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
                    Work(kind=work.kind, micro_batch=work.micro_batch, begin=begin, end=end)
                )
        if len(ends) == before:
            raise ValueError(
                "every work must come after what it needs in the stages beside it, got an order "
                "that waits for ever; pass all stages' works of one step"
            )
    return done
