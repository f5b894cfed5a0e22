"""Figures for the chapter `attention`: numbers in, plotly figures out."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import median

import plotly.graph_objects as go
import torch
from torch import Tensor

from labcore.attention import configs, traffic
from labcore.attention.traffic import Shape
from labcore.timing import quantiles
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["intensity", "memory", "rates", "rescalings", "resources", "running", "tiles"]

COLORS = {
    "naive": PALETTE["vermillion"],
    "labcore": draw.OURS,
    "flash": draw.OURS,
    "SDPA FLASH": draw.PEER,
}
_SPARE = ("green", "purple", "sky")
_LAW = {"dash": "dash", "width": 1.5}
_RING = {"symbol": "circle-open", "size": 18, "color": PALETTE["gray"], "line": {"width": 3}}
_BLOCKS = tuple(2**power for power in range(4, 11))
_LONG = 4096  # tokens in `intensity`: so many that the queries' bytes hardly matter
_NAIVE_TILE = 128
_STATES = {"skipped": "#c4c9ce", "with a mask": PALETTE["orange"], "whole": PALETTE["blue"]}


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each name: that of the part before its comma, or the next unused one."""
    spare = iter(_SPARE)
    return {name: COLORS.get(name.split(",")[0]) or PALETTE[next(spare, "gray")] for name in names}


def _lengths(values: Sequence[int]) -> dict[str, object]:
    """Return a logarithmic axis with one tick per length."""
    text = [f"{x // 1024}k" if x >= 1024 else str(x) for x in values]
    return {"title": "tokens", "type": "log", "tickvals": list(values), "ticktext": text}


def _size(count: float) -> str:
    """Format bytes for a title, with 3 digits and a unit."""
    power = min(3, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def memory(
    predicted: Mapping[str, Mapping[int, float]],
    measured: Mapping[str, Mapping[int, float]],
    *,
    title: str,
) -> go.Figure:
    """Draw bytes by length on logarithmic axes: predictions as dashed lines, measurements as dots.

    Both: form -> tokens -> bytes.
    """
    figure, words = go.Figure(), []
    colors = _colors([*predicted, *measured])
    for name, curve in predicted.items():
        line = {"color": colors[name], **_LAW}
        figure.add_scatter(
            x=list(curve), y=list(curve.values()), mode="lines", name=f"{name}, model", line=line
        )
    for name, points in measured.items():
        marker = {"color": colors[name], "size": 10}
        figure.add_scatter(
            x=list(points), y=list(points.values()), mode="markers", name=name, marker=marker
        )
        first, last = min(points), max(points)
        words.append(
            f"{name}: {_size(points[first])} at {first} tokens, {_size(points[last])} at {last}"
        )
    every = sorted({x for curve in (*predicted.values(), *measured.values()) for x in curve})
    figure.update_layout(
        title=title,
        xaxis=_lengths(every),
        yaxis={"title": "bytes", "type": "log", "dtick": 1, "exponentformat": "power"},
        height=460,
    )
    return describe(figure, f"{title}. Measured: {'; '.join(words)}.")


def running(
    tops: Sequence[float], totals: Sequence[float], *, exact: float, title: str
) -> go.Figure:
    """Draw one row of online softmax by tile: the largest score and the log-sum-exp so far.

    tops, totals: the state after each tile; exact: the row's true log-sum-exp. A ring marks each
    tile with a new largest score, which rescales the previous sum.
    """
    steps = list(range(1, len(tops) + 1))
    so_far = [top + math.log(total) for top, total in zip(tops, totals, strict=True)]
    grown = [i for i in range(1, len(tops)) if tops[i] > tops[i - 1]]
    figure = go.Figure()
    figure.add_scatter(
        x=steps, y=so_far, mode="lines+markers", name="log-sum-exp so far",
        line={"color": PALETTE["blue"]},
    )  # fmt: skip
    figure.add_scatter(
        x=steps, y=list(tops), mode="lines+markers", name="largest so far",
        line={"color": PALETTE["vermillion"], "shape": "hv"},
    )  # fmt: skip
    figure.add_scatter(
        x=[steps[i] for i in grown], y=[tops[i] for i in grown], mode="markers", name="rescaled",
        marker=_RING,
    )  # fmt: skip
    figure.add_scatter(
        x=[steps[0], steps[-1]], y=[exact] * 2, mode="lines", name="of the whole row",
        line=draw.PREDICTED,
    )  # fmt: skip
    figure.update_layout(title=title, xaxis={"title": "tiles of keys"}, yaxis={"title": "score"})
    places = ", ".join(str(steps[i]) for i in grown) or "none"
    return describe(
        figure,
        f"{title}. The log-sum-exp climbs from {so_far[0]:.3f} to {so_far[-1]:.3f}, the row's is "
        f"{exact:.3f}; rescaled at tile {places}.",
    )


@functools.cache
def _map(count: int, is_causal: bool) -> list[list[int]]:
    """Return what happens to each tile: 0 skipped, 1 computed with a mask, 2 computed without."""
    whole = torch.full((count, count), 2)
    if is_causal:
        whole = whole.tril(-1) + torch.eye(count, dtype=whole.dtype)
    found: list[list[int]] = whole.tolist()
    return found


def rescalings(scores: Tensor, block: int, length: int, *, is_causal: bool) -> float:
    """Return how often a row's largest score grows after its first tile, on average.

    scores: [rows, S], S >= length; the rows represent queries spread evenly over the length.
    """
    rows = scores[:, :length].clone()
    if is_causal:
        ends = torch.linspace(0, length - 1, len(rows)).long()
        rows = rows.masked_fill(torch.arange(length) > ends[:, None], -torch.inf)
    tops = rows.unflatten(1, (-1, block)).amax(-1).cummax(-1).values
    return float((tops[:, 1:] > tops[:, :-1]).sum(-1).float().mean())


def tiles(
    block: int = 128,
    length: int = 1024,
    is_causal: bool = True,
    head_dim: int = 64,
    *,
    data: Tensor,
) -> go.Figure:
    """Draw every tile of one head's scores, and the cost of visiting them, in a 16-bit format.

    data: the scores [rows, S] for `rescalings`; S >= length, a multiple of block.
    """
    shape = Shape(batch=1, heads=1, length=length, head_dim=head_dim, is_causal=is_causal)
    count, live = length // block, traffic.live_tiles(shape, block, block)
    naive, flash = (
        traffic.requested_bytes(shape, form, block_q=block, block_k=block)
        for form in ("naive", "flash")
    )
    grown = rescalings(data, block, length, is_causal=is_causal)
    title = f"{_size(flash)} requested, naive {_size(naive)}"
    notes = f"{live:,} of {count * count:,} tiles, {grown:.1f} rescalings per row"
    colors = list(_STATES.values())
    scale = [[edge / 3, color] for i, color in enumerate(colors) for edge in (i, i + 1)]
    middles = [block * (i + 0.5) for i in range(count)]
    figure = go.Figure(
        {
            "type": "heatmap", "z": _map(count, is_causal), "x": middles, "y": middles,
            "zmin": -0.5, "zmax": 2.5, "colorscale": scale, "showscale": False,
            "xgap": 1 if count <= 64 else 0, "ygap": 1 if count <= 64 else 0,
            "hoverinfo": "skip",
        }
    )  # fmt: skip
    for name, color in _STATES.items():  # a heatmap has no legend entries
        marker = {"symbol": "square", "size": 12, "color": color}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker)
    first = [
        middle for middle, row in zip(middles, _map(count, is_causal), strict=True) if row[0] == 2
    ]
    figure.add_scatter(
        x=middles[:1] * len(first) or (None,), y=first or (None,), mode="markers",
        name="masked by our kernel too", hoverinfo="skip", showlegend=bool(first),
        marker={"symbol": "square", "size": min(12, 200 / count), "color": PALETTE["orange"]},
    )  # fmt: skip
    figure.update_layout(
        title=title,
        xaxis={"title": f"keys<br>{notes}", "range": [0, length], "constrain": "domain"},
        yaxis={"title": "queries", "range": [length, 0], "scaleanchor": "x"},
        height=500,
    )
    return figure


