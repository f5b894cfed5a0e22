"""A simulated token obeys the laws of its streams."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from labcore.models import LlamaConfig
from labcore.parallel import cost, step
from labcore.parallel.collectives import ALL_REDUCES
from labcore.parallel.timeline import (
    CHUNKS,
    GPUS,
    Collective,
    GpuRates,
    Kernel,
    Timeline,
    decode_step,
    simulate_timeline,
)

SMALL = LlamaConfig(
    vocab_size=240,
    hidden_size=48,
    intermediate_size=120,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    qkv_bias=True,
    output_bias=True,
)
ATOL = 1e-15  # seconds: rounding of sums of microseconds


def some_gpu(dice: random.Random, **fixed: float) -> GpuRates:
    """Peaks at which the small model's kernels take microseconds."""
    values = {
        "flops": dice.uniform(1e9, 1e12),
        "bandwidth": dice.uniform(1e9, 1e11),
        "capacity": 1e9,
        "launch": dice.uniform(1e-7, 2e-5),
        "gap": dice.uniform(0, 2e-6),
        "eager_gap": dice.uniform(2e-6, 4e-6),
        **fixed,
    }
    return GpuRates(name="some", source="drawn", **values)


def some_link(dice: random.Random) -> cost.Link:
    return cost.Link(
        name="some", alpha=dice.uniform(0, 1e-5), beta=dice.uniform(1e-12, 1e-8), source="drawn"
    )


def some_ops(dice: random.Random) -> tuple[Kernel | Collective, ...]:
    """Kernels and collectives in any order, with and without weights, that read what they like."""
    found: list[Kernel | Collective] = []
    for number in range(dice.randint(1, 23)):
        after = dice.choice(((1,), (1,), (), (2,), (1, 3), (5,)))
        if dice.random() < 0.4:
            kind = dice.choice(("all_reduce", "all_reduce", "all_gather"))
            size = dice.randint(1, 40_000)
            found.append(Collective(name=kind, kind=kind, ranks=4, nbytes=size, after=after))
        else:
            found.append(
                Kernel(
                    name=f"k{number}",
                    flops=dice.uniform(0, 1e7),
                    weights=dice.choice((0, dice.uniform(1, 1e5))),
                    inputs=dice.uniform(0, 1e4),
                    outputs=dice.uniform(0, 1e4),
                    after=after,
                )
            )
    return tuple(found)


def settings(dice: random.Random) -> dict:
    return {
        "algorithm": dice.choice(list(ALL_REDUCES)),
        "graph": dice.random() < 0.5,
        "overlap": dice.choice((False, True, 1, 2, 3, 7)),
        "forked": dice.random() < 0.5,
    }


def alone(ops, gpu: GpuRates, link: cost.Link, algorithm: str) -> tuple[float, float]:
    """Seconds of all kernels, and of all collectives, one by one."""
    kernels = [op.seconds(gpu) for op in ops if isinstance(op, Kernel)]
    wires = [op.seconds(link, algorithm) for op in ops if isinstance(op, Collective)]
    return sum(kernels), sum(wires)


def gap_of(gpu: GpuRates, graph: bool) -> float:
    return gpu.gap if graph else gpu.eager_gap


def check(run: Timeline, gpu: GpuRates, graph: bool) -> None:
    """What holds of every timeline: order in streams, launches before work, sums of the bars."""
    streams = {name: [e for e in run.events if e.stream == name] for name in
               ("host", "compute", "wire")}  # fmt: skip
    for name, bars in streams.items():
        gap = 0.0 if name == "host" else gap_of(gpu, graph)
        for before, after in itertools.pairwise(bars):
            assert after.begin >= before.end + gap - ATOL
    device = [event for event in run.events if event.stream != "host"]
    assert len(device) == run.operations and len(streams["host"]) == run.launches
    launched = streams["host"] * len(device) if graph else streams["host"]
    for launch, event in zip(launched, device, strict=False):
        assert event.begin >= launch.end - ATOL
        assert graph or (launch.name, launch.at) == (event.name, event.at)
    for name, told in (("host", run.host), ("compute", run.compute), ("wire", run.wire)):
        assert sum(e.end - e.begin for e in streams[name]) == pytest.approx(told, rel=1e-9)
    assert run.seconds == max(event.end for event in device)
    # The union of the device's bars, counted between neighboring ends.
    edges = sorted({edge for e in device for edge in (e.begin, e.end)})
    busy = sum(
        high - low
        for low, high in itertools.pairwise(edges)
        if any(e.begin <= low and high <= e.end for e in device)
    )
    assert run.busy == pytest.approx(busy, rel=1e-9)
    assert run.busy + run.idle == pytest.approx(run.seconds)
    assert run.wire_share == pytest.approx(run.exposed / run.seconds)
    assert run.launch_bound == (run.host > run.busy)


