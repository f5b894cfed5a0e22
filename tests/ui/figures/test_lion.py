"""The chapter's figures show the numbers they are given, and say in words what they show."""

import itertools
import math
import random

import plotly.graph_objects as go
import pytest

from labcore.studies.lion import landscape
from labcore.ui.figures import lion as figures


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


@pytest.mark.parametrize(
    ("optimizer", "surface"), list(itertools.product(landscape.RULES, landscape.SURFACES))
)
def test_the_walk_is_the_trajectory(optimizer: str, surface: str) -> None:
    figure = figures.walk(optimizer, lr=0.003, noise=0.5, surface=surface)
    path = landscape.trajectory(optimizer, surface, lr=0.003, noise=0.5)
    drawn = figure.data[1]
    assert drawn.name == optimizer
    assert list(drawn.x) == pytest.approx(path.points[:, 0].tolist(), abs=6e-5)
    assert list(drawn.y) == pytest.approx(path.points[:, 1].tolist(), abs=6e-5)
    title = figure.layout.title.text
    assert f"{float(path.losses[-1]):.3g}" in title and "<br>" not in title
    assert "after 100 steps at learning rate 0.003" in alt(figure)


def test_both_walk_under_the_same_noise_and_only_lion_has_a_box() -> None:
    settings = {"weight_decay": 2.0, "beta1": 0.5}
    figure = figures.walk(lr=0.02, noise=1.5, surface="valley", **settings)
    for place, name in ((1, "Lion"), (2, "AdamW")):
        path = landscape.trajectory(name, "valley", lr=0.02, noise=1.5, **settings)
        assert figure.data[place].name == name
        assert list(figure.data[place].x) == pytest.approx(path.points[:, 0].tolist(), abs=6e-5)
    (box,) = figure.layout.shapes
    assert (box.x0, box.x1, box.y0, box.y1) == (-0.5, 0.5, -0.5, 0.5)
    assert not figures.walk(weight_decay=0.0).layout.shapes
    assert not figures.walk("AdamW", weight_decay=2.0).layout.shapes
    # A weight inside the box stays there, up to the step that crosses its edge.
    end = figure.data[1].x[-1], figure.data[1].y[-1]
    assert max(map(abs, end)) <= 0.5 + 0.02


def test_the_opening_moves_all_its_controls(seed: int) -> None:
    opening, dice = figures.opening(), random.Random(seed)
    for _ in range(10):
        chosen = {
            name: dice.choice([*control.positions()]) for name, control in opening.controls.items()
        }
        figure = opening.figure(**chosen)
        assert len(figure.data) == 4 and len(figure.layout.title.text) <= 41


def test_a_walk_that_diverges_says_so_and_ends_at_the_window() -> None:
    figure = figures.walk("gradient descent", lr=1.0)
    assert "diverges" in figure.layout.title.text
    assert 1 <= len(figure.data[1].x) < 20
    assert max(map(abs, figure.data[1].y)) < 100


def test_the_contour_does_not_depend_on_the_walk() -> None:
    first, second = figures.walk("Lion", lr=0.01), figures.walk("Adam", lr=0.5)
    assert first.data[0] == second.data[0]


def test_memory_stacks_copies_of_the_weights() -> None:
    figure = figures.memory(3e9, bytes_per_number=2)
    totals = {
        name: sum(bar.y[place] for bar in figure.data)
        for place, name in enumerate(figure.data[0].x)
    }
    assert totals == pytest.approx(
        {"AdamW": 24.0, "Lion": 18.0, "momentum": 18.0, "gradient descent": 12.0}
    )
    assert "AdamW 24 GB" in alt(figure) and "Lion 18 GB" in alt(figure)


def test_a_path_ends_where_the_weight_is_nan() -> None:
    figure = figures.nan_paths({"a": [1.0, 0.5, math.nan], "b": [1.0, 0.5, 0.5]}, at=1)
    assert list(figure.data[0].y) == [1.0, 0.5, None]
    assert figure.data[0].line.color != figure.data[1].line.color
    assert [(trace.name, trace.x, trace.y) for trace in figure.data[2:]] == [
        ("a: NaN from here", (1,), (0.5,))
    ]
    assert "a none, the path ends early, b 0.5" in alt(figure)


def test_step_times_are_medians_in_order_with_their_percentiles() -> None:
    figure = figures.step_times({"slow": [5.0, 4.0, 6.0], "fast": [1.0, 1.0, 1.5]}, "Steps")
    assert [bar.y[0] for bar in figure.data] == ["fast", "slow"]
    assert figure.data[1].x[0] == 5.0
    assert figure.data[1].error_x.array[0] == pytest.approx(0.6)
    assert alt(figure) == "Steps: fast 1 ms, slow 5 ms."


def test_the_other_figures_hold_their_points() -> None:
    drift = figures.drift({"Lion": [1.0, 0.9], "AdamW": [1.0, 1.0]})
    assert list(drift.data[0].y) == [1.0, 0.9]
    assert "Lion 0.9" in alt(drift)
    stall = figures.stall([1e-4, 1e-3], [0.25, 1.0], [0.24, 1.0])
    assert list(stall.data[1].y) == [0.25, 1.0]
    assert "25%" in alt(stall)
    size = figures.update_size([0, 2], [0.23, 0.9], [0.229, 0.91])
    assert [list(trace.y) for trace in size.data] == [[1.0, 1.0], [0.229, 0.91], [0.23, 0.9]]
    steps = figures.update_steps({"AdamW, 16": [(0, 0.9)], "AdamW, 64": [(0, 0.8)]})
    assert steps.data[0].line.dash != steps.data[1].line.dash
    assert "AdamW, 16 0.90" in alt(steps)
