"""Ways to save memory: bytes predicted and measured, and the cost of each in time and loss.

"plain" is torch's AdamW in float32. Unless a record's details say otherwise, bytes are counted on
batches of 8 rows of 256 bytes, and prices are measured on 4 rows of 64.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F

from benchmarks.attention import naive
from benchmarks.runner import Measurement, case, exact, ratios, seen
from labcore import memory, processes
from labcore.attention import traffic
from labcore.data import python_sources
from labcore.memory import (
    Breakdown,
    Meter,
    accumulation,
    distill,
    experts,
    offload_runs,
    pipeline,
    precision,
    zero,
)
from labcore.memory.accounting.shapes import parameter_shapes
from labcore.memory.cache import kv_bytes
from labcore.memory.lora import add_lora
from labcore.memory.model import (
    CONFIG,
    HELD_OUT_LENGTH,
    HELD_OUT_ROWS,
    MAX_BYTES,
    batches,
    fresh,
    held_out_loss,
    held_out_rows,
)
from labcore.memory.precision import RECIPES
from labcore.memory.quantization import conversion
from labcore.memory.quantization.scheme import INT4
from labcore.memory.quantization.torchao import Torchao
from labcore.memory.trials import LEARNING_RATE
from labcore.models import Llama, LlamaConfig, next_token_loss, train
from labcore.models.llama import causal_attention
from labcore.models.shipped import pretrained
from labcore.models.tokenizer import ByteTokenizer
from labcore.models.training import windows
from labcore.optim import SM3, Adafactor, AdamW8bit
from labcore.serving.simulation.workload import Workload, long_tail
from labcore.studies.memory.cache import average_held, crowd, held_out_windows, loss_through_cache
from labcore.timing import paired

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    few: tuple[int, ...] = (0, 1, 2)  # seeds if a step is slow, or processes share the cores
    big: Settings = field(default_factory=lambda: {"batch": 8, "length": 256})  # of counted bytes
    # Of bytes in 16 bits, whose products are slow here.
    half: Settings = field(default_factory=lambda: {"batch": 4, "length": 128})
    small: Settings = field(default_factory=lambda: {"batch": 4, "length": 64})  # of prices
    tiny: Settings = field(default_factory=lambda: {"batch": 2, "length": 32})
    tuned: Settings = field(default_factory=lambda: {"batch": 8, "length": 128})
    learned: int = 200  # steps before tuning
    tuning: int = 60
    steps: int = 40
    same: int = 10  # steps of ways that compute the same as plain training, or are slow
    divided: int = 6  # timed steps of several processes
    pipelines: tuple[tuple[int, int], ...] = ((2, 2), (2, 4), (2, 8), (4, 4), (4, 8))
    digit_steps: int = 200
    sparse_steps: int = 150
    repetitions: int = 5
    model_lengths: tuple[int, ...] = (256, 512, 1024)  # of attention in a model
    layer_lengths: tuple[int, ...] = (1024, 2048, 4096)  # and in one layer
    asked: tuple[str, ...] | None = None  # keys of ASKED; None for all
    lives: int = 16  # requests served, over those that run at once
    young: int = 128  # steps before a crowd is counted
    output: int = 256  # the longest
    reserved: int = 4  # bf16 requests of maximum length that the KV cache's budget holds
    windows: int = 16  # of held-out text, per seed
    window: int = 256  # tokens


FULL = Sizes()
SMALL = Sizes(
    seeds=(7, 8),
    few=(7,),
    big={"batch": 8, "length": 12},
    half={"batch": 4, "length": 5},
    small={"batch": 4, "length": 6},
    tiny={"batch": 1, "length": 3},
    tuned={"batch": 2, "length": 5},
    learned=2,
    tuning=2,
    steps=2,
    same=2,
    divided=3,
    pipelines=((2, 2), (2, 4)),
    digit_steps=3,
    sparse_steps=2,
    repetitions=2,
    model_lengths=(9, 300),
    layer_lengths=(9, 500),
    asked=("one row", "grouped, tied, 6 layers"),
    lives=8,
    young=2,
    output=20,
    reserved=5,
    windows=2,
    window=21,
)

# Learning rates were chosen on seeds 100 and 101, by the held-out loss after 40 steps: Adafactor's
# from 0.003, 0.01, 0.03 and 0.1, SM3's from 0.001, 0.003, 0.01 and 0.03. AdamW and its 8-bit
# version use the topic's.
ADAFACTOR, COVERS = 0.01, 0.01


def _torchao(weights: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit as Peer

    return Peer(weights, lr=LEARNING_RATE)


# By the names that `estimate` uses; peers by their own.
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=LEARNING_RATE),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "adafactor": functools.partial(Adafactor, lr=ADAFACTOR),
    "sm3": functools.partial(SM3, lr=COVERS),
    "adamw8bit": functools.partial(AdamW8bit, lr=LEARNING_RATE),
    "torch": functools.partial(torch.optim.Adafactor, lr=ADAFACTOR),
    "torchao": _torchao,
}
PEERS = ("torch", "torchao")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train.

    step(n): runs step n. held: the module whose bytes count. model: the model whose loss counts.
    """

    model: Llama
    held: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], object]


def way(
    seed: int,
    *,
    batch: int,
    length: int,
    config: LlamaConfig = CONFIG,
    recipe: str = "float32",
    optimizer: str = "adamw",
    checkpointing: int | str | None = None,
    parts: int = 1,
    model: Llama | None = None,
    loss: Callable[[Llama, Tensor], Tensor] | None = None,
) -> Way:
    """Return plain training, except for what is named.

    All ways with the same seed have the same weights and batches.

    model, loss: replace those of the topic.
    """
    how = RECIPES[recipe]
    generator = torch.Generator().manual_seed(seed)
    trained = Llama(config, generator=generator).to(how.weights) if model is None else model
    memory.set_checkpointing(trained, checkpointing)
    chosen = OPTIMIZERS[optimizer](trained.parameters())
    draw = batches(seed, batch=batch, length=length)
    scaler = GradScaler("cpu", enabled=how.scaled)

    def step(n: int) -> None:
        tokens, _ = draw(n)
        if parts == 1 and loss is None:
            precision.precise_step(trained, chosen, tokens, how, scaler)
            return
        chosen.zero_grad()
        if loss is not None:
            loss(trained, tokens).backward()
        else:
            rows = accumulation.split_rows(tokens[:, :-1], tokens[:, 1:], parts)
            # autocast's cache would keep copies of the weights between parts.
            with torch.autocast(
                "cpu",
                dtype=how.products,
                enabled=how.products is not None,
                cache_enabled=False,
            ):
                memory.accumulate(trained, rows)
        chosen.step()

    return Way(model=trained, held=trained, optimizer=chosen, step=step)


