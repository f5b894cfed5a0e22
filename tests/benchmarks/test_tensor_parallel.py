"""The cases run small: every quantity that a claim asks for is there, and ratios point right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import tensor_parallel as cases
from benchmarks.runner import cases_of
from benchmarks.tensor_parallel import SMALL
from labcore import processes
from labcore.models.shipped import pretrained
from labcore.parallel.launch_time import LaunchSeconds, _in_turns
from labcore.timing import Timing
from tests.benchmarks.measurements import asked, by_quantity
from tests.parallel.small import CONFIG


def test_all_that_a_cpu_runs_takes_eight_minutes() -> None:
    every = {one.name: one for one in cases_of("tensor_parallel")}
    timed = ("allreduce/2", "allreduce/4", "layers", "decode", "overlap")
    assert all((one.needs == "cpu") == name.startswith(timed) for name, one in every.items())
    assert {name for name, one in every.items() if one.needs == "gpu"} == {
        "allreduce/nccl",
        "graph/one GPU",
    }
    assert sum(one.minutes for one in every.values() if one.needs != "gpu") <= 8


def test_a_rank_holds_its_part_and_the_norms() -> None:
    found = by_quantity(cases.memory(replace(SMALL, ranks=(2,))))
    wanted = {name for name in asked("tensor_parallel", "memory") if "/2 ranks" in name}
    assert wanted and wanted <= set(found)
    value = {name: item.samples[0] for name, item in found.items()}
    over = "over the whole model's/2 ranks"
    assert value[f"bytes of cache {over}"] == 0.5
    assert 0.5 < value[f"bytes of weights {over}"] < 0.51
    by_tokens = value[f"bytes of a forward's activations {over}, sequence parallel"]
    assert 0.5 < by_tokens < value[f"bytes of a forward's activations {over}"] < 1
    # Weights are no activations, which grow with the rows.
    model, few = pretrained("target"), cases.kept_bytes(pretrained("target"))
    assert cases.kept_bytes(model, 2 * cases.ROWS) == pytest.approx(2 * few, rel=0.02)


def test_only_some_collectives_give_the_product() -> None:
    found = by_quantity(cases.split(SMALL))
    assert asked("tensor_parallel", "split") <= set(found)
    right = {"columns, all-gather", "rows, all-reduce"}
    right.add("columns, all-reduce of parts padded with zeros")
    for name, item in found.items():
        if name.startswith("bytes"):
            assert item.samples == [2]
            continue
        what, ranks = name.removeprefix("error/").rsplit(", ", 1)
        assert ranks in ("2 ranks", "4 ranks") and len(item.samples) == 3
        if what in right:
            assert max(item.samples) < 1e-5, name
        else:
            assert what in ("columns, all-reduce", "rows, all-gather")
            assert min(item.samples) > 0.1, name


def test_every_algorithm_has_its_times() -> None:
    found = by_quantity(cases.all_reduces(2, SMALL))
    assert asked("tensor_parallel", "allreduce/2 ranks") <= set(found)
    for name in cases.ALGORITHMS:
        for size in SMALL.messages:
            item = found[f"seconds/{name}, {size} bytes"]
            assert len(item.samples) == 6 and min(item.samples) > 0
            assert item.details["processes"] == 2 and item.details["cores"] >= 1
    for name in cases.FITTED:
        for what in ("alpha", "beta", "worst residual"):
            assert len(found[f"{what}/{name}"].samples) == 2


def test_a_size_that_is_left_out_is_predicted_by_the_others() -> None:
    alpha, beta = 3e-4, 2e-9
    line = {size: [alpha + beta * size] * 3 for size in SMALL.messages}
    # A late repeat moves no median.
    late = {size: [*seconds[:2], 1.0] for size, seconds in line.items()}
    found = by_quantity(cases.told_of({name: [line, late] for name in cases.FITTED}, SMALL))
    assert found["alpha/ring"].samples == pytest.approx([300, 300], rel=1e-6)
    assert found["beta/ring"].samples == pytest.approx([2, 2], rel=1e-6)
    assert found["worst residual/ring"].samples == pytest.approx([0, 0], abs=1e-9)
    for size in SMALL.left_out:
        doubled = copy.deepcopy(line)
        doubled[size] = [2 * seconds for seconds in line[size]]
        found = by_quantity(cases.told_of({name: [doubled] for name in cases.FITTED}, SMALL))
        ratio = found[f"predicted over measured/ring, {size} bytes"]
        assert ratio.samples == pytest.approx([0.5], rel=1e-6)


def test_a_divided_mlp_is_timed_beside_torchs() -> None:
    found = by_quantity(cases.layers(SMALL))
    assert asked("tensor_parallel", "layers/2 ranks") <= set(found)
    for what in ("forward", "forward and backward"):
        seconds = found[f"seconds/{what}, 2 ranks"]
        for peer in (cases.PEER, cases.LATER):
            ratio = found[f"{what}, over {peer}/2 ranks"].samples
            pairs = zip(seconds.samples, seconds.peers[peer], strict=True)
            assert list(ratio) == [ours / theirs for ours, theirs in pairs] and len(ratio) == 3


def test_ranks_write_what_one_process_writes() -> None:
    found = by_quantity(cases.decoded(2, SMALL))
    assert asked("tensor_parallel", "decode/2 ranks") <= set(found)
    speed = found["tokens a second/2 ranks"]
    assert speed.details["the same tokens"] == len(speed.samples) == 2
    assert speed.details["prompt tokens"] == [9, 9]
    # Two for each of the six layers, and the embedding's.
    assert speed.details["all-reduces a token"] == 13
    ratios = found["tokens a second over one process's/2 ranks"].samples
    pairs = zip(speed.samples, speed.peers["one process"], strict=True)
    assert list(ratios) == [together / alone for together, alone in pairs]
    shares = found["all-reduce share/2 ranks"]
    assert min(shares.samples) > 0


def test_launches_of_ranks_are_those_of_one_with_collectives() -> None:
    found = by_quantity(cases.launches())
    assert asked("tensor_parallel", "launches") <= set(found)
    one, two = (found[f"launches a token/eager, target, {n} ranks"] for n in (1, 2))
    # The logits are gathered.
    assert (one.details["collectives"], two.details["collectives"]) == (0, 14)
    assert two.samples[0] >= one.samples[0] + 14
    for n in (1, 2):
        assert found[f"launches a token/graph, target, {n} ranks"].samples == [1]


def test_overlap_is_measured_and_predicted() -> None:
    found = by_quantity(cases.overlap(SMALL))
    assert asked("tensor_parallel", "overlap") <= set(found)
    for link in ("gloo", "simulated link"):
        for chunks in (1, 3):
            at = f"plain over overlapped/{link}, {chunks} chunks"
            assert len(found[at].samples) == 4 and found[at].mode == "measured"
            predicted = found[f"predicted {at}"]
            assert predicted.mode == "simulated" and 1 <= predicted.samples[0] <= 2
            assert predicted.samples[0] == pytest.approx(1) or chunks == 3
            seconds = predicted.details["seconds"]
            compute, wire = seconds["compute"], seconds["wire"]
            pipeline = compute + wire - min(compute, wire) * (1 - 1 / chunks)
            assert predicted.samples == pytest.approx([(compute + wire) / pipeline])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("share", cases.shares_of_the_wire),
        ("hide", cases.hidden_by_a_fork),
        ("graph", cases.gains_by_a_graph),
    ],
)
def test_what_is_on_paper_has_two_ends(name: str, function: Callable[[], Any]) -> None:
    found = by_quantity(function())
    assert asked("tensor_parallel", f"paper/{name}") <= set(found)
    assert {item.mode for item in found.values()} == {"simulated"}
    for quantity, item in found.items():
        if quantity.startswith("smallest/"):
            most = found[quantity.replace("smallest", "largest")]
            assert item.samples[0] <= item.details["middle"] <= most.samples[0]


def steps_on_cpu(shapes: Mapping[str, Any]) -> dict[tuple[str, int], LaunchSeconds]:
    """What the GPU case does in its process, where nothing can be captured."""
    cases.launch_seconds = lambda decoder, *, batch, rounds: _in_turns(decoder, batch, rounds, 1)
    return cases.graphed_steps(shapes, (1, 3), 2, "gloo")


def test_a_graph_is_timed_against_the_step_that_it_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (told,) = processes.run(steps_on_cpu, 1, {"small": CONFIG})
    assert set(told) == {("small", 1), ("small", 3)}
    assert all(run.launches > 0 and run.eager.n == 2 for run in told.values())
    times = {"eager": (6.0, 8.0), "graphed": (2.0, 2.0), "eager_host": (5.0,)}
    timings = {name: Timing(samples=samples) for name, samples in times.items()}
    run = LaunchSeconds(**timings, graphed_host=Timing(samples=(0.5,)), launches=9)
    monkeypatch.setattr(cases.processes, "run", lambda *_, **__: [{("target", 8): run}])
    found = by_quantity(cases.graph())
    assert found["eager over graph/target, batch 8"].samples == [3, 4]
    assert found["seconds a step/target, batch 8, eager"].samples == [6, 8]
    assert found["host seconds a step/target, batch 8, graph"].samples == [0.5]
