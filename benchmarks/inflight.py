"""In-flight batching: our policies against each other, against transformers, and behind a server.

Everything runs on one thread with the shipped target, in fp32 and greedily. Output lengths are
imposed and unknown to the scheduler: every request asks for the most tokens and ends earlier. Times
are CPU times; counts (rows, tokens, blocks) are the same everywhere. The case "replicas" is
simulated.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.runner import Measurement, case, ratios, seen
from labcore.decoding import SamplingConfig, generate
from labcore.decoding.audit import near_tie_audit
from labcore.models import Llama, save_pretrained
from labcore.models.shipped import pretrained, prompts, shipped_tokenizer
from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.metrics import RequestMetrics
from labcore.serving.simulation.costs import CostModel, fit_costs
from labcore.serving.simulation.replay import Replay, replay
from labcore.serving.simulation.router import ROUTERS, route_requests
from labcore.serving.simulation.simulate import Run, bootstrap, simulate
from labcore.serving.simulation.workload import Workload, fixed, long_tail, poisson
from labcore.serving.triton import environment as triton_environment
from labcore.serving.triton.client import engine_stream, examples, generate_stream
from labcore.serving.triton.server import TritonServer

# What all cases share ----------------------------------------------------------------------------
STATIC, OURS, GREEDY = "static", "guaranteed_no_evict", "max_utilization"
POLICIES = (STATIC, OURS, GREEDY)
GAP = 1e-3  # nats: a near tie
TIMES = ("queue", "ttft", "tpot", "e2e", "normalized latency")  # the last: e2e per output token


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases serve. Lengths count tokens. No two cases share a seed."""

    # The pool holds eight requests of maximum length.
    slots: int = 8
    page: int = 16
    pages: int = 256
    budget: int = 256
    # The shortest and longest outputs, and prompts.
    least: int = 8
    most: int = 256
    shortest: int = 16
    longest: int = 96
    peer_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    peer_requests: int = 32
    peer_rounds: int = 2
    # The workload of nano-vllm's bench.py (256 requests, 100 to 1,024 tokens in and out, all at
    # once, batches of 16,384 tokens), a tenth of its lengths.
    crowd: int = 256
    crowd_lengths: tuple[int, int] = (10, 102)
    crowd_budget: int = 1638
    crowd_seeds: tuple[int, ...] = (100, 101)
    load_seeds: tuple[int, ...] = tuple(range(130, 138))
    load_requests: int = 64
    rate_seeds: tuple[int, ...] = (30, 31, 32)
    # Each round: the seed of the run used for the fit, and the seed of the predicted runs.
    simulated_rounds: tuple[tuple[int, int], ...] = ((40, 43), (41, 44), (42, 45))
    warm_up: int = 20  # initial steps that the fit omits
    steps_differ: bool = True  # enough for a fit to tell the costs apart
    pressed_seeds: tuple[int, ...] = (50, 51, 52)
    pressed_requests: int = 24
    few_pages: int = 40
    exact_output: int = 96
    chunks: tuple[int, ...] = (16, 64, 256, 896)
    long_prompt: int = 896
    decoding: int = 7  # rows beside the long prompt
    before: int = 12  # their steps before it comes
    chunk_rounds: int = 5
    kinds: tuple[str, ...] = ("code", "long_code")
    draft_prompts: int = 8
    draft_tokens: int = 64
    draft_rounds: int = 3
    system: int = 256  # the shared prompt
    own: tuple[int, int] = (8, 48)  # the shortest and longest rest of a prompt
    sharing: int = 24  # requests
    shared_output: int = 16
    shared_seeds: tuple[int, ...] = (60, 61, 62, 63, 64)
    equal_requests: int = 64
    streams: tuple[int, ...] = (8, 32)
    stream_tokens: int = 32
    stream_rounds: int = 5
    starts: int = 2
    kills: int = 3
    told_tokens: int = 12
    routed_requests: int = 400
    group_prefix: int = 192
    routed_seeds: tuple[int, ...] = (80, 81, 82, 83, 84)


FULL = Sizes()
SMALL = Sizes(
    slots=3, page=4, pages=40, budget=24, least=2, most=14, shortest=3, longest=11,
    peer_seeds=(3, 4), peer_requests=7, peer_rounds=1,
    crowd=9, crowd_lengths=(2, 7), crowd_budget=24, crowd_seeds=(19, 20),
    load_seeds=(6, 7), load_requests=9, rate_seeds=(8,), simulated_rounds=((9, 10), (11, 12)),
    warm_up=2, steps_differ=False, pressed_seeds=(13, 14), pressed_requests=6, few_pages=8,
    exact_output=12,
    chunks=(4, 60), long_prompt=60, decoding=2, before=2, chunk_rounds=2, kinds=("code",),
    draft_prompts=3, draft_tokens=12, draft_rounds=2, system=20, own=(2, 5), sharing=6,
    shared_output=3, shared_seeds=(15, 16), equal_requests=5, streams=(2,), stream_tokens=3,
    stream_rounds=2, starts=1, kills=1, told_tokens=3, routed_requests=40,
    group_prefix=20, routed_seeds=(17, 18),
)  # fmt: skip


def target() -> Llama:
    """Return the model of every measured case."""
    return pretrained("target")


def prompt_lengths(sizes: Sizes, n: int, seed: int) -> tuple[int, ...]:
    """Return n lengths, uniform between the shortest and the longest."""
    dice = random.Random(f"prompts {seed}")
    return tuple(dice.randint(sizes.shortest, sizes.longest) for _ in range(n))


def workload(sizes: Sizes, n: int, seed: int, arrivals: Sequence[float] | None = None) -> Workload:
    """Return n requests with long-tailed outputs, which max_tokens hides from the scheduler.

    Without arrivals, all wait from the start.
    """
    return Workload(
        arrivals=(0.0,) * n if arrivals is None else tuple(arrivals),
        prompts=prompt_lengths(sizes, n, seed),
        outputs=long_tail(sizes.least, n, seed, most=sizes.most),
        max_tokens=sizes.most,
        vocabulary=target().config.vocab_size,
        seed=seed,
    )


def engine(sizes: Sizes, policy: str = OURS, **changed: Any) -> Engine:
    """Return an engine without prefix sharing: no request may profit from an earlier round."""
    options = {
        "num_blocks": sizes.pages, "block_size": sizes.page, "max_num_seqs": sizes.slots,
        "max_num_batched_tokens": sizes.budget,
        "policy": policy, "max_length": sizes.longest + sizes.most, "eos_token_ids": (),
        "enable_prefix_caching": False,
    }  # fmt: skip
    return Engine(target(), **{**options, **changed})


