"""Timelines of batches: which request holds which slot, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.studies.inflight.scenes import Bar, Scene
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["KINDS", "two_batches"]

KINDS = {
    "prefill": ("prefill", PALETTE["orange"]),
    "decode": ("decode", PALETTE["blue"]),
    "recompute": ("read again", PALETTE["vermillion"]),
    "stalled": ("stalled", PALETTE["purple"]),
    "idle": ("ended, row held", "#a7adb4"),
}
_WAIT = "#7d6b91"
_LETTER = 0.026  # a digit's width on a phone, as a share of the time axis


def _time_axis(wide: float) -> dict[str, Any]:
    return {"range": [0, wide], "zeroline": False, "exponentformat": "none", "nticks": 6}


def _row_axis(slots: int) -> dict[str, Any]:
    return {
        "range": [slots + 0.5, 0.5], "title": "rows", "zeroline": False, "showgrid": False,
        "tickvals": list(range(1, slots + 1)),
    }  # fmt: skip


def _rows(
    bars: Iterable[Bar], width: float, *, panel: str = "", keys: bool = True
) -> list[dict[str, Any]]:
    """Return bars as thick lines, one trace per kind; keys: whether they appear in the legend."""
    given = list(bars)
    made = []
    for kind, (name, color) in KINDS.items():
        x: list[float | None] = []
        y: list[float | None] = []
        for bar in given:
            if bar.kind == kind:
                gap = [None] if x else []
                x += [*gap, bar.begin, bar.end]
                y += [*gap, bar.slot + 1, bar.slot + 1]
        made.append(
            {
                "type": "scatter", "x": x or [None], "y": y or [None], "mode": "lines",
                "name": name, "line": {"color": color, "width": width, "simplify": False},
                "hoverinfo": "skip", "showlegend": keys and bool(x), "legendgroup": kind,
                "xaxis": f"x{panel}", "yaxis": f"y{panel}",
            }
        )  # fmt: skip
    return made


def _numbers(bars: Sequence[Bar], wide: float, *, panel: str = "") -> dict[str, Any]:
    """Label each request's longest bars with its number; on hover, name every bar."""
    x, y, words, hover = [], [], [], []
    for bar in bars:
        long = bar.end - bar.begin
        told = str(bar.number + 1)
        x.append((bar.begin + bar.end) / 2)
        y.append(bar.slot + 1)
        words.append(told if bar.kind == "decode" and _LETTER * wide * len(told) <= long else "")
        hover.append(f"request {told}: {KINDS[bar.kind][0]}, {draw.seconds(long)}")
    return {
        "type": "scatter", "x": x, "y": y, "mode": "text", "text": words, "hovertext": hover,
        "hoverinfo": "text", "showlegend": False, "textposition": "middle center",
        "textfont": {"size": 11, "color": "#ffffff"}, "name": "request",
        "xaxis": f"x{panel}", "yaxis": f"y{panel}",
    }  # fmt: skip


