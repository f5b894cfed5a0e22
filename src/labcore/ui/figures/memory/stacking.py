"""Levers that stack: a GPU's peak and a step's seconds as methods are applied one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from labcore.attention.traffic import Shape, flops
from labcore.memory.accounting.prediction import Settings
from labcore.memory.levers import (
    CAUSES,
    CHUNK,
    PASSES,
    SERVER,
    Levers,
    Plan,
    elementwise_bytes,
    plan,
)
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.memory.choices import (
    CARDS,
    CHECKPOINTING,
    COLORS,
    MODELS,
    OPTIMIZERS,
    in_bytes,
    verdict,
)
from labcore.ui.figures.memory.tables import DTYPES, peak_table
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["ADAPTERS", "LEVERS_FORMULA", "PRECISIONS", "WAYS", "levers"]

# QLoRA's codes: 4 bits, and per 64 weights a scale of 8 bits, of which 256 share one in fp32.
_RANK, _BITS = 16, 4 + 8 / 64 + 32 / (64 * 256)
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "LoRA": {"rank": _RANK},
    "QLoRA": {"rank": _RANK, "bits": _BITS},
}
PRECISIONS = {"float32": "fp32", "mixed": "autocast", "bfloat16": "bf16"}
WAYS = ("none", "selective", "every layer")
CAUSE_COLORS = dict(
    zip(
        CAUSES,
        (PALETTE[c] for c in ("green", "purple", "vermillion", "gray", "orange")),
        strict=True,
    )
)
PLAIN = Levers()
CUT = 2.5


def _applied(chosen: Levers, checkpointing: str) -> dict[str, Levers]:
    """Return the levers after each that differs from plain training, by its name on the axis."""
    names = {
        "dtype": PRECISIONS[chosen.dtype],
        "optimizer": OPTIMIZERS[chosen.optimizer],
        "fused": "fused step",
        "checkpointing": "selective" if checkpointing == "selective" else "recompute",
        "parts": f"{chosen.parts} parts",
        "no_logits": "no logits",
        "zero_stage": f"ZeRO {chosen.zero_stage}",
        "offload": "offload",
        "rank": "LoRA",
        "bits": "4-bit base",
    }
    found, now = {"plain": PLAIN}, PLAIN
    for field, name in names.items():
        value = getattr(chosen, field)
        if value != getattr(PLAIN, field):
            now = replace(now, **{field: value})
            found[f"+ {name}"] = now
    return found


def levers(
    model: str = "7B",
    card: str = "A100",
    devices: int = 1,
    rows: int = 4,
    length: int = 4096,
    dtype: str = "bfloat16",
    optimizer: str = "adamw8bit",
    fused: bool = False,
    checkpointing: str = "every layer",
    parts: int = 1,
    no_logits: bool = True,
    zero_stage: int = 0,
    offload: bool = False,
    adapters: str = "none",
    share: float = 0.5,
) -> go.Figure:
    """Draw the peak and the seconds per step of plain training, and after each lever, by `plan`.

    model: a key of MODELS; card: of CARDS; checkpointing: of CHECKPOINTING. adapters: of ADAPTERS.
    A bar more than CUT times as long as the last, or as the card's memory, is cut and marked ».
    The levers are those of `Levers`, applied in this order: precision, optimizer, fused step,
    checkpointing, accumulation, loss without logits, ZeRO, offload, adapters, codes of their base.
    More parts than rows count as one row each.
    """
    chosen = Levers(
        dtype=dtype, optimizer=optimizer, fused=fused, checkpointing=CHECKPOINTING[checkpointing],
        parts=min(parts, rows), no_logits=no_logits, zero_stage=zero_stage, offload=offload,
        **ADAPTERS[adapters],
    )  # fmt: skip
    told: dict[str, Any] = {"rows": rows, "length": length, "devices": devices, "share": share}
    plans = {
        name: plan(MODELS[model], CARDS[card], one, **told)
        for name, one in _applied(chosen, checkpointing).items()
    }
    last, capacity = [*plans.values()][-1], CARDS[card].gpu.memory
    title = verdict(last.held.total, capacity)
    title += f"<br>{draw.seconds(last.step)} per step if nothing overlaps"
    words = "; ".join(
        f"{name}: {in_bytes(one.held.total)}, {draw.seconds(one.step)}"
        for name, one in plans.items()
    )
    figure = _bars(plans, title=title, capacity=capacity)
    return describe(figure, f"{title}. {words}.".replace("<br>", ", "))


def _cut(
    bars: Sequence[Mapping[str, float]], limit: float
) -> tuple[dict[str, list[float]], list[float], list[str]]:
    """Return each part's lengths, no bar longer than `limit`, the totals, and marks of the cut."""
    shown: dict[str, list[float]] = {part: [] for part in bars[0]}
    for bar in bars:
        left = limit
        for part, size in bar.items():
            shown[part].append(min(size, left))
            left -= shown[part][-1]
    totals = [sum(bar.values()) for bar in bars]
    return shown, totals, ["» " if total > limit else "" for total in totals]


