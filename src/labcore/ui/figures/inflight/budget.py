"""The time of a step by its number of tokens: flat while weights are read, then rising."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from labcore.decoding.theory.speedup import Roofline
from labcore.studies.inflight.budget import budget, ridge, step_seconds
from labcore.ui import draw
from labcore.ui.explorer import describe

__all__ = ["step_times"]

_TOKENS = [2**power for power in range(14)]


def step_times(roof: Roofline, loads: Sequence[tuple[int, int]], limit: float) -> go.Figure:
    """Draw the time of a step against its tokens for each load, with the budget within `limit`.

    loads: each (rows that decode, tokens of context per row). limit: seconds per step. Markers
    stand at the budgets; a load that misses the limit with its decodes alone has none.
    """
    lines, told = [], []
    for (rows, context), color in zip(loads, draw.COLORS, strict=False):
        most = budget(roof, limit, rows=rows, context=context)
        first = max(rows, 1)
        kept = most if most >= first else None
        x = sorted({first, *(n for n in _TOKENS if n > first), round(ridge(roof))} - {0})
        x = [n for n in x if n >= first]
        name = f"{rows} rows of {context:,} tokens" if rows else "a prompt alone"
        told.append(f"{name}: {'none' if kept is None else f'{kept:,}'}")
        y = [1e3 * step_seconds(roof, n, rows=rows, context=context) for n in x]
        lines += [
            {
                "type": "scatter", "x": x, "y": y, "mode": "lines", "name": name,
                "line": {"color": color, "width": 3},
            },
            {
                "type": "scatter", "x": [kept], "y": [None if kept is None else 1e3 * limit],
                "mode": "markers", "marker": {"color": color, "size": 11, "symbol": "diamond"},
                "showlegend": False, "name": f"budget, {name}",
            },
        ]  # fmt: skip
    lines.append(
        {
            "type": "scatter", "x": [1, _TOKENS[-1]], "y": [1e3 * limit] * 2, "mode": "lines",
            "name": f"limit, {1e3 * limit:g} ms", "line": draw.PREDICTED, "hoverinfo": "skip",
        }
    )  # fmt: skip
    return describe(
        go.Figure(
            lines,
            {
                "title": f"Flat up to about {ridge(roof):.0f} tokens,<br>then every token counts",
                "xaxis": {
                    "title": "tokens per step", "type": "log", "tickvals": [1, 8, 64, 512, 4096],
                },
                "yaxis": {
                    "title": "ms per step, at least", "type": "log",
                    "tickvals": [2, 5, 10, 20, 50, 100, 200],
                },
                "height": 440, "margin": {"t": 64}, "legend": {"xref": "container"},
            },
        ),
        f"Time per step against tokens per step. Weights alone take {1e3 * roof.seconds(1):.1f} ms "
        f"up to about {ridge(roof):.0f} tokens. Budgets within {1e3 * limit:g} ms: "
        f"{'; '.join(told)}.",
    )  # fmt: skip