def two_batches(
    static: Scene, inflight: Scene, *, names: tuple[str, str] = ("static", "in flight")
) -> go.Figure:
    """Draw the same requests in a static batch and in flight, one above the other on one time axis.

    Both scenes must have the same requests; names: of the two panels. Below a panel's rows are the
    waiting requests, each a thin line from arrival to admission. The request that waits longest in
    the first panel is marked in both, and so is the longest time that an ended request holds a row.
    Raises ValueError if the two have different numbers of requests.
    """
    if len(static.ends) != len(inflight.ends):
        raise ValueError(
            f"both must be of the same requests, got {len(static.ends)} and {len(inflight.ends)}"
        )
    wide = draw.ceiling(max(static.seconds, inflight.seconds))
    newcomer = max(static.queue, key=_length, default=None)
    number = -1 if newcomer is None else newcomer.number
    depth = max(len(set(_lanes(now.queue))) for now in (static, inflight))
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    for panel, now, domain in (("", static, [0.54, 1]), ("2", inflight, [0, 0.46])):
        traces += _rows(now.bars, 16, panel=panel, keys=panel == "")
        traces.append(_numbers(now.bars, wide, panel=panel))
        traces += _waits(now, number, panel=panel)
        traces += _callouts(now, number, wide, panel=panel)
        layout[f"xaxis{panel}"] = {**_time_axis(wide), "anchor": f"y{panel}"}
        layout[f"yaxis{panel}"] = {
            **_row_axis(now.slots), "domain": domain, "anchor": f"x{panel}",
            "range": [_lane(now, depth) + 0.8, 0.5], "title": names[panel == "2"],
        }  # fmt: skip
    layout["xaxis"]["showticklabels"] = False
    layout["xaxis2"]["title"] = "time (s)"
    saved = static.seconds / inflight.seconds
    title = ", ".join(
        f"{name} {draw.seconds(one.seconds)}"
        for name, one in zip(names, (static, inflight), strict=True)
    )
    figure = go.Figure(
        traces,
        {
            "title": title, **layout, "height": 564,
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    held = static.shares.get("idle", 0.0)
    said = f"{len(static.ends)} requests, {static.slots} rows. {title}: {saved:.2f} times as long. "
    said += f"{names[0]} leaves {held:.0%} of the rows' time to requests that have ended"
    if newcomer is not None:
        said += (
            f"; request {newcomer.number + 1} waits {draw.seconds(_length(newcomer))} there and "
            f"{draw.seconds(_wait(inflight, newcomer.number))} {names[1]}"
        )
    return describe(figure, f"{said}.")


def _length(bar: Bar) -> float:
    return bar.end - bar.begin


def _wait(now: Scene, number: int) -> float:
    return math.fsum(_length(bar) for bar in now.queue if bar.number == number)


def _lanes(bars: Sequence[Bar]) -> list[int]:
    """Return for each bar the first lane that is free when it begins."""
    busy: list[float] = []
    told = []
    for bar in bars:
        lane = next((at for at, end in enumerate(busy) if end <= bar.begin), len(busy))
        busy[lane : lane + 1] = [bar.end]
        told.append(lane)
    return told


def _lane(now: Scene, lane: int) -> float:
    """Return the position of a lane of the queue, in units of rows."""
    return now.slots + 0.95 + 0.28 * lane


def _waits(now: Scene, number: int, *, panel: str) -> list[dict[str, Any]]:
    """Return thin lines below the rows for the waiting requests, highlighting request `number`."""
    lines: dict[bool, tuple[list[float | None], list[float | None]]] = {
        False: ([], []),
        True: ([], []),
    }
    for bar, lane in zip(now.queue, _lanes(now.queue), strict=True):
        x, y = lines[bar.number == number]
        gap = [None] if x else []
        x += [*gap, bar.begin, bar.end]
        y += [*gap, _lane(now, lane), _lane(now, lane)]
    return [
        {
            "type": "scatter", "x": lines[one][0] or [None], "y": lines[one][1] or [None],
            "mode": "lines", "name": name, "hoverinfo": "skip",
            "line": {"color": color, "width": width, "simplify": False},
            "showlegend": not panel, "xaxis": f"x{panel}", "yaxis": f"y{panel}",
        }
        for one, name, color, width in (
            (False, "waiting", _WAIT, 3), (True, "waiting, named below", PALETTE["vermillion"], 5),
        )
    ]  # fmt: skip


def _callouts(now: Scene, number: int, wide: float, *, panel: str) -> list[dict[str, Any]]:
    """Return labels: where an ended request holds a row, and how long request `number` waits."""
    idle = max((bar for bar in now.bars if bar.kind == "idle"), key=_length, default=None)
    room = idle is not None and _length(idle) > 4 * _LETTER * wide
    depth = len(set(_lanes(now.queue)))
    said = f"request {number + 1} waits {draw.seconds(_wait(now, number))}" if number >= 0 else ""
    places = [
        ([(idle.begin + idle.end) / 2], [idle.slot + 1], "idle", {"size": 12, "color": "#222832"})
        if idle is not None and room
        else ([None], [None], "", {"size": 12}),
        ([0.5 * wide], [_lane(now, depth) + 0.25], said, {"size": 12}),
    ]
    return [
        {
            "type": "scatter", "x": x, "y": y, "text": [word], "mode": "text", "textfont": font,
            "textposition": "middle center", "hoverinfo": "skip", "showlegend": False,
            "name": "words", "xaxis": f"x{panel}", "yaxis": f"y{panel}",
        }
        for x, y, word, font in places
    ]  # fmt: skip
