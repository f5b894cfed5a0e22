"""The explorers draw the setting that was chosen, and fit into the static page."""

import itertools
import random
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

from labcore.claims import Measured
from labcore.studies.ghost_norm import shown, sweeps
from labcore.studies.ghost_norm.large_batches import RATES
from labcore.ui import Choice, LogSlider, Slider, twin
from labcore.ui.figures import ghost_norm as figures

BATCHES = Choice(options=(128, 512, 2048), default=512)
RATE = Choice(options=tuple(f"{rate:g}" for rate in RATES), default="1")
EXPLORERS = {
    "by_batch": {
        "rate": Choice(options=(*RATE.options, figures.BEST), default="0.1"),
        "norm": Choice(options=shown.NORMS, default="batch norm"),
    },
    "path": {
        "batch": BATCHES,
        "ghosts": Choice(options=(figures.WHOLE, "ghosts of 8", "ghosts of 32"), default="none"),
        "rate": RATE,
    },
    "companions": {
        "norm": Choice(options=("batch", "ghosts", "layer", "RMS"), default="batch"),
        "value": Slider(low=-9, high=9, default=3, step=3),
    },
    "trade_off": {
        "noise_scale": LogSlider(low=2**8, high=2**16, default=2**12, points=17),
        "runs": Choice(options=("rows", "tokens"), default="rows"),
    },
    "arrivals": {
        "norm": Choice(options=shown.NORMS, default="batch norm"),
        "loss": Choice(options=tuple(f"{loss:g}" for loss in sweeps.LOSSES), default="0.4"),
    },
}


def runs(dice: random.Random, seeds: int) -> dict[str, Any]:
    """What a record of the sweep has for one rate."""
    losses = sorted((dice.uniform(0.2, 2.3) for _ in range(10)), reverse=True)
    return {
        "accuracy": [dice.uniform(0.4, 0.75) for _ in range(seeds)],
        "curve": [dice.uniform(0.2, 0.75) for _ in range(10)],
        "training loss": [float(f"{loss:.4g}") for loss in losses],
    }