def setting(sizes: Sizes, *given: Workload, **more: Any) -> dict[str, Any]:
    """Return details: sizes, and the lengths of each workload's requests."""
    return {
        "slots": sizes.slots, "page": sizes.page, "blocks": sizes.pages, "budget": sizes.budget,
        "dtype": "float32",
        "prompt tokens": [one.prompts for one in given],
        "output tokens": [one.outputs for one in given],
        "max_tokens": [one.max_tokens for one in given], **more,
    }  # fmt: skip


def beside(
    quantity: str, unit: str, samples: Mapping[str, Sequence[float]], ours: str = OURS,
    /, **more: Any
) -> Measurement:  # fmt: skip
    """Return a measurement of one system, with the others as its peers."""
    others = {name: found for name, found in samples.items() if name != ours}
    return seen(quantity, unit, samples[ours], peers=others, **more)


def values(run: Run, name: str) -> list[float]:
    """Return one of TIMES for each request that has it, in seconds."""
    if name == "normalized latency":
        return [one.e2e / one.output for one in run.metrics if one.e2e and one.output]
    found = (getattr(one, name) for one in run.metrics)
    return [one for one in found if one is not None]


def quantile(found: Sequence[float], at: float) -> float:
    """Return a quantile, interpolated between the two nearest values."""
    return float(numpy.quantile(found, at))


def shuffled(names: Iterable[str], *seed: Any) -> list[str]:
    """Return a new order for each round: no system should always follow the same one."""
    order = [*names]
    random.Random(str(seed)).shuffle(order)
    gc.collect()
    return order


# Against transformers ----------------------------------------------------------------------------
CONTINUOUS, PADDED = "transformers continuous", "transformers static"
UNFUSED = f"{OURS}, not fused"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A system's results for a workload whose requests all wait. Times are in seconds."""

    seconds: float
    outputs: Sequence[Sequence[int]]
    ttft: Sequence[float]
    tpot: Sequence[float]
    facts: Mapping[str, float]

    @classmethod
    def of(cls, run: Replay) -> Served:
        """Return the results of an engine's run."""
        return cls(
            seconds=run.seconds,
            outputs=[run.outputs[one.id] for one in run.metrics],
            ttft=values(run, "ttft"),
            tpot=values(run, "tpot"),
            facts={
                "wasted rows": run.wasted,
                "steps": len(run.steps),
                "preemptions": sum(one.preemptions for one in run.metrics),
            },
        )

    @classmethod
    def at(
        cls, moments: Sequence[Sequence[float]], outputs: Sequence[Sequence[int]], **facts: float
    ) -> Served:
        """Return results from the times at which each request's tokens arrived."""
        return cls(
            seconds=max(one[-1] for one in moments),
            outputs=outputs,
            ttft=[one[0] for one in moments],
            tpot=[(one[-1] - one[0]) / (len(one) - 1) for one in moments if len(one) > 1],
            facts=facts,
        )


def of_transformers(model: Llama) -> Any:
    """Load the same weights in transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        peer = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
    return peer.eval()


@contextlib.contextmanager
def continuous(model: Any, sizes: Sizes) -> Iterator[Callable[[Workload], Served]]:
    """Run transformers' continuous batching with our slots, pages, budget and imposed lengths."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=sizes.most
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=sizes.page, num_blocks=sizes.pages, max_batch_tokens=sizes.budget,
            max_requests_per_batch=sizes.slots, allow_block_sharing=False,
        ),
    )  # fmt: skip
    numbers = itertools.count()

    def serve(given: Workload) -> Served:
        asked = given.requests()
        ids = [f"{next(numbers)} {one.id}" for one in asked]
        begin = time.perf_counter()
        for id, one, length in zip(ids, asked, given.outputs, strict=True):
            manager.add_request(
                [*one.prompt], request_id=id, max_new_tokens=length, record_timestamps=True
            )
        found: dict[str, Any] = {}
        while len(found) < len(ids):
            result = manager.get_result(timeout=1.0)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before its requests")
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"transformers' continuous batching: {result.error}")
                found[result.request_id] = result
        told = [found[id] for id in ids]
        return Served.at(
            [[moment - begin for moment in one.timestamps] for one in told],
            [one.generated_tokens for one in told],
            most_at_once=at_once([one.lifespan for one in told]),
        )

    manager.start()
    try:
        yield serve
    finally:
        manager.stop(block=True)


def at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return the maximum number of overlapping spans; touching spans don't overlap."""
    changes = sorted([(end, -1) for _, end in spans] + [(begin, 1) for begin, _ in spans])
    return max(itertools.accumulate(change for _, change in changes))


