"""The timeline of one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.checks import one_of
from labcore.parallel.cost import LINKS
from labcore.parallel.protocols import protocol_links
from labcore.parallel.timeline import (
    GPUS,
    MODELS,
    Event,
    Timeline,
    decode_step,
    held_bytes,
    simulate_timeline,
)
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["timeline_view"]

_STREAMS = {  # row, color and name in a timeline
    "host": (2, PALETTE["gray"], "launches"),
    "compute": (1, PALETTE["blue"], "kernels"),
    "wire": (0, PALETTE["vermillion"], "collectives"),
}
_HALF = 0.36  # half a bar's height, in rows
_LETTER = 0.026  # a letter's width on a phone, as a share of the axis
_WHOLE = {"exponentformat": "none", "separatethousands": True}  # 10,000 us, not 10k us
_WAYS = {
    "eager": (False, False),
    "graph": (True, False),
    "eager, overlap": (False, True),
    "graph, overlap": (True, True),
}


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def timeline_view(
    gpus: int = 8,
    graph: bool = False,
    batch: int = 1,
    overlap: bool = False,
    algorithm: str = "ring",
    link: str = "NVLink 4",
    model: str = "7B",
    gpu: str = "H100 SXM",
    context: int = 1024,
    launch_us: float | None = None,
    base_us: float | None = None,
) -> go.Figure:
    """Draw one layer of a decode step on three streams, and below it a token's time in four ways.

    gpus: 1, 2, 4, ..., which must divide the model's dimensions; batch: rows; graph, overlap,
    algorithm: as in `simulate_timeline`; link, model, gpu: keys of LINKS, MODELS and GPUS; context:
    tokens of a row in the cache. launch_us: microseconds a launch; None takes the GPU's.
    base_us: microseconds that a collective costs once, in the fastest of NCCL's protocols
    (`protocol_links`); None takes the link of LINKS, which knows neither.
    The layer is the middle one, from its first kernel to that of the next; its time starts at 0.
    The bars below stack the parts of a token's time: kernels, what the wire adds to them, and the
    rest, in which the device waits. The chosen way is in bold.
    Raises ValueError for arguments that `decode_step` or `simulate_timeline` rejects.
    """
    config, machine = MODELS[model], GPUS[gpu]
    one_of("link", link, LINKS)
    wire = LINKS[link] if base_us is None else protocol_links(link, base=base_us * 1e-6)
    launch = None if launch_us is None else launch_us * 1e-6
    shape: dict[str, Any] = {"ranks": gpus, "batch": batch, "context": context}
    ops = decode_step(config, **shape)
    runs = {
        name: simulate_timeline(
            ops, machine, wire, algorithm=algorithm, graph=by_graph, overlap=cut, launch=launch,
            events=(by_graph, cut) == (graph, overlap),
        )
        for name, (by_graph, cut) in _WAYS.items()
    }  # fmt: skip
    chosen = next(name for name, way in _WAYS.items() if way == (graph, overlap))
    run = runs[chosen]
    held = held_bytes(config, **shape)
    title = f"{draw.seconds(run.seconds)} per token, wire alone {run.wire_share:.0%}"
    notes = (
        f"{run.launches:,} launch{'' if run.launches == 1 else 'es'},<br>{held / 1e9:.3g} GB"
        f"{' of' if held <= machine.capacity else ', above'} {machine.capacity / 1e9:.3g} per GPU"
    )
    begin, end, bars = _layer(run, len(ops), config.num_hidden_layers, gpus)
    wide = draw.ceiling((end - begin) * 1e6)
    figure = go.Figure(
        [
            *(_bars(bars, stream, begin, end) for stream in _STREAMS),
            _names(bars, begin, end, wide),
            *_stacked(runs),
        ],
        {
            "title": title,
            **_two_panels(runs, chosen, wide, notes),
        },
    )
    words = "; ".join(
        f"{name}: {draw.seconds(one.seconds)}, kernels {draw.seconds(one.compute)}, wire alone "
        f"{draw.seconds(one.exposed)}, idle {draw.seconds(one.idle)}"
        for name, one in runs.items()
    )
    return describe(
        figure,
        f"{model}, {_gpus(gpus)}, batch {batch}, {chosen}: {title}, {notes.replace('<br>', ' ')}. "
        f"A token's time, {words}.",
    )


def _two_panels(
    runs: Mapping[str, Timeline], chosen: str, wide: float, notes: str
) -> dict[str, Any]:
    """Return the layout: streams above, a token's ways below.

    wide: µs of the upper axis; notes: below the lower axis's title.
    """
    return {
        "barmode": "stack",
        "xaxis": {
            "anchor": "y", "range": [0, wide], "title": "one layer (µs), simulated",
            "zeroline": False, **_WHOLE,
        },
        "yaxis": {
            "domain": [0.56, 1], "anchor": "x", "range": [-0.5, 2.5], "zeroline": False,
            "tickvals": [row for row, _, _ in _STREAMS.values()], "ticktext": list(_STREAMS),
            "showgrid": False,
        },
        "xaxis2": {
            "anchor": "y2", "title": f"one token (ms), simulated<br>{notes}",
            "rangemode": "tozero",
            "range": [0, 1.04e3 * max(one.seconds for one in runs.values())], **_WHOLE,
        },
        "yaxis2": {
            "domain": [0, 0.36], "anchor": "x2", "type": "category", "autorange": "reversed",
            "tickvals": list(runs),
            "ticktext": [f"<b>{name}</b>" if name == chosen else name for name in runs],
        },
        "height": 560,
        # No room on a phone beside the ways; stacked bars would reverse the order.
        "legend": {"xref": "container", "traceorder": "normal"},
    }  # fmt: skip


def _layer(
    run: Timeline, operations: int, layers: int, gpus: int
) -> tuple[float, float, list[Event]]:
    """Return where the middle layer begins and ends, and all bars that overlap it."""
    before, behind = (2, 3) if gpus > 1 else (1, 2)  # operations outside the layers
    long = (operations - before - behind) // layers
    first = before + long * (layers // 2)
    device = [event for event in run.events if event.stream != "host"]
    begin = next(event.begin for event in device if event.at == first)
    end = next(event.begin for event in device if event.at == first + long)
    return begin, end, [event for event in run.events if event.end > begin and event.begin < end]


def _bars(bars: Sequence[Event], stream: str, begin: float, end: float) -> dict[str, Any]:
    """Return a stream's events as boxes in µs, cut at the ends of the layer."""
    row, color, name = _STREAMS[stream]
    x: list[float | None] = []
    y: list[float | None] = []
    for event in bars:
        if event.stream == stream:
            left, right = (
                1e6 * (min(max(at, begin), end) - begin) for at in (event.begin, event.end)
            )
            gap = [None] if x else []
            x += [*gap, left, right, right, left, left]
            y += [*gap, row - _HALF, row - _HALF, row + _HALF, row + _HALF, row - _HALF]
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return {
        "type": "scatter", "x": x or [None], "y": y or [None], "mode": "lines", "name": name,
        "fill": "toself", "fillcolor": f"rgba({red},{green},{blue},0.4)", "hoverinfo": "skip",
        "line": {"color": color, "width": 1}, "showlegend": False,
    }  # fmt: skip


