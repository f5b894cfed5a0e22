"""The look of every figure: a plotly template readable on light and on dark pages.

The palette is Okabe and Ito's ("Color Universal Design", 2008), which readers with any of the
common color deficiencies can tell apart; yellow is left out because it fades on white.
"""

from __future__ import annotations

from typing import Any, Literal

import plotly.graph_objects as go
import plotly.io as pio

__all__ = ["HEIGHT", "NAME", "PALETTE", "Mode", "install", "template"]

NAME = "labcore"
HEIGHT = 420  # pixels, the default
Mode = Literal["light", "dark"]

PALETTE = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "gray": "#808080",
}
"""Hex colors by name, in the order in which traces use them."""

_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
_INK = {"light": "#222832", "dark": "#ced6dd"}
_PAPER = {"light": "#ffffff", "dark": "rgba(0,0,0,0)"}
_GRID = {"light": "#e3e6e9", "dark": "#3c444d"}
_LINE = {"light": "#9aa2ab", "dark": "#6b7480"}
# The default blue has too little contrast on a dark page.
_DARK_COLORWAY = {"blue": "#4C9FDB", "vermillion": "#F0803C", "gray": "#9AA2AB"}


def template(mode: Mode = "light") -> go.layout.Template:
    """Return the template for light or dark pages. Raises ValueError for another mode."""
    if mode not in _INK:
        raise ValueError(f"mode must be 'light' or 'dark', got {mode!r}")
    return go.layout.Template(template_dict(mode))


def template_dict(mode: Mode) -> dict[str, Any]:
    """Return the template as plain JSON values, as the static page stores it."""
    colors = PALETTE if mode == "light" else {**PALETTE, **_DARK_COLORWAY}
    axis = {
        "gridcolor": _GRID[mode],
        "linecolor": _LINE[mode],
        "zerolinecolor": _LINE[mode],
        "tickcolor": _LINE[mode],
        "zerolinewidth": 1,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8},
    }
    return {
        "layout": {
            "colorway": list(colors.values()),
            "paper_bgcolor": _PAPER[mode],
            "plot_bgcolor": _PAPER[mode],
            "font": {"family": _FONT, "size": 14, "color": _INK[mode]},
            # The title is at the top and the legend at the bottom, so neither runs into the other
            # if it grows by rows.
            "title": {
                "x": 0,
                "xref": "container",
                "xanchor": "left",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"l": 12, "t": 12},
                "font": {"size": 16},
            },
            "margin": {"l": 56, "r": 16, "t": 44, "b": 48},
            "xaxis": axis,
            "yaxis": axis,
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 0,
                "yref": "container",
                "yanchor": "bottom",
            },
            "hovermode": "closest",
            "height": HEIGHT,
            "shapedefaults": {"line": {"color": _INK[mode]}},
            "colorscale": {"sequential": "Viridis", "diverging": "RdBu"},
        },
        "data": {
            "scatter": [{"type": "scatter", "line": {"width": 2.5}}],
            "bar": [{"type": "bar", "error_x": {"color": _INK[mode]}}],
            "heatmap": [{"type": "heatmap", "colorscale": "Viridis"}],
            "contour": [{"type": "contour", "colorscale": "Viridis"}],
        },
    }


def install() -> None:
    """Register the template and make it plotly's default; labcore.ui does this on import."""
    pio.templates[NAME] = template("light")
    pio.templates.default = NAME
