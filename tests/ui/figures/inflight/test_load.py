"""Curves, replicas and the check of the simulator draw the numbers that they are given."""

from __future__ import annotations

import random

import plotly.graph_objects as go
import pytest

from labcore.studies.inflight import scenarios
from labcore.studies.inflight.scenarios import Fleet, Quantiles
from labcore.ui import twin
from labcore.ui.figures.inflight import load as figures


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


def made(dice: random.Random) -> dict:
    return {
        (policy, mix): {
            rate: {
                name: Quantiles(low := dice.choice((0.0, 10 ** dice.uniform(-7, 0))), 3 * low)
                for name in scenarios.MEASURES
            }
            for rate in (0.4, 0.8)
        }
        for policy in ("static", "guaranteed_no_evict", "max_utilization")
        for mix in ("x", "y")
    }


@pytest.mark.parametrize("measure", scenarios.MEASURES)
def test_curves_are_quantiles_with_short_waits_at_the_foot(measure: str, seed: int) -> None:
    dice = random.Random(seed)
    data, scale = made(dice), 10 ** dice.uniform(-2, 2)
    longest = data["static", "y"][0.8] = {
        name: Quantiles(0.3 * scale, scale) for name in scenarios.MEASURES
    }
    figure = figures.latency_curves(measure, "y", data=data)
    assert len(figure.data) == 6
    raw, shown = [], []
    for policy in ("static", "guaranteed_no_evict", "max_utilization"):
        for part, end in (("p50", ""), ("p99", ", p99")):
            line = trace(figure, figures.POLICIES[policy] + end)
            assert list(line.x) == [0.4, 0.8]
            raw += [getattr(one[measure], part) for one in data[policy, "y"].values()]
            shown += line.y
            assert line.line.dash == ("solid" if part == "p50" else "dash")
    foot = min(shown)
    assert longest[measure].p99 in shown
    assert all(two == max(one, foot) for one, two in zip(raw, shown, strict=True))
    clipped = min(raw) < foot
    assert not clipped or max(raw) / 30_000 <= foot <= max(raw) / 3000
    low, high = figure.layout.yaxis.range
    assert 10**low < foot and max(shown) < 10**high
    ticks = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    seen = [word for at, word in ticks.items() if 10**low <= at <= 10**high]
    assert sum(word.startswith("≤") for word in seen) == clipped
    assert "admit what fits now: p50" in alt(figure)
    assert not any("_" in item.name for item in figure.data)
    twin.still(figure.to_plotly_json(), alt="x")


def test_replicas_are_areas_of_what_is_under_way() -> None:
    fleet = Fleet(
        loads=(((0.0, 0), (1.0, 2), (3.0, 0)), ((0.0, 1), (2.0, 0))),
        sent=(2, 1), read=(30, 20), found=(10, 0), hit_rate=1 / 6, p50=0.1, p99=0.2, seconds=3.0,
    )  # fmt: skip
    other = Fleet(
        loads=(((0.0, 4), (1.0, 0)), ((0.0, 0),)),
        sent=(4, 0), read=(90, 0), found=(0, 0), hit_rate=0.0, p50=1.0, p99=2.0, seconds=1.0,
    )  # fmt: skip
    data = {("round_robin", 0.5): fleet, ("least_loaded", 0.5): other}
    figure = figures.replicas("round_robin", 0.5, data=data)
    area = trace(figure, "requests under way, up to 4")
    rows = [[]]
    for x, y in zip(area.x, area.y, strict=True):
        if x is None:
            rows.append([])
        else:
            rows[-1].append((x, y))
    assert len(rows) == 2
    for foot, row, high in zip((1, 2), rows, (2, 1), strict=True):
        assert row[0] == row[-1] == (0.0, foot)
        assert min(y for _, y in row) == pytest.approx(foot - 0.9 * high / 4)
    assert list(trace(figure, "prompt tokens read").x) == [30, 20]
    assert list(trace(figure, "found in the cache").x) == [10, 0]
    assert figure.layout.xaxis2.range[1] > 90 and figure.layout.xaxis.range[1] >= 3
    title = figure.layout.title.text
    assert "TTFT p99 200 ms" in title and "17% found" in title and "p50 100 ms" in alt(figure)
    assert "replica 2: 1 requests, 1 at once at most, 20 tokens read and 0 found" in alt(figure)
    twin.still(figure.to_plotly_json(), alt="x")


def test_requests_inside_and_outside_the_band_are_told(seed: int) -> None:
    dice = random.Random(seed)
    measured = [10 ** dice.uniform(-3, 1) for _ in range(37)]
    factors = [dice.choice((0.7, 0.9, 1.0, 1.14, 1.16)) for _ in measured]
    simulated = [one * factor for one, factor in zip(measured, factors, strict=True)]
    figure = figures.simulated_against_measured(measured, simulated, title="TTFT")
    inside = [
        pair
        for pair, factor in zip(zip(measured, simulated, strict=True), factors, strict=True)
        if 0.85 <= factor <= 1.15
    ]
    dots = trace(figure, "inside")
    if inside:
        assert list(zip(dots.x, dots.y, strict=True)) == inside
    assert figure.layout.title.text == f"{len(inside)} of 37 requests within ± 15 %"
    assert figure.layout.xaxis.title.text == "measured<br>TTFT"
    errors = sorted(two / one - 1 for one, two in zip(measured, simulated, strict=True))
    assert f"TTFT: {len(inside)} of 37" in alt(figure)
    assert f"median deviation {errors[18]:+.1%}" in alt(figure)
    low, high = (10**end for end in figure.layout.xaxis.range)
    assert low < min(*measured, *simulated) and max(*measured, *simulated) < high
    band = trace(figure, "± 15 %")
    assert all(
        y / x == pytest.approx(1.15) or y / x == pytest.approx(0.85)
        for x, y in zip(band.x, band.y, strict=True)
    )
    assert figure.layout.xaxis.range == figure.layout.yaxis.range
    twin.still(figure.to_plotly_json(), alt="x")


def test_what_cannot_be_compared_is_refused() -> None:
    for measured, simulated in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="of the same requests"):
            figures.simulated_against_measured(measured, simulated, title="x")
    with pytest.raises(ValueError, match="leave out requests without it"):
        figures.simulated_against_measured([1.0, 0.0], [1.0, 1.0], title="x")
    figure = figures.simulated_against_measured([1.0], [9.0], title="x", names=["long"])
    assert trace(figure, "outside").hovertext == ("long: +800%",)
    assert trace(figure, "inside").x == (None,)
