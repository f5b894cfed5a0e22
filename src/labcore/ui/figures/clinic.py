"""Curves of a bug clinic: one row per patient, one column per panel, the healthy curve in each."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labcore.exercises.clinic import Clinic, ends, one_scale
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["curves"]

ROW = 150  # pixels
LEFT = 78  # pixels left of the first column, for a patient's name
AIR = 0.06  # margin between a panel's lines and its edges, as a share of its height
SMALL = {"size": 11}
TITLE = 16  # letters per line of a panel's title that fit on a phone


def curves(
    patients: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    quantity: str = "",
    clinic: Clinic | None = None,
    from_zero: bool = False,
) -> go.Figure:
    """Draw the patients' curves from `Clinic.patients`; a curve has a gap where it's NaN.

    patients: name -> title of a panel -> curve; "healthy" is drawn dotted in every row.
    quantity: what the curves show, written beside the first column.
    clinic: whose patients they are. It says where the values stand; if None, in steps from 0 on.
    from_zero: whether each panel shows the value 0.
    The rows of a panel share their axis, unless a patient is far outside the healthy range.
    Raises ValueError if "healthy" or a patient is missing.
    """
    ill = [name for name in patients if name != "healthy"]
    if not ill or "healthy" not in patients:
        raise ValueError(
            f"patients must hold 'healthy' and one patient or more, got {list(patients)}; "
            "pass what Clinic.patients returns"
        )
    panels, unit = list(patients[ill[0]]), clinic.unit if clinic else "step"
    figure = make_subplots(
        rows=len(ill),
        cols=len(panels),
        shared_xaxes="columns",
        column_titles=["<br>".join(textwrap.wrap(panel, TITLE)) for panel in panels],
        vertical_spacing=0.05,
        horizontal_spacing=0.15,
    )
    figure.update_annotations(font={"size": 12})
    healthy = patients["healthy"]
    for row, name in enumerate(ill, 1):
        for column, panel in enumerate(panels, 1):
            corner = row == column == 1
            steps = clinic.axis if clinic else range(len(healthy[panel]))
            line = {"color": PALETTE["gray"], "dash": "dot", "width": 1.5}
            _add(figure, steps, healthy[panel], "healthy", line, row, column, corner)
            line = {"color": PALETTE["vermillion"], "width": 2}
            _add(figure, steps, patients[name][panel], "patient", line, row, column, corner)
    for column, panel in enumerate(panels, 1):
        steps = clinic.axis if clinic else range(len(healthy[panel]))
        middle, end = steps[(len(steps) - 1) // 2], steps[-1]
        # On a phone, more than three labels would overlap.
        figure.update_xaxes(tickvals=[0, middle, end], range=[0, end], col=column)
        figure.update_xaxes(title={"text": unit, "font": SMALL}, row=len(ill), col=column)
        _scale(figure, patients, panel, column, from_zero)
    for row, name in enumerate(ill, 1):
        low, high = figure.get_subplot(row, 1).yaxis.domain
        figure.update_yaxes(title={"text": quantity, "font": SMALL, "standoff": 4}, row=row, col=1)
        figure.add_annotation(
            text=f"<b>{name}</b>", font={"size": 16}, showarrow=False, xref="paper", yref="paper",
            x=0, xanchor="left", xshift=-LEFT, y=(low + high) / 2, yanchor="middle",
        )  # fmt: skip
    figure.update_layout(
        height=ROW * len(ill) + 130, margin={"t": 56, "b": 80, "l": LEFT + 2, "r": 16}
    )
    figure.update_xaxes(tickfont=SMALL, tickangle=0, showticklabels=True)
    figure.update_traces(
        hovertemplate=f"{unit} %{{x}}: %{{y:.3g}}<extra>%{{fullData.name}}</extra>"
    )
    figure.update_yaxes(tickfont=SMALL, nticks=5)
    return describe(figure, _words(patients))


def _scale(
    figure: go.Figure,
    patients: Mapping[str, Mapping[str, Sequence[float]]],
    panel: str,
    column: int,
    from_zero: bool,
) -> None:
    """Give a panel's rows one axis if they're similar, with margins above and below the lines."""
    rows = [[patients["healthy"], one] for name, one in patients.items() if name != "healthy"]
    shared = one_scale(patients, panel)
    for row, pair in enumerate(rows, 1):
        low, high = ends(patients.values() if shared else pair, panel)
        if from_zero or low == high:
            low, high = min(low, 0.0), max(high, 0.0)
        air = AIR * (high - low or 1.0)
        figure.update_yaxes(range=[low - air, high + air], row=row, col=column)
    if shared:
        figure.update_yaxes(matches="y" if column == 1 else f"y{column}", col=column)


def _add(
    figure: go.Figure,
    steps: range,
    curve: Sequence[float],
    name: str,
    line: Mapping[str, object],
    row: int,
    column: int,
    legend: bool,
) -> None:
    figure.add_scatter(
        x=list(steps),
        y=[None if math.isnan(value) else value for value in curve],
        mode="lines",
        name=name,
        legendgroup=name,
        showlegend=legend,
        line=dict(line),
        row=row,
        col=column,
    )


def _words(patients: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return five values along each curve, for readers who can't see it."""
    told = []
    for name, panels in patients.items():
        for panel, curve in panels.items():
            last = len(curve) - 1
            values = ", ".join(f"{curve[last * quarter // 4]:.3g}" for quarter in range(5))
            told.append(f"{name}, {panel}: {values}")
    return "Curves at the start, each quarter and the end. " + "; ".join(told) + "."
