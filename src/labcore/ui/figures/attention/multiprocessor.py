"""A multiprocessor at work: where the numbers lie, and which of its units work when."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labcore.attention import traffic
from labcore.ui.theme import PALETTE

__all__ = ["FORMS", "MOMENTS", "machine"]

FORMS = ("three lines", "ours, warps run ahead", "ours, warps take turns", "FA3's ping-pong")
MOMENTS = 16
# TFLOP/s on an H100 SXM in fp16 at 16k tokens without a mask, by head dimension: the preprint of
# FlashAttention-3, July 2024, arXiv 2407.08608.
PUBLISHED = {64: 497, 128: 648}
_BINS = 64
_ROWS = ("softmax B", "softmax A", "products B", "products A", "copies")  # from the bottom
_A, _B, _SHARED, _OFF = PALETTE["blue"], PALETTE["orange"], PALETTE["gray"], "rgba(128,128,128,0.1)"
_INK = "#808080"
# Boxes of the picture: x from, x to, y from, y to, in a square of 10 by 4.
_BOXES = {
    "HBM": (0.0, 1.9, 0.3, 3.7),
    "shared memory": (2.6, 5.0, 0.3, 3.7),
    "tensor cores": (5.7, 10.0, 2.75, 3.7),
    "warps A": (5.7, 10.0, 1.5, 2.45),
    "warps B": (5.7, 10.0, 0.3, 1.25),
}
_NAIVE = (("QKᵀ", "Q, K → S"), ("softmax", "S → P"), ("PV", "P, V → O"))
Rows = dict[str, list[float]]


def machine(
    moment: int = 0,
    form: str = FORMS[0],
    head_dim: int = 128,
    *,
    data: Mapping[str, Mapping[str, Any]],
) -> go.Figure:
    """Draw an SM of an H100 at one of MOMENTS, above the work of its units over time.

    form: one of FORMS. data: "D 64, ahead" and so on -> the details of `compiled/timeline`: clocks,
    and rows of shares of time for the products and the softmax of two groups of warps.
    """
    rows, told = _work(form, head_dim, data)
    at = min(_BINS - 1, (2 * moment + 1) * _BINS // (2 * MOMENTS))
    now = {name: row[at] for name, row in rows.items()}
    figure = make_subplots(rows=2, cols=1, row_heights=[0.45, 0.55], vertical_spacing=0.06)
    _draw_boxes(figure, now, form, at)
    for names, color in (
        (_ROWS[4:], _SHARED),
        (("products A", "softmax A"), _A),
        (("products B", "softmax B"), _B),
    ):
        figure.add_heatmap(
            z=[rows[name] if name in names else [None] * _BINS for name in _ROWS],
            x=[*range(_BINS)], y=[*range(len(_ROWS))], zmin=0, zmax=1,
            colorscale=[[0, _OFF], [1, color]], showscale=False, hoverinfo="skip", ygap=4,
            row=2, col=1,
        )  # fmt: skip
    figure.add_scatter(
        x=[at, at], y=[-0.5, 4.5], mode="lines", hoverinfo="skip", row=2, col=1,
        line={"color": PALETTE["vermillion"], "width": 2},
    )  # fmt: skip
    figure.update_layout(title=_title(rows, form, head_dim), showlegend=False, height=500)
    hidden = {"visible": False, "fixedrange": True}
    figure.update_xaxes(range=[0, 10], **hidden, row=1, col=1)
    figure.update_yaxes(range=[0, 4], **hidden, row=1, col=1)
    bare = {"showgrid": False, "zeroline": False, "ticks": ""}
    figure.update_xaxes(title=told, showticklabels=False, **bare, row=2, col=1)
    figure.update_yaxes(
        tickvals=[*range(5)], ticktext=_ROWS, range=[-0.5, 4.5], **bare, row=2, col=1
    )
    return figure


def _title(rows: Rows, form: str, head_dim: int) -> str:
    """Return how much the tensor cores work by the model, and for FA3 the published share."""
    busy = sum(rows["products A"] + rows["products B"]) / (_BINS * (2 if form == FORMS[0] else 1))
    if form == FORMS[3]:
        share = PUBLISHED[head_dim] * 1e12 / traffic.GPUS["H100"].matmul
        return f"Tensor cores: ideal {busy:.0%}, published {share:.0%}"
    return f"Tensor cores at work: {busy:.0%}, by a model"


def _work(form: str, head_dim: int, data: Mapping[str, Mapping[str, Any]]) -> tuple[Rows, str]:
    """Return each row's share of every bin in which its unit works, and the axis's words."""
    if form == FORMS[0]:
        return _naive(head_dim), "time, by the data sheet"
    own = data[f"D {head_dim}, {'turns' if form == FORMS[2] else 'ahead'}"]
    if form == FORMS[3]:
        return _ping_pong(own["rows"]), "time of two steps, idealized"
    rows = {"copies": [0.5] * _BINS}  # the model doesn't time them; it assumes that they are done
    for unit, name in (("products", "matrix"), ("softmax", "softmax")):
        for letter, row in zip("AB", own["rows"][name], strict=True):
            rows[f"{unit} {letter}"] = row
    return rows, f"time of two steps: {own['clocks']:,} clocks"


def _ping_pong(own: Mapping[str, Sequence[Sequence[float]]]) -> Rows:
    """Return FlashAttention-3's order: one group's products during the other group's softmax.

    own: as in `_work`, of our kernel, whose products and softmax give the lengths.
    """
    products, softmax = (sum(own[name][0]) for name in ("matrix", "softmax"))
    half = _BINS // 4

    def part(length: float) -> list[float]:
        filled = half * length / max(products, softmax)
        return [min(1.0, max(0.0, filled - at)) for at in range(half)]

    idle = [0.0] * half
    return {
        "products A": (part(products) + idle) * 2,
        "products B": (idle + part(products)) * 2,
        "softmax A": (idle + part(softmax)) * 2,
        "softmax B": (part(softmax) + idle) * 2,
        "copies": [0.5] * _BINS,
    }


@functools.cache
def _naive(head_dim: int) -> Rows:
    """Return the work of the three operations, each as long as the slower of its two resources."""
    gpu = traffic.GPUS["H100"]
    products, moved = 2 * head_dim / gpu.matmul, 2 / gpu.bandwidth  # per score, in 16 bits
    exponential = 1 / (gpu.exponentials * gpu.units * gpu.clock)
    parts = [(moved, products, 0.0), (2 * moved, 0.0, exponential), (moved, products, 0.0)]
    ends: list[float] = []
    total = sum(max(part) for part in parts)
    for part in parts:
        ends.append((ends[-1] if ends else 0.0) + _BINS * max(part) / total)
    rows: Rows = {name: [] for name in _ROWS}
    for at in range(_BINS):
        which = next(i for i, end in enumerate(ends) if at + 0.5 <= end)
        copies, product, exps = (work / max(parts[which]) for work in parts[which])
        rows["copies"].append(copies)
        for letter in "AB":
            rows[f"products {letter}"].append(product)
            rows[f"softmax {letter}"].append(exps)
    return rows


def _draw_boxes(figure: go.Figure, now: Mapping[str, float], form: str, at: int) -> None:
    """Draw the parts of the multiprocessor, those at work in color, and what moves."""
    naive = form == FORMS[0]
    products = {letter: now[f"products {letter}"] for letter in "AB"}
    busier = max(products, key=lambda letter: products[letter])
    tensor = _SHARED if naive else (_A if busier == "A" else _B)
    lit = {
        "HBM": (now["copies"], _SHARED),
        "shared memory": (now["copies"], _SHARED),
        "tensor cores": (max(products.values()), tensor),
        "warps A": (now["softmax A"], _SHARED if naive else _A),
        "warps B": (now["softmax B"], _SHARED if naive else _B),
    }
    for start, end, y, work in (
        (1.9, 2.6, 2.0, now["copies"]),
        (5.0, 5.7, 3.2, max(products.values())),
        (5.0, 5.7, 1.95, now["softmax A"] if naive else 0.0),
        (5.0, 5.7, 0.75, now["softmax B"] if naive else 0.0),
    ):
        figure.add_scatter(
            x=[start, end], y=[y, y], mode="lines", hoverinfo="skip", row=1, col=1,
            line={"color": _INK, "width": 6 if work > 0.05 else 1},
        )  # fmt: skip
    for name, (left, right, low, high) in _BOXES.items():
        work, color = lit[name]
        figure.add_scatter(
            x=[left, right, right, left, left], y=[low, low, high, high, low], mode="lines",
            fill="toself", fillcolor=_faded(color, work), hoverinfo="skip",
            line={"color": _INK, "width": 1}, row=1, col=1,
        )  # fmt: skip
    figure.add_scatter(
        x=[(left + right) / 2 for left, right, _, _ in _BOXES.values()],
        y=[(low + high) / 2 for _, _, low, high in _BOXES.values()],
        mode="text", text=_labels(now, naive, at), textfont={"size": 11}, hoverinfo="skip",
        row=1, col=1,
    )  # fmt: skip


def _labels(now: Mapping[str, float], naive: bool, at: int) -> Sequence[str]:
    """Return the words on the boxes, in the order of _BOXES."""
    if naive:
        which = 1 if now["softmax A"] > 0 else 0 if at < _BINS // 2 else 2
        name, moved = _NAIVE[which]
        work = "softmax" if which == 1 else "wait"
        return [
            "<b>HBM</b><br>Q, K, V<br>S, P, O", f"<b>shared<br>memory</b><br>{moved}",
            f"<b>tensor cores</b><br>{name if which != 1 else 'idle'}",
            f"<b>warps A</b>: {work}", f"<b>warps B</b>: {work}",
        ]  # fmt: skip

    def doing(letter: str) -> str:
        state = "softmax" if now[f"softmax {letter}"] >= 0.1 else "wait"
        return f"<b>warps {letter}</b>: {state}<br>m, ℓ, a"

    works = [letter for letter in "AB" if now[f"products {letter}"] > 0.05]
    held = f"for {' and '.join(works)}" if works else "idle"
    return [
        "<b>HBM</b><br>Q, K, V<br>and O", "<b>shared<br>memory</b><br>Q, K, V<br>tiles",
        f"<b>tensor cores</b><br>{held}", doing("A"), doing("B"),
    ]  # fmt: skip


def _faded(color: str, work: float) -> str:
    """Return a fill of that hex color, stronger the more a unit works."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{0.06 + 0.5 * min(1.0, work):.2f})"
