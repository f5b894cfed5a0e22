"""A server under load: latency by arrival rate, replicas behind a router, and a validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.checks import one_of, positive
from labcore.studies.inflight.scenarios import MEASURES, Fleet, Quantiles
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = [
    "POLICIES",
    "ROUTERS",
    "TIMES",
    "latency_curves",
    "replicas",
    "simulated_against_measured",
]

POLICIES = {
    "static": "static",
    "guaranteed_no_evict": "admit only what fits to the end",
    "max_utilization": "admit what fits now",
}
ROUTERS = {
    "round_robin": "round robin",
    "least_loaded": "least loaded",
    "prefix_aware": "prefix aware",
}
_COLORS = {
    "static": PALETTE["gray"],
    "guaranteed_no_evict": PALETTE["blue"],
    "max_utilization": PALETTE["orange"],
}
TIMES = {
    "ttft": "time to the first token",
    "tpot": "time between tokens",
    "normalised": "time per token, from arrival",
    "queue": "time in the queue",
}
_REACH = 3000  # the longest time over the shortest that fits on a logarithmic axis


def latency_curves(
    measure: str = "normalised",
    mix: str = "long tail",
    *,
    data: Mapping[tuple[str, str], Mapping[float, Mapping[str, Quantiles]]],
) -> go.Figure:
    """Draw a latency of the requests by arrival rate, p50 solid and p99 dashed, for each policy.

    measure: one of `scenarios.MEASURES`. mix: the distribution of lengths. data: such as
    `scenarios.curves()`, by (policy, mix), rate and measure, in seconds. Times far below the
    longest, such as waits of 0, are drawn at the bottom of the axis, and its lowest tick says so.
    Raises ValueError for another measure or mix.
    """
    one_of("measure", measure, MEASURES)
    one_of("mix", mix, sorted({key[1] for key in data}))
    chosen = {key[0]: found for key, found in data.items() if key[1] == mix}
    raw = [
        value
        for found in chosen.values()
        for one in found.values()
        for value in (one[measure].p50, one[measure].p99)
    ]
    foot = 10.0 ** math.floor(math.log10(max(max(raw) / _REACH, 1e-9)))
    lines = [
        _curve(policy, found, measure, name, foot)
        for policy, found in chosen.items()
        for name in ("p50", "p99")
    ]
    every = [time for line in lines for time in line["y"]]
    said = []
    for policy, found in chosen.items():
        low, high = (found[rate][measure] for rate in (min(found), max(found)))
        said.append(
            f"{POLICIES[policy]}: p50 {draw.seconds(low.p50)} to {draw.seconds(high.p50)}, "
            f"p99 {draw.seconds(low.p99)} to {draw.seconds(high.p99)}"
        )
    axis = draw.seconds_axis(0.8 * min(every), 1.25 * max(every), (1, 3))
    if min(raw) < foot:
        axis["ticktext"] = [
            f"≤ {word}" if at <= foot * (1 + 1e-9) else word
            for at, word in zip(axis["tickvals"], axis["ticktext"], strict=True)
        ]
    ticks = list(next(iter(chosen.values())))
    title = TIMES[measure]
    figure = go.Figure(
        lines,
        {
            "title": title,
            "xaxis": {
                "title": "arrivals, over the capacity", "tickvals": ticks, "type": "log",
                "ticktext": [f"{rate:g}" for rate in ticks],
            },
            "yaxis": {"title": "simulated (solid p50, dashed p99)", **axis},
            "height": 444,
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    return describe(
        figure,
        f"{TIMES[measure]}, lengths {mix}, from {ticks[0]:g} to {ticks[-1]:g} of the capacity: "
        f"{'; '.join(said)}.",
    )


def _curve(
    policy: str,
    found: Mapping[float, Mapping[str, Quantiles]],
    measure: str,
    name: str,
    foot: float,
) -> dict[str, Any]:
    """Return one quantile of a policy by rate, at least `foot`."""
    color = _COLORS.get(policy, PALETTE["green"])
    width = 2 if policy == "max_utilization" else 3.5  # so that both show if they overlap
    return {
        "type": "scatter", "x": list(found), "mode": "lines+markers", "legendgroup": policy,
        "y": [max(getattr(one[measure], name), foot) for one in found.values()],
        "name": POLICIES[policy] + ", p99" * (name == "p99"), "showlegend": name == "p50",
        "line": {"color": color, "dash": "solid" if name == "p50" else "dash", "width": width},
        "marker": {"size": 3 + 2 * width, "color": color},
    }  # fmt: skip


def replicas(
    policy: str = "round_robin", share: float = 0.5, *, data: Mapping[tuple[str, float], Fleet]
) -> go.Figure:
    """Draw each replica's running requests over time, and what it read and found in its cache.

    data: such as `scenarios.fleets()`, by (policy, share); all share the axes.
    Raises ValueError for a combination that isn't in the data.
    """
    one_of("policy and share", (policy, share), data)
    now = data[policy, share]
    wide = draw.ceiling(max(one.seconds for one in data.values()))
    high = max(count for one in data.values() for load in one.loads for _, count in load)
    long = max(max(map(sum, zip(one.read, one.found, strict=True))) for one in data.values())
    names = [f"{at + 1}" for at in range(len(now.loads))]
    bars = [
        {
            "type": "bar", "orientation": "h", "y": names, "x": list(tokens), "name": name,
            "marker": {"color": color}, "xaxis": "x2", "yaxis": "y2",
        }
        for name, tokens, color in (
            ("prompt tokens read", now.read, PALETTE["orange"]),
            ("found in the cache", now.found, PALETTE["sky"]),
        )
    ]  # fmt: skip
    title = f"{now.hit_rate:.0%} found in a cache, TTFT p99 {draw.seconds(now.p99)}"
    figure = go.Figure(
        [_loads(now, high), *bars],
        {
            "title": title,
            "barmode": "stack",
            "xaxis": {
                "anchor": "y", "range": [0, wide], "title": "time (s)", "zeroline": False,
                "nticks": 6, "exponentformat": "none",
            },
            "yaxis": {
                "domain": [0.5, 1], "anchor": "x", "range": [len(names) + 0.1, 0],
                "tickvals": [at + 0.6 for at in range(len(names))], "ticktext": names,
                "title": "replica", "zeroline": False, "showgrid": False,
            },
            "xaxis2": {
                "anchor": "y2", "range": [0, 1.03 * long], "title": "prompt tokens", "nticks": 5,
                "exponentformat": "none", "separatethousands": True,
            },
            "yaxis2": {
                "domain": [0, 0.32], "anchor": "x2", "title": "replica", "type": "category",
                "autorange": "reversed",
            },
            "height": 564,
            "legend": {"xref": "container", "traceorder": "normal"},
        },
    )  # fmt: skip
    each = "; ".join(
        f"replica {name}: {sent} requests, {max(count for _, count in load)} at once at most, "
        f"{read:,} tokens read and {found:,} found"
        for name, sent, load, read, found in zip(
            names, now.sent, now.loads, now.read, now.found, strict=True
        )
    )
    return describe(
        figure,
        f"{ROUTERS[policy]}, {share:.0%} common prefixes: {title}, "
        f"p50 {draw.seconds(now.p50)}. {each}.",
    )


def _loads(now: Fleet, high: int) -> dict[str, Any]:
    """Return the running requests as one area per replica, all to the same scale."""
    x: list[float | None] = []
    y: list[float | None] = []
    for at, load in enumerate(now.loads):
        foot = at + 1.0
        x += [*([None] if x else []), 0.0]
        y += [*([None] if y else []), foot]
        before = foot
        for time, count in load:
            level = foot - 0.9 * count / high
            x += [time, time]
            y += [before, level]
            before = level
        x += [now.seconds, now.seconds, 0.0]
        y += [before, foot, foot]
    return {
        "type": "scatter", "x": x, "y": y, "mode": "lines", "fill": "toself",
        "line": {"width": 1, "color": PALETTE["blue"]}, "fillcolor": "rgba(0,114,178,0.45)",
        "name": f"requests under way, up to {high}", "hoverinfo": "skip",
    }  # fmt: skip


def simulated_against_measured(
    measured: Sequence[float],
    simulated: Sequence[float],
    *,
    title: str,
    names: Sequence[str] = (),
    tolerance: float = 0.15,
) -> go.Figure:
    """Draw each request's simulated time by its measured time, with a band around equality.

    measured, simulated: seconds above 0, of the same requests in the same order. title: what was
    timed, named below the axis. names: of the requests, shown on hover. tolerance: half the band,
    relative.
    Raises ValueError if lengths differ or are 0.
    """
    positive("tolerance", tolerance)
    if len(measured) != len(simulated) or not len(measured):
        raise ValueError(
            f"measured and simulated must be of the same requests, got {len(measured)} and "
            f"{len(simulated)} times"
        )
    for one in (*measured, *simulated):
        positive("a time", one, "leave out requests without it")
    low, high = 0.7 * min(*measured, *simulated), 1.4 * max(*measured, *simulated)
    errors = [two / one - 1 for one, two in zip(measured, simulated, strict=True)]
    inside = [abs(error) <= tolerance for error in errors]
    told = [names[at] if at < len(names) else f"request {at + 1}" for at in range(len(errors))]
    middle = sorted(errors)[len(errors) // 2]
    dots = [_dots(measured, simulated, told, inside, wanted=wanted) for wanted in (True, False)]
    counted = f"{sum(inside)} of {len(inside)} requests within {_percent(tolerance)}"
    axis = draw.seconds_axis(low, high, (1, 2, 5) if high < 100 * low else (1,))
    figure = go.Figure(
        [
            *_band(low, high, tolerance),
            *dots,
        ],
        {
            "title": counted,
            "xaxis": {"title": f"measured<br>{title}", **axis},
            "yaxis": {"title": "simulated", **axis},
            "height": 480,
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    return describe(
        figure,
        f"{title}: {counted}, median deviation {middle:+.1%}. "
        f"Deviations from {min(errors):+.0%} to {max(errors):+.0%}.",
    )


def _dots(
    measured: Sequence[float],
    simulated: Sequence[float],
    names: Sequence[str],
    inside: Sequence[bool],
    *,
    wanted: bool,
) -> dict[str, Any]:
    """Return the requests inside the band, or those outside."""
    kept = [
        (one, two, name)
        for one, two, name, ok in zip(measured, simulated, names, inside, strict=True)
        if ok is wanted
    ]
    return {
        "type": "scatter", "mode": "markers", "name": "inside" if wanted else "outside",
        "x": [one for one, _, _ in kept] or [None], "y": [two for _, two, _ in kept] or [None],
        "hovertext": [f"{name}: {two / one - 1:+.0%}" for one, two, name in kept],
        "hoverinfo": "text",
        "marker": {
            "size": 9, "color": PALETTE["blue" if wanted else "vermillion"],
            "symbol": "circle" if wanted else "diamond",
        },
    }  # fmt: skip


def _band(low: float, high: float, tolerance: float) -> list[dict[str, Any]]:
    """Return the line of equality from low to high, and the band of `tolerance` around it."""
    above, below = 1 + tolerance, 1 - tolerance
    return [
        {
            "type": "scatter", "mode": "lines", "fill": "toself", "hoverinfo": "skip",
            "name": _percent(tolerance), "x": [low, high, high, low, low],
            "y": [low * above, high * above, high * below, low * below, low * above],
            "fillcolor": "rgba(128,128,128,0.2)", "line": {"width": 0, "color": PALETTE["gray"]},
        },
        {
            "type": "scatter", "mode": "lines", "x": [low, high], "y": [low, high],
            "name": "equal", "line": draw.PREDICTED, "hoverinfo": "skip",
        },
    ]  # fmt: skip


def _percent(tolerance: float) -> str:
    return f"± {100 * tolerance:.0f} %"
