"""The chapter's figures show what the clipping functions did, and say it in words."""

import math

import plotly.graph_objects as go
import pytest

from labcore.studies.clipping import cliff, effects, exploding, results
from labcore.ui import Choice, LogSlider, explore, twin
from labcore.ui.figures import clipping as figures

SETTINGS = {"RNN": {"width": 12, "gain": 1.2}, "conv": {"depth": 3, "channels": 3}}
CONTROLS = {
    "norm": Choice(options=exploding.COMPARABLE, default="global"),
    "max_norm": LogSlider(low=1e-2, high=1e3, default=1.0, points=11),
}


@pytest.fixture
def data(seed: int) -> dict[str, effects.Snapshot]:
    return {name: effects.snapshot(name, seed=seed, **SETTINGS[name]) for name in SETTINGS}


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


@pytest.mark.parametrize("norm", exploding.COMPARABLE)
def test_the_dots_are_the_norms_before_and_after(norm: str, data) -> None:
    for name, taken in data.items():
        figure = figures.norm_choice(norm, 0.1, name, data=data)
        found = effects.effect(taken, exploding.comparable(norm, taken, 0.1))
        shown = {trace.name: list(trace.y) for trace in figure.data}
        assert shown["before"] == list(found.before)
        assert shown["after"] == list(found.after)
        assert set(shown["max_norm"]) == {0.1}
        assert f"cosine {found.cosine:.3f}" in figure.layout.title.text
        assert f"{norm}, max_norm 0.1: " in alt(figure)
        low, high = figure.layout.yaxis.range
        heights = [math.log10(y) for y in (*found.before, *found.after) if y > 0]
        assert low < min(heights) and max(heights) < high


def test_parameters_have_names_that_an_axis_has_room_for(data) -> None:
    figure = figures.norm_choice(gradient="conv", data=data)
    assert list(figure.data[1].x) == ["0", "1", "2", "head"]
    assert "inputs.bias" in figures.norm_choice(data=data).data[1].x


def test_frames_share_traces_and_titles_fit_a_phone(data) -> None:
    kinds = set()
    for norm in CONTROLS["norm"].positions():
        for max_norm in CONTROLS["max_norm"].positions():
            figure = figures.norm_choice(norm, max_norm, data=data)
            kinds.add(tuple((trace.name, trace.mode) for trace in figure.data))
            lines = figure.layout.title.text.split("<br>")
            assert len(lines) == 1 and max(map(len, lines)) <= 40, lines
    assert len(kinds) == 1


def test_the_static_page_moves_both_controls_within_its_limits(data) -> None:
    explore(figures.norm_choice, alt="x", data=data, **CONTROLS)
    frames = len(CONTROLS["norm"].positions()) * len(CONTROLS["max_norm"].positions())
    assert frames == 66 <= twin.MOST_FRAMES


def test_growth_starts_at_the_loss_and_names_both_ends() -> None:
    curves = {"gain 2": ((8.0, 4.0, 2.0), (18.0, 6.0, 2.0))}
    figure = figures.growth(curves, title="Back", steps="layers")
    predicted, measured = figure.data
    assert list(measured.y) == [1, 2, 4] and list(predicted.y) == [1, 3, 9]
    assert predicted.line.dash == "dash" and predicted.line.color == measured.line.color
    assert "gain 2: 4 measured, 9 predicted" in alt(figure)


def test_losses_end_with_a_cross_where_they_are_not_finite() -> None:
    curves = {"none": [3.0, 5.0, math.nan, 1.0], "global": [3.0, 2.0, 2.0, 1.0]}
    figure = figures.losses(curves, title="Runs")
    none, cross, good = figure.data
    assert list(none.y) == [3.0, 4.0, None, None]
    assert list(cross.x) == [2] and cross.marker.symbol == "x"
    assert good.y[-1] == pytest.approx(2.0)
    assert "none not finite at step 2, global 2.00" in alt(figure)
    low, high = figure.layout.yaxis.range
    assert low <= cross.y[0] <= high


