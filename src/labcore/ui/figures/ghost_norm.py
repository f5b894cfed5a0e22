"""Figures for the chapter `ghost_norm`: numbers in, plotly figures out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import correlation, fmean, median
from typing import Any

import plotly.graph_objects as go

from labcore.claims import Measured
from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = [
    "accuracy_by_batch",
    "arrivals",
    "flatness",
    "gradient_bias",
    "gradient_variance",
    "regimes",
    "running_statistics",
    "sweep",
    "throughput",
]

_BATCHES = {"title": "batch size", "type": "log"}
_COLORS = {"epochs": PALETTE["blue"], "updates": PALETTE["vermillion"]}
# Letters per line of a name on a phone's axis.
_WRAP = 22


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the 95 % interval over seeds; 0 for one seed."""
    measured = Measured.of(samples)
    half = measured.high - measured.mean
    return measured.mean, half if math.isfinite(half) else 0.0


def _curve(
    x: Sequence[float], points: Sequence[Sequence[float]], name: str, **style: Any
) -> dict[str, Any]:
    """Return a trace of means with their intervals."""
    means, halves = zip(*(_interval(samples) for samples in points), strict=True)
    return {
        "x": list(x),
        "y": list(means),
        "error_y": {"array": list(halves), "thickness": 1.2},
        "mode": "lines+markers",
        "name": name,
        **style,
    }


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    return {"tickvals": list(values), "ticktext": [f"{value:g}" for value in values]}


def _words(x: Sequence[float], points: Sequence[Sequence[float]], digits: int = 3) -> str:
    return ", ".join(
        f"{fmean(samples):.{digits}g} at {place:g}"
        for place, samples in zip(x, points, strict=True)
    )


def _wrapped(name: str) -> str:
    """Break a name into lines that fit on a phone's axis."""
    lines = [""]
    for word in name.split():
        if len(lines[-1]) + len(word) >= _WRAP:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def accuracy_by_batch(
    batches: Sequence[int], accuracy: Mapping[str, Sequence[Sequence[float]]]
) -> go.Figure:
    """Draw test accuracy by batch size, one curve per name; accuracy: name -> [batches, seeds]."""
    figure = go.Figure([_curve(batches, points, name) for name, points in accuracy.items()])
    figure.update_layout(
        title="Test accuracy by batch size",
        xaxis={**_BATCHES, **_ticks(batches)},
        yaxis={"title": "test accuracy"},
        showlegend=True,
    )
    words = "; ".join(f"{name}: {_words(batches, points)}" for name, points in accuracy.items())
    return describe(figure, f"Test accuracy by batch size. {words}.")


def gradient_variance(
    batches: Sequence[int],
    variance: Mapping[str, Sequence[Sequence[float]]],
    law: Mapping[str, Sequence[float]],
) -> go.Figure:
    """Draw the gradient's variance by batch size, on logarithmic axes.

    variance: name -> [batches, seeds], relative to the squared norm of the full gradient; law: name
    -> the prediction for each batch, drawn dashed. Zeros don't fit on the axis and are left out.
    """
    figure = go.Figure()
    for name, points in variance.items():
        means = [fmean(samples) for samples in points]
        figure.add_scatter(
            x=list(batches),
            y=[mean if mean > 1e-9 else None for mean in means],
            mode="markers",
            marker={"size": 10},
            name=name,
        )
    for name, line in law.items():
        figure.add_scatter(
            x=list(batches),
            y=[value if value > 0 else None for value in line],
            mode="lines",
            line=draw.PREDICTED,
            name=name,
        )
    figure.update_layout(
        title="How far batches disagree",
        xaxis={**_BATCHES, **_ticks(batches)},
        yaxis={
            "title": "relative variance",
            "type": "log",
            "dtick": 1,
            "exponentformat": "power",
        },
    )
    words = "; ".join(f"{name}: {_words(batches, points)}" for name, points in variance.items())
    return describe(figure, f"Variance of a batch's gradient by batch size. {words}.")


def gradient_bias(
    batches: Sequence[int], bias: Mapping[str, Sequence[Sequence[float]]]
) -> go.Figure:
    """Draw the distance of mean batch gradients from the full gradient; bias: [batches, seeds]."""
    figure = go.Figure([_curve(batches, points, name) for name, points in bias.items()])
    figure.update_layout(
        title="How far the mean gradient is off",
        xaxis={**_BATCHES, **_ticks(batches)},
        yaxis={"title": "distance over its norm", "rangemode": "tozero"},
        showlegend=True,
    )
    words = "; ".join(f"{name}: {_words(batches, points, 2)}" for name, points in bias.items())
    return describe(draw.named_at_ends(figure), f"Relative distance of the mean gradient. {words}.")


