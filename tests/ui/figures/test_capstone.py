"""The capstone's figures hold the numbers that they are given, and every control moves them."""

from __future__ import annotations

import dataclasses

import pytest

from labcore.ui.figures import capstone as figures

CURVES = figures.Curves(
    bits=[8.0 - 5 * step / 399 + (3 if step == 240 else 0) for step in range(400)],
    norms=[1.0 + step % 7 for step in range(400)],
    seconds=[0.6] * 400,
    tokens=1_200,
    planned=0.5,
    steps=400,
    expected=2.5,
    memory=(41.0, 42.0),
)


def alt(figure) -> str:
    return figure.layout.meta["alt"]


def test_a_training_is_drawn_up_to_a_minute() -> None:
    half, whole = (figures.training(minute, CURVES) for minute in (2.0, 4.0))
    loss, expected, norm, speed, planned, memory = half.data
    assert loss.x[-1] == pytest.approx(2.0, abs=0.05) and whole.data[0].x[-1] > 3.9
    assert list(expected.y) == [2.5, 2.5] and list(planned.y) == [2.4, 2.4]
    assert set(speed.y) == {2.0} and max(norm.y) <= 7 and list(memory.x) == [41.0, 42.0]
    assert half.layout.title.text.startswith("Step 200 of 400: ")
    assert "5.5" in alt(half) and "42 MiB, 41 predicted" in alt(half)
    assert list(loss.y)[:-1] == list(whole.data[0].y)[: len(loss.y) - 1]


def test_a_training_that_has_begun_leaves_room_for_the_rest() -> None:
    begun = dataclasses.replace(
        CURVES, bits=CURVES.bits[:3], norms=CURVES.norms[:3], seconds=[0.5] * 3
    )
    figure = figures.training(0.025, begun)
    assert figure.layout.xaxis.range[1] == pytest.approx(400 * 0.5 / 60)
    assert figure.layout.title.text.startswith("Step 3 of 400")


def test_the_size_by_the_rule_grows_with_the_computation() -> None:
    weights = [10**n for n in range(4, 10)]

    def formula(n: float, d: float) -> float:
        return 0.5 + 50 * n**-0.34 + 50 * d**-0.28

    small, large = (
        figures.sizes(minutes, 10.0, (weights, formula, 20.0)) for minutes in (2.0, 200.0)
    )
    assert small.data[1].x[0] < large.data[1].x[0]
    flops = 60e9 * 2 * 10
    assert small.data[1].x[0] * 1e6 == pytest.approx((flops / 120) ** 0.5, rel=2.2)
    assert min(small.data[0].y) == small.data[2].y[0]
    assert min(large.data[0].y) < min(small.data[0].y)
    faster = figures.sizes(2.0, 1_000.0, (weights, formula, 20.0))
    assert list(faster.data[0].y) == list(large.data[0].y)


def test_the_first_lever_that_fits_is_named() -> None:
    data = {
        "4 rows": {"weights": 3.0, "activations": 9.0},
        "1 row": {"weights": 3.0, "activations": 3.0},
    }
    titles = [figures.budget(size, data).layout.title.text for size in (12.0, 11.0, 5.0)]
    assert titles == ["12 MiB: 4 rows", "11 MiB: 1 row", "5 MiB: no lever fits"]
    figure = figures.budget(11.0, data)
    assert [list(bar.x) for bar in figure.data] == [[3.0, 3.0], [9.0, 3.0]]
    assert list(figure.data[0].marker.opacity) == [0.35, 1]
    assert "the first that fits is 1 row" in alt(figure)
