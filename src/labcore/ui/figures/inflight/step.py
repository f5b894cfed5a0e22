"""One step of an engine: how it spends its budget, and how a long prompt affects the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.checks import one_of
from labcore.studies.inflight.scenarios import Gaps
from labcore.studies.inflight.scenes import StepParts
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["anatomy", "chunk_gaps"]

_READ = PALETTE["orange"]
_SAY = PALETTE["blue"]


def chunk_gaps(chunk: int = 64, *, data: Mapping[int, Gaps]) -> go.Figure:
    """Draw the gaps between tokens of decoding rows while a long prompt is read in chunks.

    The upper panel shows them over time since the long prompt's arrival, and when it's being read.
    The lower one shows the longest gap and the prompt's TTFT by chunk size, with the chosen size
    marked.
    data: such as `scenarios.chunk_sizes()`. Raises ValueError for a size that isn't in it.
    """
    one_of("chunk", chunk, data)
    now = data[chunk]
    high = 1.08e3 * max(one.worst for one in data.values())
    left = 1e3 * min(min(one.times) for one in data.values())
    right = 1.03e3 * max(max(one.times) for one in data.values())
    sizes = list(data)
    times = [time for one in data.values() for time in (one.worst, one.ttft)]
    title = f"longest gap {draw.seconds(now.worst)}, TTFT {draw.seconds(now.ttft)}"
    figure = go.Figure(
        [
            {
                "type": "scatter", "x": [0, 0, 1e3 * now.ttft, 1e3 * now.ttft, 0],
                "y": [0, high, high, 0, 0], "mode": "lines", "fill": "toself",
                "fillcolor": "rgba(230,159,0,0.2)", "line": {"width": 0, "color": _READ},
                "name": "the prompt is read", "hoverinfo": "skip",
            },
            _stems(now),
            {
                "type": "scatter", "x": [1e3 * time for time in now.times],
                "y": [1e3 * gap for gap in now.gaps], "mode": "markers", "name": "a token",
                "marker": {"color": _SAY, "size": 6}, "showlegend": False,
            },
            *_tradeoff(chunk, data),
        ],
        {
            "title": title,
            "xaxis": {
                "anchor": "y", "range": [left, right], "zeroline": False,
                "title": "time since the long prompt came (ms)", "exponentformat": "none",
                "nticks": 6,
            },
            "yaxis": {
                "domain": [0.56, 1], "anchor": "x", "range": [0, high], "title": "gap (ms)",
                "zeroline": False, "nticks": 6,
            },
            "xaxis2": {
                "anchor": "y2", "type": "log", "title": "tokens per chunk", "tickvals": sizes,
                "ticktext": [str(size) for size in sizes],
            },
            "yaxis2": {
                "domain": [0, 0.32], "anchor": "x2", "title": "time",
                **draw.seconds_axis(0.7 * min(times), 1.4 * max(times), (1, 3)),
            },
            "height": 544,
            "legend": {"xref": "container"},
        },
    )  # fmt: skip
    words = "; ".join(
        f"{size}: {draw.seconds(one.worst)} and {draw.seconds(one.ttft)}"
        for size, one in data.items()
    )
    return describe(
        figure,
        f"chunks of {chunk} tokens: {title}, usual gap {draw.seconds(now.usual)}; {now.rows} rows "
        f"decode while a prompt of {now.prompt} tokens is read. "
        f"Longest gap and TTFT by size of the chunks, {words}.",
    )


def _stems(now: Gaps) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for time, gap in zip(now.times, now.gaps, strict=True):
        x += [*([None] if x else []), 1e3 * time, 1e3 * time]
        y += [*([None] if y else []), 0, 1e3 * gap]
    return {
        "type": "scatter", "x": x, "y": y, "mode": "lines", "name": "gap before a token",
        "line": {"color": _SAY, "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip


def _tradeoff(chunk: int, data: Mapping[int, Gaps]) -> list[dict[str, Any]]:
    made = []
    for name, color, told in (
        ("longest gap", _SAY, [one.worst for one in data.values()]),
        ("TTFT of the long prompt", _READ, [one.ttft for one in data.values()]),
    ):
        made.append(
            {
                "type": "scatter", "x": list(data), "y": told, "mode": "lines+markers",
                "name": name, "line": {"color": color, "width": 2}, "xaxis": "x2", "yaxis": "y2",
                "marker": {
                    "color": color, "size": [14 if size == chunk else 6 for size in data],
                    "line": {"width": 0}, "opacity": 1,
                },
                "showlegend": name != "longest gap",
            }
        )  # fmt: skip
    return made


def anatomy(step: int = 1, *, data: Sequence[StepParts]) -> go.Figure:
    """Draw one step: its budget of tokens, decodes first, then chunks of prompts, and what waits.

    step: a position in `data`, from 1; data: such as `scenes.step_parts(run.steps, budget)`. Below
    the budget is what the prompts in the step have left to read. At the bottom are the tokens of
    all steps, with the chosen one marked. Raises ValueError for a position out of range.
    """
    if not 1 <= step <= len(data):
        raise ValueError(f"step must be between 1 and {len(data)}, got {step}")
    now = data[step - 1]
    said, read = sum(now.decodes), sum(count for _, count in now.chunks)
    rest = sum(count for _, count in now.left)
    room = max(now.budget - said - read, 0)
    longest = max(max(sum(c for _, c in one.left) for one in data), now.budget)
    title = f"{said} decoded + {read} of prompts, {now.waiting} waiting"
    slots = [
        _stack("decodes", "this step", said, _SAY, _word(said, longest)),
        *_chunks(data, now, longest),
        _stack("not used", "this step", room, "rgba(128,128,128,0.25)", ""),
        _stack("left for later steps", "later", rest, "#d8b98a", _word(rest, longest)),
    ]
    figure = go.Figure(
        [*slots, *_history(step, data)],
        {
            "title": title,
            "barmode": "stack",
            "xaxis": {
                "anchor": "y", "range": [0, 1.02 * longest], "title": "tokens", "nticks": 6,
                "zeroline": False,
            },
            "yaxis": {
                "domain": [0.62, 1], "anchor": "x", "type": "category", "range": [1.5, -0.5],
                "categoryorder": "array", "categoryarray": ["this step", "later"],
            },
            "xaxis2": {
                "anchor": "y2", "title": "step", "range": [0, len(data) + 1],
                "zeroline": False, "nticks": 8,
            },
            "yaxis2": {
                "domain": [0, 0.38], "anchor": "x2", "title": "tokens", "zeroline": False,
                "range": [0, 1.12 * now.budget], "nticks": 5,
            },
            "height": 504,
            "legend": {"xref": "container", "traceorder": "normal"},
        },
    )  # fmt: skip
    each = ", ".join(f"{count} of prompt {number + 1}" for number, count in now.chunks)
    return describe(
        figure,
        f"step {step}, {draw.seconds(now.seconds)}: {title}. The budget of {now.budget} tokens: "
        f"{said} decodes{', ' + each if each else ''}, {room} not used; {rest} left for later.",
    )


def _word(count: int, longest: int) -> str:
    """Return a number as text if its bar has room for it."""
    return str(count) if count and count >= 0.055 * len(str(count)) * longest else ""


def _stack(name: str, row: str, count: int, color: str, word: str) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "x": [count], "y": [row], "name": name,
        "marker": {"color": color}, "text": [word],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "insidetextfont": {"color": "#ffffff" if color == _SAY else "#222832"},
    }  # fmt: skip


def _chunks(data: Sequence[StepParts], now: StepParts, longest: int) -> list[dict[str, Any]]:
    """Return one bar per chunk, as many as the step with the most chunks has."""
    most = max(len(one.chunks) for one in data)
    made = []
    for at in range(max(most, 1)):
        count, word = 0, ""
        if at < len(now.chunks):
            number, count = now.chunks[at]
            told = f"prompt {number + 1}: {count}"
            word = told if count >= 0.03 * len(told) * longest else ""
        bar = _stack("chunks of prompts", "this step", count, (_READ, "#f3c766")[at % 2], word)
        made.append({**bar, "legendgroup": "chunks", "showlegend": at == 0})
    return made


def _history(step: int, data: Sequence[StepParts]) -> list[dict[str, Any]]:
    numbers = list(range(1, len(data) + 1))  # as the control counts
    now = data[step - 1]
    bars = [
        {
            "type": "bar", "x": numbers, "y": tokens, "name": name, "showlegend": False,
            "marker": {"color": color}, "xaxis": "x2", "yaxis": "y2",
        }
        for name, color, tokens in (
            ("decodes of a step", _SAY, [sum(one.decodes) for one in data]),
            ("prompt tokens of a step", _READ, [sum(c for _, c in one.chunks) for one in data]),
        )
    ]  # fmt: skip
    return [
        *bars,
        {
            "type": "scatter", "x": [step], "y": [1.06 * now.budget], "mode": "markers",
            "marker": {"symbol": "triangle-down", "size": 13, "color": PALETTE["vermillion"]},
            "name": "this step", "showlegend": False, "xaxis": "x2", "yaxis": "y2",
        },
    ]  # fmt: skip
