"""Curves and fits show the times of `labcore.parallel.cost` and what was measured."""

from __future__ import annotations

import itertools
import random

import plotly.graph_objects as go
import pytest

from labcore.parallel import cost
from labcore.parallel.collectives import ALL_REDUCES
from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.figures.tensor_parallel import cost as figures
from tests.ui.figures.drawn import packed


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


def test_curves_are_the_models_and_dots_what_was_measured(seed: int) -> None:
    dice = random.Random(seed)
    data = {
        name: {size: [dice.uniform(1e-5, 1e-3) for _ in range(5)] for size in (4096, 2**20)}
        for name in ("backend", "ring")
    }
    figure = figures.all_reduce_curves(4, 30.0, 2.5, data=data)
    link = cost.Link(name="x", alpha=3e-5, beta=4e-10, source="")
    for name in ALL_REDUCES:
        line = trace(figure, name.replace("_", "-"))
        assert tuple(line.x) == figures.SIZES
        expect = [1e6 * cost.all_reduce_seconds(name, 4, size, link) for size in figures.SIZES]
        assert list(line.y) == pytest.approx(expect)
    for name, by_size in data.items():
        dots = trace(figure, f"{name}, measured")
        rows = [quantiles(samples) for samples in by_size.values()]
        assert list(dots.x) == list(by_size)
        assert list(dots.y) == pytest.approx([1e6 * middle for _, middle, _ in rows])
        assert list(dots.error_y.array) == pytest.approx([1e6 * (h - m) for _, m, h in rows])
    assert trace(figure, "ring, measured").marker.color == trace(figure, "ring").line.color
    assert "backend measured: 4 KiB" in alt(figure) and packed(figure) < 25_000
    ranges = [
        (shown.layout.xaxis.range, shown.layout.yaxis.range)
        for shown in (figure, figures.all_reduce_curves(2, 900.0, 0.1, data=data))
    ]
    assert ranges[0] == ranges[1]  # of all frames of an explorer
    (left, right), (low, high) = ranges[0]
    for name in data:
        dots = trace(figure, f"{name}, measured")
        assert 10**left < min(dots.x) and max(dots.x) < 10**right
        assert 10**low < min(dots.y) and max(dots.y) < 10**high
    small = figures.all_reduce_curves(2, data={"ring": {16: [1e-4], 2**22: [1e-2]}})
    assert trace(small, "ring").x[0] == 16 and trace(small, "ring").x[-1] == figures.SIZES[-1]
    assert 10 ** small.layout.xaxis.range[0] < 16 and len(small.layout.xaxis.tickvals) <= 5
    odd = figures.all_reduce_curves(6)
    assert set(trace(odd, "halving-doubling").y) == {None}


def test_curves_of_every_link_of_the_explorer_stay_on_one_axis() -> None:
    reach = set()
    for point in itertools.product((2, 3, 16), (0.1, 1000.0), (1.0, 900.0)):
        figure = figures.all_reduce_curves(*point)
        every = [y for item in figure.data for y in item.y if y is not None]
        low, high = figure.layout.yaxis.range
        assert 10**low <= min(every) and max(every) <= 10**high
        reach.add((low, high))
    assert len(reach) == 1
    assert alt(figures.all_reduce_curves(2, 1000.0, 1.0)).startswith("2 ranks, 1000 µs, 1 GB/s, ")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_title_names_the_fastest_for_small_and_large_messages(ranks: int) -> None:
    figure = figures.all_reduce_curves(ranks, 5.0, 10.0)
    link = cost.Link(name="x", alpha=5e-6, beta=1e-10, source="")
    said = figure.layout.title.text
    assert f"{ranks} ranks, 5 µs, 10 GB/s, {said}. " in alt(figure)
    where = cost.crossover("one_shot", "two_shot", ranks, link)
    if where > figures.SIZES[-1]:
        assert said == "fastest: one-shot at every size"
    else:
        size = min(size for size in figures.SIZES if size > where)
        assert said == f"fastest: one-shot, two-shot from {figures._size(size)}"


def test_a_fit_is_shown_with_what_it_leaves_over(seed: int) -> None:
    dice = random.Random(seed)
    sizes = [4 * 5**power for power in range(1, 9)]
    seconds = [[(2e-4 + 3e-9 * n) * dice.uniform(0.8, 1.3) for _ in range(7)] for n in sizes]
    fitted = cost.fit_alpha_beta(sizes, seconds)
    figure = figures.fit_view(sizes, seconds, fitted, title="gloo, 2 ranks")
    middles = [quantiles(one)[1] for one in seconds]
    assert list(trace(figure, "measured").y) == pytest.approx([1e6 * one for one in middles])
    assert list(trace(figure, "residual").y) == pytest.approx(
        [100 * one for one in fitted.residuals]
    )
    line = trace(figure, f"{draw.seconds(fitted.alpha)} + {1e9 * fitted.beta:.3g} ns × bytes")
    assert list(line.y) == pytest.approx([1e6 * fitted.at(size) for size in line.x])
    assert (line.x[0], line.x[-1]) == pytest.approx((sizes[0], sizes[-1]))
    stems = next(item for item in figure.data if item.name is None)
    assert list(stems.y[1::3]) == pytest.approx([100 * one for one in fitted.residuals])
    assert f"gloo, 2 ranks. alpha {draw.seconds(fitted.alpha)}, beta" in alt(figure)
    assert figure.layout.title.text == "gloo, 2 ranks"
    assert packed(figure) < 25_000
    once = figures.fit_view(sizes, middles, fitted, title="x")
    assert list(trace(once, "measured").y) == pytest.approx([1e6 * one for one in middles])
    with pytest.raises(ValueError, match="sizes must be above 0 with seconds for each"):
        figures.fit_view(sizes, seconds[:-1], fitted, title="x")


def test_ticks_of_time_are_whole() -> None:
    found = figures._time_ticks(1e-6, 1.0, (1,))
    assert found["ticktext"] == ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"]
    assert found["tickvals"] == pytest.approx([10.0**power for power in range(7)])
    low, high = 3.3e-5, 0.041
    ticks = figures._time_ticks(low, high, (1, 2, 5))["tickvals"]
    assert ticks[0] <= 1e6 * low and ticks[-1] >= 1e6 * high


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.9996, "1 s"), (1.23456e-3, "1.23 ms"), (999.4e-9, "999 ns"), (1.5, "1.5 s"), (0, "0 ns")],
)
def test_times_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert draw.seconds(value).replace("1000 ms", "1 s") == text


def test_sizes_have_three_digits_and_a_unit() -> None:
    assert [figures._size(n) for n in (0, 7, 1000, 1024, 1536, 1023 * 1024, 2**26)] == [
        "0 B", "7 B", "1000 B", "1 KiB", "1.5 KiB", "1023 KiB", "64 MiB",
    ]  # fmt: skip