def arrivals(
    batches: Sequence[int], ratios: Mapping[str, Sequence[Sequence[float]]], loss: float
) -> go.Figure:
    """Draw the cost of a training loss over the smallest batch's; ratios: name -> [batches, n]."""
    figure = go.Figure([_curve(batches, points, name) for name, points in ratios.items()])
    figure.add_hline(y=1, line=draw.PREDICTED)
    figure.update_layout(
        title=f"What a training loss of {loss:g} costs",
        xaxis={**_BATCHES, **_ticks(batches)},
        yaxis={"title": f"over batch {batches[0]}", "type": "log", **_ticks((0.1, 0.2, 0.5, 1, 2))},
    )
    words = "; ".join(f"{name}: {_words(batches, points)}" for name, points in ratios.items())
    return describe(
        draw.named_at_ends(figure),
        f"Cost of a training loss over that at batch {batches[0]}. {words}.",
    )


def throughput(batches: Sequence[int], speed: Sequence[Sequence[float]]) -> go.Figure:
    """Draw images per second by batch size, with a line for speed proportional to the batch."""
    means = [fmean(samples) for samples in speed]
    figure = go.Figure(_curve(batches, speed, "measured", line={"color": draw.MEASURED}))
    figure.add_scatter(
        x=list(batches),
        y=[means[0] * batch / batches[0] for batch in batches],
        mode="lines",
        line=draw.PREDICTED,
        name="in proportion to the batch",
    )
    ticks = [10.0**power for power in range(3, 7)]
    figure.update_layout(
        title="Training speed on one CPU thread",
        xaxis={**_BATCHES, **_ticks(batches)},
        yaxis={
            "title": "images per second",
            "type": "log",
            "tickvals": ticks,
            "ticktext": [f"{tick:,.0f}" for tick in ticks],
            "range": [math.log10(means[0]) - 0.15, math.log10(max(means)) + 0.5],
        },
    )
    return describe(figure, f"Images per second by batch size: {_words(batches, speed)}.")


