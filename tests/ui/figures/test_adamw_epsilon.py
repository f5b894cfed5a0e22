"""The chapter's figures show what the law and the three formats give, and say it in words."""

import math
import random
import re

import plotly.graph_objects as go
import pytest
import torch

from labcore.studies.adamw_epsilon import epsilon, gradient_batches, switches
from labcore.ui import Choice, LogSlider, explore, twin
from labcore.ui.figures import adamw_epsilon as figures

CONTROLS = {
    "eps": LogSlider(low=1e-12, high=1e-4, default=1e-8, points=9),
    "gradient": LogSlider(low=1e-12, high=1.0, default=1e-3, points=13),
}


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def named(figure: go.Figure, name: str) -> go.Scatter:
    return next(trace for trace in figure.data if trace.name == name)


def test_the_curves_are_the_measured_updates_beside_the_law(seed: int) -> None:
    eps = 10 ** random.Random(seed).uniform(-12, -4)
    figure = figures.trap(eps, 1e-2)
    for name, dtype in figures.DTYPES.items():
        trace = named(figure, name)
        gradients = torch.tensor(trace.x, dtype=torch.float64)
        sizes = epsilon.update_sizes(gradients, eps=eps, dtype=dtype).tolist()
        for shown, size in zip(trace.y, sizes, strict=True):
            if math.isfinite(size) and size:
                assert shown == pytest.approx(size)
    law = named(figure, "exact")
    assert list(law.y) == pytest.approx([g / (g + eps) for g in law.x])


@pytest.mark.parametrize(
    ("eps", "gradient", "row"),
    [(1e-8, 0.001, "∞"), (1e-8, 1e-9, "NaN"), (1e-6, 1e-9, "0")],
)
def test_updates_without_a_place_on_the_axis_stand_in_their_row(
    eps: float, gradient: float, row: str
) -> None:
    figure = figures.trap(eps, gradient)
    marked = next(trace for trace in figure.data if trace.mode == "markers")
    place = list(figures.DTYPES).index("fp16")
    at = dict(zip(figure.layout.yaxis.ticktext, figure.layout.yaxis.tickvals, strict=True))
    assert marked.y[place] == at[row]
    assert f"fp16: update {row}, " in figure.layout.title.text
    low, high = figure.layout.yaxis.range
    assert all(low < math.log10(value) < high for value in at.values())


def test_no_finite_update_is_mistaken_for_a_row() -> None:
    rows = figures.trap().layout.yaxis.tickvals
    largest = max(
        size
        for eps in CONTROLS["eps"].positions()
        for size in epsilon.update_sizes(
            torch.tensor(CONTROLS["gradient"].positions()).double(), eps=eps, dtype=torch.float16
        ).tolist()
        if math.isfinite(size)
    )
    assert largest < sorted(rows)[-2] / 10


def test_weight_follows_law_in_fp32_stalls_in_bf16_dies_in_fp16() -> None:
    figure = figures.trap(1e-8, 1e-3)
    fp32, bf16, fp16, law = (trace for trace in figure.data if trace.yaxis == "y2")
    assert fp32.y[-1] == pytest.approx(law.y[-1], abs=1e-5)
    assert law.y[-1] == pytest.approx(1 - 50 * 1e-3 / (1 + 1e-5))
    assert set(bf16.y) == {1.0}
    assert fp16.y[0] == 1.0 and set(fp16.y[1:]) == {None}
    assert "fp16: update ∞, weight −∞" in figure.layout.title.text
    # Thrown far and finite: epsilon is the whole denominator.
    thrown = epsilon.weight_after(1e-3, dtype=torch.float16, eps=1e-6, steps=50)
    assert f"weight −{abs(thrown):.3g}" in figures.trap(1e-6, 1e-3).layout.title.text
    for name, path in (("fp32", fp32), ("bf16", bf16)):
        assert re.search(rf"{name}: update \S+, weight {path.y[-1]:.3g}[;.]", alt(figure))
    assert "exact arithmetic gives an update of 1 learning rates" in alt(figure)