def _bars(plans: Mapping[str, Plan], *, title: str, capacity: float) -> go.Figure:
    names, last = list(plans), [*plans.values()][-1]
    most, longest = CUT * max(last.held.total, capacity), CUT * last.step
    sizes, totals, over = _cut([one.held.parts() for one in plans.values()], most)
    causes, steps, later = _cut([one.seconds for one in plans.values()], longest)

    def bars(which: str, colors: Mapping[str, str], **place: str) -> list[dict[str, Any]]:
        return [
            {"type": "bar", "orientation": "h", "y": names, "name": name, "legendgroup": which,
             "marker": {"color": color}, **place}
            for name, color in colors.items()
        ]  # fmt: skip

    held = bars("bytes", COLORS)
    for bar, part in zip(held, COLORS, strict=True):
        bar["x"] = [size / 1e9 for size in sizes[part]]
    time = bars("time", CAUSE_COLORS, xaxis="x2", yaxis="y2")
    for bar, cause in zip(time, CAUSES, strict=True):
        bar["x"] = causes[cause]
    outside = {"textposition": "outside", "cliponaxis": False, "constraintext": "none"}
    held[-1] |= {"text": [m + in_bytes(x) for m, x in zip(over, totals, strict=True)], **outside}
    time[-1] |= {
        "text": [m + draw.seconds(x) for m, x in zip(later, steps, strict=True)],
        **outside,
    }
    return go.Figure(
        [*held, *time],
        {
            "title": {"text": title, "pad": {"t": 18}},
            "barmode": "stack",
            "xaxis": {"title": "GB at the peak", "anchor": "y",
                      "range": [0, 1.3 * max(min(max(totals), most), capacity) / 1e9]},
            "xaxis2": {"title": "seconds per step", "anchor": "y2",
                       "range": [0, 1.3 * min(max(steps), longest)]},
            "yaxis": {"domain": [0.57, 1], "autorange": "reversed", "type": "category"},
            "yaxis2": {"domain": [0, 0.43], "autorange": "reversed", "type": "category",
                       "anchor": "x2"},
            "shapes": [
                {"type": "line", "x0": capacity / 1e9, "x1": capacity / 1e9, "yref": "y domain",
                 "y0": 0, "y1": 1, "line": draw.PREDICTED}
            ],
            "annotations": [
                {"x": capacity / 1e9, "y": 1, "yref": "y domain", "yanchor": "bottom",
                 "text": f"{in_bytes(capacity)} card", "showarrow": False}
            ],
            "height": 760,
            "margin": {"t": 100},
        },
    )  # fmt: skip


def _levers_data() -> dict[str, Any]:
    def work(model: str) -> dict[str, Any]:
        config = MODELS[model]
        told: dict[str, Any] = {"batch": 1, "length": 1, "device": "gpu", "dtype": "bfloat16"}
        part = Settings(**told).ends(config)[0]
        adapted = Settings(**told, rank=_RANK).ends(config)[0]
        pairs = flops(Shape(batch=1, heads=config.num_attention_heads, length=1,
                            head_dim=config.head_size, is_causal=True))  # fmt: skip
        layers = config.num_hidden_layers
        return {
            "matrices": layers * part.elements("proj.weight"),
            "down": layers * part.elements("down_proj.weight"),
            "adapters": layers * adapted.gradients() / adapted.wide,
            "head": part.table,
            "pair": layers * pairs,
            "elementwise": {
                dtype: elementwise_bytes(Settings(**{**told, "dtype": dtype}).ends(config)[0])
                for dtype in DTYPES
            },
        }

    kinds = {
        f"{no_logits} {number}": peak_table(WAYS, chunk=CHUNK if no_logits else None, **settings)
        for no_logits in (0, 1)
        for number, settings in enumerate(ADAPTERS.values())
    }
    cards = {
        name: {
            "memory": card.gpu.memory, "bandwidth": card.gpu.bandwidth, "link": card.link,
            "network": card.network, "host": card.host, "main": card.main,
            "rates": {dtype: card.rate(dtype) for dtype in DTYPES},
        }
        for name, card in CARDS.items()
    }  # fmt: skip
    return {
        "kinds": kinds,
        "cards": cards,
        "work": {model: work(model) for model in MODELS},
        "names": {"dtype": PRECISIONS, "optimizer": OPTIMIZERS},
        "passes": PASSES,
        "server": SERVER,
        "cut": CUT,
    }


LEVERS_FORMULA = Formula("memoryLevers", _levers_data)