@pytest.fixture
def data(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    swept = {
        kind: {batch: {rate: runs(dice, 3) for rate in RATES} for batch in sweeps.BATCHES}
        for kind in sweeps.KINDS
    }
    swept["batch norm"][32][3.0] = {
        "accuracy": [0.1] * 3,
        "curve": [0.1] * 10,
        "training loss": [None] * 10,
    }
    by_batch = {
        batch: {kind: swept[kind][batch] for kind in sweeps.sized(batch) if kind != "layer norm"}
        for batch in sweeps.BATCHES
    }
    costs = {
        norm: {
            f"{loss:g}": {
                unit: [[dice.uniform(0.05, 3)] * 2 for _ in sweeps.BATCHES]
                for unit in ("updates", "rows", "time")[: 3 if norm == "batch norm" else 2]
            }
            for loss in sweeps.LOSSES
        }
        for norm in shown.NORMS
    }
    examples = {
        "tokens": {2_048: [1.0, 1.0], 8_192: [1.8, 2.2], 32_768: [5.0]},
        "rows": {32: [1.0], 128: [1.2]},
    }
    return {
        "by_batch": {norm: swept[norm] for norm in shown.NORMS},
        "path": by_batch,
        "arrivals": costs,
        "trade_off": examples,
    }


def test_a_rate_is_the_same_for_all_batches_or_each_ones_best(data: dict[str, Any]) -> None:
    swept = data["by_batch"]["layer norm"]
    figure = figures.by_batch("0.3", "layer norm", data["by_batch"])
    accuracy, losses = figure.data
    wanted = [100 * fmean(rates[0.3]["accuracy"]) for rates in swept.values()]
    assert list(accuracy.y) == pytest.approx(wanted)
    assert list(losses.y) == [rates[0.3]["training loss"][-1] for rates in swept.values()]
    best = figures.by_batch(figures.BEST, "layer norm", data["by_batch"]).data[0]
    for y, rates in zip(best.y, swept.values(), strict=True):
        assert y == pytest.approx(100 * max(fmean(each["accuracy"]) for each in rates.values()))
    assert f"{wanted[-1] - wanted[0]:+.1f} points" in figure.layout.title.text
    diverged = figures.by_batch("3", "batch norm", data["by_batch"])
    assert diverged.data[1].y[0] is None
    assert "32: 10.0% at training loss none" in diverged.layout.meta["alt"]


def test_a_path_ends_at_its_largest_point(data: dict[str, Any]) -> None:
    figure = figures.path(512, "ghosts of 32", "1", data["path"])
    small, whole, ghosts = figure.data
    swept = data["path"][512]
    assert list(whole.x) == swept["batch norm"][1.0]["training loss"]
    assert list(ghosts.y) == pytest.approx([100 * y for y in swept["ghosts of 32"][1.0]["curve"]])
    assert whole.marker.size[-1] > whole.marker.size[0]
    best = max(data["path"][32]["batch norm"].values(), key=lambda each: fmean(each["accuracy"]))
    assert list(small.x) == best["training loss"]
    same = figures.path(512, figures.WHOLE, "1", data["path"])
    assert list(same.data[1].y) == list(same.data[2].y)
    larger = figures.path(128, "ghosts of 128", "1", data["path"])
    assert list(larger.data[1].y) == list(larger.data[2].y)


@pytest.mark.parametrize(
    ("norm", "marks"),
    [("batch", "●●●●●●"), ("ghosts", "●●●○○○"), ("layer", "○●○○○○"), ("RMS", "○●○○○○")],
)
def test_only_companions_change(norm: str, marks: str) -> None:
    figure = figures.companions(norm, 9.0)
    assert "".join(label[-1] for label in figure.layout.yaxis.ticktext) == marks
    table = torch.tensor(shown.TABLE, dtype=torch.float64)
    table[1, 0] = 9.0
    wanted = shown.normalized(table, norm)
    assert torch.allclose(torch.tensor(figure.data[0].z), wanted.float(), atol=6e-3)
    unchanged = figures.companions(norm, shown.TABLE[1][0])
    assert "0 of 6 tokens change" in unchanged.layout.title.text


def test_steps_and_examples_are_twice_their_least_at_the_noise_scale(data: dict[str, Any]) -> None:
    figure = figures.trade_off(2.0**12, "tokens", data["trade_off"])
    steps, examples, measured = figure.data
    at = list(steps.x).index(2**12)
    assert steps.y[at] == examples.y[at] == 2
    product = [(a - 1) * (b - 1) for a, b in zip(steps.y, examples.y, strict=True)]
    assert product == pytest.approx([1] * len(product), rel=0.03)
    # The smallest batch lies on its curve, the others where their ratios put them.
    assert list(measured.x) == [2_048, 8_192, 32_768]
    assert list(measured.y) == pytest.approx([1.5, 3.0, 7.5])
    assert "8,192: 2.00 measured, 2.00 computed" in figure.layout.meta["alt"]


def test_costs_have_a_mean_and_an_interval_by_batch(data: dict[str, Any]) -> None:
    costs = data["arrivals"]
    costs["layer norm"]["0.5"]["rows"][2] = [1.5, 1.9]
    figure = figures.arrivals("layer norm", "0.5", costs)
    updates, rows, time, _ = figure.data
    assert list(updates.y) == pytest.approx(
        [fmean(each) for each in costs["layer norm"]["0.5"]["updates"]]
    )
    assert rows.y[2] == pytest.approx(1.7)
    assert rows.error_y.array[2] == pytest.approx(Measured.of([1.5, 1.9]).high - 1.7)
    assert not len(time.y) and "1.70 × rows" in figure.layout.title.text
    assert len(figures.arrivals("batch norm", "0.5", costs).data[2].y) == len(sweeps.BATCHES)


@pytest.mark.parametrize("name", EXPLORERS)
def test_the_static_page_moves_every_control(name: str, data: dict[str, Any]) -> None:
    controls, given = EXPLORERS[name], {"data": data[name]} if name in data else {}

    def figure(**chosen: Any) -> go.Figure:
        return getattr(figures, name)(**chosen, **given)

    packed = twin.payload(figure, controls=controls, alt="x")
    assert [len(control["values"]) for control in packed["controls"]] == [
        len(control.positions()) for control in controls.values()
    ]
    kinds = set()
    for point in itertools.product(*(control.positions() for control in controls.values())):
        drawn = figure(**dict(zip(controls, point, strict=True)))
        kinds.add(tuple((trace.name, trace.type) for trace in drawn.data))
        assert len(drawn.layout.title.text) <= 42, drawn.layout.title.text
    assert len(kinds) == 1
