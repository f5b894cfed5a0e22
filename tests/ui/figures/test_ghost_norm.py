"""The chapter's figures show the numbers that they are given, and say them in words."""

import itertools
import math
import random
from statistics import fmean

import plotly.graph_objects as go
import pytest

from labcore.claims import Measured
from labcore.studies.ghost_norm import large_batches
from labcore.ui import LogSlider, explore, twin
from labcore.ui.figures import ghost_norm as figures

CONTROLS = {
    "batch": LogSlider(low=32, high=512, default=512, points=5),
    "ghost": LogSlider(low=8, high=512, default=32, points=7),
}


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def point(dice: random.Random, seeds: int) -> dict[str, list[float]]:
    """What a record of the sweep details for one batch and ghost, of a record's size."""
    return {
        "accuracy": [dice.uniform(0.94, 0.98) for _ in range(seeds)],
        "steps": list(range(0, 495, 15)),
        "loss": [0.0, *(float(f"{dice.uniform(1e-7, 2):.4g}") for _ in range(32))],
    }


@pytest.fixture
def swept(seed: int) -> dict[str, dict[int, dict[str, dict[str, list[float]]]]]:
    dice = random.Random(seed)
    return {
        budget: {
            batch: {str(g): point(dice, 5) for g in large_batches.SWEEP_GHOSTS if g <= batch}
            for batch in large_batches.SWEEP_BATCHES
        }
        for budget in ("epochs", "updates")
    }


def test_the_sweep_shows_the_chosen_ghosts_beside_whole_batches(swept: dict) -> None:
    figure = figures.sweep(256, 64, swept)
    curves = [trace for trace in figure.data if trace.showlegend is not False]
    assert [trace.line.dash for trace in curves] == ["solid", "dot"] * 2
    whole, ghosts = curves[:2]
    for trace, sizes in ((whole, large_batches.SWEEP_BATCHES), (ghosts, (32, 64, 64, 64, 64))):
        assert list(trace.x) == list(large_batches.SWEEP_BATCHES)
        for batch, size, y, half in zip(trace.x, sizes, trace.y, trace.error_y.array, strict=True):
            wanted = Measured.of(swept["epochs"][batch][str(size)]["accuracy"])
            assert (y, y + half) == pytest.approx((wanted.mean, wanted.high))
    assert list(whole.marker.size).index(max(whole.marker.size)) == 3
    losses = [trace for trace in figure.data if trace.yaxis == "y2"]
    assert len(losses) == 4
    run = swept["updates"][256]["64"]
    assert list(losses[3].x) == run["steps"][1:]  # step 0 has no place on the axis
    assert list(losses[3].y) == pytest.approx([max(x, 1e-6) for x in run["loss"][1:]])


def test_a_ghost_larger_than_the_batch_is_the_whole_batch(swept: dict) -> None:
    figure = figures.sweep(32, 512, swept)
    whole, ghosts = [trace for trace in figure.data if trace.showlegend is not False][:2]
    assert list(whole.y) == list(ghosts.y)
    assert figure.layout.title.text == "Ghosts: epochs +0.0000, updates +0.0000"
    assert "Ghosts of 32 instead of whole batches of 32" in alt(figure)


def test_the_title_has_what_ghosts_change_and_the_words_both_accuracies(swept: dict) -> None:
    figure = figures.sweep(512, 32, swept)
    for budget, rows in swept.items():
        whole, ghosts = (fmean(rows[512][size]["accuracy"]) for size in ("512", "32"))
        assert f"{budget} {ghosts - whole:+.4f}" in figure.layout.title.text
        assert f"equal {budget} from {whole:.4f} to {ghosts:.4f}" in alt(figure)


