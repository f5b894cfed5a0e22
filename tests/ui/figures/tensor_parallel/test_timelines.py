"""The chapter's figures show the times and messages of `labcore.parallel`, and say so."""

from __future__ import annotations

import itertools
import random

import plotly.graph_objects as go
import pytest

from labcore.parallel import cost
from labcore.parallel.collectives import ALL_REDUCES
from labcore.parallel.protocols import protocol_links
from labcore.parallel.timeline import (
    GPUS,
    MODELS,
    Collective,
    decode_step,
    held_bytes,
    simulate_timeline,
)
from labcore.ui import Choice, IntSlider, LogSlider, Toggle, draw, explore, twin
from labcore.ui.compact import dumps, plain
from labcore.ui.figures import tensor_parallel as figures
from labcore.ui.figures.tensor_parallel import timelines
from tests.ui.figures.drawn import packed

LETTERS_OF_A_PHONE = 41
LETTERS_BELOW_BARS = 26  # below an axis that begins right of the longest way's name
MOST_BYTES = 120_000  # of a page's frames and picture
MODEL_CHOICE = Choice(options=("7B", "8B", "70B"))
CONTROLS = {
    "timeline_view": {
        "gpus": Choice(options=(1, 2, 4, 8, 16), default=8),
        "graph": Toggle(),
        "batch": Choice(options=(1, 8, 64, 256, 1024)),
        "link": Choice(options=tuple(cost.LINKS)),
        "overlap": Toggle(),
        "algorithm": Choice(options=tuple(ALL_REDUCES)),
        "model": MODEL_CHOICE,
        "gpu": Choice(options=tuple(GPUS), default="H100 SXM"),
    },
    "all_reduce_curves": {
        "ranks": IntSlider(low=2, high=16, default=8),
        "alpha_us": LogSlider(low=0.1, high=1000, default=1, points=9),
        "gb_per_s": LogSlider(low=1, high=900, default=450, points=9),
    },
    "steps_view": {
        "algorithm": Choice(options=tuple(ALL_REDUCES)),
        "ranks": Choice(options=(2, 4, 8, 16), default=4),
    },
    "split_picture": {
        "by": Choice(options=("columns", "rows")),
        "ranks": IntSlider(low=2, high=4, default=2),
    },
}


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


# Explorers.


def test_a_launch_and_nccl_s_base_can_be_moved(seed: int) -> None:
    dice = random.Random(seed)
    launch, base = dice.uniform(0, 20), dice.uniform(0, 50)
    ops, gpu = decode_step(MODELS["7B"], ranks=8), GPUS["H100 SXM"]
    for link in cost.LINKS:
        figure = figures.timeline_view(link=link, launch_us=launch, base_us=base)
        links = protocol_links(link, base=base * 1e-6)
        for name, graph in (("eager", False), ("graph", True)):
            run = simulate_timeline(ops, gpu, links, graph=graph, launch=launch * 1e-6)
            assert f"{name}: {draw.seconds(run.seconds)}, " in alt(figure)
    plain_link, given = figures.timeline_view(), figures.timeline_view(launch_us=5)
    assert alt(plain_link) == alt(given)


@pytest.mark.parametrize("name", CONTROLS)
def test_frames_share_traces_and_titles_fit_a_phone(name: str, seed: int) -> None:
    controls, function = CONTROLS[name], getattr(figures, name)
    points = list(itertools.product(*(control.positions() for control in controls.values())))
    longest = tuple(
        max(control.positions(), key=lambda value: len(f"{value:.3g}" if isinstance(value, float)
                                                       else f"{value}"))
        for control in controls.values()
    )  # fmt: skip
    kinds = set()
    for point in [longest, *random.Random(seed).sample(points, min(len(points), 30))]:
        figure = function(**dict(zip(controls, point, strict=True)))
        kinds.add((tuple((item.name, item.type, item.mode if item.type == "scatter" else "")
                         for item in figure.data), figure.layout.height))  # fmt: skip
        lines = figure.layout.title.text.split("<br>")
        assert len(lines) == 1 and max(map(len, lines)) <= LETTERS_OF_A_PHONE, lines
    assert len(kinds) == 1


def drawn(figure: dict) -> str:
    """What a reader sees change: traces and title, in the page's digits."""
    return dumps(plain([figure["data"], figure["layout"]["title"]]))


