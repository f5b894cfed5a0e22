"""A step's budget is dealt out in the figure as in the trace; gaps are those of the run."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from labcore.studies.inflight import scenarios
from labcore.ui import twin
from labcore.ui.figures.inflight import step as figures


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def named(figure: go.Figure, name: str) -> list:
    return [item for item in figure.data if item.name == name]


@pytest.mark.parametrize("policy", ["static", "guaranteed_no_evict", "max_utilization"])
def test_the_bars_of_a_step_are_its_budget_and_what_is_left(policy: str) -> None:
    trace = scenarios.short_trace(policy, most=30)
    for place, now in enumerate(trace, 1):
        figure = figures.anatomy(place, data=trace)
        (said,) = named(figure, "decodes")
        chunks = named(figure, "chunks of prompts")
        (unused,) = named(figure, "not used")
        (later,) = named(figure, "left for later steps")
        assert said.x == (sum(now.decodes),)
        assert [bar.x[0] for bar in chunks if bar.x[0]] == [count for _, count in now.chunks]
        assert sum(bar.x[0] for bar in (said, *chunks, unused)) == now.budget
        assert later.x == (sum(count for _, count in now.left),) and later.y == ("later",)
        assert {bar.y[0] for bar in (said, *chunks, unused)} == {"this step"}
        assert max(now.budget, later.x[0]) <= figure.layout.xaxis.range[1]
        assert [bar.showlegend for bar in chunks].count(True) == 1
        (mark,) = named(figure, "this step")
        assert mark.x == (place,) and f"{now.waiting} waiting" in figure.layout.title.text
        (prompts,) = named(figure, "prompt tokens of a step")
        assert list(prompts.y) == [sum(count for _, count in one.chunks) for one in trace]
        for number, count in now.chunks:
            assert f"{count} of prompt {number + 1}" in alt(figure)
    twin.still(figure.to_plotly_json(), alt="x")
    for wrong in (0, 31):
        with pytest.raises(ValueError, match="step must be between 1 and 30"):
            figures.anatomy(wrong, data=trace)


def test_a_number_stands_only_where_its_bar_has_room() -> None:
    trace = scenarios.short_trace()
    for place in range(1, len(trace) + 1):
        figure = figures.anatomy(place, data=trace)
        for bar in (item for item in figure.data if item.orientation == "h"):
            word = bar.text[0]
            assert not word or bar.x[0] >= 0.03 * len(word) * figure.layout.xaxis.range[1] / 1.02


@pytest.mark.parametrize("chunk", scenarios.CHUNKS)
def test_gaps_are_drawn_as_stems_and_the_chosen_size_is_marked(chunk: int) -> None:
    data = scenarios.chunk_sizes()
    figure = figures.chunk_gaps(chunk, data=data)
    now = data[chunk]
    (dots,) = named(figure, "a token")
    assert list(dots.x) == pytest.approx([1e3 * time for time in now.times])
    assert list(dots.y) == pytest.approx([1e3 * gap for gap in now.gaps])
    (stems,) = named(figure, "gap before a token")
    assert len(stems.x) == 3 * len(now.times) - 1 and set(stems.y[::3]) == {0}
    (read,) = named(figure, "the prompt is read")
    assert max(read.x) == pytest.approx(1e3 * now.ttft) and min(read.x) == 0
    for name, told in (
        ("longest gap", [one.worst for one in data.values()]),
        ("TTFT of the long prompt", [one.ttft for one in data.values()]),
    ):
        (line,) = named(figure, name)
        assert list(line.x) == list(data) and list(line.y) == pytest.approx(told)
        largest = max(line.marker.size)
        assert [x for x, size in zip(line.x, line.marker.size, strict=True) if size == largest] == [
            chunk
        ]
    high = figure.layout.yaxis.range[1]
    low, right = figure.layout.xaxis.range
    for one in data.values():
        assert 1e3 * one.worst < high and low <= 1e3 * min(one.times)
        assert 1e3 * max(one.times) < right
    assert f"chunks of {chunk} tokens" in alt(figure)
    twin.still(figure.to_plotly_json(), alt="x")