def padded(model: Any, sizes: Sizes) -> Callable[[Workload], Served]:
    """Run transformers' generate on left-padded batches, one row a slot, in order of arrival.

    A row ends at its imposed length, but is computed until the longest of its batch has ended.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Ends(StoppingCriteria):
        def __init__(self, width: int, lengths: Sequence[int]) -> None:
            self.width, self.lengths = width, torch.tensor(lengths)
            self.moments: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
            self.moments.append(time.perf_counter())
            return self.lengths <= input_ids.shape[1] - self.width

    def serve(given: Workload) -> Served:
        asked, begin = given.requests(), time.perf_counter()
        moments, outputs, pads, places = [], [], 0, 0
        for first in range(0, len(asked), sizes.slots):
            rows = [[*one.prompt] for one in asked[first : first + sizes.slots]]
            lengths = given.outputs[first : first + sizes.slots]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            pads, places = pads + int((1 - mask).sum()), places + mask.numel()
            ends = Ends(width, lengths)
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=sizes.most,
                pad_token_id=0, eos_token_id=None, stopping_criteria=StoppingCriteriaList([ends]),
            )  # fmt: skip
            for row, length in enumerate(lengths):
                moments.append([moment - begin for moment in ends.moments[:length]])
                outputs.append(out[row, width : width + length].tolist())
        return Served.at(moments, outputs, padding_share=pads / places)

    return serve


def refuse_wrong(found: Mapping[str, Served], given: Workload) -> dict[str, Any]:
    """Check that outputs are greedy and have the imposed lengths.

    Raises RuntimeError for a wrong output, which must not be timed.
    """
    worst, same = 0.0, dict.fromkeys(found, 0)
    for name, served in found.items():
        for request, length, tokens, ours in zip(
            given.requests(), given.outputs, served.outputs, found[OURS].outputs, strict=True
        ):
            same[name] += [*tokens] == [*ours]
            if len(tokens) != length:
                raise RuntimeError(f"{name} must output {length} tokens, got {len(tokens)}")
            if [*tokens] == [*ours] and name != OURS:
                continue
            audit = near_tie_audit(target(), request.prompt, tokens, gap=GAP)
            if not audit.passed:
                raise RuntimeError(
                    f"each output must be greedy up to near ties of {GAP} nats, got a gap of "
                    f"{audit.worst:.3g} nats from {name}"
                )
            worst = max(worst, audit.worst)
    return {"requests": len(given), f"identical to {OURS}": same, "largest gap, nats": worst}


@case("peers", minutes=1.6, needs="cpu")
def peers(sizes: Sizes = FULL) -> list[Measurement]:
    """Requests that all wait: each system in the same rounds, and the waste of static batches."""
    given = {seed: workload(sizes, sizes.peer_requests, seed) for seed in sizes.peer_seeds}
    engines = {policy: engine(sizes, policy) for policy in POLICIES}
    engines[UNFUSED] = engine(sizes, fused=False)
    model = of_transformers(target())
    runs: dict[str, list[Served]] = {}
    first: dict[int, dict[str, Served]] = {}
    with continuous(model, sizes) as serve:
        systems: dict[str, Callable[[Workload], Served]] = {
            name: functools.partial(served_by, one) for name, one in engines.items()
        }
        systems |= {CONTINUOUS: serve, PADDED: padded(model, sizes)}
        for seed, one in given.items():  # a warmup whose outputs are checked
            first[seed] = {name: system(one) for name, system in systems.items()}
        audits = [refuse_wrong(first[seed], one) for seed, one in given.items()]
        for turn, (seed, one) in itertools.product(range(sizes.peer_rounds), given.items()):
            for name in shuffled(systems, "peers", turn, seed):
                runs.setdefault(name, []).append(systems[name](one))
    most = max(int(one.facts["most_at_once"]) for one in runs[CONTINUOUS])
    if most > sizes.slots:
        raise RuntimeError(
            f"transformers must run at most {sizes.slots} requests at once, got {most}"
        )
    details = setting(
        sizes, *given.values(), audits=audits, seeds=sizes.peer_seeds, rounds=sizes.peer_rounds
    )
    details["most requests at once in transformers"] = most
    details["seconds"] = {name: [one.seconds for one in found] for name, found in runs.items()}
    return [*compared(runs, given, details, sizes), *wasted_by(first, details)]


def served_by(one: Engine, given: Workload) -> Served:
    """Serve by an engine, from an empty pool."""
    one.pool.clear()
    return Served.of(replay(one, given))


def compared(
    runs: Mapping[str, Sequence[Served]],
    given: Mapping[int, Workload],
    details: dict[str, Any],
    sizes: Sizes,
) -> list[Measurement]:
    """Return rates and times of every system, and ours over each of the others."""
    totals = [sum(one.outputs) for one in given.values()] * sizes.peer_rounds
    speeds = {
        name: [total / one.seconds for total, one in zip(totals, found, strict=True)]
        for name, found in runs.items()
    }
    rates = {
        name: [sizes.peer_requests / one.seconds for one in found] for name, found in runs.items()
    }
    found = [
        beside("tokens a second", "tokens/s", speeds, **details),
        beside("requests a second", "requests/s", rates),
    ]
    for what, (label, at) in itertools.product(
        ("ttft", "tpot"), (("p50", 0.5), ("p99", 0.99))
    ):  # fmt: skip
        times = {
            name: [quantile(getattr(one, what), at) for one in served]
            for name, served in runs.items()
        }
        found.append(beside(f"{what} {label}", "s", times))
    for name in runs:
        if name != OURS:
            both = {one: statistics.median(speeds[one]) for one in (OURS, name)}
            samples = ratios(speeds[OURS], speeds[name])
            quantity = f"tokens a second, {OURS} over {name}"
            found.append(seen(quantity, "ratio", samples, medians=both))
    return found


def wasted_by(first: Mapping[int, Mapping[str, Served]], details: Any) -> list[Measurement]:
    """Return counts of waste, which are the same in every round."""
    lengths = {"output tokens": details["output tokens"], "exact": True}
    found = [
        seen(
            f"share of rows computed for requests that had ended/{policy}",
            "share",
            [one[policy].facts["wasted rows"] for one in first.values()],
            **lengths,
        )
        for policy in (STATIC, OURS)
    ]
    padding = [one[PADDED].facts["padding_share"] for one in first.values()]
    found.append(
        seen(
            f"share of padding in the prompts/{PADDED}", "share", padding,
            exact=True, **{"prompt tokens": details["prompt tokens"]},
        )
    )  # fmt: skip
    steps = {name: [one[name].facts["steps"] for one in first.values()] for name in POLICIES}
    found.append(beside("steps", "steps", steps, exact=True))
    return found


@case("crowd", minutes=3.2, needs="cpu")
def crowd(sizes: Sizes = FULL) -> list[Measurement]:
    """nano-vllm's workload at a tenth of its lengths, beside transformers' continuous batching."""
    least, most = sizes.crowd_lengths
    wide = replace(
        sizes, slots=sizes.crowd, pages=sizes.crowd * -(-2 * most // sizes.page),
        budget=sizes.crowd_budget, shortest=least, longest=most, most=most,
    )  # fmt: skip
    given = {seed: uniform(wide, seed) for seed in sizes.crowd_seeds}
    ours = functools.partial(served_by, engine(wide))
    speeds: dict[str, list[float]] = {}
    audits = []
    with continuous(of_transformers(target()), wide) as serve:
        systems: dict[str, Callable[[Workload], Served]] = {OURS: ours, CONTINUOUS: serve}
        for system in systems.values():  # a warmup
            system(uniform(replace(wide, crowd=1), -1))
        for seed, one in given.items():
            found = {name: systems[name](one) for name in shuffled(systems, "crowd", seed)}
            audits.append(refuse_wrong(found, one))
            for name, served in found.items():
                speeds.setdefault(name, []).append(sum(one.outputs) / served.seconds)
    details = setting(wide, *given.values(), audits=audits, seeds=sizes.crowd_seeds)
    over = ratios(speeds[OURS], speeds[CONTINUOUS])
    return [
        beside("tokens a second", "tokens/s", speeds, **details),
        seen(f"tokens a second, {OURS} over {CONTINUOUS}", "ratio", over),
    ]


def uniform(sizes: Sizes, seed: int) -> Workload:
    """Return requests that all wait, with uniform prompt and output lengths."""
    dice = random.Random(f"outputs {seed}")
    return Workload(
        arrivals=(0.0,) * sizes.crowd,
        prompts=prompt_lengths(sizes, sizes.crowd, seed),
        outputs=tuple(dice.randint(sizes.shortest, sizes.most) for _ in range(sizes.crowd)),
        max_tokens=sizes.most,
        vocabulary=target().config.vocab_size,
        seed=seed,
    )


# Arrivals ----------------------------------------------------------------------------------------
LOADS: Mapping[str, float] = {"light": 0.3, "busy": 0.7, "saturated": 1.2}


def served_rate(one: Engine, sizes: Sizes) -> list[float]:
    """Return requests per second if all wait from the start: the loads are fractions of this."""
    replay(one, workload(sizes, sizes.load_requests, sizes.rate_seeds[0]))  # a warmup
    given = (workload(sizes, sizes.load_requests, seed) for seed in sizes.rate_seeds)
    return [replay(one, each).requests_per_second for each in given]


def arriving(sizes: Sizes, seed: int, rate: float) -> Workload:
    """Return a workload with Poisson arrivals, at this rate in requests per second."""
    return workload(sizes, sizes.load_requests, seed, poisson(rate, sizes.load_requests, seed))


@case("load", minutes=7, needs="cpu")
def load(sizes: Sizes = FULL) -> list[Measurement]:
    """Poisson arrivals in real time: a request's times under each policy and load, and alone."""
    engines = {policy: engine(sizes, policy) for policy in POLICIES}
    rates = served_rate(engines[OURS], sizes)
    rate = statistics.median(rates)
    for policy in (STATIC, GREEDY):
        replay(engines[policy], workload(sizes, sizes.load_requests, sizes.rate_seeds[0]))
    runs: dict[tuple[str, str], list[Replay]] = {}
    alone = []
    for seed in sizes.load_seeds:
        for name, share in LOADS.items():
            given = arriving(sizes, seed, share * rate)
            for policy in shuffled(engines, "load", name, seed):
                runs.setdefault((policy, name), []).append(replay(engines[policy], given))
        alone.append(alone_times(engines[OURS], workload(sizes, sizes.load_requests, seed)))
    details = setting(
        sizes,
        *(workload(sizes, sizes.load_requests, seed) for seed in sizes.load_seeds),
        seeds=sizes.load_seeds,
        loads=LOADS,
    )
    found = [seen(f"requests a second, all waiting/{OURS}", "requests/s", rates, **details)]
    for name, share in LOADS.items():
        by_policy = {policy: runs[policy, name] for policy in POLICIES}
        arrivals = {
            "arrivals": [poisson(share * rate, sizes.load_requests, s) for s in sizes.load_seeds]
        }
        found += told_of_load(name, by_policy, {"rate": share * rate, **arrivals})
        found += told_of_own_times(name, by_policy, alone)
    return found