def _own_tile(machine: traffic.Gpu, head_dim: int) -> int | None:
    """Return the forward kernel's queries per tile on that GPU; None if it doesn't run there."""
    backend = "hip" if machine.name.startswith("MI") else "cuda"
    if backend == "cuda" and machine.sram < traffic.GPUS["RTX 4090"].sram:
        return None
    kind = configs.kind_for(backend, 9, machine.sram)  # no GPU of the table is newer than Hopper
    return configs.FORWARD[head_dim][kind].m


def intensity(gpu: str = "H100", head_dim: int = 128) -> go.Figure:
    """Draw FLOP per requested byte by the queries of a tile, with what the GPU needs.

    gpu: a key of `traffic.GPUS`; head_dim: 64, 128 or 256. Keys come in tiles of 32, with two tiles
    in flight; numbers have 16 bits, 4,096 tokens, no mask. The naive form's matrix products have
    tiles of 128 by 128.
    """
    machine = traffic.GPUS[gpu]
    shape = Shape(batch=1, heads=1, length=_LONG, head_dim=head_dim)
    work = traffic.flops(shape)
    reached = {
        block: work / traffic.flash_bytes(shape, block_q=block, block_k=32) for block in _BLOCKS
    }
    naive = traffic.requested_bytes(shape, "naive", block_q=_NAIVE_TILE, block_k=_NAIVE_TILE)
    ridge = machine.matmul / machine.bandwidth
    fits = traffic.largest_block(machine.sram, head_dim=head_dim, block_k=32)
    figure = go.Figure()
    for name, y, color in (
        ("needed", ridge, "green"),
        ("naive form", work / naive, "vermillion"),
    ):
        line = {"color": PALETTE[color], **_LAW}
        figure.add_scatter(
            x=[_BLOCKS[0], _BLOCKS[-1]], y=[y, y], mode="lines", name=name, line=line
        )
    figure.add_scatter(
        x=list(reached),
        y=list(reached.values()),
        mode="lines+markers",
        name="tiles",
        line={"color": PALETTE["blue"]},
    )
    diamond = {"symbol": "diamond", "size": 15, "color": PALETTE["orange"]}
    for name, block, marker in (
        ("our kernel's tile", _own_tile(machine, head_dim), diamond),
        ("largest that fits", min(fits, _BLOCKS[-1]) or None, _RING),
    ):
        figure.add_scatter(
            x=[block], y=[reached.get(block)], mode="markers", name=name, marker=marker
        )
    held = f"{fits:,} queries fit" if fits else "no room for queries"
    powers = [2**power for power in range(2, 11)]
    figure.update_layout(
        title=f"{held}, {ridge:.0f} FLOP/byte needed",
        xaxis={
            "title": f"queries per tile, {machine.sram // 1024} KiB for a program",
            "type": "log",
            "tickvals": list(_BLOCKS),
            "ticktext": [str(x) for x in _BLOCKS],
        },
        yaxis={
            "title": "FLOP per byte requested",
            "type": "log",
            "range": [0.9, 3.1],
            "tickvals": powers,
            "ticktext": [str(x) for x in powers],
        },
        height=444,
    )
    return figure


