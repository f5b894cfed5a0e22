"""How much of a batch nobody needs, by its rows: static batches beside a batch in flight."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from labcore.checks import one_of
from labcore.studies.inflight.slack import ROWS, Filled
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["unused_rows"]


def unused_rows(
    tail: float = 1.0, queue: int = 32, *, data: Mapping[tuple[int, float, int], Filled]
) -> go.Figure:
    """Draw the share of rows that no request needs, for each number of rows, and the steps saved.

    tail: of the output lengths; the smaller, the more they differ. queue: requests that wait. data:
    such as `slack.sweep()`. Raises ValueError for a combination that isn't in it.
    """
    one_of("tail and queue", (tail, queue), sorted({key[1:] for key in data}))
    runs = [data[rows, tail, queue] for rows in ROWS]
    lines = [
        {
            "type": "scatter", "x": list(ROWS), "y": [100 * (1 - run.used[at]) for run in runs],
            "mode": "lines+markers", "name": name,
            "line": {"color": color, "width": 3}, "marker": {"size": 9, "color": color},
        }
        for at, (name, color) in enumerate(
            (("static: ended or empty", PALETTE["gray"]), ("in flight: empty", PALETTE["blue"]))
        )
    ]  # fmt: skip
    saved = [
        f"{rows}: {run.steps[0] / run.steps[1]:.1f}" for rows, run in zip(ROWS, runs, strict=True)
    ]
    title = f"Static over in-flight steps, by rows:<br>{', '.join(saved)}"
    return describe(
        go.Figure(
            lines,
            {
                "title": title,
                "xaxis": {"title": "rows of the batch", "type": "log", "tickvals": list(ROWS)},
                "yaxis": {"title": "rows that nobody needs (%)", "range": [0, 100]},
                "height": 420, "margin": {"t": 64}, "legend": {"xref": "container"},
            },
        ),
        f"{queue} requests, tail {tail:g}. "
        + "; ".join(
            f"{rows} rows: {1 - run.used[0]:.0%} unused in static batches, {1 - run.used[1]:.0%} "
            f"in flight, {run.steps[0] / run.steps[1]:.1f} times the steps"
            for rows, run in zip(ROWS, runs, strict=True)
        )
        + ".",
    )  # fmt: skip