WHOLE = f"{STATIC}, returned whole"  # answers that come when their whole batch has ended
OWN = "latency over its time alone"


def alone_times(one: Engine, given: Workload) -> list[float]:
    """Return the seconds that each request takes, from arrival to end, on an idle engine."""
    told = []
    for request in given.requests():
        run = replay(one, [replace(request, arrival=0.0)], lengths=given.lengths)
        told += values(run, "e2e")
    return told


def returned_whole(run: Run) -> list[float]:
    """Return each request's seconds from arrival to the end of its static batch."""
    told = [0.0] * len(run.metrics)
    batch: list[int] = []
    end = 0.0  # of the batch
    for place in sorted(range(len(told)), key=lambda at: admitted_at(run.metrics[at])):
        one = run.metrics[place]
        if admitted_at(one) >= end:
            batch = []
        batch.append(place)
        end = max(run.metrics[at].arrival + (run.metrics[at].e2e or 0.0) for at in batch)
        for at in batch:
            told[at] = end - run.metrics[at].arrival
    return told


def admitted_at(one: RequestMetrics) -> float:
    """Return when a request left the queue, in seconds from the start of the run."""
    return one.arrival + (one.queue or 0.0)


def told_of_own_times(
    name: str, runs: Mapping[str, Sequence[Run]], alone: Sequence[Sequence[float]]
) -> list[Measurement]:
    """Return what each policy makes of a request's time, over what the request takes alone."""
    times = {policy: [values(run, "e2e") for run in each] for policy, each in runs.items()}
    times[WHOLE] = [returned_whole(run) for run in runs[STATIC]]
    waits = {policy: [values(run, "queue") for run in each] for policy, each in runs.items()}
    far, middle = (
        {
            policy: [quantile(ratios(*pair), at) for pair in zip(each, alone, strict=True)]
            for policy, each in times.items()
        }
        for at in (0.99, 0.5)
    )
    queue = {
        policy: [statistics.fmean(ratios(*pair)) for pair in zip(each, alone, strict=True)]
        for policy, each in waits.items()
    }
    door = {policy: [1 + mean for mean in means] for policy, means in queue.items()}
    return [
        *(
            seen(f"{OWN} p99, {one} over {OURS}/{name}", "ratio", ratios(far[one], far[OURS]))
            for one in (WHOLE, STATIC)
        ),
        seen(
            f"queue and time alone over its time alone, {STATIC} over {OURS}/{name}",
            "ratio",
            ratios(door[STATIC], door[OURS]),
        ),
        beside(f"{OWN} p50/{name}", "own times", middle),
        beside(f"{OWN} p99/{name}", "own times", far),
        beside(f"queue over its time alone/{name}", "own times", queue),
    ]


def told_of_load(
    name: str, runs: Mapping[str, Sequence[Run]], details: dict[str, Any]
) -> list[Measurement]:
    """Return the ratio of the claim, and all times, with a sample per seed."""
    told: dict[str, dict[str, list[float]]] = {}
    for policy, each in runs.items():
        for what in TIMES:
            found = [values(run, what) for run in each]
            told.setdefault(f"{what} p50", {})[policy] = [quantile(x, 0.5) for x in found]
            told.setdefault(f"{what} p99", {})[policy] = [quantile(x, 0.99) for x in found]
            told.setdefault(f"{what} mean", {})[policy] = [statistics.fmean(x) for x in found]
        speeds = [run.tokens_per_second for run in each]
        told.setdefault("tokens a second", {})[policy] = speeds
    middle = told["normalized latency p50"]
    over = ratios(middle[OURS], middle[STATIC])
    units = {"tokens a second": "tokens/s"}
    return [
        seen(f"normalized latency p50, {OURS} over {STATIC}/{name}", "ratio", over, **details),
        *(
            beside(f"{what}/{name}", units.get(what, "s"), samples)
            for what, samples in told.items()
            if not what.endswith("mean") or what == "queue mean"
        ),
    ]