@pytest.mark.parametrize("name", CONTROLS)
def test_every_step_of_a_control_changes_the_figure(name: str) -> None:
    controls, function = CONTROLS[name], getattr(figures, name)
    start = {key: control.default for key, control in controls.items()}
    for key, control in controls.items():
        seen = [drawn(function(**start | {key: value}).to_dict()) for value in control.positions()]
        assert all(one != other for one, other in itertools.pairwise(seen)), key


@pytest.mark.parametrize("name", CONTROLS)
def test_static_page_carries_the_explorer_without_a_dead_step(name: str, monkeypatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    controls = dict(list(CONTROLS[name].items())[: twin.MOST_CONTROLS])
    shown = explore(getattr(figures, name), alt="x", **controls)
    found = shown._repr_mimebundle_()[twin.MIME]
    moved = [control["name"] for control in found["controls"]]
    assert moved == list(controls)
    assert sum(len(one["frames"]) for one in found["slices"]) <= twin.MOST_FRAMES
    found = twin.first_slice(found)
    assert len(dumps(found)) < MOST_BYTES
    parts = found["parts"] | found["slices"][0]["parts"]

    def whole(value):
        if isinstance(value, list):
            return [whole(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$" in value:
            return whole(parts[str(value["$"])])
        return {key: whole(item) for key, item in value.items()}

    frames = [drawn(whole(frame)) for frame in found["slices"][0]["frames"]]
    rows, columns = (len(control["values"]) for control in found["controls"])
    for row, column in itertools.product(range(rows), range(columns)):
        here = frames[row * columns + column]
        assert row == 0 or here != frames[(row - 1) * columns + column]
        assert column == 0 or here != frames[row * columns + column - 1]


# A token.


def boxes(item) -> list[tuple[float, float, float]]:
    """(left, right, row) of each bar of a stream."""
    found = []
    for at in range(0, len(item.x), 6):
        x, y = item.x[at : at + 5], item.y[at : at + 5]
        if x[0] is not None:
            found.append((min(x), max(x), (min(y) + max(y)) / 2))
    return found


@pytest.mark.parametrize("way", list(itertools.product((1, 4), (False, True), (False, True))))
def test_the_timeline_is_one_layer_of_the_simulated_step(way: tuple[int, bool, bool]) -> None:
    gpus, graph, overlap = way
    figure = figures.timeline_view(
        gpus, graph, 3, overlap, "two_shot", "PCIe 5.0 x16", "8B", "A100 SXM", 77
    )
    ops = decode_step(MODELS["8B"], ranks=gpus, batch=3, context=77)
    link = cost.LINKS["PCIe 5.0 x16"]
    run = simulate_timeline(
        ops, GPUS["A100 SXM"], link, algorithm="two_shot", graph=graph, overlap=overlap
    )
    first = [at for at, op in enumerate(ops) if op.name == "norm"][32]  # of layer 16 of 32
    layer = range(first, first + (10 if gpus > 1 else 8))
    begin = next(e.begin for e in run.events if e.at == first and e.stream == "compute")
    for stream, name, row in (("compute", "kernels", 1), ("wire", "collectives", 0)):
        bars = [e for e in run.events if e.at in layer and e.stream == stream]
        found = boxes(trace(figure, name))
        assert len(found) == len(bars)
        for event, (left, right, at) in zip(bars, found, strict=True):
            assert at == row
            assert left == pytest.approx(1e6 * (event.begin - begin), abs=1e-6)
            assert right == pytest.approx(1e6 * (event.end - begin), abs=1e-6)
    end = max(right for name in ("kernels", "collectives") for _, right, _ in
              boxes(trace(figure, name)))  # fmt: skip
    low, high = figure.layout.xaxis.range
    assert low == 0 and end <= high < 6 * end
    launches = boxes(trace(figure, "launches"))
    assert all(0 <= left <= right <= high and row == 2 for left, right, row in launches)
    past = next(e.begin for e in run.events if e.at == layer[-1] + 1 and e.stream == "compute")
    due = [e for e in run.events if e.stream == "host" and e.begin < past and e.end > begin]
    assert len(launches) == len(due) and not (graph and due)
    words = next(item for item in figure.data if item.mode == "text").text
    assert ("launched already" in words) == (not due) and packed(figure) < 25_000


def test_a_token_s_time_is_stacked_for_all_four_ways() -> None:
    figure = figures.timeline_view(8, True, 1, True, model="70B")
    ops = decode_step(MODELS["70B"], ranks=8, batch=1, context=1024)
    link = cost.LINKS["NVLink 4"]
    bars = [item for item in figure.data if item.type == "bar"]
    for at, (graph, overlap) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
        run = simulate_timeline(
            ops, GPUS["H100 SXM"], link, graph=bool(graph), overlap=bool(overlap)
        )
        assert sum(bar.x[at] for bar in bars) == pytest.approx(1e3 * run.seconds)
        assert [bar.x[at] for bar in bars] == pytest.approx(
            [1e3 * run.compute, 1e3 * run.exposed, 1e3 * run.idle], abs=1e-9
        )
        assert sum(bar.x[at] for bar in bars) <= figure.layout.xaxis2.range[1]
    assert [item.name for item in figure.data if item.showlegend is not False] == [
        "kernels", "wire alone", "device idle"
    ]  # fmt: skip
    assert figure.layout.yaxis2.ticktext[3] == "<b>graph, overlap</b>"
    assert figure.layout.yaxis2.ticktext[0] == "eager"
    held = held_bytes(MODELS["70B"], ranks=8)
    assert f"<br>1 launch,<br>{held / 1e9:.3g} GB of 80 per GPU" in figure.layout.xaxis2.title.text
    lines = [*figure.layout.xaxis2.title.text.split("<br>"), figure.layout.xaxis.title.text]
    assert max(map(len, lines)) <= LETTERS_BELOW_BARS
    title = figure.layout.title.text
    assert title == f"{draw.seconds(run.seconds)} per token, wire alone {run.wire_share:.0%}"
    assert f"70B, 8 GPUs, batch 1, graph, overlap: {title}" in alt(figure)
    assert f"graph, overlap: {run.seconds * 1e3:.3g} ms, kernels" in alt(figure)


@pytest.mark.parametrize("way", list(itertools.product((1, 2, 8), (False, True), (False, True))))
def test_names_reach_no_other_bar(way: tuple[int, bool, bool]) -> None:
    figure = figures.timeline_view(way[0], way[1], 8, way[2], model="8B")
    names = next(item for item in figure.data if item.mode == "text")
    told = [word for word in names.text if word and word != "launched already"]
    assert "gate, up" in told or way[0] == 8
    assert len(names.text) == len(names.hovertext)
    wide = figure.layout.xaxis.range[1]
    for stream, row in (("launches", 2), ("kernels", 1), ("collectives", 0)):
        bars = boxes(trace(figure, stream))
        for x, y, word in zip(names.x, names.y, names.text, strict=True):
            if y != row or not word or word == "launched already":
                continue
            half = 0.5 * timelines._LETTER * wide * len(word.replace(", ", ","))
            own = [one for one in bars if one[0] <= x <= one[1]]
            assert len(own) == 1 and own[0][1] - own[0][0] >= half - 1e-9
            for left, right, _ in bars:
                assert (left, right, row) == own[0] or right <= x - half + 1e-9 or (
                    left >= x + half - 1e-9
                )  # fmt: skip


def test_a_step_that_no_gpu_holds_is_told() -> None:
    few, many = (
        figures.timeline_view(2, batch=batch, model="7B", gpu="H100 SXM").layout.xaxis2.title.text
        for batch in (1, 1024)
    )
    size = held_bytes(MODELS["7B"], ranks=2, batch=1024) / 1e9
    assert f"{size:.3g} GB, above 80 per GPU" in many and "7.01 GB of 80 per GPU" in few


def test_collectives_of_one_layer_are_two() -> None:
    """What the timeline's window relies on: two operations before the layers, three behind."""
    for ranks, (before, behind) in ((1, (1, 2)), (2, (2, 3))):
        ops = decode_step(MODELS["7B"], ranks=ranks)
        assert ops[before].name == "norm" and ops[-behind].name == "norm"
        sums = sum(isinstance(op, Collective) for op in ops)
        assert sums == (2 * 32 + 2 if ranks > 1 else 0)