def rates(
    curves: Mapping[str, Mapping[int, Sequence[float]]],
    *,
    unit: str,
    title: str,
    limits: Mapping[str, float] | None = None,
) -> go.Figure:
    """Draw median rates by length, with the 20th and 80th percentile for several samples.

    curves: form -> tokens -> samples, in `unit`; limits: name -> a level, dashed.
    """
    figure, colors = go.Figure(), _colors(list(curves))
    for name, by_length in curves.items():
        spread = [quantiles(list(samples)) for samples in by_length.values()]
        bars = {
            "array": [high - middle for _, middle, high in spread],
            "arrayminus": [middle - low for low, middle, _ in spread],
            "thickness": 1.2,
        }
        figure.add_scatter(
            x=list(by_length), y=[middle for _, middle, _ in spread], error_y=bars,
            mode="lines+markers", name=name, line={"color": colors[name]},
        )  # fmt: skip
    every = sorted({x for by_length in curves.values() for x in by_length})
    for (name, level), dash in zip((limits or {}).items(), ("dash", "dot"), strict=False):
        line = {"color": PALETTE["gray"], "dash": dash, "width": 1.5}
        ends = [every[0], every[-1]]
        figure.add_scatter(x=ends, y=[level] * 2, mode="lines", name=name, line=line)
    figure.update_layout(
        title=title, xaxis=_lengths(every), yaxis={"title": unit, "rangemode": "tozero"}, height=460
    )
    words = "; ".join(
        f"{name}: " + ", ".join(f"{median(samples):.3g} at {x}" for x, samples in by_length.items())
        for name, by_length in curves.items()
    )
    words += "".join(f"; {name} {level:.3g}" for name, level in (limits or {}).items())
    return describe(figure, f"{title}, in {unit}. {words}.")


def resources(
    kernels: Mapping[str, Mapping[str, Mapping[str, int]]], targets: Sequence[str], *, title: str
) -> go.Figure:
    """Draw each kernel's registers as compiled, also shown by color, and shared memory below.

    kernels: name -> target -> registers, spills and shared, in bytes; targets: the columns.
    """
    cells, words = [], []
    for name, row in kernels.items():
        cells.append([_cell(row[target]) for target in targets])
        shown = ", ".join(
            f"{target} {row[target]['registers']}, {row[target]['spills']} spilled, "
            f"{row[target]['shared'] // 1024} KiB"
            for target in targets
        )
        words.append(f"{name}: {shown}")
    figure = go.Figure(
        {
            "type": "heatmap",
            "z": [[row[target]["registers"] for target in targets] for row in kernels.values()],
            "x": list(targets),
            "y": [name.replace(" ", "<br>") for name in kernels],
            "text": cells,
            "texttemplate": "%{text}",
            "textfont": {"size": 9, "color": "#222832"},
            "colorscale": [[0, "#eef4fb"], [1, "#86bde6"]],
            "zmin": 0,
            "zmax": 256,
            "showscale": False,
            "xgap": 2,
            "ygap": 2,
            "hoverinfo": "skip",
        }
    )
    figure.update_layout(
        title=title, xaxis={"tickangle": -60}, yaxis={"autorange": "reversed"}, height=500
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


def _cell(need: Mapping[str, int]) -> str:
    """Format registers, KiB of shared memory, and spills if there are any, for cells of 20 px."""
    spilled = f"<br>{need['spills']} spilled" if need["spills"] else ""
    return f"<b>{need['registers']}</b><br>{need['shared'] // 1024}{spilled}"