# The simulator against the engine ----------------------------------------------------------------
PREDICTED = (STATIC, OURS)
WITHIN = 0.15  # tolerance of a prediction


def scheduler_of(one: Engine) -> Callable[[], Scheduler]:
    """Return a function that makes schedulers like the engine's."""

    def make() -> Scheduler:
        return Scheduler(
            BlockPool(one.pool.num_blocks, one.pool.block_size), policy=one.scheduler.policy_name,
            max_num_seqs=one.scheduler.max_num_seqs,
            max_num_batched_tokens=one.scheduler.max_num_batched_tokens,
            chunk=one.scheduler.chunk, max_length=one.max_length,
            enable_prefix_caching=one.scheduler.enable_prefix_caching,
        )  # fmt: skip

    return make


# What predicts a run: costs fitted to an earlier run; costs fitted to its own steps, which removes
# changes of the machine's speed between runs; and the same requests, served again.
FORECAST, CALIBRATED, REPEATED = "costs of an earlier run", "costs of its own steps", "served again"


@case("simulator", minutes=4.1, needs="cpu")
def simulator(sizes: Sizes = FULL) -> list[Measurement]:
    """Runs predicted from fitted step costs, for other requests, loads, and a policy."""
    engines = {policy: engine(sizes, policy) for policy in PREDICTED}
    rate = statistics.median(served_rate(engines[OURS], sizes))
    replay(engines[STATIC], workload(sizes, sizes.load_requests, sizes.rate_seeds[0]))
    told: dict[tuple[str, str], list[tuple[Run, dict[str, Run]]]] = {}
    fits = []
    for fitted_seed, seed in sizes.simulated_rounds:
        run = replay(engines[OURS], arriving(sizes, fitted_seed, LOADS["busy"] * rate))
        fits.append(fit_costs(run.steps, skip=sizes.warm_up))
        if fits[-1].problem and sizes.steps_differ:
            raise RuntimeError(fits[-1].problem)
        for name, share in LOADS.items():
            given = arriving(sizes, seed, share * rate)
            for policy in shuffled(PREDICTED, "simulator", name, seed):
                was, again = (replay(engines[policy], given) for _ in range(2))
                make = scheduler_of(engines[policy])
                ways: dict[str, Run] = {REPEATED: again}
                for way, one in (
                    (FORECAST, fits[-1]),
                    (CALIBRATED, fit_costs(was.steps)),
                ):
                    ways[way] = simulate(
                        given, make, one.cost, residuals=one.residuals, seed=seed
                    )  # fmt: skip
                told.setdefault((policy, name), []).append((was, ways))
    details = {
        "costs": [asdict(each.cost) for each in fits],
        "steps": [len(each.seconds) for each in fits],
        "typical residual": [each.typical for each in fits],
        "fitted to": f"{OURS}, busy",
        "seeds of what is fitted to and of what is predicted": sizes.simulated_rounds,
        "rate": rate,
        "bar": WITHIN,
    }
    return [
        one
        for way in (FORECAST, CALIBRATED, REPEATED)
        for one in predictions(way, told, details)
    ]  # fmt: skip


def predictions(
    way: str,
    told: Mapping[tuple[str, str], Sequence[tuple[Run, Mapping[str, Run]]]],
    details: dict[str, Any],
) -> list[Measurement]:
    """Return predictions over measurements, and how often a p99 is within the measured interval."""
    found, off = [], []
    inside: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    for (policy, load_name), each in told.items():
        pairs = [(ways[way], was) for was, ways in each]
        over = {"tokens a second": [a.tokens_per_second / b.tokens_per_second for a, b in pairs]}
        for name in inside:
            both = [(values(a, name), values(b, name)) for a, b in pairs]
            over[f"{name} p50"] = [quantile(a, 0.5) / quantile(b, 0.5) for a, b in both]
            over[f"{name} p99"] = [quantile(a, 0.99) / quantile(b, 0.99) for a, b in both]
            for said, was in both:
                low, high = bootstrap(was, 0.99)
                inside[name].append(float(low <= quantile(said, 0.99) <= high))
        for what, samples in over.items():
            at = f"{what} over measured/{way}, {policy}, {load_name}"
            found.append(seen(at, "ratio", samples))
            if not what.endswith("p99"):
                off += [abs(sample - 1) for sample in samples]
    within = statistics.fmean(one <= WITHIN for one in off)
    hits = {name: statistics.fmean(each) for name, each in inside.items()}
    runs = len(inside["e2e"])
    return [
        seen(f"deviation of throughput and medians/{way}", "share", off, **details),
        seen(f"throughput and medians within the bar/{way}", "share", [within], bar=WITHIN),
        *(
            seen(f"{name} p99 inside the measured interval/{way}", "share", [share], runs=runs)
            for name, share in hits.items()
        ),
        *found,
    ]


# A pool that is too small ------------------------------------------------------------------------
def pressed(kind: str, seed: int, sizes: Sizes) -> tuple[Workload, int]:
    """Return the requests, and the number of blocks in their pool."""
    if kind == "off pressure":
        return workload(sizes, sizes.pressed_requests, seed), sizes.pages
    if kind == "small pool, long-tailed outputs":
        return workload(sizes, sizes.pressed_requests, seed), sizes.few_pages
    outputs = fixed(sizes.exact_output, sizes.pressed_requests)
    exact = Workload(
        arrivals=(0.0,) * sizes.pressed_requests,
        prompts=prompt_lengths(sizes, sizes.pressed_requests, seed),
        outputs=outputs,
        vocabulary=target().config.vocab_size,
        seed=seed,
    )
    return exact, sizes.few_pages


PRESSURES = (
    "small pool, outputs as long as asked for",
    "small pool, long-tailed outputs",
    "off pressure",
)