def _names(bars: Sequence[Event], begin: float, end: float, wide: float) -> dict[str, Any]:
    """Label each bar: always on hover, and on the bar if there's room.

    There is room for words up to twice as long as their bar if they don't reach another bar.
    """
    x, y, words, hover = [], [], [], []
    for stream, (row, _, _) in _STREAMS.items():
        here = [event for event in bars if event.stream == stream]
        edges = [begin, *(edge for event in here for edge in (event.begin, event.end))]
        edges.append(begin + 1.03e-6 * wide)
        for at, event in enumerate(here):
            left, right = max(event.begin, begin), min(event.end, end)
            middle = (left + right) / 2
            # A comma and its space together are as wide as one letter.
            half = 0.5e-6 * _LETTER * wide * len(event.name.replace(", ", ","))
            free = edges[2 * at] <= middle - half and middle + half <= edges[2 * at + 3]
            x.append(1e6 * (middle - begin))
            y.append(row)
            words.append(event.name if free and half <= right - left else "")
            hover.append(f"{event.name}: {draw.seconds(event.end - event.begin)}")
    if not any(event.stream == "host" for event in bars):
        x.append(1e6 * (end - begin) / 2)
        y.append(_STREAMS["host"][0])
        words.append("launched already")
        hover.append("all launches were made before this layer")
    return {
        "type": "scatter", "x": x, "y": y, "mode": "text", "text": words, "hovertext": hover,
        "hoverinfo": "text", "showlegend": False, "textposition": "middle center",
        "textfont": {"size": 10},
    }  # fmt: skip


def _stacked(runs: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Return each way's time per token: kernels, what the wire adds, and the device's idle time."""
    parts = {
        "kernels": ([run.compute for run in runs.values()], PALETTE["blue"]),
        "wire alone": ([run.exposed for run in runs.values()], PALETTE["vermillion"]),
        "device idle": ([run.idle for run in runs.values()], PALETTE["orange"]),
    }
    return [
        {
            "type": "bar", "orientation": "h", "x": [1e3 * one for one in seconds],
            "y": list(runs), "name": name, "xaxis": "x2", "yaxis": "y2",
            "marker": {"color": color},
        }
        for name, (seconds, color) in parts.items()
    ]  # fmt: skip
