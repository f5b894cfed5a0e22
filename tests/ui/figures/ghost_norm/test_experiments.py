"""The experiments' figures show the numbers that they are given, and say them in words."""

import math

import plotly.graph_objects as go
import pytest

from labcore.ui.figures import ghost_norm as figures


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def test_equal_loss_draws_a_point_for_each_length() -> None:
    curves = {
        "batch 32": {
            "training loss": [[0.6, 0.8], [0.2, 0.2]],
            "accuracy": [[0.6, 0.7], [0.7, 0.8]],
        },
        "batch 512": {"training loss": [[0.4]], "accuracy": [[0.5]]},
    }
    figure = figures.equal_loss(curves, 0.4)
    small, large = figure.data
    assert list(small.x) == pytest.approx([0.7, 0.2]) and list(small.y) == pytest.approx([65, 75])
    assert small.line.color != large.line.color
    assert figure.layout.shapes[0].x0 == 0.4
    assert figure.layout.xaxis.autorange == "reversed"
    assert "batch 32: 65.0% at 0.70, 75.0% at 0.20; batch 512: 50.0% at 0.40" in alt(figure)


def test_catching_up_has_the_small_batch_at_zero() -> None:
    points = {"whole batch": [[-3.0, -2.0], [1.0, 1.0]], "ghosts": [[-4.0], [2.0]]}
    losses = {"whole batch": [[0.1], [0.3]], "ghosts": [[0.2], [0.0]]}
    figure = figures.catching_up([20, 40], points, losses)
    drawn = [(list(trace.y), trace.yaxis) for trace in figure.data]
    assert drawn[:3] == [([-2.5, 1.0], "y"), ([-4.0, 2.0], "y"), ([0, 0], "y")]
    assert drawn[3:] == [([0.1, 0.3], "y2"), ([0.2, 0.0], "y2"), ([0, 0], "y2")]
    assert [trace.showlegend for trace in figure.data].count(True) == 2
    assert "ghosts: -4 at 20, 2 at 40. Test loss: whole batch: 0.1 at 20" in alt(figure)


def test_the_gap_is_read_against_equal_losses() -> None:
    points = {
        "32, repeated": ([0.4, 0.5], [0.7, 0.8]),
        "512, repeated": ([0.4], [0.9]),
        "32, fresh": ([0.5], [0.5]),
        "512, fresh": ([0.6], [0.61]),
    }
    figure = figures.unseen(points)
    *runs, line = figure.data
    assert [list(trace.y) for trace in runs] == [list(test) for _, test in points.values()]
    looks = {(trace.marker.color, trace.marker.symbol) for trace in runs}
    assert len(looks) == 4
    assert list(line.x) == list(line.y) == list(figure.layout.xaxis.range)
    assert "32, repeated +0.30, 512, repeated +0.50, 32, fresh +0.00" in alt(figure)


def test_a_variance_of_nothing_is_left_out_of_a_logarithmic_axis() -> None:
    figure = figures.gradient_variance(
        [8, 512], {"plain": [[2.0, 4.0], [0.0, 1e-30]]}, {"law": [3.0, 0.0]}
    )
    assert list(figure.data[0].y) == [3.0, None]
    assert list(figure.data[1].y) == [3.0, None]
    assert "plain: 3 at 8" in alt(figure)


def test_running_statistics_set_measured_beside_predicted() -> None:
    measured = {"shuffled": {"pooled": 1.0, "mean": 1.1}, "sorted": {"pooled": 1.0, "mean": 0.4}}
    predicted = {"shuffled": {"pooled": 1.0, "mean": 1.0}, "sorted": {"pooled": 1.0, "mean": 0.3}}
    figure = figures.running_statistics(measured, predicted, 1.5)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    marks = [trace for trace in figure.data if trace.type == "scatter"]
    assert [list(bar.y) for bar in bars] == [[1.0, 1.1], [1.0, 0.4]]
    assert [list(mark.y) for mark in marks] == [[1.0, 1.0], [1.0, 0.3]]
    assert [bar.offsetgroup for bar in bars] == [mark.offsetgroup for mark in marks]
    assert "of all rows 1.500. shuffled: pooled 1.000, mean 1.100" in alt(figure)


def test_the_language_models_figures_draw_losses_and_scales() -> None:
    losses = {"tuned": {2048: [2.0, 2.2], 8192: [2.1]}, "unchanged": {2048: [2.3]}}
    rates = figures.carried_rates(losses)
    assert list(rates.data[0].y) == pytest.approx([2.1, 2.1])
    assert len({trace.line.color for trace in rates.data}) == 2
    assert "unchanged: 2.3 at 2048" in alt(rates)
    noise = figures.noise_scale({0.5: 9000.0, 1.0: math.pi}, [2048, 8192])
    assert list(noise.data[0].x) == [0.5, 1.0]
    assert [trace.y[0] for trace in noise.data[1:]] == [2048, 8192]
    assert [trace.text[0] for trace in noise.data[1:]] == ["batch 2,048", "batch 8,192"]
    assert "9,000 after 50%, 3 after 100%" in alt(noise)
