"""The chapter's figures show the numbers that they are given, and say them in words."""

import itertools
import random
from statistics import fmean

import plotly.graph_objects as go
import pytest

from labcore.studies.shuffling.language_spikes import Plan
from labcore.ui import Choice, IntSlider, twin
from labcore.ui.figures import shuffling as figures

SIZES = ("1 (file order)", "256", "all (full)")


@pytest.fixture
def data(seed: int) -> dict[str, dict[str, object]]:
    dice = random.Random(seed)
    steps = 120

    def run(spikes: int) -> dict[str, object]:
        return {
            "losses": [[dice.uniform(1.5, 4.5) for _ in range(steps)] for _ in range(2)],
            "distances": [[dice.uniform(0.5, 20) for _ in range(20)] for _ in range(2)],
            "onsets": [sorted(dice.sample(range(50, steps - 5), spikes)) for _ in range(2)],
            "held out": [2.2, 2.1],
            "design effect": [7.8, 6.1],
            "design effect of 16 batches": [51.2, 40.0],
        }

    return dict(zip(SIZES, (run(7), run(1), run(0)), strict=True))


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def test_each_spike_has_a_mark_above_its_curve(seed: int) -> None:
    dice = random.Random(seed)
    losses = {name: [dice.uniform(1, 4) for _ in range(90)] for name in ("file order", "full")}
    onsets = {"file order": [52, 80], "full": []}
    figure = figures.spikes(losses, onsets)
    assert [trace.name for trace in figure.data] == ["file order", "full", "a spike begins"]
    marks = figure.data[2]
    assert list(marks.x) == [52, 80]
    for step, height in zip(marks.x, marks.y, strict=True):
        assert height > losses["file order"][step]
    assert "spikes at steps 52, 80" in alt(figure) and "spikes at steps none" in alt(figure)


def test_two_orders_with_spikes_share_one_entry_in_the_legend() -> None:
    figure = figures.spikes({"a": [1.0] * 60, "b": [1.0] * 60}, {"a": [51], "b": [52]})
    assert [trace.showlegend for trace in figure.data[2:]] == [True, False]


def test_frames_share_traces_and_titles_fit_a_phone(data) -> None:
    kinds = set()
    for size in SIZES:
        for seed in (0, 1):
            figure = figures.buffer(size, seed, data)
            kinds.add(tuple((trace.name, trace.mode, trace.yaxis) for trace in figure.data))
            told = figure.layout.xaxis2.title.text
            assert told.endswith(("7.8, over 16 batches 51", "6.1, over 16 batches 40"))
            lines = figure.layout.title.text.split("<br>")
            assert len(lines) == 1 and len(lines[0]) <= 40, lines
            assert list(figure.data[0].y) == data[size]["losses"][seed]
            assert list(figure.data[2].y) == data[size]["distances"][seed]
            marks = [step for step in figure.data[1].x if step is not None]
            assert marks == data[size]["onsets"][seed]
    assert len(kinds) == 1


def test_one_spike_is_not_spikes(data) -> None:
    titles = {size: figures.buffer(size, 0, data).layout.title.text for size in SIZES}
    assert titles["256"].startswith("1 spike,")
    assert titles["all (full)"].startswith("0 spikes,")


def test_the_static_page_moves_both_controls(data) -> None:
    packed = twin.payload(
        lambda order, seed: figures.buffer(order, seed, data),
        controls={"order": Choice(options=SIZES), "seed": Choice(options=(0, 1))},
        alt="x",
    )
    assert len(packed["slices"][0]["frames"]) == 6


FLOW = {
    "memory": Choice(options=(16, 32, 64, 96), default=32),
    "given": IntSlider(low=0, high=24, default=10, step=2),
    "block": Choice(options=(1, 4, 8, 16), default=4),
}


def cells(trace: go.Heatmap) -> list[int]:
    return sorted(value for row in trace.z for value in row if value is not None)


@pytest.mark.parametrize("given", [0, 2, 14, 24])
def test_rows_on_their_way_are_given_out_or_wait(given: int, seed: int) -> None:
    dice = random.Random(seed)
    memory, block = dice.choice(FLOW["memory"].options), dice.choice(FLOW["block"].options)
    figure = figures.flow(memory, given, block)
    disk, buffer, waiting, blocks, in_blocks = figure.data
    every = cells(disk)
    assert len(every) == 192 and len(set(every)) == 6
    for out, held in ((buffer, waiting), (blocks, in_blocks)):
        assert len(cells(out)) == 8 * given
        assert len(cells(held)) <= min(memory, 192 - 8 * given)
        # No place has two rows, and a row is in one place.
        pairs = zip(*(itertools.chain(*trace.z) for trace in (out, held)), strict=True)
        assert all(one is None or other is None for one, other in pairs)
        together = cells(out) + cells(held)
        assert all(together.count(file) <= every.count(file) for file in set(every))
    # From the buffer come only rows that it can have read.
    read = every[: 8 * given + memory]
    assert all(cells(buffer).count(file) <= read.count(file) for file in set(every))
    if given == 24:
        assert cells(buffer) == cells(blocks) == every
    assert f"After {given} batches" in alt(figure)