def mean_loss(model: Llama, tokens: Tensor) -> Tensor:
    """Return the loss in nats per byte."""
    loss, count = next_token_loss(model, tokens)
    return loss / count


def told(
    *, config: LlamaConfig = CONFIG, recipe: str = "float32", parts: int = 1, **rest: Any
) -> Breakdown:
    """Return the prediction for `way` with the same settings."""
    dtype = RECIPES[recipe].estimated_as
    return accumulation.estimate_accumulated(config, parts=parts, dtype=dtype, **rest)


def metered(one: Way) -> Meter:
    """Meter two steps; the first creates the optimizer's state."""
    with Meter(one.held, one.optimizer) as meter:
        for n in range(2):
            one.step(n)
    return meter


@functools.cache
def plain(batch: int, length: int) -> tuple[Breakdown, Breakdown]:
    """Return the peak of plain training, measured and predicted."""
    size: Settings = {"batch": batch, "length": length}
    return metered(way(0, **size)).peak, told(**size)


def against(
    name: str,
    measured: Breakdown,
    predicted: Breakdown | None,
    reference: tuple[Breakdown, Breakdown],
    **details: Any,
) -> list[Measurement]:
    """Return bytes, and their ratio to the reference's, both with predictions."""
    base, base_predicted = reference
    details = {"measured": measured.parts(), "plain": base.parts(), **details}
    total, over = {}, {}
    if predicted is not None:
        details["predicted"] = predicted.parts()
        total = {"predicted": [predicted.total]}
        over = {"predicted": [predicted.total / base_predicted.total]}
    # `exact` has no place for these details: it takes a number as "predicted".
    more: Settings = {"exact": True, **details}
    share = measured.total / base.total
    return [
        seen(f"peak/{name}", "bytes", [measured.total], peers=total, **more),
        seen(f"peak over plain/{name}", "ratio", [share], peers=over, **more),
    ]


def bytes_of(variants: Mapping[str, Settings], size: Settings) -> list[Measurement]:
    """Return the peaks of ways, each given by the settings that `way` and `told` share."""
    found = []
    for name, settings in variants.items():
        predicted = None if settings.get("optimizer") in PEERS else told(**settings, **size)
        peak = metered(way(0, **settings, **size)).peak
        found += against(name, peak, predicted, plain(**size), **size)
    return found


# Prices ------------------------------------------------------------------------------------------
Costs = Mapping[str, tuple[float, float]]  # by way: time, in any unit, and loss


def race(
    models: Mapping[str, Llama], calls: Mapping[str, Callable[[], object]], **timed: Any
) -> Costs:
    """Time calls in turn; return each one's time over the plain one's, and its held-out loss.

    timed: settings of `paired`. The losses are computed in float32.
    """
    comparison, found = paired(calls, **timed), {}
    for name, model in models.items():
        if model.embed_tokens.weight.dtype != torch.float32:
            model = copy.deepcopy(model).float()
        found[name] = comparison.ratio(name, "plain"), held_out_loss(model)
    return found


def prices(
    variants: Mapping[str, Settings],
    make: Callable[..., Way] = way,
    *,
    steps: int,
    size: Settings,
    seeds: Sequence[int],
    watch: Callable[[Mapping[str, Way]], None] | None = None,
) -> list[Measurement]:
    """Return step times over plain's, and held-out losses minus plain's, seed by seed.

    All ways, including the plain one, start from the same seed and take `steps` steps in turn.
    make: makes a way from its settings. watch: called with each seed's ways after their losses are
    computed.
    """
    costs = []
    for seed in seeds:
        ways = {"plain": way(seed, **size)}
        ways |= {name: make(seed, **settings, **size) for name, settings in variants.items()}
        models = {name: one.model for name, one in ways.items()}
        # Each call takes the next step.
        calls = {
            name: functools.partial(next, map(one.step, itertools.count()))
            for name, one in ways.items()
        }
        costs.append(race(models, calls, rounds=steps, warmup=0, seed=seed))
        if watch is not None:
            watch(ways)
    return priced(costs, seeds=list(seeds), steps=steps, **size)


def priced(costs: Sequence[Costs], **details: Any) -> list[Measurement]:
    """Return the two prices of each way from the costs, which include "plain", seed by seed."""
    found = []
    plain_times, plain_losses = zip(*(each["plain"] for each in costs), strict=True)
    for name in costs[0]:
        if name == "plain":
            continue
        times, losses = zip(*(each[name] for each in costs), strict=True)
        gaps = minus(losses, plain_losses)
        both: dict[str, Any] = {"loss": losses, "plain loss": plain_losses}
        found += [
            seen(f"time over plain/{name}", "ratio", ratios(times, plain_times), **details),
            seen(f"loss minus plain/{name}", "nats a byte", gaps, **details, **both),
        ]
    return found


