"""Figures of the language-model runs that the training chapters share."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import plotly.graph_objects as go

from labcore.studies.language.curves import Reported
from labcore.studies.language.tuning import Setting, plateau
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["curves", "tuning"]

_COLORS = {
    "AdamW": PALETTE["blue"],
    "Lion": PALETTE["vermillion"],
    "Muon": PALETTE["green"],
}
_DASHES = {"Lion 0.95/0.98": "dash", "Lion 0.95/0.95": "dot"}


def curves(
    batch: int,
    against: str,
    data: Mapping[int, Mapping[str, Reported]],
    step_seconds: Mapping[int, Mapping[str, float]],
) -> go.Figure:
    """Draw the training loss of the language model, one line per optimizer, the mean over seeds.

    batch: tokens per step. against: "tokens" or "time". data: batch -> optimizer -> its runs.
    step_seconds: batch -> optimizer -> the time of a step; others are left out against time.
    """
    figure, said = go.Figure(), []
    for name, runs in data[batch].items():
        seconds = step_seconds[batch].get(name)
        if against == "time" and seconds is None:
            continue
        scale = (seconds or 0.0) / batch if against == "time" else 1e-3
        figure.add_scatter(
            x=[round(scale * tokens, 2) for tokens in runs.tokens],
            y=[round(loss, 3) for loss in runs.losses],
            mode="lines",
            name=name,
            line={"color": _COLORS[name.split()[0]], "dash": _DASHES.get(name, "solid")},
        )
        said.append(f"{name} {fmean(runs.held_out):.2f}")
    figure.update_layout(
        title=f"Loss on held-out files at the end: {', '.join(said)}",
        xaxis={"title": "thousand tokens" if against == "tokens" else "seconds on one core"},
        yaxis={"title": "training loss, nats per token"},
    )
    return describe(
        figure, f"Training loss at {batch:,} tokens per step. Held-out loss: {', '.join(said)}."
    )


def tuning(
    batch: int,
    data: Mapping[int, Mapping[str, Mapping[Setting, float]]],
    noise: Mapping[int, float],
) -> go.Figure:
    """Draw the held-out loss of each setting that was tried, by learning rate.

    data: batch -> optimizer -> setting -> loss in nats per token. A setting within `noise` of its
    optimizer's best is filled; a square has ten times the usual decay.
    """
    figure = go.Figure()
    for name, losses in data[batch].items():
        good, usual = plateau(losses, noise[batch]), min(setting.decay for setting in losses)
        ordered = sorted(losses, key=lambda setting: (setting.decay, setting.lr))
        line = [setting for setting in ordered if setting.decay == usual]
        figure.add_scatter(
            x=[setting.lr for setting in line],
            y=[losses[setting] for setting in line],
            mode="lines",
            line={
                "color": _COLORS[name.split()[0]],
                "width": 1,
                "dash": _DASHES.get(name, "solid"),
            },
            showlegend=False,
            hoverinfo="skip",
        )
        shapes = [
            ("circle" if setting.decay == usual else "square")
            + ("" if setting in good else "-open")
            for setting in ordered
        ]
        figure.add_scatter(
            x=[setting.lr for setting in ordered],
            y=[losses[setting] for setting in ordered],
            mode="markers",
            name=name,
            marker={"color": _COLORS[name.split()[0]], "size": 9, "symbol": shapes},
            text=[f"decay {setting.decay:g}" for setting in ordered],
        )
    figure.update_layout(
        title=f"Tuning trials at {batch:,} tokens per step",
        xaxis={"title": "learning rate", "type": "log", "dtick": 1, "exponentformat": "power"},
        yaxis={"title": "held-out loss, nats per token"},
    )
    bests = ", ".join(f"{name} {min(losses.values()):.2f}" for name, losses in data[batch].items())
    return describe(figure, f"Held-out loss by learning rate. The lowest of each: {bests}.")
