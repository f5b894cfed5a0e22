"""The gain by batch size is the closed form's, on GPUs by their peaks and here as measured."""

import math
import random

import pytest

from labcore.decoding.theory.speedup import Roofline, speedup
from labcore.parallel.step import GPUS, MODELS
from labcore.ui import Choice, IntSlider, LogSlider, Slider, explore, twin
from labcore.ui.figures.speculative import batches as figures

MEASURED = {1: 1.0, 2: 1.08, 4: 1.26, 8: 1.6, 16: 2.7, 32: 5.0, 64: 9.7}
BATCHES = {
    "alpha": Slider(low=0.05, high=0.95, step=0.05, default=0.7),
    "draft_cost": Choice(options=(0.0, 0.02, 0.05, 0.1, 0.2, 0.4), default=0.05),
    "gamma": IntSlider(low=1, high=8, default=4),
    "batch": LogSlider(low=1, high=512, default=1, points=10),
    "context": LogSlider(low=512, high=131072, default=1024, points=9),
    "model": Choice(options=("7B", "8B", "70B"), default="8B"),
}


def settings(seed: int) -> list[dict]:
    pick = random.Random(seed)
    every = [{n: pick.choice(c.positions()) for n, c in BATCHES.items()} for _ in range(30)]
    return [*every, {n: control.default for n, control in BATCHES.items()}]


def test_curves_follow_the_roofline_and_end_where_the_cache_is_full(seed: int) -> None:
    for chosen in settings(seed):
        figure = figures.gain_by_batch(**chosen, data=MEASURED)
        curves = {item.name: item for item in figure.data if item.name}
        config, gpu = MODELS[chosen["model"]], GPUS["H100 SXM"]
        roof = Roofline.of(config, flops=gpu.flops, bandwidth=gpu.bandwidth)
        for batch, gain in zip(curves["H100"].x, curves["H100"].y, strict=True):
            held = 2 * roof.weights + batch * chosen["context"] * roof.cache
            assert (gain is None) == (held > 640e9)
            if gain is not None:
                cost = roof.cost(chosen["gamma"] + 1, batch=batch, context=int(chosen["context"]))
                assert gain == pytest.approx(
                    speedup(chosen["alpha"], chosen["gamma"], verify_cost=cost,
                            draft_cost=chosen["draft_cost"])
                )  # fmt: skip
        dots = curves["your batch"]
        place = round(math.log2(chosen["batch"]))
        assert set(dots.x) == {2**place}
        assert list(dots.y) == [curves[n].y[place] for n in ("H100", "A100", "this CPU")]
        assert len(figure.layout.title.text) <= 44 and "<br>" not in figure.layout.title.text


def test_this_cpu_is_as_measured_and_ends_with_the_measurements() -> None:
    figure = figures.gain_by_batch(0.8, 0.1, 7, 2, data=MEASURED)
    curve = next(item for item in figure.data if item.name == "this CPU")
    wanted = [speedup(0.8, 7, verify_cost=MEASURED[8 * b] / MEASURED[b], draft_cost=0.1)
              for b in (1, 2, 4, 8)]  # fmt: skip
    assert list(curve.y[:4]) == pytest.approx(wanted)
    assert list(curve.y[4:]) == [None] * 6
    halfway = figures.gain_by_batch(0.8, 0.1, 2, 1, data=MEASURED)
    curve = next(item for item in halfway.data if item.name == "this CPU")
    assert curve.y[0] == pytest.approx(speedup(0.8, 2, verify_cost=1.17, draft_cost=0.1))


def test_the_gain_dies_with_the_batch_and_a_long_context_revives_it() -> None:
    def gains(context: int) -> list[float]:
        drawn = figures.gain_by_batch(0.8, 0.05, 4, 1, context, "70B", data=MEASURED)
        return [y for y in drawn.data[1].y if y is not None]

    short, long = gains(512), gains(32768)
    assert short[0] > 2 > 1 > short[-1]
    assert long[-1] > 2


def test_the_static_page_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    formula = figures.gain_formula(MEASURED)
    assert isinstance(formula, twin.Formula)
    explore(figures.gain_by_batch, alt="x", data=MEASURED, formula=formula, **BATCHES)