def test_frames_share_traces_and_titles_fit_a_phone() -> None:
    kinds = set()
    for eps in CONTROLS["eps"].positions():
        for gradient in CONTROLS["gradient"].positions():
            figure = figures.trap(eps, gradient)
            kinds.add(tuple((trace.name, trace.mode, trace.yaxis) for trace in figure.data))
            lines = figure.layout.title.text.split("<br>")
            assert len(lines) == 1 and max(map(len, lines)) <= 40, lines
    assert len(kinds) == 1


def test_the_static_page_moves_both_controls_within_its_limits() -> None:
    explore(figures.trap, alt="x", **CONTROLS)
    packed = twin.payload(figures.trap, controls=CONTROLS, alt="x")
    assert [len(control["values"]) for control in packed["controls"]] == [9, 13]
    assert len(packed["slices"][0]["frames"]) == 117 <= twin.MOST_FRAMES


def test_a_switched_path_is_drawn_beside_fp32_and_told_in_the_title() -> None:
    paths = switches.all_paths(1e-3, dtypes=figures.DTYPES, epsilons=(1e-8, 1e-6), steps=120)
    kinds = set()
    for eps, of_eps in paths.items():
        for formats, path in of_eps.items():
            figure = figures.switches(*formats, eps, paths)
            kinds.add(tuple((trace.name, trace.mode, trace.yaxis) for trace in figure.data))
            weight, fp32, updates, _ = figure.data
            end = path.weights[-1].item()
            assert weight.y[-1] == (pytest.approx(end, rel=1e-3) if math.isfinite(end) else None)
            assert fp32.y[-1] == pytest.approx(1 - 0.12 / (1 + eps / 1e-3), abs=1e-3)
            assert len(weight.x) == len(weight.y) == len(updates.y) <= 70
            assert len(figure.layout.title.text) <= 40
    assert len(kinds) == 1
    lost = figures.switches("fp16", "fp16", "fp16", 1e-8, paths)
    assert "Ends at −∞; in fp32 at 0.88" in lost.layout.title.text
    assert "weight fp16, state fp16, arithmetic fp16" in alt(lost).lower()


def test_the_static_page_moves_all_switches_within_its_limits() -> None:
    paths = switches.all_paths(1e-3, dtypes=figures.DTYPES, epsilons=(1e-8, 1e-6), steps=60)
    formats = Choice(options=tuple(figures.DTYPES), default="fp16")
    controls = {"state": formats, "arithmetic": formats, "weight": formats}
    controls["eps"] = Choice(options=(1e-8, 1e-6))
    shown = explore(figures.switches, alt="x", data=paths, **controls)
    packed = twin.payload(shown.figure, controls=controls, alt="x")
    frames = [frame for one in packed["slices"] for frame in one["frames"]]
    assert len(frames) == 54 <= twin.MOST_FRAMES


def test_matrices_color_what_is_no_number_and_read_by_rows() -> None:
    panels = {"a": [[0.0, math.nan], [-math.inf, 4e-6]], "b": [[-0.998, 0.09], [1.0, -1e-10]]}
    figure = figures.matrices(panels)
    first, second = figure.data
    assert list(map(list, first.z)) == [[0.0, 2.0], [2.0, 4e-6]]
    assert list(map(list, first.text)) == [["0", "NaN"], ["−∞", "4e-6"]]
    assert list(map(list, second.text)) == [["−0.998", "0.09"], ["1", "−1e-10"]]
    assert max(len(text) for trace in figure.data for row in trace.text for text in row) <= 6
    assert (first.xaxis, first.yaxis) != (second.xaxis, second.yaxis)
    assert "a: 0 NaN | −∞ 4e-6; b: " in alt(figure)


def test_a_diverging_run_ends_with_a_mark() -> None:
    curves = {"fp32": [5.0, 4.0, 3.0], "fp16": [5.0, 147.0, None, None]}
    figure = figures.divergence(curves, "Two runs")
    whole, broken = figure.data
    assert list(whole.y) == [5.0, 4.0, 3.0] and set(whole.marker.size) == {0}
    assert list(broken.y) == [5.0, 147.0]
    assert list(broken.marker.symbol) == ["circle", "x"] and broken.marker.size[-1] > 0
    assert whole.line.color != broken.line.color
    assert "fp32: 3; fp16: 147, not finite after 1" in alt(figure)
    low, high = figure.layout.yaxis.range
    assert low < math.log10(3.0) and math.log10(300) < high