def minus(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Subtract seed by seed."""
    return [one - other for one, other in zip(mine, theirs, strict=True)]


# Sixteen bits ------------------------------------------------------------------------------------
PRECISION: Mapping[str, Settings] = {
    name: {"recipe": name}
    for name in ("autocast to bfloat16", "autocast to float16, scaled", "bfloat16")
}


@case("bytes/precision", minutes=1.5, needs="cpu")
def bytes_of_precision(sizes: Sizes = FULL) -> list[Measurement]:
    """A batch whose activations outweigh the weights, and a tiny batch whose don't."""
    tiny = {f"{name}, tiny batch": settings for name, settings in PRECISION.items()}
    return bytes_of(PRECISION, sizes.half) + bytes_of(tiny, sizes.tiny)


@case("price/precision", minutes=2, needs="cpu")
def price_of_precision(sizes: Sizes = FULL) -> list[Measurement]:
    """Prices in 16 bits; the time is that of processors without 16-bit matrix units."""
    return prices(PRECISION, steps=sizes.same, size=sizes.tiny, seeds=sizes.few)


# Accumulation and checkpointing ------------------------------------------------------------------
ACCUMULATION: Mapping[str, Settings] = {f"{n} parts": {"parts": n} for n in (2, 4, 8)}


@case("bytes/accumulation", minutes=0.3)
def bytes_of_accumulation(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks of a batch in parts, also relative to a batch as small as a part."""
    found = bytes_of(ACCUMULATION, sizes.big)
    for name, settings in ACCUMULATION.items():
        parts = metered(way(0, **settings, **sizes.big))
        rows = sizes.big["batch"] // settings["parts"]
        alone = metered(way(0, **{**sizes.big, "batch": rows}))
        peak = parts.peak.total / alone.peak.total
        kept = parts.most.activations / alone.most.activations
        found += [
            exact(f"peak over the small batch's/{name}", "ratio", peak),
            exact(f"activations over the small batch's/{name}", "ratio", kept),
        ]
    return found


@case("price/accumulation", minutes=0.5)
def price_of_accumulation(sizes: Sizes = FULL) -> list[Measurement]:
    """The price of smaller products."""
    variants = {"4 parts": ACCUMULATION["4 parts"]}
    return prices(variants, steps=sizes.same, size=sizes.small, seeds=sizes.seeds)


@case("gradient/accumulation", minutes=0.2)
def gradient_of_accumulation(sizes: Sizes = FULL) -> list[Measurement]:
    """Relative error of the accumulated gradient against one backward of the whole batch."""
    ways = {"exact": memory.accumulate, "mean of means": accumulation.accumulate_means}
    found: dict[str, list[float]] = {}
    rows, length = sizes.small["batch"], sizes.small["length"]
    for seed, kind in itertools.product(sizes.seeds, ("equal", "ragged")):
        model, (tokens, _) = fresh(seed), batches(seed, **sizes.small)(0)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        if kind == "ragged":
            generator = torch.Generator().manual_seed(seed)
            ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
            targets[torch.arange(length) >= ends] = accumulation.IGNORED
        whole = gradient(model, memory.accumulate, [(inputs, targets)])
        for name, accumulate in ways.items():
            split = accumulation.split_rows(inputs, targets, rows)
            gap = gradient(model, accumulate, split) - whole
            at = f"relative error/{name}, {kind} rows"
            found.setdefault(at, []).append(float(gap.norm() / whole.norm()))
    details = {"seeds": sizes.seeds, "parts": rows, **sizes.small}
    return [seen(name, "ratio", xs, **details) for name, xs in found.items()]


def gradient(model: Llama, accumulate: Callable[..., float], parts: Sequence[Any]) -> Tensor:
    """Return all gradients of one accumulation, in float64."""
    model.zero_grad()
    accumulate(model, parts)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([x.double().flatten() for x in found])


# With four layers, every 2 is the square root.
CHECKPOINTING: Mapping[str, Settings] = {
    "every 1": {"checkpointing": 1},
    "every 2": {"checkpointing": 2},
    "every 4": {"checkpointing": 4},
    "selective": {"checkpointing": "selective"},
}


@case("bytes/checkpointing", minutes=0.4)
def bytes_of_checkpointing(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks by the number of layers that are recomputed together."""
    return bytes_of(CHECKPOINTING, sizes.big)


@case("price/checkpointing", minutes=1)
def price_of_checkpointing(sizes: Sizes = FULL) -> list[Measurement]:
    """The price of the second forward."""
    return prices(CHECKPOINTING, steps=sizes.same, size=sizes.small, seeds=sizes.seeds)


# Several processes -------------------------------------------------------------------------------
RANKS, MICRO = 2, 4  # processes, micro-batches
SCHEDULES, STAGES = ("gpipe", "1f1b"), (1, 2, 3)


def by_rank(
    ranks: int, seeds: Sequence[int], ways: Mapping[str, Callable[[int], Any]]
) -> list[dict[str, list[Any]]]:
    """Return, seed by seed, what each process of a group returned for each way, in turn."""

    def work() -> list[dict[str, Any]]:
        return [{name: run(seed) for name, run in ways.items()} for seed in seeds]

    came = zip(*processes.run(work, ranks, timeout_s=400), strict=True)
    return [{name: [rank[name] for rank in every] for name in ways} for every in came]


def warm(seeds: Sequence[int]) -> list[int]:
    """Repeat the first seed, as a warmup whose times are discarded."""
    return [seeds[0], *seeds]


@case("bytes/pipeline", minutes=0.6)
def bytes_of_pipeline(sizes: Sizes = FULL) -> list[Measurement]:
    """Two stages, four micro-batches. The estimate is for 1F1B's fullest stage, the first."""
    big = sizes.big
    part: Settings = {**big, "batch": big["batch"] // MICRO}
    first = memory.estimate(CONFIG, pipeline_parallel=RANKS, **part)
    ahead = memory.estimate(CONFIG, pipeline_parallel=RANKS, moment="forward", **part).activations
    (every,) = by_rank(RANKS, (0,), schedules(steps=2, **big))
    found = []
    for schedule, runs in every.items():
        for stage, run in enumerate(runs):
            known = first if (schedule, stage) == ("1f1b", 0) else None
            found += against(f"{schedule}, stage {stage}", run.peak, known, plain(**big))
        predicted = ahead / RANKS * pipeline.in_flight(0, RANKS, MICRO, schedule=schedule)
        kept = runs[0].most.activations
        fullest = max(run.peak.total for run in runs) / plain(**big)[0].total
        found += [
            exact(f"activations/{schedule}, stage 0", "bytes", kept, predicted=predicted),
            exact(f"fullest stage over plain/{schedule}", "ratio", fullest),
        ]
    return found


def schedules(**settings: Any) -> dict[str, Callable[[int], pipeline.PipelineRun]]:
    """Return training by each schedule."""
    run = functools.partial(memory.train_stage, micro_batches=MICRO, **settings)
    return {name: functools.partial(run, schedule=name) for name in SCHEDULES}


UNIT = {"forward": 1.0, "backward": 2.0}  # seconds in a replay


@case("pipeline/bubble", minutes=1)
def bubbles(sizes: Sizes = FULL) -> list[Measurement]:
    """Fraction of waiting in the order of torch's schedules, with unit costs and by the clock."""
    found = []
    for stages, group in itertools.groupby(sizes.pipelines, key=lambda pair: pair[0]):
        asked: dict[str, Settings] = {
            f"bubble/{name}, {stages} stages, {micro} micro-batches": {
                "schedule": name, "micro_batches": micro, "steps": 4, "batch": 8, "length": 64,
            }
            for (_, micro), name in itertools.product(group, SCHEDULES)
        }  # fmt: skip
        ways = {name: functools.partial(memory.train_stage, **one) for name, one in asked.items()}
        (every,) = by_rank(stages, (0,), ways)
        for name, runs in every.items():
            share = pipeline.idle([run.works[-1] for run in runs], UNIT)
            predicted = pipeline.bubble(stages, asked[name]["micro_batches"])
            # The first two steps are metered.
            clock = [pipeline.idle([run.works[n] for run in runs]) for n in (2, 3)]
            more = {"cores": os.cpu_count(), "by the clock": clock, **asked[name]}
            found.append(exact(name, "share", share, predicted=predicted, **more))
    return found


def plain_alone(seed: int, *, steps: int, **size: Any) -> tuple[list[float], list[float]] | None:
    """Train plainly in the first process; return when each step began, and its loss."""
    found, begins = None, []
    if dist.get_rank() == 0:
        model, draw = fresh(seed), batches(seed, **size)

        def noted(n: int) -> tuple[Tensor, Tensor | None]:
            begins.append(time.monotonic())
            return draw(n)

        optimizer = OPTIMIZERS["adamw"](model.parameters())
        curve = train(model, noted, optimizer, steps=steps, progress=False)
        found = begins, curve.losses
    dist.barrier()
    return found


def pace(begins: Sequence[float]) -> float:
    """Return the mean seconds from one step to the next, without the first two (metered) steps."""
    return (begins[-1] - begins[2]) / (len(begins) - 3)


@case("price/pipeline", minutes=1)
def price_of_pipeline(sizes: Sizes = FULL) -> list[Measurement]:
    """Two processes over one. The loss is that of the last step's batch."""
    settings = {"steps": 2 + sizes.divided, **sizes.small}
    ways: dict[str, Callable[[int], Any]] = {"plain": functools.partial(plain_alone, **settings)}
    ways |= schedules(**settings)
    costs = []
    for runs in by_rank(RANKS, warm(sizes.few), ways)[1:]:
        begins, losses = runs.pop("plain")[0]
        cost = {"plain": (pace(begins), losses[-1])}
        for name, (first, last) in runs.items():
            cost[name] = pace([works[0].begin for works in first.works]), last.losses[-1]
        costs.append(cost)
    return priced(costs, seeds=sizes.few, processes=RANKS, cores=os.cpu_count(), **settings)


def zero_stages(**settings: Any) -> dict[str, Callable[[int], zero.ZeroRun]]:
    """Return training by each stage of ZeRO; stage 0 is plain data parallelism."""
    run = functools.partial(zero.train_divided, **settings)
    return {f"stage {n}" if n else "plain": functools.partial(run, stage=n) for n in (0, *STAGES)}


@case("bytes/zero", minutes=0.4)
def bytes_of_zero(sizes: Sizes = FULL) -> list[Measurement]:
    """Weights, gradients and state of the fuller of two ranks after a step."""
    shared: Settings = {"data_parallel": RANKS, "moment": "step", **sizes.big}
    (runs,) = by_rank(RANKS, (0,), zero_stages(steps=2, **sizes.big))
    fullest = {name: max((r.held for r in rs), key=lambda b: b.total) for name, rs in runs.items()}
    reference = fullest["plain"], resting(memory.estimate(CONFIG, **shared))
    found = []
    for stage in STAGES:
        name = f"stage {stage}"
        predicted = resting(memory.estimate(CONFIG, zero_stage=stage, **shared))
        more = {"gathered": max(run.gathered for run in runs[name]), "of": RESTING}
        found += against(name, fullest[name], predicted, reference, **more)
    return found


RESTING = "weights, gradients, optimizer state"


def resting(held: Breakdown) -> Breakdown:
    """Return what is held between steps: no activations and no workspace."""
    return replace(held, activations=0, workspace=0)


def metered_rank(seed: int, *, stage: int, batch: int, length: int) -> Breakdown:
    """Return the peak of this rank's second and third step; batch: its own rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = memory.divide(fresh(seed), stage, torch.optim.AdamW, lr=LEARNING_RATE)
    draw = batches(seed, batch=batch * ranks, length=length)

    def step(n: int) -> None:
        optimizer.zero_grad()
        mean_loss(model, draw(n)[0].tensor_split(ranks)[rank]).backward()  # type: ignore[arg-type]
        optimizer.step()

    step(0)  # makes the optimizer's state
    with Meter(model, getattr(optimizer, "optim", optimizer)) as meter:
        for n in (1, 2):
            step(n)
    return meter.peak


@case("peak/zero", minutes=1)
def peak_of_zero(sizes: Sizes = FULL) -> list[Measurement]:
    """The peak of a whole step on the fuller of two ranks: of many tokens, and of few.

    It varies from run to run at stages 2 and 3, so each seed has processes of its own.
    """
    tokens = {"many tokens": sizes.big, "few tokens": {**sizes.small, "batch": 1}}
    settings: dict[str, Settings] = {
        f"stage {stage}, {name}": {"stage": stage, **size}
        for name, size in tokens.items()
        for stage in (0, *STAGES)
    }
    ways = {name: functools.partial(metered_rank, **each) for name, each in settings.items()}
    rounds = [by_rank(RANKS, (seed,), ways)[0] for seed in sizes.few]
    found = []
    for name, each in settings.items():
        peaks = [max(one[name], key=lambda held: held.total) for one in rounds]
        middle = sorted(peaks, key=lambda held: held.total)[len(peaks) // 2]
        size = {key: each[key] for key in ("batch", "length")}
        said = memory.estimate(CONFIG, zero_stage=each["stage"], data_parallel=RANKS, **size)
        more: Settings = {"held": middle.parts(), "estimated": said.parts(), **each}
        predicted = {"predicted": [said.total]}
        totals = [held.total for held in peaks]
        found.append(seen(f"whole step/{name}", "bytes", totals, peers=predicted, **more))
    return found


@case("price/zero", minutes=1)
def price_of_zero(sizes: Sizes = FULL) -> list[Measurement]:
    """Stages 1 to 3 over plain data parallelism in the same two processes."""
    settings = {"steps": sizes.divided, **sizes.small}
    costs = [
        {name: (first.seconds, first.losses[-1]) for name, (first, _) in runs.items()}
        for runs in by_rank(RANKS, warm(sizes.few), zero_stages(**settings))[1:]
    ]
    return priced(costs, seeds=sizes.few, processes=RANKS, cores=os.cpu_count(), **settings)


# Offload -----------------------------------------------------------------------------------------
OFFLOADS = {"disk": False, "disk, ahead": True}


def offloaded_run(seed: int, name: str, **settings: Any) -> offload_runs.OffloadRun:
    """Train plainly, or with the layers on disk."""
    tier = None if name == "plain" else memory.Disk()
    ahead = OFFLOADS.get(name, False)
    return offload_runs.offload_run(seed, tier=tier, prefetch=ahead, **settings)


@case("bytes/offload", minutes=0.2)
def bytes_of_offload(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks of weights, gradients and state in memory; activations aren't offloaded.

    The prediction is for two layers at a time.
    """

    def run(name: str) -> offload_runs.OffloadRun:
        return offloaded_run(0, name, steps=2, **sizes.small)

    told_plain = resting(memory.estimate(CONFIG, moment="step", **sizes.small))
    reference, found = (run("plain").peak, told_plain), []
    for name, ahead in OFFLOADS.items():
        predicted = memory.offloaded(CONFIG) if ahead else None
        found += against(name, run(name).peak, predicted, reference, of=RESTING)
    return found


@case("price/offload", minutes=0.8)
def price_of_offload(sizes: Sizes = FULL) -> list[Measurement]:
    """Prices of whole runs in turn: interleaved steps would overlap one run's reading ahead."""
    names, costs = ["plain", *OFFLOADS], []
    settings = {"steps": sizes.same, **sizes.small}
    for seed in warm(sizes.seeds):
        order = names[:: 1 if seed % 2 else -1]
        runs = {name: offloaded_run(seed, name, **settings) for name in order}
        costs.append({name: (runs[name].seconds, runs[name].held_out) for name in names})
    return priced(costs[1:], seeds=sizes.seeds, **settings)


# Quantization and distillation -------------------------------------------------------------------
SCHEMES: Mapping[str, memory.Scheme | Torchao] = {
    "int8": memory.INT8,
    "int4": memory.INT4,
    "torchao int8": Torchao(),
    "torchao int8 dynamic": Torchao(method="int8 dynamic"),
    "torchao int4": Torchao(method="int4"),
}


@functools.cache
def teacher(seed: int, **settings: int) -> Llama:
    """Return the plain model after its steps, frozen. settings: steps, batch, length."""
    return distill.make_teacher(seed, **settings)


def every_scheme(model: Llama) -> dict[str, Llama]:
    """Return copies of the model in fewer bits."""
    models = {name: copy.deepcopy(model).requires_grad_(False) for name in SCHEMES}
    for name, tried in models.items():
        memory.convert(tried, SCHEMES[name])
    return models


@torch.no_grad()
def inference_peak(model: Llama, batch: int, length: int) -> int:
    """Return the peak bytes of a forward without gradients."""
    with Meter(model) as meter:
        model(held_out_rows(batch)[:, :length])
    return meter.peak.total


@case("bytes/quantization", minutes=0.2, needs="cpu")
def bytes_of_quantization(sizes: Sizes = FULL) -> list[Measurement]:
    """Bytes of the parameters, and the peak of a forward; embedding and norms stay in float32."""
    model = fresh(0).requires_grad_(False)
    stored = Breakdown(parameters=conversion.stored_bytes(model))
    reference = stored, conversion.quantized_bytes(CONFIG, None)
    plain_forward = inference_peak(model, **sizes.big)
    found = []
    for name, tried in every_scheme(model).items():
        stored = Breakdown(parameters=conversion.stored_bytes(tried))
        predicted = conversion.quantized_bytes(CONFIG, SCHEMES[name])
        found += against(name, stored, predicted, reference, of="parameters")
        ratio = inference_peak(tried, **sizes.big) / plain_forward
        found.append(exact(f"forward peak over plain/{name}", "ratio", ratio, **sizes.big))
    return found


@case("price/quantization", minutes=4, needs="cpu")
def price_of_quantization(sizes: Sizes = FULL) -> list[Measurement]:
    """A trained model's loss, and the time of its forward, in fewer bits.

    torchao's int4 gives the same numbers as ours. Without 8-bit products it and "dynamic" are slow.
    """
    rows = held_out_rows(sizes.small["batch"])[:, : sizes.small["length"]]
    costs = []
    for seed in sizes.seeds:
        trained = teacher(seed, steps=sizes.steps, **sizes.small)
        models = {"plain": trained, **every_scheme(trained)}
        del models["torchao int4"]
        calls = {name: functools.partial(model, rows) for name, model in models.items()}
        with torch.no_grad():
            costs.append(race(models, calls, rounds=5, warmup=1, seed=seed))
    details = {"seeds": sizes.seeds, "trained": sizes.steps, "time": "a forward", **sizes.small}
    return priced(costs, **details)


def student_way(seed: int, *, batch: int, length: int, taught: bool, sizes: Sizes = FULL) -> Way:
    """Return training of the small model, on the text alone or with the same seed's teacher."""
    student, size = distill.make_student(seed), Settings(batch=batch, length=length)
    if not taught:
        return way(seed, model=student, **size)
    above = teacher(seed, steps=sizes.steps, **sizes.small)

    def loss(model: Llama, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.no_grad():  # first, before the student's activations take memory
            said = above(inputs).logits
        return memory.distillation_loss(model(inputs).logits, said, targets)

    learning = way(seed, model=student, loss=loss, **size)
    return replace(learning, held=nn.ModuleList([student, above]))


TAUGHT: Mapping[str, Settings] = {"student alone": {"taught": False}, "distilled": {"taught": True}}


@case("bytes/distillation", minutes=0.3)
def bytes_of_distillation(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks of training the student alone and with the teacher, and the parameters that remain."""
    big = sizes.big
    predicted = {
        "student alone": told(config=distill.STUDENT, **big),
        "distilled": distill.estimate_distillation(distill.STUDENT, CONFIG, **big),
    }
    found = []
    for name, settings in TAUGHT.items():
        peak = metered(student_way(0, sizes=sizes, **settings, **big)).peak
        found += against(name, peak, predicted[name], plain(**big), **big)
    small, large = (conversion.quantized_bytes(c, None).total for c in (distill.STUDENT, CONFIG))
    return [*found, exact("parameters, student over teacher", "ratio", small / large)]


@case("price/distillation", minutes=1.5)
def price_of_distillation(sizes: Sizes = FULL) -> list[Measurement]:
    """Prices of the student. The plain model is the teacher; its training isn't in the time."""
    seeds, steps = sizes.seeds, sizes.steps
    make = functools.partial(student_way, sizes=sizes)
    found = prices(TAUGHT, make, steps=steps, size=sizes.small, seeds=seeds)
    losses = {item.quantity: item.details["loss"] for item in found if "loss" in item.details}
    alone, taught = (losses[f"loss minus plain/{name}"] for name in TAUGHT)
    gaps = minus(taught, alone)
    gain = seen("loss minus student alone/distilled", "nats a byte", gaps, seeds=seeds, steps=steps)
    return [*found, gain]


@case("digits/distillation", minutes=0.4)
def digits_of_distillation(sizes: Sizes = FULL) -> list[Measurement]:
    """Accuracy gained on digits; the teacher saw all labels, the student few or all."""
    found = []
    for name, labels in (("80 labels", 80), ("all labels", None)):
        run = functools.partial(distill.distill_digits, labels=labels, steps=sizes.digit_steps)
        runs = [run(seed) for seed in sizes.seeds]
        gains = [100 * (run.distilled - run.alone) for run in runs]
        every: Settings = {
            k: [getattr(r, k) for r in runs] for k in ("alone", "distilled", "teacher")
        }
        quantity = f"accuracy gained/{name}"
        found.append(seen(quantity, "percentage points", gains, seeds=sizes.seeds, **every))
    return found


# Optimizers --------------------------------------------------------------------------------------
LESS_STATE: Mapping[str, Settings] = {
    "Adafactor": {"optimizer": "adafactor"},
    "torch Adafactor": {"optimizer": "torch"},
    "SM3": {"optimizer": "sm3"},
    "AdamW8bit": {"optimizer": "adamw8bit"},
    "torchao AdamW8bit": {"optimizer": "torchao"},
}


@case("bytes/optimizers", minutes=0.6, needs="cpu")
def bytes_of_optimizers(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks, and the optimizer state alone relative to AdamW's."""
    with torch.compiler.set_stance("force_eager"):  # torchao's compiler takes minutes here
        found = bytes_of(LESS_STATE, sizes.big)
    (measured, estimated), states = plain(**sizes.big), []
    for item in found:
        what, name = item.quantity.split("/")
        if what == "peak":
            state, known = item.details["measured"]["optimizer"], item.details.get("predicted")
            predicted = known["optimizer"] / estimated.optimizer if known else None
            ratio = state / measured.optimizer
            quantity = f"state over AdamW's/{name}"
            states.append(exact(quantity, "ratio", ratio, predicted=predicted))
    return found + states


@case("price/optimizers", minutes=4)
def price_of_optimizers(sizes: Sizes = FULL) -> list[Measurement]:
    """Prices at each optimizer's own learning rate.

    torchao's isn't timed: it is meant to be compiled, and slow otherwise.
    """
    variants = {n: s for n, s in LESS_STATE.items() if s["optimizer"] != "torchao"}
    return prices(variants, steps=sizes.steps, size=sizes.small, seeds=sizes.seeds)


# Contexts of one to three bytes are hashed to rows of a table: few rows have gradients in a step.
ROWS, ORDERS, SPARSE_BATCH = 2048, 3, 256
# Rates were chosen on seeds 100 and 101 from 0.003, 0.01, 0.03, 0.1, 0.3 and 1; for SM3 also 3.
SPARSE: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "AdamW": (torch.optim.AdamW, 0.03),
    "SM3": (SM3, 1.0),
    "AdaGrad": (torch.optim.Adagrad, 0.3),
}


def contexts(windows: Tensor) -> Tensor:
    """Map windows to the rows for the bytes before the last: int64 [N, 4] to int64 [N, 3]."""
    place = windows[:, ORDERS - 1] % ROWS
    found = [place]
    for order in range(1, ORDERS):
        place = (place * 257 + windows[:, ORDERS - 1 - order] + 1) % ROWS
        found.append(place + order * ROWS)
    return torch.stack(found, 1)


def sparse_run(seed: int, name: str, steps: int) -> float:
    """Train a table of logits with one optimizer; return its held-out loss in nats per byte."""
    generator = torch.Generator().manual_seed(seed)
    start = 0.01 * torch.randn(ORDERS * ROWS, CONFIG.vocab_size, generator=generator)
    table = nn.Parameter(start)
    make, rate = SPARSE[name]
    optimizer = make([table], lr=rate)
    draw = batches(seed, batch=SPARSE_BATCH, length=ORDERS)

    def loss(windows: Tensor) -> Tensor:
        return F.cross_entropy(F.embedding(contexts(windows), table).sum(1), windows[:, -1])

    for n in range(steps):
        optimizer.zero_grad()
        loss(draw(n)[0]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(held_out_rows().unfold(1, ORDERS + 1, 1).flatten(0, 1)))


@case("sparse/SM3", minutes=0.7)
def sparse_of_sm3(sizes: Sizes = FULL) -> list[Measurement]:
    """Sparse gradients: a table predicts the next byte from the three before it."""
    seeds, steps = sizes.seeds, sizes.sparse_steps
    losses = {name: [sparse_run(seed, name, steps) for seed in seeds] for name in SPARSE}
    details: Settings = {"seeds": seeds, "rates": {n: r for n, (_, r) in SPARSE.items()}}
    found = []
    for name, other in (("SM3", "AdamW"), ("AdaGrad", "AdamW"), ("SM3", "AdaGrad")):
        gaps = minus(losses[name], losses[other])
        quantity = f"loss minus {other}/{name}"
        found.append(seen(quantity, "nats a byte", gaps, **details, loss=losses))
    return found


# Mixture of experts ------------------------------------------------------------------------------
EXPERTS = 4
MIXED = f"{EXPERTS} experts"


def experts_way(seed: int, *, batch: int, length: int, coefficient: float = 0.01) -> Way:
    """Return training with experts in place of each MLP. coefficient: of the auxiliary loss."""

    def loss(model: Llama, tokens: Tensor) -> Tensor:
        return mean_loss(model, tokens) + coefficient * experts.model_balance_loss(model)

    model = memory.with_experts(fresh(seed), EXPERTS, seed=seed)
    return way(seed, batch=batch, length=length, model=model, loss=loss)


@case("bytes/experts", minutes=0.4)
def bytes_of_experts(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks against dense models with as many active parameters, and with as many in total."""
    big, wide = sizes.big, EXPERTS * CONFIG.intermediate_size
    sparse = experts_way(0, **big)
    counts = experts.count_parameters(sparse.model)
    dense: Settings = {"config": replace(CONFIG, intermediate_size=wide), **big}
    mine, theirs = metered(sparse), metered(way(0, **dense))
    predicted = experts.estimate_experts(CONFIG, experts=EXPERTS, **big)
    activations = mine.most.activations / theirs.most.activations
    return [
        *against(MIXED, mine.peak, predicted, plain(**big), **big),
        *against("dense, as many parameters", theirs.peak, told(**dense), plain(**big), **big),
        exact(f"peak over dense/{MIXED}", "ratio", mine.peak.total / theirs.peak.total),
        exact(f"activations over dense/{MIXED}", "ratio", activations),
        exact(f"active over all parameters/{MIXED}", "ratio", counts.active / counts.total),
    ]


@case("price/experts", minutes=3)
def price_of_experts(sizes: Sizes = FULL) -> list[Measurement]:
    """Loss and time against the dense model, and how even the routing of held-out text is."""
    variants: dict[str, Settings] = {MIXED: {}, f"{MIXED}, unbalanced": {"coefficient": 0}}
    labels = dict(zip(variants, ("with auxiliary loss", "without auxiliary loss"), strict=True))
    found: dict[str, list[float]] = {}

    def watch(ways: Mapping[str, Way]) -> None:
        for name, label in labels.items():
            layers = [m for m in ways[name].model.modules() if isinstance(m, experts.SwitchMLP)]
            routings = [layer.routing for layer in layers if layer.routing is not None]
            for what, values in (
                ("busiest expert", [float(routing.load.max()) for routing in routings]),
                ("dropped tokens", [float(routing.dropped) for routing in routings]),
            ):
                found.setdefault(f"{what}/{label}", []).append(statistics.fmean(values))

    common: Settings = {"seeds": sizes.seeds, "steps": sizes.steps}
    paid = prices(variants, experts_way, size=sizes.small, watch=watch, **common)
    details: Settings = {**common, "even": 1 / EXPERTS}
    return paid + [seen(name, "share", samples, **details) for name, samples in found.items()]


# LoRA --------------------------------------------------------------------------------------------
LORA: Settings = {"rank": 8, "alpha": 16.0}
# By the held-out loss after tuning on seeds 100 and 101, from 0.0005, 0.002 and 0.008; 0.000125
# too for all weights, whose best was the lowest.
LORA_RATES = {"full": 5e-4, "LoRA": 2e-3, "QLoRA": 2e-3}


@functools.cache
def source_bytes(part: str) -> Tensor:
    """Return source files of Python's library as byte tokens; the topic's model reads its prose."""
    text = python_sources(part, max_bytes=MAX_BYTES[part]).text
    return torch.tensor(ByteTokenizer().encode(text), dtype=torch.int64)


@torch.no_grad()
def source_loss(model: Llama) -> float:
    """Return the loss in nats per byte on source files that no training reads."""
    rows, _ = windows(source_bytes("held_out"), batch=HELD_OUT_ROWS, length=HELD_OUT_LENGTH)(0)
    loss, count = next_token_loss(model, rows)
    return loss.item() / count


def adapted(model: Llama, name: str, seed: int) -> list[nn.Parameter]:
    """Prepare `model` for one way of tuning, in place, and return what it trains."""
    if name == "full":
        return list(model.parameters())
    scheme = INT4 if name == "QLoRA" else None
    return add_lora(model, scheme=scheme, generator=torch.Generator().manual_seed(seed), **LORA)


@case("bytes/lora", minutes=0.3)
def bytes_of_lora(sizes: Sizes = FULL) -> list[Measurement]:
    """Peaks of tuning few numbers beside weights that are frozen, and those in 4 bits."""
    size = {**sizes.big, "batch": 1}
    found = []
    for name in ("LoRA", "QLoRA"):
        model = fresh(0)
        adapted(model, name, 0)
        peak = metered(way(0, model=model, **size)).peak
        found += against(name, peak, None, plain(**size), **size, **LORA)
    return found


@case("price/lora", minutes=4)
def price_of_lora(sizes: Sizes = FULL) -> list[Measurement]:
    """Held-out loss on source code, after the topic's model learned prose and was tuned on code."""
    losses: dict[str, list[float]] = {}
    for seed in sizes.few:
        base = fresh(seed)
        read = batches(seed, **sizes.tuned)
        train(base, read, torch.optim.AdamW(base.parameters(), lr=LEARNING_RATE),
              steps=sizes.learned, progress=False)  # fmt: skip
        losses.setdefault("not tuned", []).append(source_loss(base))
        code = windows(source_bytes("train"), seed=seed, **sizes.tuned)
        for name, rate in LORA_RATES.items():
            model = copy.deepcopy(base)
            optimizer = torch.optim.AdamW(adapted(model, name, seed), lr=rate)
            train(model, code, optimizer, steps=sizes.tuning, progress=False)
            losses.setdefault(name, []).append(source_loss(model))
    full = losses.pop("full")
    details: Settings = {"seeds": list(sizes.few), "full loss": full, **LORA, **sizes.tuned}
    return [
        seen(f"loss minus full/{name}", "nats a byte", minus(mine, full), loss=mine, **details)
        for name, mine in losses.items()
    ]


# Attention ---------------------------------------------------------------------------------------
def naive_told(config: LlamaConfig, *, batch: int, length: int) -> int:
    """Predict the peak bytes of plain training with an attention that keeps its weights.

    A layer keeps the attention weights and a mask. Unlike the fused form, it keeps neither its
    output by head, which o_proj copies, nor a log-sum-exp per row. The peak is at the loss, or
    where the last layer's scores get their gradients. There it holds two more matrices, the
    gradients of what comes after them, and that layer's first norm, queries and keys.
    """
    shape = traffic.Shape(
        batch=batch, heads=config.num_attention_heads, length=length, dtype_bytes=4,
        head_dim=config.head_size, is_causal=True,
    )  # fmt: skip
    given: Settings = {"batch": batch, "length": length}
    layers, row, tokens = config.num_hidden_layers, shape.query_bytes, batch * length
    weights = traffic.kept_bytes(shape, "naive")
    more = weights + length**2 - row - shape.row_bytes
    fused = memory.estimate(config, **given)
    one, two = (
        memory.estimate(replace(config, num_hidden_layers=n), moment="forward", **given).activations
        for n in (layers, layers + 1)
    )
    inputs = 8 * batch * (length + 1) + 4 * tokens * config.head_size
    last = 5 * row + 4 * tokens + weights + length**2
    kept = inputs + (layers - 1) * (two - one + more) + last
    top = f"layers.{layers - 1}."
    after = ("lm_head.", "norm.", f"{top}mlp.", f"{top}post_", f"{top}self_attn.o_proj.")
    gradients = sum(
        4 * math.prod(size)
        for name, size in parameter_shapes(config).items()
        if name.startswith(after)
    )
    at_scores = fused.parameters + fused.optimizer + gradients + kept + 2 * weights + 2 * row
    return max(at_scores, fused.total + layers * more)


@case("bytes/attention", minutes=1)
def bytes_of_attention(sizes: Sizes = FULL) -> list[Measurement]:
    """Peak of training with all scores in memory over the fused form's, by length."""
    alone = replace(CONFIG, num_hidden_layers=1, max_position_embeddings=4096)
    forms: dict[str, Callable[..., Tensor]] = {
        "naive": functools.partial(naive, is_causal=True),
        "flash": causal_attention,
    }
    found = []
    for what, config, batch, lengths in (
        ("model", CONFIG, 2, sizes.model_lengths),
        ("layer", alone, 1, sizes.layer_lengths),
    ):
        for length in lengths:
            size: Settings = {"batch": batch, "length": length}
            models = {name: Llama(config, attention=form) for name, form in forms.items()}
            peaks = {n: metered(way(0, model=m, **size)).peak for n, m in models.items()}
            ratio = peaks["naive"].total / peaks["flash"].total
            predicted = naive_told(config, **size) / memory.estimate(config, **size).total
            name = f"peak, naive over flash/{what}, {length} tokens"
            parts: Settings = {form: peak.parts() for form, peak in peaks.items()}
            found.append(exact(name, "ratio", ratio, predicted=predicted, **parts, **size))
    return found


# Together ----------------------------------------------------------------------------------------
SAVING: Settings = {"checkpointing": 1, "parts": 4}
TOGETHER: Mapping[str, Settings] = {
    "checkpointing, accumulation": SAVING,
    "checkpointing, accumulation, Adafactor": {**SAVING, **LESS_STATE["Adafactor"]},
    "checkpointing, accumulation, AdamW8bit": {**SAVING, **LESS_STATE["AdamW8bit"]},
}
IN_HALF: Mapping[str, Settings] = {
    "autocast, accumulation": {"recipe": "autocast to bfloat16", "parts": 4},
    "bfloat16, checkpointing, accumulation, Adafactor": {
        "recipe": "bfloat16", **SAVING, **LESS_STATE["Adafactor"],
    },
}  # fmt: skip


@case("combination", minutes=5, needs="cpu")
def combination(sizes: Sizes = FULL) -> list[Measurement]:
    """Combined methods: bytes, time and loss; in 16 bits only the bytes."""
    tried = {name: settings for name, settings in TOGETHER.items() if "optimizer" in settings}
    found = bytes_of(TOGETHER, sizes.big) + bytes_of(IN_HALF, sizes.half)
    return found + prices(tried, steps=sizes.steps, size=sizes.small, seeds=sizes.seeds)


# The estimate ------------------------------------------------------------------------------------
GROUPED = LlamaConfig(
    vocab_size=300, hidden_size=80, intermediate_size=200, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
ASKED: Mapping[str, Settings] = {
    "plain": FULL.big,
    "one row": {"batch": 1, "length": 77},
    "long": {"batch": 1, "length": 1024},
    "grouped, tied, 6 layers": {"config": GROUPED, "batch": 3, "length": 131},
    "SGD": {"optimizer": "sgd", **FULL.tiny},
    "Adafactor": {"optimizer": "adafactor", **FULL.tiny},
    "SM3": {"optimizer": "sm3", **FULL.tiny},
    "AdamW8bit": {"optimizer": "adamw8bit", **FULL.tiny},
    "every 1": {"checkpointing": 1, **FULL.half},
    "every 3": {"checkpointing": 3, **FULL.half},
    "selective": {"checkpointing": "selective", **FULL.half},
    "bfloat16": {"recipe": "bfloat16", **FULL.tiny},
    "mixed": {"recipe": "autocast to bfloat16", **FULL.tiny},
    "bfloat16, every 2, Adafactor": {
        "recipe": "bfloat16", "checkpointing": 2, "optimizer": "adafactor", **FULL.tiny,
    },
}  # fmt: skip


@case("estimate/error", minutes=0.7, needs="cpu")
def error_of_estimate(sizes: Sizes = FULL) -> list[Measurement]:
    """The estimate against the meter: shapes, batches, dtypes, optimizers, checkpoints."""
    found = []
    for name in ASKED if sizes.asked is None else sizes.asked:
        settings = ASKED[name]
        predicted, peak = told(**settings), metered(way(0, **settings)).peak
        parts: Settings = {"predicted": predicted.parts(), "measured": peak.parts()}
        error = predicted.total / peak.total - 1
        found.append(seen(f"relative error/{name}", "share", [error], exact=True, **parts))
    largest = max(abs(item.samples[0]) for item in found)
    return [*found, exact("largest relative error", "share", largest)]


# Serving -----------------------------------------------------------------------------------------
PROMPTS = (16, 96)  # the shortest and longest
LEAST = 8  # tokens of an output
FEWER_HEADS = replace(CONFIG, num_key_value_heads=2)  # a third of CONFIG's
POOLS: Mapping[str, tuple[LlamaConfig, str, int | None]] = {  # dtype, page; None: contiguous
    "contiguous": (CONFIG, "bfloat16", None),
    "pages of 256": (CONFIG, "bfloat16", 256),
    "pages of 64": (CONFIG, "bfloat16", 64),
    "pages of 16": (CONFIG, "bfloat16", 16),
    "pages of 16, int8": (CONFIG, "int8", 16),
    "pages of 16, float8": (CONFIG, "float8", 16),
    "pages of 16, GQA": (FEWER_HEADS, "bfloat16", 16),
    "pages of 16, GQA, int8": (FEWER_HEADS, "int8", 16),
}


def asking(n: int, seed: int, most: int) -> Workload:
    """Return n waiting requests with outputs of 8 to `most` tokens, most of them short."""
    dice = random.Random(f"prompts {seed}")
    return Workload(
        arrivals=(0.0,) * n,
        prompts=tuple(dice.randint(*PROMPTS) for _ in range(n)),
        outputs=long_tail(LEAST, n, seed, most=most),
        max_tokens=most,
        vocabulary=CONFIG.vocab_size,
        seed=seed,
    )


@case("cache/requests", minutes=8, needs="cpu")
def requests_at_once(sizes: Sizes = FULL) -> list[Measurement]:
    """The requests that our engine runs at once in one budget of bytes, by how it keeps them."""
    longest = PROMPTS[1] + sizes.output
    budget = sizes.reserved * kv_bytes(CONFIG, longest)
    found = []
    for name, (config, dtype, page) in POOLS.items():
        size, model = page or longest, Llama(config).eval()  # imposed lengths: any weights do
        held = average_held(asking(500, 0, sizes.output), size)
        token = kv_bytes(config, 1, dtype=dtype)
        n = math.ceil(sizes.lives * max(sizes.reserved, budget / token / held))
        seen_by_seed = [
            crowd(
                model, asking(n, seed, sizes.output), budget=budget, dtype=dtype, page=size,
                longest=longest, warm_up=sizes.young,
            )
            for seed in sizes.few
        ]  # fmt: skip
        predicted = [one.predicted for one in seen_by_seed]
        found += [
            exact(f"bytes per token/{name}", "B", token, budget=budget, page=size),
            seen(
                f"requests at once/{name}", "requests", [one.measured for one in seen_by_seed],
                peers={"predicted": predicted}, seeds=sizes.few, requests=n, budget=budget,
                blocks=seen_by_seed[0].blocks, page=size, longest=longest,
                preemptions=[one.preemptions for one in seen_by_seed],
            ),
            seen(
                f"wasted/{name}", "share", [one.wasted for one in seen_by_seed], seeds=sizes.few,
            ),
        ]  # fmt: skip
    return found


@case("cache/loss", minutes=3, needs="cpu")
def rounded_cache(sizes: Sizes = FULL) -> list[Measurement]:
    """The held-out loss of the shipped model with a rounded KV cache, minus that with float32."""
    model = pretrained("target")
    rows = {seed: held_out_windows(sizes.windows, sizes.window, seed) for seed in sizes.seeds}
    losses = {
        dtype: [loss_through_cache(model, rows[seed], dtype) for seed in sizes.seeds]
        for dtype in ("float32", "bfloat16", "int8", "float8")
    }
    plain = losses.pop("float32")
    return [
        seen(
            f"loss minus float32/{dtype}", "nats per token",
            [mine - other for mine, other in zip(loss, plain, strict=True)],
            seeds=sizes.seeds, loss=loss, float32=plain, windows=sizes.windows,
            tokens=sizes.window, bytes=kv_bytes(model.config, 1, dtype=dtype),
        )
        for dtype, loss in losses.items()
    ]  # fmt: skip
