"""The chapter's figures show the numbers that they are given, and say them in words."""

import random

import plotly.graph_objects as go
import pytest

from labcore.ui import Choice, twin
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
        lambda size, seed: figures.buffer(size, seed, data),
        controls={"size": Choice(options=SIZES), "seed": Choice(options=(0, 1))},
        alt="x",
    )
    assert len(packed["slices"][0]["frames"]) == 6


def test_outcomes_have_a_point_an_order() -> None:
    figure = figures.outcomes({"file order": ([8.0, 6.0], [0.2, 0.3]), "noise": ([25], [0.02])})
    assert [(trace.x[0], trace.y[0]) for trace in figure.data] == [(7.0, 0.25), (25, 0.02)]
    assert figure.data[0].marker.symbol != figure.data[1].marker.symbol
    assert "file order: 7.0 spikes, +0.250 nats" in alt(figure)


def test_design_effects_pair_a_line_with_its_points() -> None:
    pairs = {"sorted": ((3.0, 20.0), (3.1, 12.0)), "full": ((1.0, 1.1), (1.0, 0.9))}
    figure = figures.design_effects((8, 64), pairs, at=32)
    for line, points in zip(figure.data[::2], figure.data[1::2], strict=True):
        assert (line.mode, points.mode) == ("lines", "markers")
        assert line.line.color == points.marker.color and line.legendgroup == points.legendgroup
    assert figure.data[0].line.color != figure.data[2].line.color
    assert "sorted: 8 rows 3 predicted 3.1 measured, 64 rows 20 predicted 12" in alt(figure)


def test_noise_scales_have_a_row_an_order_and_the_exact_line() -> None:
    figure = figures.noise_scales([60.0, 62.0], {"full": [58.0, 63.0], "sorted": [3.0, 3.2]})
    assert [trace.y[0] for trace in figure.data] == ["full", "sorted"]
    assert figure.layout.shapes[0].x0 == 61.0
    assert "sorted 3.1; exact 61.0" in alt(figure)