@case("pressure", minutes=0.6, needs="cpu")
def pressure(sizes: Sizes = FULL) -> list[Measurement]:
    """Preemption against promises, with a pool that is too small for all slots and a larger one."""
    found = []
    for kind in PRESSURES:
        runs: dict[str, list[Replay]] = {OURS: [], GREEDY: []}
        engines: dict[str, Engine] = {}
        for turn, seed in enumerate((sizes.pressed_seeds[0], *sizes.pressed_seeds)):
            given, pages = pressed(kind, seed, sizes)
            for policy in shuffled(runs, "pressure", kind, turn):
                one = engines.setdefault(policy, engine(sizes, policy, num_blocks=pages))
                run = replay(one, given)
                if turn:
                    runs[policy].append(run)
        found += told_of_pressure(kind, runs, pages)
    return found


def told_of_pressure(
    kind: str, runs: Mapping[str, Sequence[Replay]], pages: int
) -> list[Measurement]:
    """Return max_utilization over guaranteed_no_evict, and the tokens that it recomputed."""
    tails = {name: [quantile(values(r, "tpot"), 0.99) for r in x] for name, x in runs.items()}
    speeds = {name: [run.tokens_per_second for run in each] for name, each in runs.items()}
    again = {name: [recomputed(run) for run in each] for name, each in runs.items()}
    details: dict[str, Any] = {
        "blocks": pages,
        "preemptions": [sum(m.preemptions for m in run.metrics) for run in runs[GREEDY]],
        "most at once": {
            name: [max(step.running for step in run.steps) for run in each]
            for name, each in runs.items()
        },
        "prompt tokens": [[m.prompt for m in run.metrics] for run in runs[GREEDY]],
        "output tokens": [[m.output for m in run.metrics] for run in runs[GREEDY]],
    }
    pair = f"{GREEDY} over {OURS}/{kind}"
    return [
        seen(f"tokens a second, {pair}", "ratio", ratios(speeds[GREEDY], speeds[OURS]), **details),
        seen(f"tpot p99, {pair}", "ratio", ratios(tails[GREEDY], tails[OURS])),
        beside(f"tokens a second/{kind}", "tokens/s", speeds),
        beside(f"tpot p99/{kind}", "s", tails),
        beside(f"recomputed tokens share/{kind}", "share", again, GREEDY, exact=True),
    ]


def recomputed(run: Run) -> float:
    """Return the fraction of all tokens read that were read again."""
    again = sum(one.recomputed for one in run.metrics)
    read = sum(one.prompt + one.output - 1 for one in run.metrics)
    return again / (again + read)


# A long prompt among short ones ------------------------------------------------------------------
def interrupted(one: Engine, seed: int, sizes: Sizes) -> tuple[float, float, float]:
    """Return the largest and median gap between decode steps, and the long prompt's TTFT."""
    dice = random.Random(f"chunks {seed}")
    vocabulary = range(target().config.vocab_size)
    most = SamplingConfig(max_tokens=sizes.most)
    for length in prompt_lengths(sizes, sizes.decoding, seed):
        one.submit(dice.choices(vocabulary, k=length), most)
    while sum(len(step.decodes) == sizes.decoding for step in one.trace) < sizes.before:
        one.step()
    moments, began = [one.clock.now()], time.perf_counter()
    few = SamplingConfig(max_tokens=2)
    long = one.submit(dice.choices(vocabulary, k=sizes.long_prompt), few)
    first = 0.0
    while not first:
        told = {output.id: output for output in one.step()}
        moments.append(one.clock.now())
        if long in told:
            first = time.perf_counter() - began
    alone = [step.seconds for step in one.trace if not step.chunks]
    one.close()
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    return max(gaps), statistics.median(alone), first


@case("chunks", minutes=0.2, needs="cpu")
def chunks(sizes: Sizes = FULL) -> list[Measurement]:
    """How much a long prompt delays decoding rows, by the chunk size of its prefill."""
    found: dict[int, list[tuple[float, float, float]]] = {size: [] for size in sizes.chunks}
    for turn in range(-1, sizes.chunk_rounds):
        for name in shuffled(map(str, sizes.chunks), "chunks", turn):
            size = int(name)
            budget = max(size + sizes.decoding, sizes.budget)
            longest = target().config.max_position_embeddings
            one = engine(sizes, chunk=size, max_num_batched_tokens=budget, max_length=longest)
            told = interrupted(one, turn, sizes)
            if turn >= 0:
                found[size].append(told)
    details: dict[str, Any] = {
        "rows that decode": sizes.decoding,
        "tokens of the long prompt": sizes.long_prompt,
    }
    every: list[Measurement] = []
    for size, each in found.items():
        gaps, medians, firsts = (list(x) for x in zip(*each, strict=True))
        over = ratios(gaps, medians)
        both = {"gap": gaps, "median": medians, **details}
        every += [
            seen(f"largest gap over the median gap/chunks of {size}", "ratio", over, **both),
            seen(f"ttft of the long prompt/chunks of {size}", "s", firsts, **details),
        ]
    return every


# Speculation in the engine -----------------------------------------------------------------------
DRAFTED_ROWS = (1, 8)


def code(kind: str, sizes: Sizes) -> list[Request]:
    """Return shipped prompts as requests that all wait; none ends early."""
    texts = [shipped_tokenizer().encode(text) for text in prompts(kind)][: sizes.draft_prompts]
    asked = SamplingConfig(max_tokens=sizes.draft_tokens)
    return [Request(f"{kind} {place}", tuple(text), asked) for place, text in enumerate(texts)]


@case("speculation", minutes=0.6, needs="cpu")
def speculation(sizes: Sizes = FULL) -> list[Measurement]:
    """n-gram drafts in the engine over no drafts, by the number of rows that decode together."""
    found = []
    for kind, rows in itertools.product(sizes.kinds, DRAFTED_ROWS):
        given = code(kind, sizes)
        longest = max(len(one.prompt) for one in given) + sizes.draft_tokens
        options: dict[str, Any] = {
            "max_num_seqs": rows,
            "max_length": longest,
            "num_blocks": 4 * sizes.pages,
        }
        ways = {name: engine(sizes, proposer=name, **options) for name in ("ngram", None)}
        speeds: dict[str | None, list[float]] = {name: [] for name in ways}
        shares: dict[str | None, Replay] = {}
        for turn in range(-1, sizes.draft_rounds):
            for name in sorted(ways, key=str, reverse=turn % 2 == 0):
                shares[name] = replay(ways[name], given)
                if turn >= 0:
                    speeds[name].append(shares[name].tokens_per_second)
        drafted, accepted = (
            sum(getattr(step, what) for step in shares["ngram"].steps)
            for what in ("drafted", "accepted")
        )
        same = sum(shares["ngram"].outputs[one.id] == shares[None].outputs[one.id] for one in given)
        at = f"{kind}, {rows} rows"
        tokens = sizes.draft_tokens
        details: dict[str, Any] = {"outputs equal": same, "requests": len(given), "tokens": tokens}
        over = ratios(speeds["ngram"], speeds[None])
        found += [
            seen(f"tokens a second, n-gram over none/{at}", "ratio", over, **details),
            seen(f"accepted share/{at}", "share", [accepted / max(drafted, 1)], drafted=drafted),
        ]
    return found


