"""The chapter's figures show what the clipping functions did, and say it in words."""

import math

import plotly.graph_objects as go
import pytest

from labcore.studies.clipping import effects, exploding
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
    figure = figures.losses(curves, title="Runs", bad_step=2)
    none, cross, good = figure.data
    assert list(none.y) == [3.0, 4.0, None, None]
    assert list(cross.x) == [2] and cross.marker.symbol == "x"
    assert good.y[-1] == pytest.approx(2.0)
    assert "none not finite at step 2, global 2.00" in alt(figure)
    assert len(figure.layout.shapes) == 1
    low, high = figure.layout.yaxis.range
    assert low <= cross.y[0] <= high


def test_means_and_spreads_over_seeds() -> None:
    figure = figures.cosines([2, 8], {"local": [[0.5, 0.7], [0.9, 0.9]], "global": [[1], [1]]})
    assert list(figure.data[0].y) == pytest.approx([0.6, 0.9])
    assert list(figure.data[0].error_y.array) == pytest.approx([0.2 / math.sqrt(2), 0])
    assert "local: 0.60 at 2, 0.90 at 8" in alt(figure)
    rows = {"SGD": {"none": [0.0], "global": [0.3, 0.2]}, "AdamW": {"none": [0.2]}}
    figure = figures.accuracies(rows, title="After")
    assert list(figure.data[0].x) == pytest.approx([0.0, 0.25])
    assert list(figure.data[0].y) == ["none", "global"]
    assert figure.data[0].marker.symbol != figure.data[1].marker.symbol
    assert "SGD: none 0.000, global 0.250" in alt(figure)
