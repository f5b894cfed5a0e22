"""The tiles of a head's scores, and what a tile needs of a GPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from labcore import records
from labcore.attention import traffic
from labcore.attention.traffic import Shape
from labcore.ui import draw
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["DESIGNER_FORMULA", "designer", "grid", "rescalings", "size_of", "tiles"]

_STATES = {"skipped": "#c4c9ce", "with a mask": PALETTE["orange"], "whole": PALETTE["blue"]}
_CARDS = {"sm_80": "A100", "sm_90": "H100"}
_FITS, _OVER = PALETTE["blue"], PALETTE["vermillion"]
_MOST = 255  # registers of a thread
_SPILLED = 130.0  # percent drawn for registers that spill: how many they lack isn't known


def size_of(count: float) -> str:
    """Format bytes for a title, with 3 digits and a unit."""
    power = min(3, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


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
    title = f"{size_of(flash)} requested, naive {size_of(naive)}"
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
    figure.update_layout(
        title=title,
        xaxis={"title": f"keys<br>{notes}", "range": [0, length], "constrain": "domain"},
        yaxis={"title": "queries", "range": [length, 0], "scaleanchor": "x", "constrain": "domain"},
        height=500,
    )
    return figure


@functools.cache
def grid() -> dict[str, Any]:
    """Return the record of compiled tiles, as JSON values: "tiles", "limits" and "needed".

    tiles: "target head_dim rows columns stages warps" -> registers, spills in bytes, shared memory
    in bytes as compiled and by the formula. limits: the bytes of shared memory that a
    block may use. needed: the FLOP per byte that keep the GPU's matrix units busy.
    """
    kept = records.find("attention", "compiled/tiles", "tiles that fit").details
    found = {}
    for name, need in kept["tiles"].items():
        _, head_dim, rows, columns, stages, _ = (int(x) if x.isdigit() else 0 for x in name.split())
        formula = traffic.sram_bytes(
            block_q=rows, block_k=columns, head_dim=head_dim, stages=stages
        )
        found[name] = {**need, "formula": formula}
    cards = {target: traffic.GPUS[card] for target, card in _CARDS.items()}
    needed = {target: card.matmul / card.bandwidth for target, card in cards.items()}
    return {"tiles": found, "limits": kept["limits"], "needed": needed}


def designer(
    rows: int = 128,
    columns: int = 128,
    stages: int = 2,
    warps: int = 8,
    head_dim: int = 128,
    target: str = "sm_90",
) -> go.Figure:
    """Draw what a forward tile needs as shares of what a block may have, by the compiled record.

    target: "sm_80" or "sm_90". The page computes it by the formula `attentionDesigner`.
    """
    table = grid()
    need = table["tiles"][f"{target} {head_dim} {rows} {columns} {stages} {warps}"]
    limit = table["limits"][target]
    shared, formula, spills = need["shared"], need["formula"], need["spills"]
    if shared > limit:
        title = f"Too large: {shared // 1024} of {limit // 1024} KiB"
    elif spills:
        title = f"Registers spill: {spills:,} bytes"
    else:
        title = f"Fits: {shared // 1024} of {limit // 1024} KiB, {need['registers']} registers"
    registers = 100.0 * need["registers"] / _MOST
    figure = go.Figure()
    figure.add_bar(
        x=[100 * formula / limit, 100 * shared / limit, _SPILLED if spills else registers],
        y=["SRAM, formula", "SRAM, compiled", "registers"],
        text=[
            *(f"{size // 1024} KiB" for size in (formula, shared)),
            "spill" if spills else str(need["registers"]),
        ],
        marker={"color": [
            _OVER if formula > limit else _FITS,
            _OVER if shared > limit else _FITS,
            _OVER if spills else _FITS,
        ]},
        orientation="h", textposition="auto", hoverinfo="skip",
    )  # fmt: skip
    figure.add_vline(x=100, line=draw.PREDICTED)
    needed = f"{table['needed'][target]:.0f}"
    figure.update_layout(
        title=title,
        xaxis={
            "title": "% of the limit<br>"
            f"requests a byte per {rows} FLOP;<br>HBM delivers one per {needed}",
            "range": [0, 175],
        },
        yaxis={"autorange": "reversed"},
        height=340,
    )
    return figure


DESIGNER_FORMULA = Formula("attentionDesigner", grid)
