"""The drawn ranges end where they end; a bar holds or fails whole, else it is undecided."""

from __future__ import annotations

import math
import random

import pytest

from labcore.studies.tensor_parallel.ranges import Range
from labcore.ui.figures import tensor_parallel as figures

LETTERS_OF_A_PHONE = 41


def some(dice: random.Random, low: float, high: float) -> Range:
    ends = sorted(dice.uniform(low, high) for _ in range(3))
    return Range(low=ends[0], middle=ends[1], high=ends[2])


@pytest.mark.parametrize("above", [True, False])
def test_a_bar_holds_if_all_of_it_is_on_the_rules_side(above: bool, seed: int) -> None:
    dice = random.Random(seed)
    rule = dice.uniform(0.3, 0.7)
    judged = {f"setting {at}": some(dice, 0.05, 0.95) for at in range(5)}
    judged["below"], judged["above"] = some(dice, 0.05, rule), some(dice, rule, 0.95)
    judged["across"] = Range(low=rule - 0.1, middle=rule + 0.05, high=rule + 0.1)
    explored = {"tried": some(dice, 0.05, 0.95), "tried too": some(dice, rule, 0.95)}
    figure = figures.ranges_view(judged, explored, rule=rule, above=above, quantity="wire")
    alt = figure.layout.meta["alt"]
    for name, one in judged.items():
        holds = [end >= rule if above else end <= rule for end in (one.low, one.high)]
        kind = "holds" if all(holds) else "undecided" if any(holds) else "does not hold"
        assert f"{name}: {one.low:.2f} to {one.high:.2f}, {kind}" in alt
    assert "across: " in alt and "undecided" in alt and alt.count("explored, not judged") == 2
    ends = {}
    for item in figure.data:
        if item.mode == "lines":
            for at in range(0, len(item.x), 3):
                ends[item.y[at]] = (item.x[at], item.x[at + 1], item.name)
    rows = [*judged.values(), *explored.values()]
    assert {at: one[:2] for at, one in ends.items()} == {
        at: (one.low, one.high) for at, one in enumerate(rows)
    }
    assert [ends[at][2] for at in (8, 9)] == ["explored, not judged"] * 2
    (shade,) = (one for one in figure.layout.shapes if one.type == "rect")
    assert shade.x0 == rule and (shade.x1 > rule) == above
    lines = [one for one in figure.layout.shapes if one.type == "line"]
    labels = figure.layout.annotations
    assert [one.text for one in labels] == [*judged, *explored]
    for at, (line, label) in enumerate(zip(lines, labels, strict=True)):
        assert (label.x, label.xref, label.xanchor) == (0, "paper", "left")  # always on the figure
        assert line.x0 == line.x1 == rule and label.y + 0.2 < line.y0 < at < line.y1
    assert len(figure.layout.title.text) <= LETTERS_OF_A_PHONE


def test_a_band_runs_from_the_lowest_to_the_highest_gains(seed: int) -> None:
    dice = random.Random(seed)
    hosts = (1e-6, 2.5e-6, 5e-5)
    gains = {name: {at: some(dice, 1, 12) for at in hosts} for name in ("small", "large")}
    figure = figures.gain_view(gains, {"bare": hosts[1], "eager": hosts[2]}, rule=1.1)
    bands = [item for item in figure.data if item.fill == "toself"]
    for item, by_host in zip(bands, gains.values(), strict=True):
        edge = {}
        for x, y in zip(item.x, item.y, strict=True):
            edge.setdefault(x, []).append(y)
        assert edge == {1e6 * at: [one.high, one.low] for at, one in by_host.items()}
    lines = [one.x0 for one in figure.layout.shapes if one.type == "line" and one.x0 == one.x1]
    assert lines == pytest.approx([2.5, 50])
    names = {one.text: one.x for one in figure.layout.annotations}
    assert names == pytest.approx({"bare": math.log10(2.5), "eager": math.log10(50)})
    assert len(figure.layout.title.text) <= LETTERS_OF_A_PHONE