def regimes(accuracy: Mapping[str, Sequence[float]]) -> go.Figure:
    """Draw each regime's test accuracy: one point per seed, and the mean with its 95 % interval."""
    figure = go.Figure()
    names = [_wrapped(name) for name in accuracy]
    figure.add_scatter(
        x=[each for samples in accuracy.values() for each in samples],
        y=[name for name, xs in zip(names, accuracy.values(), strict=True) for _ in xs],
        mode="markers",
        name="one seed",
        marker={"color": PALETTE["sky"], "size": 6, "opacity": 0.7},
    )
    means, halves = zip(*(_interval(samples) for samples in accuracy.values()), strict=True)
    figure.add_scatter(
        x=list(means),
        y=names,
        error_x={"array": list(halves), "thickness": 2},
        mode="markers",
        name="mean, 95 %",
        marker={"color": PALETTE["vermillion"], "size": 10},
    )
    figure.update_layout(
        title="One network, several ways to train it",
        xaxis={"title": "test accuracy"},
        yaxis={"autorange": "reversed"},
        legend={"xref": "container"},
        height=max(300, 110 + 48 * len(names)),
    )
    words = ", ".join(f"{name} {mean:.4f}" for name, mean in zip(accuracy, means, strict=True))
    return describe(figure, f"Test accuracy by regime: {words}.")


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; ties keep their order."""
    order = [sorted(range(len(x)), key=x.__getitem__) for x in (a, b)]
    places = [sorted(range(len(x)), key=x.__getitem__) for x in order]
    return correlation(*places) if len(a) > 1 else math.nan


def flatness(
    measure: Mapping[str, Sequence[float]], accuracy: Mapping[str, Sequence[float]], title: str
) -> go.Figure:
    """Draw test accuracy by a measure of sharpness (logarithmic), one marker per regime.

    measure, accuracy: name -> seeds. A marker is at the median of the measure and the mean of the
    accuracy; its bars are the middle 60 % and the 95 % interval. title: the measure, named below
    its axis; the figure's title is Spearman's rank correlation of the two over the regimes.
    """
    figure = go.Figure()
    rank = _rank_correlation(
        [median(samples) for samples in measure.values()],
        [fmean(accuracy[name]) for name in measure],
    )
    for number, (name, samples) in enumerate(measure.items()):
        low, middle, high = quantiles([*samples])
        mean, half = _interval(accuracy[name])
        figure.add_scatter(
            x=[middle],
            y=[mean],
            error_x={"array": [high - middle], "arrayminus": [middle - low], "thickness": 1.2},
            error_y={"array": [half], "thickness": 1.2},
            mode="markers",
            marker={"size": 12, "symbol": ("circle", "square", "diamond", "x")[number % 4]},
            name=name,
        )
    told = f"Rank correlation with accuracy {rank:+.2f}"
    figure.update_layout(
        title=told,
        xaxis={"title": title, "type": "log", "exponentformat": "power", "dtick": 1},
        yaxis={"title": "test accuracy"},
        height=492,
    )
    words = ", ".join(f"{name} {median(samples):.2g}" for name, samples in measure.items())
    return describe(figure, f"{title}. {told}. Medians: {words}.")


def running_statistics(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]],
    whole: float,
) -> go.Figure:
    """Draw the running variance by policy, one bar per order.

    measured, predicted: order -> policy -> the variance. whole: the variance that a statistic over
    all rows would have, a dashed line.
    """
    figure = go.Figure()
    colors = (PALETTE["blue"], PALETTE["orange"])
    for (order, row), color in zip(measured.items(), colors, strict=False):
        figure.add_bar(
            x=list(row),
            y=list(row.values()),
            name=f"{order}, measured",
            marker={"color": color},
            offsetgroup=order,
        )
        figure.add_scatter(
            x=list(row),
            y=[predicted[order][policy] for policy in row],
            mode="markers",
            name=f"{order}, predicted",
            marker={
                "size": 11,
                "symbol": "diamond",
                "color": "white",
                "line": {"width": 2.5, "color": color},
            },
            offsetgroup=order,
        )
    figure.add_hline(y=whole, line=draw.PREDICTED)
    figure.update_layout(
        title="The running variance after three batches",
        xaxis={"title": "policy"},
        yaxis={"title": "running variance"},
        barmode="group",
        scattermode="group",
        height=480,
    )
    words = "; ".join(
        f"{order}: " + ", ".join(f"{policy} {value:.3f}" for policy, value in row.items())
        for order, row in measured.items()
    )
    return describe(figure, f"Running variance, of all rows {whole:.3f}. {words}.")


def sweep(
    batch: float, ghost: float, data: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> go.Figure:
    """Draw test accuracy by batch size above, and below it the training loss at the chosen batch.

    data: budget ("epochs", "updates") -> batch -> ghost -> {accuracy, steps, loss}, from the
    details of the record `digits/sweep`. Lines are solid with whole batches and dotted with ghosts;
    a ghost larger than the batch is the whole batch.
    """
    batch, ghost = round(batch), round(ghost)
    traces, gains, words = [], [], []
    for budget, rows in data.items():
        for whole in (True, False):
            size = {each: each if whole else min(ghost, each) for each in rows}
            points = [rows[each][str(size[each])]["accuracy"] for each in rows]
            style = {
                "line": {"color": _COLORS[budget], "dash": "solid" if whole else "dot"},
                "marker": {"size": [13 if each == batch else 5 for each in rows]},
            }
            name = f"equal {budget}, {'whole batch' if whole else 'ghosts'}"
            traces.append(_curve(list(rows), points, name, **style))
            run = rows[batch][str(size[batch])]
            seen = [
                (step, loss) for step, loss in zip(run["steps"], run["loss"], strict=True) if step
            ]
            traces.append(
                {
                    "x": [step for step, _ in seen],
                    "y": [max(loss, 1e-6) for _, loss in seen],
                    "mode": "lines",
                    "line": style["line"],
                    "xaxis": "x2",
                    "yaxis": "y2",
                    "showlegend": False,
                }
            )
        before, after = (
            fmean(rows[batch][str(each)]["accuracy"]) for each in (batch, min(ghost, batch))
        )
        gains.append(f"{budget} {after - before:+.4f}")
        words.append(f"after equal {budget} from {before:.4f} to {after:.4f}")
    figure = go.Figure(
        traces,
        {
            "title": f"Ghosts: {', '.join(gains)}",
            "xaxis": {**_BATCHES, **_ticks(list(next(iter(data.values())))), "anchor": "y"},
            "yaxis": {"title": "test accuracy", "domain": [0.5, 1], "range": [0.93, 0.985]},
            "xaxis2": {
                "title": f"step, at batch {batch}",
                "type": "log",
                "dtick": 1,
                "range": [0, 2.75],
                "anchor": "y2",
            },
            "yaxis2": {
                "title": "training loss",
                "type": "log",
                "dtick": 2,
                "exponentformat": "power",
                "range": [-6, 0.7],
                "domain": [0, 0.34],
                "anchor": "x2",
            },
            "height": 628,
        },
    )
    return describe(
        figure,
        f"Ghosts of {min(ghost, batch)} instead of whole batches of {batch} change the test "
        f"accuracy {' and '.join(words)}.",
    )
