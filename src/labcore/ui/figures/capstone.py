"""Figures of the capstone: a training as it runs, and the size of model that a budget pays for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["Curves", "budget", "sizes", "training"]

_POINTS = 150  # per line


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """How a training went, one number per step.

    bits: the loss in bits per byte. norms: of the gradients, before clipping. seconds: of each
    step. tokens: read per step. planned: seconds of a step by the plan. steps: by the plan.
    expected: predicted bits per byte at the end. memory: MiB of a step, predicted and measured.
    first: the step at which the numbers begin, after a resumption.
    """

    bits: Sequence[float]
    norms: Sequence[float]
    seconds: Sequence[float]
    tokens: int
    planned: float
    steps: int
    expected: float
    memory: tuple[float, float]
    first: int = 0


def training(minute: float, data: Curves) -> go.Figure:
    """Draw the training up to a minute: loss, norm and speed over time, and memory."""
    ends = list(itertools.accumulate(one / 60 for one in data.seconds))
    count = max(1, sum(end <= minute + 1e-9 for end in ends))
    planned = max((data.steps - data.first) * data.planned / 60, ends[-1])
    figure = make_subplots(rows=4, row_heights=[0.4, 0.23, 0.23, 0.14], vertical_spacing=0.07)
    each = -(-len(ends) // _POINTS) if len(ends) >= data.steps else -(-data.steps // _POINTS)
    speeds = [data.tokens / one / 1e3 for one in data.seconds]
    lines = (
        (data.bits, "blue", "loss", data.expected, "predicted end"),
        (data.norms, "orange", "norm", None, ""),
        (speeds, "green", "speed", data.tokens / data.planned / 1e3, "planned"),
    )
    for row, (values, color, name, level, called) in enumerate(lines, 1):
        found = _means(values[:count], each)
        times = _means(ends[:count], each)
        figure.add_scatter(
            x=[round(one, 3) for one in times],
            y=[float(f"{one:.4g}") for one in found],
            mode="lines",
            name=name,
            line={"color": PALETTE[color], "width": 1.5},
            row=row,
            col=1,
        )
        if level is not None:
            figure.add_scatter(
                x=[0, planned],
                y=[round(level, 3)] * 2,
                mode="lines",
                name=called,
                line={"color": PALETTE["gray"], "dash": "dash", "width": 1.5},
                row=row,
                col=1,
            )
    figure.add_bar(
        y=["predicted", "measured"],
        x=[round(one, 1) for one in data.memory],
        orientation="h",
        marker={"color": [PALETTE["gray"], PALETTE["sky"]]},
        text=[f"{one:.0f} MiB" for one in data.memory],
        textposition="inside",
        row=4,
        col=1,
    )
    for row in (1, 2, 3):
        figure.update_xaxes(range=[0, planned], ticksuffix=" min", row=row, col=1)
    figure.update_xaxes(title="memory of a step, MiB", row=4, col=1)
    heights = [min(0.9 * data.expected, 0.95 * min(data.bits)), 1.02 * max(data.bits)]
    figure.update_yaxes(title="bits per byte", range=heights, row=1, col=1)
    figure.update_yaxes(title="norm", type="log", row=2, col=1)
    figure.update_yaxes(title="1,000 tokens/s", rangemode="tozero", row=3, col=1)
    last = _means(data.bits[:count], each)[-1]
    figure.update_layout(
        title=f"Step {data.first + count:,} of {data.steps:,}: {last:.2f} bits per byte",
        height=680,
        showlegend=False,
    )
    return describe(
        figure,
        f"After {ends[count - 1]:.2f} minutes: loss {last:.2f} bits per byte, "
        f"{data.expected:.2f} predicted for the end; gradient norm {data.norms[count - 1]:.2f}; "
        f"{_means(speeds[:count], each)[-1]:.1f} thousand tokens per second; memory of a step "
        f"{data.memory[1]:.0f} MiB, {data.memory[0]:.0f} predicted.",
    )


def _means(values: Sequence[float], each: int) -> list[float]:
    """Return the means of so many values after one another."""
    return [fmean(values[at : at + each]) for at in range(0, len(values), each)]


def sizes(
    minutes: float,
    gigaflops: float,
    data: tuple[Sequence[int], Callable[[float, float], float], float],
) -> go.Figure:
    """Draw the predicted loss of each model size that the same computation could train.

    minutes: of training. gigaflops: per second. data: the weights of each size; the formula, a
    function of weights and tokens; tokens per weight by the rule.
    """
    weights, formula, per_weight = data
    flops = 60e9 * minutes * gigaflops
    tokens = [flops / (6 * one) for one in weights]
    losses = [formula(one, read) for one, read in zip(weights, tokens, strict=True)]
    wanted = math.sqrt(flops / 6 / per_weight)
    rule = min(range(len(weights)), key=lambda n: abs(math.log(weights[n] / wanted)))
    best = min(range(len(weights)), key=losses.__getitem__)
    figure = go.Figure()
    figure.add_scatter(
        x=[one / 1e6 for one in weights],
        y=[round(one, 3) for one in losses],
        mode="lines+markers",
        name="predicted loss",
        line={"color": PALETTE["blue"]},
    )
    for at, color, symbol, name in (
        (rule, "vermillion", "diamond", f"{per_weight:.0f} tokens per weight"),
        (best, "green", "circle-open", "lowest"),
    ):
        figure.add_scatter(
            x=[weights[at] / 1e6],
            y=[round(losses[at], 3)],
            mode="markers",
            name=name,
            marker={"color": PALETTE[color], "symbol": symbol, "size": 14, "line": {"width": 2}},
        )
    figure.update_layout(
        title=f"The rule: {weights[rule] / 1e6:.2g} million weights",
        xaxis={
            "title": "million weights",
            "type": "log",
            "tickvals": [one / 1e6 for one in weights],
            "ticktext": [
                f"{one / 1e6:.2g}" if one < 1e8 else f"{one / 1e6:.0f}" for one in weights
            ],
        },
        # Sizes that are far off would flatten the valley.
        yaxis={"title": "bits per byte", "range": [0.95 * min(losses), 1.6 * min(losses)]},
    )
    return describe(
        figure,
        f"{flops:.2g} FLOPs. The rule trains {weights[rule]:,} weights on {tokens[rule]:.3g} "
        f"tokens to {losses[rule]:.2f} bits per byte; the lowest is {losses[best]:.2f} with "
        f"{weights[best]:,} weights.",
    )


def budget(mebibytes: float, data: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Draw the memory of a training step by lever, and which of them fit into a budget.

    data: lever -> part of the memory -> MiB, the strongest lever last.
    """
    figure = go.Figure()
    totals = {name: sum(parts.values()) for name, parts in data.items()}
    fits = [name for name, total in totals.items() if total <= mebibytes]
    for part, color in zip(next(iter(data.values())), PALETTE.values(), strict=False):
        figure.add_bar(
            y=list(data),
            x=[round(parts[part], 2) for parts in data.values()],
            orientation="h",
            name=part,
            marker={"color": color, "opacity": [1 if one in fits else 0.35 for one in data]},
        )
    figure.add_vline(x=mebibytes, line={"color": PALETTE["vermillion"], "dash": "dash"})
    figure.update_layout(
        barmode="stack",
        title=f"{mebibytes:g} MiB: {fits[0] if fits else 'no lever fits'}",
        xaxis={"title": "MiB of a training step", "range": [0, 1.05 * max(totals.values())]},
        yaxis={"autorange": "reversed"},
    )
    said = ", ".join(f"{name} {total:.1f} MiB" for name, total in totals.items())
    first = f"the first that fits is {fits[0]}" if fits else "none fits"
    return describe(figure, f"Budget {mebibytes:g} MiB: {first}. Predicted: {said}.")