def test_every_timeline_keeps_the_order_of_its_streams(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, gpu, link, how = some_ops(dice), some_gpu(dice), some_link(dice), settings(dice)
        run = simulate_timeline(ops, gpu, link, **how)
        check(run, gpu, how["graph"])
        bare = simulate_timeline(ops, gpu, link, **how, events=False)
        assert bare == dataclasses.replace(run, events=())


def test_nothing_runs_before_what_it_waits_for(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, gpu, link, how = some_ops(dice), some_gpu(dice), some_link(dice), settings(dice)
        run = simulate_timeline(ops, gpu, link, **how)
        device = [event for event in run.events if event.stream != "host"]
        gap = gap_of(gpu, how["graph"])
        last = {at: max(e.end for e in device if e.at == at) for at in range(len(ops))}
        pieces = {at: [e for e in device if e.at == at] for at in range(len(ops))}
        for at, bars in pieces.items():
            product = at > 0 and len(pieces[at - 1]) > 1 and ops[at - 1].name[0] == "k"
            for number, event in enumerate(bars):
                if product:  # a message leaves when its own part of the product is there
                    assert event.begin >= pieces[at - 1][number].end + gap - ATOL
                elif number == 0 and at:
                    reads = range(at)
                    if how["forked"]:
                        reads = [at - back for back in ops[at].after if back <= at]
                    for one in reads:
                        assert event.begin >= last[one] + gap - ATOL


def test_without_overlap_a_replayed_step_is_the_sum_of_its_parts(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, gpu, link = some_ops(dice), some_gpu(dice), some_link(dice)
        for algorithm in ALL_REDUCES:
            compute, wire = alone(ops, gpu, link, algorithm)
            replay = simulate_timeline(ops, gpu, link, algorithm=algorithm, graph=True)
            expected = gpu.launch + compute + wire + (len(ops) - 1) * gpu.gap
            assert replay.seconds == pytest.approx(expected)
            assert (replay.compute, replay.wire) == pytest.approx((compute, wire))
            assert replay.exposed == pytest.approx(replay.wire)
            eager = simulate_timeline(ops, gpu, link, algorithm=algorithm)
            assert eager.seconds >= replay.seconds - ATOL
            device = compute + wire + (len(ops) - 1) * gpu.eager_gap
            assert eager.seconds >= max(len(ops) * gpu.launch, device) - ATOL
            ahead = simulate_timeline(ops, gpu, link, algorithm=algorithm, launch=0.0)
            assert ahead.seconds == pytest.approx(device)


def test_an_operation_of_a_forked_stream_begins_as_soon_as_it_may(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, gpu, link = some_ops(dice), some_gpu(dice), some_link(dice)
        graph = dice.random() < 0.5
        run = simulate_timeline(ops, gpu, link, graph=graph, forked=True)
        bars = [event for event in run.events if event.stream != "host"]
        assert [bar.at for bar in bars] == list(range(len(ops)))
        for at, bar in enumerate(bars):
            needed = [at - back for back in ops[at].after if back <= at]
            needed += [one for one in range(at) if bars[one].stream == bar.stream]
            launched = gpu.launch * (1 if graph else at + 1)
            ready = (bars[one].end + gap_of(gpu, graph) for one in needed)
            allowed = max([launched, *ready])
            assert bar.begin == pytest.approx(allowed, abs=ATOL)
        chain = simulate_timeline(ops, gpu, link, graph=graph)
        assert run.seconds <= chain.seconds + ATOL
        assert (run.compute, run.wire) == (chain.compute, chain.wire)


@pytest.mark.parametrize("graph", [False, True])
def test_a_forked_stream_hides_nothing_of_a_llama_s_step(graph: bool, seed: int) -> None:
    dice = random.Random(seed)
    ops = decode_step(SMALL, ranks=4, batch=6, context=dice.randint(1, 99))
    gpu, link = some_gpu(dice), some_link(dice)
    chain, forked = (
        simulate_timeline(ops, gpu, link, graph=graph, forked=way) for way in (False, True)
    )
    assert forked == dataclasses.replace(chain, exposed=forked.exposed)
    assert forked.exposed == pytest.approx(forked.wire)


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_a_parallel_block_the_mlp_hides_the_sum_of_attention(ranks: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        ops = decode_step(SMALL, ranks=ranks, batch=dice.randint(1, 9), parallel_block=True)
        gpu, link = some_gpu(dice, gap=0.0), some_link(dice)
        run = simulate_timeline(ops, gpu, link, graph=True, forked=True, launch=0.0)
        names = ("norm", "qkv", "attention", "o", "all-reduce", "gate, up", "silu", "down")
        assert tuple(op.name for op in ops[2:10]) == names
        took = [
            op.seconds(gpu) if isinstance(op, Kernel) else op.seconds(link, "ring") for op in ops
        ]
        sums, layers = took[1], SMALL.num_hidden_layers
        hidden = min(sums, sum(took[7:10]))  # by the MLP: gate and up, silu, down
        assert run.seconds == pytest.approx(sum(took) - layers * hidden)
        assert run.exposed == pytest.approx(run.wire - layers * hidden)
        assert simulate_timeline(ops, gpu, link, graph=True, launch=0.0).seconds == pytest.approx(
            sum(took)
        )


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_rows_hide_each_other_s_sums(parts: int, seed: int) -> None:
    """Equal segments: the wire shows only once, or, if it is the longer, never rests."""
    dice = random.Random(seed)
    for _ in range(20):
        gpu, link = some_gpu(dice, gap=0.0), some_link(dice)
        work = Kernel(name="work", flops=dice.uniform(1e4, 1e7))
        sums = Collective(name="sum", kind="all_reduce", ranks=4, nbytes=dice.randint(1, 40_000))
        segments = dice.randint(1, 9)
        ops = step._in_turns((work, work, sums) * segments, parts)
        run = simulate_timeline(ops, gpu, link, graph=True, forked=True, launch=0.0)
        k, w, turns = 2 * work.seconds(gpu), sums.seconds(link, "ring"), parts * segments
        assert run.seconds == pytest.approx(turns * max(k, w) + min(k, w))
        assert run.exposed == pytest.approx(run.seconds - turns * k)


def test_a_launch_may_be_given(seed: int) -> None:
    dice = random.Random(seed)
    ops, gpu, link, how = some_ops(dice), some_gpu(dice), some_link(dice), settings(dice)
    launch = dice.uniform(0, 2e-5)
    given = simulate_timeline(ops, gpu, link, **how, launch=launch)
    assert given == simulate_timeline(ops, dataclasses.replace(gpu, launch=launch), link, **how)
    with pytest.raises(ValueError, match="launch must be a finite number, at least 0"):
        simulate_timeline(ops, gpu, link, launch=-1e-6)


def test_a_graph_changes_launches_and_never_the_wire(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, link, how = some_ops(dice), some_link(dice), settings(dice)
        how.pop("graph")
        gpu = some_gpu(dice)
        eager, replay = (
            simulate_timeline(ops, gpu, link, **how, graph=way) for way in (False, True)
        )
        assert replay.wire == eager.wire and replay.compute == eager.compute
        assert replay.operations == eager.operations == eager.launches
        assert replay.launches == 1 and replay.seconds <= eager.seconds + ATOL
        gpu = dataclasses.replace(gpu, launch=0.0, eager_gap=gpu.gap)
        eager, replay = (
            simulate_timeline(ops, gpu, link, **how, graph=way) for way in (False, True)
        )
        assert replay.seconds == eager.seconds
        bars = [[e for e in run.events if e.stream != "host"] for run in (eager, replay)]
        assert bars[0] == bars[1]


def test_overlap_hides_the_shorter_of_two_at_most(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, gpu, link, how = some_ops(dice), some_gpu(dice), some_link(dice), settings(dice)
        run = simulate_timeline(ops, gpu, link, **how)
        assert run.seconds >= max(run.compute, run.wire) - ATOL
        assert 0 <= run.exposed <= run.wire + ATOL
        one, none = (simulate_timeline(ops, gpu, link, **how | {"overlap": n}) for n in (1, False))
        assert one == none
        assert simulate_timeline(ops, gpu, link, **how | {"overlap": True}) == simulate_timeline(
            ops, gpu, link, **how | {"overlap": CHUNKS}
        )


def test_a_wire_that_a_kernel_hides_is_not_exposed_by_rounding() -> None:
    """A sum of parts may exceed the whole by a rounding error, and time can't be negative."""
    gpu = GpuRates(
        name="x", flops=1e9, bandwidth=1, capacity=1, launch=3e-6, gap=0, eager_gap=0, source=""
    )
    link = cost.Link(name="x", alpha=1e-6, beta=1e-9, source="")
    for size in range(1, 200):
        work = Kernel(name="work", flops=1e6)
        sums = Collective(name="sum", kind="all_reduce", ranks=3, nbytes=size, after=())
        run = simulate_timeline((work, sums, sums, sums), gpu, link, forked=True)
        assert 0 <= run.exposed == pytest.approx(0, abs=ATOL)


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 31])
def test_overlap_of_one_product_is_the_pipeline_s_closed_form(chunks: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        gpu = some_gpu(dice, gap=0.0)
        link = dataclasses.replace(some_link(dice), alpha=0.0)
        product = Kernel(name="down", flops=dice.uniform(1, 1e8), weights=dice.uniform(1, 1e6))
        message = Collective(name="sum", kind="all_reduce", ranks=3, nbytes=dice.uniform(1, 1e6))
        run = simulate_timeline((product, message), gpu, link, graph=True, overlap=chunks)
        work, wire = product.seconds(gpu) / chunks, message.seconds(link, "ring") / chunks
        expected = work + (chunks - 1) * max(work, wire) + wire
        assert run.seconds - gpu.launch == pytest.approx(expected)
        assert run.exposed == pytest.approx(expected - chunks * work, abs=ATOL)


def test_each_chunk_pays_the_latency_and_reads_its_inputs_again() -> None:
    product = Kernel(name="o", flops=6e6, weights=3000, inputs=90, outputs=60)
    assert product.chunk(3) == Kernel(name="o", flops=2e6, weights=1000, inputs=90, outputs=20)
    message = Collective(name="sum", kind="all_reduce", ranks=4, nbytes=3000)
    gpu = GpuRates(
        name="x", flops=1e12, bandwidth=1e9, capacity=1, launch=0, gap=0, eager_gap=0, source=""
    )
    link = cost.Link(name="x", alpha=1e-6, beta=1e-9, source="")
    whole, cut = (simulate_timeline((product, message), gpu, link, overlap=n) for n in (1, 3))
    assert cut.operations == 3 * whole.operations == 6
    assert cut.wire - whole.wire == pytest.approx(2 * 6 * 1e-6)  # 6 steps of a ring of 4
    assert product.seconds(gpu) == 6e-6  # the longer of arithmetic and memory
    assert cut.compute == pytest.approx(3 * 2e-6)
    # The same product, once cut and once not.
    both = simulate_timeline((product, message, product), gpu, link, overlap=3)
    assert both.compute == pytest.approx(3 * 2e-6 + 6e-6)
    # Only a product is cut, and only before an all-reduce.
    gather = dataclasses.replace(message, kind="all_gather")
    silu = dataclasses.replace(product, weights=0)
    for ops in ((product, gather), (silu, message), (message, product), (product, product)):
        assert simulate_timeline(ops, gpu, link, overlap=3) == simulate_timeline(ops, gpu, link)


def test_time_grows_with_launch_alpha_beta_and_slower_peaks(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ops, gpu, link, how = some_ops(dice), some_gpu(dice), some_link(dice), settings(dice)
        before = simulate_timeline(ops, gpu, link, **how).seconds
        factor = dice.uniform(1, 5)
        for worse in (
            (dataclasses.replace(gpu, launch=factor * gpu.launch), link),
            (dataclasses.replace(gpu, gap=factor * gpu.gap), link),
            (dataclasses.replace(gpu, eager_gap=factor * gpu.eager_gap), link),
            (dataclasses.replace(gpu, flops=gpu.flops / factor), link),
            (dataclasses.replace(gpu, bandwidth=gpu.bandwidth / factor), link),
            (gpu, dataclasses.replace(link, alpha=factor * link.alpha)),
            (gpu, dataclasses.replace(link, beta=factor * link.beta)),
        ):
            assert simulate_timeline(ops, *worse, **how).seconds >= before - ATOL


def test_misuse_is_refused() -> None:
    link = cost.LINKS["NVLink 4"]
    ops = decode_step(SMALL, ranks=2)
    with pytest.raises(ValueError, match="algorithm must be one of .*did you mean 'ring'"):
        simulate_timeline(decode_step(SMALL), GPUS["H200"], link, algorithm="rings")
    with pytest.raises(ValueError, match="overlap must be at least 1, got 0"):
        simulate_timeline(ops, GPUS["H200"], link, overlap=0)
    with pytest.raises(ValueError, match="power of two"):
        odd = Collective(name="x", kind="all_reduce", ranks=3, nbytes=1)
        simulate_timeline((odd,), GPUS["H200"], link, algorithm="halving_doubling")
    with pytest.raises(ValueError, match="ranks must be at least 2, got 1"):
        Collective(name="x", kind="all_reduce", ranks=1, nbytes=1)
    with pytest.raises(ValueError, match="kind must be one of"):
        Collective(name="x", kind="all_to_all", ranks=2, nbytes=1)
    with pytest.raises(ValueError, match="bandwidth must be a finite number above 0"):
        dataclasses.replace(GPUS["H200"], bandwidth=0)