def test_the_flow_moves_on_the_static_page() -> None:
    packed = twin.payload(figures.flow, controls=FLOW, alt="x")
    assert [len(part["frames"]) for part in packed["slices"]] == [52] * 4


def test_outcomes_show_orders_and_made_spikes_beside_the_yardstick() -> None:
    orders = {"files": (8.0, [0.2, 0.3]), "256": (3.0, [0.1, 0.1])}
    figure = figures.outcomes(orders, {"noise": (20.0, [0.01, 0.03])}, 0.016)
    drawn, made = figure.data
    assert list(drawn.x) == [8.0, 3.0] and list(drawn.y) == [0.25, 0.1]
    assert (made.x[0], made.y[0]) == (20.0, 0.02) and figure.layout.shapes[0].y0 == 0.016
    assert drawn.marker.color != made.marker.color
    assert drawn.textposition == ("middle right", "middle right")
    assert made.textposition == "middle left"
    assert "files: 8.0 spikes, +0.250 nats" in alt(figure) and "fewer steps: +0.016" in alt(figure)


def test_correlations_show_each_order_in_both_panels() -> None:
    orders = {"files": (8.0, 50.0, [0.2, 0.3]), "mixed": (8.0, 7.0, [0.1, 0.0])}
    orders |= {"8192": (1.2, 4.0, [0.03]), "blocks": (1.2, 3.9, [0.028])}
    one, pooled = figures.correlations(orders).data
    assert list(one.x) == [8.0, 8.0, 1.2, 1.2] and list(pooled.x) == [50.0, 7.0, 4.0, 3.9]
    assert list(one.y) == list(pooled.y) == [0.25, 0.05, 0.03, 0.028]
    assert one.textposition == ("middle left", "middle left", "top right", "bottom right")
    assert "mixed: 8.0, of 16 batches 7.0, +0.050 nats" in alt(figures.correlations(orders))


def test_schedules_have_a_panel_each_and_one_legend(seed: int) -> None:
    dice = random.Random(seed)
    rates, orders = (3e-3, 1e-2, 3e-2), ("file order", "full")
    data = {
        panel: {
            order: {rate: [dice.uniform(1.8, 2.4) for _ in range(5)] for rate in rates}
            for order in orders
        }
        for panel in ("constant", "linear decay")
    }
    figure = figures.schedules(data)
    assert [trace.name for trace in figure.data] == [*orders, *orders]
    assert [trace.showlegend for trace in figure.data] == [True, True, False, False]
    assert figure.data[0].line.color == figure.data[2].line.color != figure.data[1].line.color
    assert figure.data[3].y[2] == fmean(data["linear decay"]["full"][3e-2])


def test_effective_rows_are_drawn_beside_the_batch() -> None:
    figure = figures.effective_rows({"file order": 4.2, "full": 31.0}, 32)
    assert list(figure.data[0].x) == [4.2, 31.0] and figure.layout.shapes[0].x0 == 32
    assert "file order 4.2, full 31.0" in alt(figure)


def test_damage_of_the_language_model_is_a_mean_that_ends_at_the_last_step() -> None:
    plan = Plan()
    clean, worse = [[3.0, 2.0, 1.0], [5.0, 4.0, 1.0]], [[3.0, 9.0, 2.0]]
    names = ("clean", "random tokens", "repeated n-grams", "short rows")
    losses = [clean, worse, worse, [[7.0] * plan.steps]]
    data = {"none": {n: {"loss": each} for n, each in zip(names, losses, strict=True)}}
    data["z"] = {"clean": {"loss": clean}}
    figure = figures.language_damage("loss", "none", data)
    assert list(figure.data[0].x) == [plan.steps - 2, plan.steps - 1, plan.steps]
    assert list(figure.data[0].y) == [4.0, 3.0, 1.0]
    assert figure.data[3].x[0] == figure.layout.xaxis.range[0] == plan.trunk - 4
    assert len({trace.line.color for trace in figure.data}) == 4
    shade = figure.layout.shapes[0]
    assert (shade.x0, shade.x1) == (plan.trunk + 0.5, plan.trunk + plan.bad + 0.5)
    assert "random tokens: highest 9.00, last 2.00" in alt(figure)
    assert figure.layout.yaxis.title.text == "loss, nats per token"
    cured = figures.language_damage("loss", "z", data)
    assert list(cured.data[1].y) == [] and "random tokens" not in alt(cured)


def test_design_effects_pair_a_line_with_its_points() -> None:
    pairs = {"sorted": ((3.0, 20.0), (3.1, 12.0)), "full": ((1.0, 1.1), (1.0, 0.9))}
    figure = figures.design_effects((8, 64), pairs, at=32)
    for line, points in zip(figure.data[::2], figure.data[1::2], strict=True):
        assert (line.mode, points.mode) == ("lines", "markers")
        assert line.line.color == points.marker.color and line.legendgroup == points.legendgroup
    assert figure.data[0].line.color != figure.data[2].line.color
    assert "sorted: 8 rows 3 predicted 3.1 measured, 64 rows 20 predicted 12" in alt(figure)