# Shared prefixes ---------------------------------------------------------------------------------
@case("prefixes", minutes=0.2, needs="cpu")
def prefixes(sizes: Sizes = FULL) -> list[Measurement]:
    """A common system prompt: read once for all requests, or once per request."""
    runs: dict[bool, list[Replay]] = {True: [], False: []}
    options: dict[str, Any] = {"num_blocks": 2 * sizes.pages, "max_length": None}
    engines = {share: engine(sizes, enable_prefix_caching=share, **options) for share in runs}
    for turn, seed in enumerate((sizes.shared_seeds[0], *sizes.shared_seeds)):
        dice = random.Random(f"prefixes {seed}")
        given = Workload(
            arrivals=(0.0,) * sizes.sharing,
            prompts=tuple(sizes.system + dice.randint(*sizes.own) for _ in range(sizes.sharing)),
            outputs=fixed(sizes.shared_output, sizes.sharing),
            prefix=sizes.system,
            vocabulary=target().config.vocab_size,
            seed=seed,
        )
        for share in sorted(runs, reverse=turn % 2 == 0):
            engines[share].pool.clear()  # start each round without known prefixes
            run = replay(engines[share], given)
            if turn:
                runs[share].append(run)
    firsts = {share: [statistics.fmean(values(r, "ttft")) for r in x] for share, x in runs.items()}
    read = {
        share: [float(sum(step.prefill_tokens for step in run.steps)) for run in each]
        for share, each in runs.items()
    }
    details: dict[str, Any] = {
        "tokens of the shared prompt": sizes.system,
        "requests": sizes.sharing,
        "slots": sizes.slots,
    }
    return [
        seen("ttft, shared over each its own", "ratio", ratios(firsts[True], firsts[False]),
             **details),
        seen("prompt tokens read, shared over each its own", "ratio",
             ratios(read[True], read[False]), exact=True, tokens=read[True], alone=read[False]),
    ]  # fmt: skip


# Outputs -----------------------------------------------------------------------------------------
EQUAL_SEED = 70


def equal_ways(few_pages: int) -> dict[str, dict[str, Any]]:
    """Return the engines' options whose outputs are compared."""
    return {
        OURS: {},
        STATIC: {"policy": STATIC},
        f"{GREEDY}, {few_pages} blocks": {"policy": GREEDY, "num_blocks": few_pages},
        "n-gram": {"proposer": "ngram"},
    }


@case("equal", minutes=0.4)
def equal(sizes: Sizes = FULL) -> list[Measurement]:
    """Compare outputs with those of each request alone, by `generate`; audit every output.

    `generate` ends at an EOS; after it, only the audit decides.
    """
    given = workload(sizes, sizes.equal_requests, EQUAL_SEED)
    asked = given.requests()
    alone = [
        generate(target(), [one.prompt], SamplingConfig(max_tokens=length)).tokens[0]
        for one, length in zip(asked, given.outputs, strict=True)
    ]
    found = []
    for way, options in equal_ways(sizes.few_pages).items():
        run = replay(engine(sizes, **options), given)
        counts = {"equal": 0, "near tie": 0, "other": 0}
        worst = 0.0
        for one, told, length in zip(asked, alone, given.outputs, strict=True):
            tokens = [*run.outputs[one.id]]
            audit = near_tie_audit(target(), one.prompt, tokens, gap=GAP)
            worst = max(worst, audit.worst)
            right = audit.passed and len(tokens) == length
            same = right and tokens[: len(told)] == told
            counts["equal" if same else "near tie" if right else "other"] += 1
        details: dict[str, Any] = {
            **counts,
            "requests": len(given),
            "largest gap, nats": worst,
            "preemptions": sum(m.preemptions for m in run.metrics),
        }
        for what, label in (
            ("equal", "outputs equal to the request alone"),
            ("near tie", "outputs that differ by a near tie"),
            ("other", "outputs that differ otherwise"),
        ):
            found.append(seen(f"{label}/{way}", "requests", [counts[what]], **details))
    return found


# The real server ---------------------------------------------------------------------------------
ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-triton"
PATIENCE_S = 60.0


def lacks_server() -> str:
    """Return why the server can't be started here, or ""."""
    return triton_environment.missing(ENVIRONMENT)


Talk = Callable[[str], Iterator[Any]]


def streamed(talk: Talk, text: str, ready: threading.Barrier) -> tuple[float, float]:
    """Return a client's seconds to the first token, and between tokens."""
    ready.wait()
    begin = time.perf_counter()
    moments = []
    for part in talk(text):
        moments += [time.perf_counter() - begin] * len(part.tokens)
    if len(moments) < 2:
        raise RuntimeError(f"a stream must have at least two tokens, got {len(moments)}")
    return moments[0], (moments[-1] - moments[0]) / (len(moments) - 1)


def all_at_once(talk: Talk, count: int) -> tuple[float, float]:
    """Return the medians over `count` clients that send their requests at the same time."""
    texts = prompts("code")
    ready = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        asked = [
            pool.submit(streamed, talk, texts[place % len(texts)], ready)
            for place in range(count)
        ]  # fmt: skip
        told = [one.result() for one in asked]
    return statistics.median(x for x, _ in told), statistics.median(x for _, x in told)


def healthy_again(one: TritonServer, name: str) -> float:
    """Return the seconds from the SIGKILL of a process until requests are accepted again."""
    pid = one.pids()[name]
    if pid is None:
        raise RuntimeError(f"the server's {name} must be running to be killed; see its log")
    begin = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: one.pids()[name] not in (None, pid))
    one.wait_ready(PATIENCE_S)
    took = time.perf_counter() - begin
    list(generate_stream(one.addresses, prompts("code")[0], max_tokens=2))
    return took


