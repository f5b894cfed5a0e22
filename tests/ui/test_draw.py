"""Names at the ends of lines: in the order of the ends, apart, or else a legend."""

from __future__ import annotations

import itertools
import math
import random

import plotly.graph_objects as go
import pytest

import labcore.ui  # noqa: F401  (installs the template)
from labcore.ui.draw import ROW, named_at_ends


def drawn(ends: dict[str, float], **yaxis: object) -> go.Figure:
    figure = go.Figure()
    for name, end in ends.items():
        figure.add_scatter(x=[1, 10], y=[ends[name] / 2 + 1, end], mode="lines", name=name)
    return figure.update_layout(yaxis=yaxis, height=410)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_names_stand_in_the_order_of_the_ends_and_apart(scale: str, seed: int) -> None:
    draw = random.Random(seed)
    ends = {f"line {at}": draw.choice((1.0, 5.0)) + draw.random() / 50 for at in range(4)}
    low, high = (0.5, 8.0) if scale == "linear" else (math.log10(0.5), math.log10(8.0))
    figure = named_at_ends(drawn(ends, type=scale, range=[low, high]))
    assert not any(trace.showlegend for trace in figure.data)
    notes = figure.layout.annotations
    assert [note.text.partition("</span> ")[2] for note in notes] == [*ends]
    expected = [math.log10(end) if scale == "log" else end for end in ends.values()]
    assert [note.y for note in notes] == pytest.approx(expected)
    pixels = 300 / (high - low)
    shown = [
        (end, pixels * (note.y - low) + note.yshift)
        for end, note in zip(ends.values(), notes, strict=True)
    ]
    heights = [height for _, height in sorted(shown)]
    assert all(b - a >= ROW - 1.01 for a, b in itertools.pairwise(heights))
    moved = sum(note.yshift for note in notes)
    assert abs(moved) <= 2  # they move apart, not away


def test_ends_that_are_apart_keep_their_names_in_place() -> None:
    figure = named_at_ends(drawn({"a": 1.0, "b": 4.0, "c": 9.0}))
    assert [note.yshift for note in figure.layout.annotations] == [0, 0, 0]
    assert figure.layout.margin.r >= 16


@pytest.mark.parametrize(
    "figure",
    [
        drawn({f"line {at}": at + 1.0 for at in range(5)}),
        drawn({"a": 1.0, "a name that is too long": 2.0}),
        drawn({"a": 1.0, "b": 20.0}, range=[0, 10]),
        drawn({"a": 1.0, "b": math.nan}),
        drawn({"a": 1.0, "b": 0.0}, type="log"),
        drawn({"a": 1.0}).add_scatter(y=[], mode="lines", name="empty"),
        drawn({"a": 1.0, "b": 2.0}).add_scatter(y=[1, 2], mode="lines", yaxis="y2"),
        go.Figure(go.Scatter(y=[1, 2], mode="markers", name="points")),
    ],
    ids=["five", "long", "outside", "not finite", "zero on log", "empty", "two axes", "no lines"],
)
def test_elsewhere_the_legend_stays(figure: go.Figure) -> None:
    before = figure.to_json()
    assert named_at_ends(figure).to_json() == before


def test_a_group_is_named_once_at_the_mean_of_its_ends() -> None:
    figure = go.Figure()
    for at, end in enumerate((2.0, 3.0, 7.0)):
        figure.add_scatter(
            y=[1, end], mode="lines", name="seeds", legendgroup="seeds", showlegend=at == 0
        )
    (note,) = named_at_ends(figure).layout.annotations
    assert note.y == pytest.approx(4.0)