def test_the_static_page_moves_both_controls_within_its_limits(swept: dict) -> None:
    explore(figures.sweep, data=swept, alt="x", **CONTROLS)

    def figure(**chosen: float) -> go.Figure:
        return figures.sweep(**chosen, data=swept)

    packed = twin.payload(figure, controls=CONTROLS, alt="x")
    assert [len(control["values"]) for control in packed["controls"]] == [5, 7]
    assert len(packed["slices"][0]["frames"]) == 35 <= twin.MOST_FRAMES
    kinds = set()
    points = itertools.product(*(control.positions() for control in CONTROLS.values()))
    for batch, ghost in points:
        shown = figure(batch=batch, ghost=ghost)
        kinds.add(tuple((trace.name, trace.mode, trace.yaxis) for trace in shown.data))
        lines = shown.layout.title.text.split("<br>")
        assert len(lines) == 1 and max(map(len, lines)) <= 40, lines
    assert len(kinds) == 1


def test_accuracy_has_a_mean_and_an_interval_a_batch() -> None:
    figure = figures.accuracy_by_batch([32, 512], {"a": [[0.9, 0.8], [0.7, 0.7]], "b": [[1], [0]]})
    a, b = figure.data
    assert list(a.y) == pytest.approx([0.85, 0.7])
    assert list(a.error_y.array) == pytest.approx([Measured.of([0.9, 0.8]).high - 0.85, 0])
    assert list(b.error_y.array) == [0, 0]  # one seed says nothing about its spread
    assert "a: 0.85 at 32, 0.7 at 512; b: 1 at 32, 0 at 512" in alt(figure)


def test_a_variance_of_nothing_is_left_out_of_a_logarithmic_axis() -> None:
    figure = figures.gradient_variance(
        [8, 512], {"plain": [[2.0, 4.0], [0.0, 1e-30]]}, {"law": [3.0, 0.0]}
    )
    assert list(figure.data[0].y) == [3.0, None]
    assert list(figure.data[1].y) == [3.0, None]
    assert "plain: 3 at 8" in alt(figure)


def test_bias_arrivals_and_speed_are_drawn_as_given() -> None:
    bias = figures.gradient_bias([8, 16], {"ghosts": [[0.5], [0.25]]})
    assert list(bias.data[0].y) == [0.5, 0.25]
    assert "ghosts: 0.5 at 8, 0.25 at 16" in alt(bias)
    cost = figures.arrivals([32, 64], {"steps": [[1.0], [0.5]], "images": [[1.0], [1.0]]}, 0.1)
    assert [trace.name for trace in cost.data] == ["steps", "images"]
    assert "steps: 1 at 32, 0.5 at 64" in alt(cost)
    speed = figures.throughput([8, 32], [[1000.0, 1200.0], [3000.0, 3000.0]])
    assert list(speed.data[1].y) == [1100.0, 4400.0]
    low, high = speed.layout.yaxis.range
    assert all(low < math.log10(y) < high for y in speed.data[0].y)


def test_regimes_have_a_row_each_with_every_seed() -> None:
    accuracy = {"small batch": [0.9, 0.96], "large, root rate, ghosts, more updates": [0.8, 0.8]}
    seeds, means = figures.regimes(accuracy).data
    assert len(seeds.x) == len(seeds.y) == 4
    assert list(means.x) == pytest.approx([0.93, 0.8])
    assert list(means.y) == ["small batch", "large, root rate,<br>ghosts, more updates"]
    assert all(len(line) <= 22 for name in means.y for line in name.split("<br>"))
    assert "small batch 0.9300" in alt(figures.regimes(accuracy))


@pytest.mark.parametrize(("accuracy", "shown"), [((1, 2, 3), "+1.00"), ((3, 2, 1), "-1.00")])
def test_flatness_tells_the_correlation_of_the_ranks(accuracy: tuple, shown: str) -> None:
    names = ("a", "b", "c")
    measure = dict(zip(names, ([1.0, 1.2, 5.0], [40.0], [500.0]), strict=True))
    figure = figures.flatness(measure, {n: [y] for n, y in zip(names, accuracy, strict=True)}, "T")
    assert figure.layout.title.text == f"Rank correlation with accuracy {shown}"
    assert figure.layout.xaxis.title.text == "T"
    assert [trace.x[0] for trace in figure.data] == [1.2, 40.0, 500.0]
    assert "a 1.2, b 40" in alt(figure)


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
