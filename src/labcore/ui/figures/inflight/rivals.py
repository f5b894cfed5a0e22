"""Two policies beside each other, on the same arrivals, with the same pool, budget and chunk."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from labcore.checks import one_of
from labcore.studies.inflight.rivals import BUDGETS, CHUNKS, LOADS, POOLS, ROWS, Rival, rivals
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.inflight.batches import KINDS
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["POLICIES", "RIVALS_FORMULA", "two_policies"]

POLICIES = {
    "static": "static",
    "no-evict": "guaranteed_no_evict",
    "max-utilization": "max_utilization",
}
"""The engine's policies by the names that the page shows."""

_SHOWN = ("prefill", "decode", "recompute", "stalled", "idle")
_GREEN = PALETTE["green"]


def two_policies(
    first: str = "static",
    second: str = "no-evict",
    load: float = 0.8,
    pool: int = 28,
    budget: int = 64,
    chunk: int = 64,
) -> go.Figure:
    """Draw what two policies do with the same requests: each row of the batch, and the pool.

    first, second: names in POLICIES. load: arrivals over the capacity. pool: blocks. budget, chunk:
    the most tokens per step, and of one prompt in it. The values are those of `studies.rivals`.
    Raises ValueError for others.
    """
    for name, value, options in (
        ("first", first, POLICIES), ("second", second, POLICIES), ("load", load, LOADS),
        ("pool", pool, POOLS), ("budget", budget, BUDGETS), ("chunk", chunk, CHUNKS),
    ):  # fmt: skip
        one_of(name, value, options)
    runs = rivals()
    setting = load, pool, budget, min(chunk, budget)
    both = [runs[POLICIES[name], *setting] for name in (first, second)]
    traces: list[dict[str, Any]] = []
    for panel, run in zip(("", "3"), both, strict=True):
        traces += _panel(run, panel)
    wide = draw.ceiling(max(run.seconds for key, run in runs.items() if key[1:] == setting))
    names = [_told(*pair) for pair in zip((first, second), both, strict=True)]
    return describe(
        go.Figure(traces, _layout(wide, pool, names)),
        f"{load:g} of the capacity, {pool} blocks, {budget} tokens per step, chunks of {chunk}. "
        + "; ".join(name.replace("<br>", ", ") for name in names)
        + ".",
    )


def _told(name: str, run: Rival) -> str:
    """Return what stands above a panel."""
    return (
        f"<b>{name}</b>: {run.tokens_per_second:.0f} tokens/s<br>worst first token "
        f"{draw.seconds(run.ttft)}, worst gap {draw.seconds(run.gap)}"
    )


def _panel(run: Rival, panel: str) -> list[dict[str, Any]]:
    below = str(int(panel or 1) + 1)
    made = []
    for kind in _SHOWN:
        name, color = KINDS[kind]
        x: list[float | None] = []
        y: list[float | None] = []
        for bar in run.bars:
            if bar.kind == kind:
                x += [bar.begin, bar.end, None]
                y += [bar.slot + 1, bar.slot + 1, None]
        made.append(
            {
                "type": "scatter", "x": x or [None], "y": y or [None], "mode": "lines",
                "name": name, "line": {"color": color, "width": 11, "simplify": False},
                "hoverinfo": "skip", "showlegend": not panel, "legendgroup": kind,
                "xaxis": f"x{panel}", "yaxis": f"y{panel}",
            }
        )  # fmt: skip
    times = [time for time, _ in run.held] + [run.seconds]
    counts = [count for _, count in run.held]
    made.append(
        {
            "type": "scatter", "x": times, "y": [*counts, counts[-1]], "mode": "lines",
            "name": "blocks held", "line": {"shape": "hv", "width": 1.5, "color": _GREEN},
            "fill": "tozeroy", "fillcolor": "rgba(0,158,115,0.3)", "hoverinfo": "skip",
            "showlegend": not panel, "xaxis": f"x{below}", "yaxis": f"y{below}",
        }
    )  # fmt: skip
    return made


def _layout(wide: float, pool: int, names: list[str]) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "height": 660,
        "margin": {"t": 70},
        "legend": {"xref": "container"},
        "annotations": [
            {
                "text": name, "x": 0, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left",
                "yanchor": "bottom", "showarrow": False, "align": "left", "font": {"size": 13},
            }
            for name, y in zip(names, (1.01, 0.44), strict=True)
        ],
    }  # fmt: skip
    domains = ([0.74, 1], [0.6, 0.72], [0.17, 0.43], [0, 0.15])
    for number, domain in enumerate(domains, 1):
        end = "" if number == 1 else str(number)
        rows = number % 2 == 1
        layout[f"xaxis{end}"] = {
            "range": [0, wide],
            "zeroline": False,
            "nticks": 6,
            "anchor": f"y{end}",
            "showticklabels": number == 4,
            "exponentformat": "none",
            **({"title": "time (s)"} if number == 4 else {}),
        }
        layout[f"yaxis{end}"] = {
            "domain": domain, "anchor": f"x{end}", "zeroline": False, "nticks": 4,
            "title": "rows" if rows else "blocks",
            "range": [ROWS + 0.6, 0.4] if rows else [0, pool], "showgrid": not rows,
        }  # fmt: skip
    return layout


def _points() -> dict[str, Any]:
    """Return all runs as the page needs them, times in tenths of a millisecond."""

    def short(seconds: float) -> int:
        return round(1e4 * seconds)

    runs = {}
    for (policy, *setting), run in rivals().items():
        name = next(name for name, one in POLICIES.items() if one == policy)
        runs[" ".join([name, *(f"{one:g}" for one in setting)])] = [
            [[_SHOWN.index(b.kind), b.slot, short(b.begin), short(b.end)] for b in run.bars],
            [[short(time), count] for time, count in run.held],
            short(run.seconds),
            _told(name, run),
        ]
    widths = {
        " ".join(f"{one:g}" for one in key[1:]): draw.ceiling(
            max(run.seconds for other, run in rivals().items() if other[1:] == key[1:])
        )
        for key in rivals()
    }
    return {"runs": runs, "widths": widths}


RIVALS_FORMULA = Formula("inflightRivals", _points)