def wait_for(what: Callable[[], Any]) -> None:
    """Wait until `what()` is true. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing happened within {PATIENCE_S} s; see the server's logs")
        time.sleep(0.01)


@case("server", minutes=0.7, needs="cpu", lacks=lacks_server)
def server(sizes: Sizes = FULL) -> list[Measurement]:
    """NVIDIA's Triton Inference Server in front of an engine: its overhead, and its recovery.

    Both ways lead to one engine process. Its clients are threads of this process, on the same
    cores.
    """
    starts: list[float] = []
    killed: dict[str, list[float]] = {"engine": [], "stub": []}
    options = ["--threads", "1", "--max-num-seqs", str(max(sizes.streams))]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(sizes.starts):
            one = TritonServer(
                Path(folder) / str(turn), environment=ENVIRONMENT, engine_options=options
            )
            begin = time.perf_counter()
            with one:
                starts.append(time.perf_counter() - begin)
                if turn == sizes.starts - 1:
                    found = overheads(one, sizes)
                    for _, name in itertools.product(range(sizes.kills), killed):
                        killed[name].append(healthy_again(one, name))
    details: dict[str, Any] = {"server": triton_environment.SERVER_VERSION, "cores": os.cpu_count()}
    return [
        seen("seconds to ready", "s", starts, **details),
        *found,
        *(seen(f"seconds until healthy/{name}", "s", x, **details) for name, x in killed.items()),
    ]


SHOWN = r"def area(width, height):\n"


@case("transcript", minutes=0.2, lacks=lacks_server)
def transcript(sizes: Sizes = FULL) -> list[Measurement]:
    """A request to the server by curl, as the chapter prints it, and the events that came back."""
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(
            Path(folder), environment=ENVIRONMENT, engine_options=["--threads", "1"]
        ) as one,
    ):  # fmt: skip
        command = examples(one.addresses).split("curl -s ")[0].strip()
        command = command.replace('"max_tokens": 24', f'"max_tokens": {sizes.told_tokens}')
        command = command.replace(SHOWN, "for i in range(")  # the answer is one readable line
        command += " \\\n  -w 'HTTP %{http_code}\\n'"
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        port = str(one.addresses.http)
    lines = done.stdout.splitlines()
    events = [line for line in lines if line.startswith("data:")]
    details: dict[str, Any] = {
        "exact": True, "server": triton_environment.SERVER_VERSION, "lines": lines,
        "command": command.replace(port, "8000"),
    }  # fmt: skip
    return [seen("events of a streamed answer", "events", [len(events)], **details)]


def overheads(one: TritonServer, sizes: Sizes) -> list[Measurement]:
    """Measure a client's waiting times through the server and directly over the engine's socket."""
    found = []
    ways: dict[str, Talk] = {
        "server": lambda text: generate_stream(
            one.addresses, text, max_tokens=sizes.stream_tokens, timeout=PATIENCE_S
        ),
        "socket": lambda text: engine_stream(
            one.socket, text, max_tokens=sizes.stream_tokens, timeout=PATIENCE_S
        ),
    }
    for count in sizes.streams:
        told: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(-1, sizes.stream_rounds):
            for name in shuffled(ways, "server", turn, count):
                medians = all_at_once(ways[name], count)
                if turn >= 0:
                    told[name].append(medians)
        details = {"streams": count, "tokens": sizes.stream_tokens, "cores": os.cpu_count()}
        for place, what in enumerate(("first token", "token")):
            times = {name: [pair[place] for pair in each] for name, each in told.items()}
            added = [a - b for a, b in zip(times["server"], times["socket"], strict=True)]
            found += [
                beside(f"seconds a {what}/{count} streams", "s", times, "server", **details),
                seen(f"seconds that the server adds a {what}/{count} streams", "s", added),
            ]
    return found


# Replicas, simulated -----------------------------------------------------------------------------
REPLICAS, GROUPS, ROUTED_LOADS = 4, 32, (0.5, 0.9)
# Round numbers near what the case "simulator" fits to a CPU.
COST = CostModel(base=2e-3, per_prefill_token=1e-4, per_decode_row=4e-4, per_context_token=5e-7)


def routed_workload(sizes: Sizes, seed: int, arrivals: tuple[float, ...]) -> Workload:
    """Return requests with GROUPS system prompts, too many for one replica's pool."""
    dice = random.Random(f"routed {seed}")
    n = len(arrivals)
    return Workload(
        arrivals=arrivals,
        prompts=tuple(sizes.group_prefix + dice.randint(8, 48) for _ in range(n)),
        outputs=long_tail(sizes.least, n, seed, most=sizes.most // 2),
        max_tokens=sizes.most // 2,
        prefix=sizes.group_prefix,
        groups=GROUPS,
        seed=seed,
    )


def replica(sizes: Sizes) -> Scheduler:
    """Return the scheduler of a simulated replica."""
    return Scheduler(
        BlockPool(sizes.pages, sizes.page),
        policy=OURS,
        max_num_seqs=sizes.slots,
        max_num_batched_tokens=sizes.budget,
    )


@case("replicas", minutes=0.15)
def replicas(sizes: Sizes = FULL) -> list[Measurement]:
    """Routers in front of four simulated replicas: waiting times and prefix hits."""
    waiting = routed_workload(sizes, sizes.routed_seeds[0], (0.0,) * sizes.routed_requests)
    make = functools.partial(replica, sizes)
    rate = REPLICAS * simulate(waiting, make, COST).requests_per_second
    found = []
    for share in ROUTED_LOADS:
        told: dict[str, dict[str, list[float]]] = {}
        for seed, router in itertools.product(sizes.routed_seeds, ROUTERS):
            arrivals = poisson(share * rate, sizes.routed_requests, seed)
            given = routed_workload(sizes, seed, arrivals)
            run = route_requests(given, REPLICAS, make, COST, policy=router)
            summary = run.summary()
            for what, value in {
                "ttft p99": summary["ttft"]["p99"],
                "e2e p99": summary["e2e"]["p99"],
                "hit share": run.hit_rate,
            }.items():
                told.setdefault(what, {}).setdefault(router, []).append(value)
        details = {
            "replicas": REPLICAS, "slots": sizes.slots, "blocks": sizes.pages,
            "requests": sizes.routed_requests, "groups": GROUPS, "prefix": sizes.group_prefix,
            "rate": share * rate, **asdict(COST),
        }  # fmt: skip
        found += [
            beside(
                f"{what}/{share:g} of the load", "share" if what == "hit share" else "s", samples,
                "prefix_aware", mode="simulated", **details,
            )
            for what, samples in told.items()
        ]  # fmt: skip
    return found
