"""The language model's curves during and after damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import plotly.graph_objects as go

from labcore.studies.shuffling.language_spikes import Plan
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["language_damage"]

_PLAN, _BEFORE = Plan(), 5  # steps drawn before the damage


def language_damage(
    curve: str,
    cure: str,
    data: Mapping[str, Mapping[str, Mapping[str, Sequence[Sequence[float]]]]],
) -> go.Figure:
    """Draw one curve of each run, the mean over seeds, with the damaged steps shaded.

    data: cure -> name of a run -> curve -> values by seed; the last value is that of the last step
    of a default `Plan`. A run that was not made with this cure has no line.
    """
    figure, said = go.Figure(), []
    first, steps = _PLAN.trunk + 1 - _BEFORE, _PLAN.steps
    names = next(iter(data.values()))
    for name, color in zip(names, ("blue", "vermillion", "orange", "green"), strict=True):
        runs = data[cure].get(name, {}).get(curve, ())
        means = [fmean(step) for step in zip(*runs, strict=True)][first - steps - 1 :]
        figure.add_scatter(
            x=list(range(steps - len(means) + 1, steps + 1)),
            y=[round(mean, 3) for mean in means],
            mode="lines",
            name=name,
            line={"color": PALETTE[color], "width": 2},
        )
        if means:
            said.append(f"{name}: highest {max(means):.2f}, last {means[-1]:.2f}")
    figure.add_vrect(
        x0=_PLAN.trunk + 0.5, x1=_PLAN.trunk + _PLAN.bad + 0.5, fillcolor=PALETTE["gray"],
        opacity=0.3, line={"width": 0},
    )  # fmt: skip
    unit = "" if "norm" in curve else ", nats per token"
    figure.update_layout(
        title=f"Four bad steps, {cure}",
        xaxis={"title": "step; gray: the damaged steps", "range": [first, steps]},
        yaxis={"title": f"{curve}{unit}"},
    )
    return describe(figure, f"{curve}, {cure}. {'; '.join(said)}.")