@pytest.mark.parametrize("start", cliff.STARTS)
def test_paths_on_the_cliff_are_the_walks_until_they_leave_the_window(start: str) -> None:
    figure = figures.cliff(0.1, 1.0, start)
    _, thrown, clipped, _ = figure.data
    walk = cliff.descend(cliff.STARTS[start], lr=1.0, max_norm=0.1)
    points = [*zip(clipped.x, clipped.y, strict=True)]
    assert points == [pytest.approx(point, abs=1e-3) for point in walk.points]
    (left, right), (bottom, top) = cliff.WINDOW
    inside = [
        left <= w <= right and bottom <= b <= top for w, b in zip(thrown.x, thrown.y, strict=True)
    ]
    assert not inside[-1] and all(inside[:-1])
    assert figure.layout.title.text == f"unclipped: thrown out, clipped: {walk.losses[-1]:.4f}"
    assert len(figure.layout.title.text) <= 44


def test_networks_that_explode_are_counted_from_the_line_on() -> None:
    ways = {"LSTM, default": {"new": [-99.0, 2.0], "trained": [3.0, -1.0]}}
    figure = figures.common(ways, exploded=100.0, title="Networks")
    new, trained = figure.data
    assert list(new.x) == [-30, 2] and list(trained.x) == [3, -1]
    assert new.marker.symbol != trained.marker.symbol
    assert figure.layout.shapes[0].x0 == pytest.approx(2)
    assert "LSTM, default: 2 of 4" in alt(figure)


def harms(**changed: list[float | None]) -> dict[str, results.Harm]:
    times = {"1": [0.1, 0.3, None], results.AT_THE_END: [1.0, 2.0, 9.0], **changed}
    kinds = {kind: {1: times, 5: times} for kind in ("large", "large and reversed")}
    return {"AdamW": {"none": kinds, "global": kinds, "updates": kinds}, "SGD": {"none": kinds}}


def test_harm_is_a_median_with_its_range_and_a_lost_run_is_the_worst() -> None:
    figure = figures.harm("AdamW", 5, data=harms())
    assert [trace.name for trace in figure.data] == [
        "no clipping",
        "global norm",
        "clipped updates",
    ]
    assert len({trace.marker.color for trace in figure.data}) == 3
    assert list(figure.data[0].x) == [2.0, 2.0]
    assert list(figure.data[0].error_x.array) == [7.0, 7.0]
    assert "AdamW, 5 bad batches, at the end: large, no clipping 2" in alt(figure)
    soon = figures.harm("AdamW", 1, "1", data=harms())
    assert soon.layout.xaxis.type == "log"
    assert list(soon.data[0].x) == [0.3, 0.3]
    assert soon.data[0].error_x.array[0] == pytest.approx(figures.MOST - 0.3)
    none = figures.harm("SGD", 1, "1", data=harms(**{"1": [-0.5, 0.0, 0.004]}))
    assert set(none.data[0].x) == {figures.LEAST}


def test_limits_are_means_with_their_ranges() -> None:
    curves = {"one": {0.1: [1.0, 3.0], 10.0: [4.0, 4.0]}, "five": {0.1: [5.0], 10.0: [9.0]}}
    data = {"SGD": curves, "AdamW": {"one": {0.1: [1.0]}}}
    figure = figures.limits("SGD", data=data, unit="points lost", usual={"SGD": 0.5})
    one, five = figure.data
    assert list(one.x) == [0.1, 10.0] and list(one.y) == [2.0, 4.0]
    assert list(one.error_y.array) == list(one.error_y.arrayminus) == [1.0, 0.0]
    assert one.line.color != five.line.color
    assert figure.layout.shapes[0].x0 == 0.5
    assert "SGD, points lost. one: 2.0 at 0.1, 4.0 at 10; five: 5.0" in alt(figure)
    assert not figures.limits("SGD", data=data, unit="points lost").layout.shapes


def test_norms_are_counted_above_the_line_that_moves() -> None:
    data = {"max_norm 1.0": [[2.0, 0.5, 0.5, 0.5], [3.0, 1.5, 0.5, 0.5]]}
    figure = figures.norms(1.0, "max_norm 1.0", data)
    assert figure.layout.title.text == "38% of the steps are above 1"
    assert set(figure.data[-1].y) == {1.0}
    assert [trace.showlegend for trace in figure.data[:2]] == [True, False]
    assert figures.norms(2.5, "max_norm 1.0", data).layout.title.text.startswith("12%")