def test_attenuation_draws_the_law_and_names_the_largest_gap() -> None:
    figure = figures.attenuation([0.1, 1.0], {"noise": [0.1, 0.5]}, [0.09, 0.5])
    assert [list(trace.y) for trace in figure.data] == [[0.09, 0.5], [0.1, 0.5]]
    assert "noise 1.0e-02" in alt(figure)


def test_second_moments_have_a_color_each_and_the_predicted_ceiling() -> None:
    paths = {"fp32": [0.0, 0.4], "bf16": [0.0, 0.5], "bf16, 0.95": [0.0, 1.0]}
    figure = figures.second_moments(paths, 0.25)
    assert len({trace.line.color for trace in figure.data}) == 3
    assert figure.layout.shapes[0].y0 == 0.25
    assert "bf16 0.5, bf16, 0.95 1. Predicted ceiling: 0.25" in alt(figure)


def test_rms_by_batch_draws_dots_on_a_curve_of_the_same_color() -> None:
    rms = {"embedding": {512: 2e-3, 2048: 1e-3}, "layer 1": {512: 4e-3, 2048: 2e-3}}
    said = {layer: {512: 1e-3, 4_194_304: 1e-5} for layer in rms}
    figure = figures.rms_by_batch(rms, said)
    dots = [trace for trace in figure.data if trace.mode == "markers"]
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert [trace.name for trace in dots] == list(rms)
    assert [dot.marker.color for dot in dots] == [line.line.color for line in lines]
    assert len({dot.marker.color for dot in dots}) == 2
    assert figure.layout.shapes[0].y0 == 1e-8
    assert "embedding: 0.002 at 512, 0.001 at 2,048" in alt(figure)


def test_weights_below_eps_have_another_color_and_their_share(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    roots = {"embedding": 10 ** (-12 * torch.rand(400, generator=generator, dtype=torch.float64))}
    epsilons = LogSlider(low=1e-12, high=1e-3, default=1e-8, points=10)
    data = {512: gradient_batches.sizes_of(roots, epsilons.positions())}
    for eps in epsilons.positions():
        figure = figures.gradient_sizes(eps, 512, "embedding", data)
        (bars,) = figure.data
        under = [
            x for x, color in zip(bars.x, bars.marker.color, strict=True)
            if color == figures.COLORS["fp16"]
        ]  # fmt: skip
        assert all(x < eps for x in under)
        share = (roots["embedding"] < eps).double().mean().item()
        shown = sum(y for x, y in zip(bars.x, bars.y, strict=True) if x in under)
        assert shown == pytest.approx(share, abs=0.02)
        assert f"Below ε: {share:.1%}." in figure.layout.title.text
        assert figure.layout.shapes[0].x0 == eps


def test_means_and_spreads_over_seeds() -> None:
    scales = figures.scales([1e-8, 1e-3], {"ε 1e-8": [[0.5, 0.7], [0.9, 0.9]], "atan2": [[1], [1]]})
    assert list(scales.data[0].y) == pytest.approx([0.6, 0.9])
    assert list(scales.data[0].error_y.array) == pytest.approx([0.2 / math.sqrt(2), 0.0])
    assert "ε 1e-8: 0.6 at 1e-08, 0.9 at 0.001" in alt(scales)
    widths = figures.rms_by_width([32, 64], {"head": [[2e-3], [1e-3]]}, "Fresh")
    assert list(widths.data[0].y) == [2e-3, 1e-3]
    assert widths.layout.title.text == "Fresh"
    loss = figures.loss_by_eps([1e-8, 1e-2], {"64": [[2.5], [2.9]]})
    assert "64: 2.5 at 1e-08, 2.9 at 0.01" in alt(loss)


def test_remedies_have_a_row_each_and_a_symbol_a_failure() -> None:
    accuracy = {"fp16": {"none": [0.1], "atan2": [0.9, 0.7]}, "bf16": {"none": [0.2]}}
    figure = figures.remedies(accuracy)
    assert list(figure.data[0].y) == ["none", "atan2"]
    assert list(figure.data[0].x) == pytest.approx([0.1, 0.8])
    assert figure.data[0].marker.symbol != figure.data[1].marker.symbol
    assert "fp16: none 0.100, atan2 0.800" in alt(figure)
