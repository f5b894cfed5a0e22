"""Figures for the chapter `memory`: numbers in, plotly figures out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from labcore.claims import Measured
from labcore.memory import Breakdown, Moment, estimate
from labcore.memory.accounting.part import Part
from labcore.memory.accounting.prediction import DTYPES, MOMENTS, OPTIMIZERS
from labcore.memory.accounting.states import STAGES
from labcore.models import LlamaConfig
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = [
    "CAPACITIES",
    "CHECKPOINTING",
    "MODELS",
    "MOMENTS_FORMULA",
    "STAGES_FORMULA",
    "modules",
    "moments",
    "points",
    "prices",
    "stacks",
    "stages",
    "stretches",
    "timeline",
]

COLORS = {
    "parameters": PALETTE["gray"],
    "gradients": PALETTE["sky"],
    "optimizer": PALETTE["vermillion"],
    "activations": PALETTE["blue"],
    "workspace": PALETTE["orange"],
}
CAPACITIES = (16, 24, 80, 141)  # GB on the labels of common GPUs
MODELS = {  # the shapes of TinyLlama and of Llama 2
    name: LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
    )
    for name, (width, wide, layers, heads, kv_heads) in {
        "1.1B": (2048, 5632, 22, 32, 4),
        "7B": (4096, 11008, 32, 32, 32),
        "13B": (5120, 13824, 40, 40, 40),
        "70B": (8192, 28672, 80, 64, 8),
    }.items()
}
CHECKPOINTING: Mapping[str, int | str | None] = {
    "none": None,
    "selective": "selective",
    "every 4 layers": 4,
    "every layer": 1,
}
_MOST_POINTS = 250  # per timeline, because the page contains each of them five times


def _size(count: float) -> str:
    """Format bytes with 3 digits and a unit."""
    power = min(4, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _ceiling(tallest: float) -> float:
    """Return the end of the axis in GB: above the bars and the next larger capacity."""
    above = [line for line in CAPACITIES if line >= tallest]
    return 1.1 * max(tallest, above[0] if above else CAPACITIES[-1])


def _stacked(columns: Mapping[str, Breakdown], title: str) -> go.Figure:
    names, top = list(columns), _ceiling(max(held.total for held in columns.values()) / 1e9)
    lines = sorted(CAPACITIES, reverse=True)
    return go.Figure(
        [
            {
                "type": "bar",
                "x": names,
                "y": [held.parts()[part] / 1e9 for held in columns.values()],
                "name": part,
                "marker": {"color": color},
            }
            for part, color in COLORS.items()
        ],
        {
            "title": {"text": title, "pad": {"t": 18}},
            "barmode": "stack",
            "xaxis": {"type": "category"},
            "yaxis": {"title": "GB", "range": [0, top]},
            "shapes": [
                {
                    "type": "line",
                    "xref": "paper",
                    "x0": 0,
                    "x1": 1,
                    "y0": y,
                    "y1": y,
                    "line": draw.PREDICTED,
                    "visible": y < top,
                }
                for y in lines
            ],
            "annotations": _labels(lines, top),
            "height": 480,
            "margin": {"t": 40 + 20 * title.count("<br>"), "r": 64},
        },
    )


def _labels(lines: Sequence[float], top: float) -> list[dict[str, object]]:
    """Return labels beside the lines, from the highest down; those that would overlap hide."""
    place = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False}
    labels, last = [], math.inf
    for line in lines:
        shown = line < top and last - line > 0.05 * top
        last = line if shown else last
        labels.append({"text": f"{line} GB", "y": line, "visible": shown, **place})
    return labels


def stacks(columns: Mapping[str, Breakdown], *, title: str) -> go.Figure:
    """Draw each column's bytes stacked by purpose, with the memory of common GPUs."""
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{part} {_size(size)}" for part, size in held.parts().items() if size)
        + f", together {_size(held.total)}"
        for name, held in columns.items()
    )
    return describe(_stacked(columns, title), f"{title}. {words}.".replace("<br>", " "))


def moments(
    model: str = "7B",
    length: int = 4096,
    batch: int = 1,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    checkpointing: str = "none",
) -> go.Figure:
    """Draw what one GPU holds at the peak of each part of a step, by `memory.estimate`.

    model: a key of MODELS; checkpointing: a key of CHECKPOINTING; the rest as in `estimate`.
    """
    columns = {
        moment: estimate(
            MODELS[model],
            batch=batch,
            length=length,
            dtype=dtype,
            optimizer=optimizer,
            checkpointing=CHECKPOINTING[checkpointing],
            moment=moment,
            device="gpu",
        )
        for moment in MOMENTS
    }
    highest = max(columns, key=lambda moment: columns[moment].total)
    return _stacked(columns, f"Peak: {_size(columns[highest].total)}, in the {highest}")


def stages(
    optimizer: str = "adamw",
    checkpointing: str = "none",
    model: str = "7B",
    dtype: str = "bfloat16",
    batch: int = 1,
    length: int = 4096,
    devices: int = 8,
) -> go.Figure:
    """Draw the peak on one of `devices` GPUs by ZeRO stage, each with its batch; see `moments`."""
    columns = {
        f"stage {stage}": estimate(
            MODELS[model],
            batch=batch,
            length=length,
            dtype=dtype,
            optimizer=optimizer,
            checkpointing=CHECKPOINTING[checkpointing],
            zero_stage=stage,
            data_parallel=devices,
            device="gpu",
        )
        for stage in STAGES
    }
    most, least = columns["stage 0"].total, min(held.total for held in columns.values())
    return _stacked(columns, f"Per GPU: {_size(most)} without ZeRO, {_size(least)} at best")


def points() -> dict[str, Any]:
    """Return what the page needs to repeat `estimate` for `moments` and `stages`.

    By model and dtype: the points at which a step may peak, with bytes as [constant, per token].
    """

    def fixed(model: str, dtype: str, length: int = 1, **other: Any) -> Part:
        config = MODELS[model]
        settings = {"optimizer": "adamw", "checkpointing": None, **other}
        return Part(
            config=config, batch=1, length=length, dtype=dtype, shares=1, in_flight=1, gpu=True,
            layers=config.num_hidden_layers, embedding=True, head=True, **settings,
        )  # fmt: skip

    def line(at_one: float, at_two: float) -> tuple[int, int]:
        return round(2 * at_one - at_two), round(at_two - at_one)

    def listed(model: str, dtype: str, checkpointing: int | str | None, moment: str) -> list[Any]:
        pair = (fixed(model, dtype, n, checkpointing=checkpointing) for n in (1, 2))
        return [
            [*line(one.activations, two.activations), one.gradients,
             *line(one.workspace, two.workspace), one.done, one.gathered, int(one.first)]
            for one, two in zip(*(getattr(part, moment)() for part in pair), strict=True)
        ]  # fmt: skip

    table: dict[str, dict[str, Any]] = {}
    for model, dtype in itertools.product(MODELS, DTYPES):
        part = fixed(model, dtype)
        steps = {name: fixed(model, dtype, optimizer=name) for name in OPTIMIZERS}
        table.setdefault(model, {})[dtype] = {
            "weights": part.weights,
            "unit": part.unit,
            "layers": part.layers,
            "optimizers": {
                name: {"state": one.state, "workspace": one.step()[0].workspace}
                for name, one in steps.items()
            },
            "points": {
                name: {moment: listed(model, dtype, way, moment) for moment in MOMENTS[:2]}
                for name, way in CHECKPOINTING.items()
            },
        }
    return {"table": table, "capacities": CAPACITIES}


MOMENTS_FORMULA = Formula("memoryMoments", points)
STAGES_FORMULA = Formula("memoryStages", points)


def _last_step(moments: Sequence[Moment]) -> Sequence[Moment]:
    """Return the moments starting with the last beginning of a forward."""
    begins = [
        at + 1
        for at, (before, now) in enumerate(pairwise(moments))
        if now.phase == "forward" != before.phase
    ]
    return moments[begins[-1] if begins else 0 :]


def timeline(moments: Sequence[Moment], *, title: str) -> go.Figure:
    """Draw what the last step of `Meter.timeline` held, moment by moment, stacked.

    If a step has too many moments for a page, each point is the highest of several.
    """
    step = _last_step(moments)
    every = -(-len(step) // _MOST_POINTS)
    shown = [
        max(step[at : at + every], key=lambda moment: moment.held.total)
        for at in range(0, len(step), every)
    ]
    places = [every * at for at in range(len(shown))]
    tops = [[0.0] * len(shown)]
    for part in COLORS:
        sizes = [getattr(moment.held, part) / 1e6 for moment in shown]
        tops.append([below + size for below, size in zip(tops[-1], sizes, strict=True)])
    begins = [at for at in range(len(shown)) if not at or shown[at].phase != shown[at - 1].phase]
    edge = {"yref": "paper", "y0": 0, "y1": 1, "line": draw.PREDICTED, "type": "line"}
    word = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    figure = go.Figure(
        [
            {
                "x": places,
                "y": top,
                "mode": "lines",
                "name": part,
                "line": {"color": color, "width": 1, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": color,
                "hoverinfo": "name",
            }
            # Draw from the highest down; each trace covers what is below it.
            for (part, color), top in zip(reversed(COLORS.items()), reversed(tops[1:]), strict=True)
        ],
        {
            "title": title,
            "xaxis": {"title": "storages that came or went"},
            "yaxis": {"title": "MB", "rangemode": "tozero"},
            "legend": {"traceorder": "reversed"},
            "shapes": [{"x0": places[at], "x1": places[at], **edge} for at in begins],
            "annotations": [{"x": places[at], "text": shown[at].phase, **word} for at in begins],
            "height": 460,
            "margin": {"t": 64},
        },
    )
    words = []
    for phase in dict.fromkeys(moment.phase for moment in step):
        totals = [moment.held.total for moment in step if moment.phase == phase]
        words.append(f"{phase}: at most {_size(max(totals))}")
    return describe(figure, f"{title}. {'; '.join(words)}.")


def modules(held: Mapping[str, Breakdown], *, title: str) -> go.Figure:
    """Draw `Meter.by_module` as horizontal bars, with a layer's parts added up."""
    rows: dict[str, dict[str, int]] = {}
    for name, one in held.items():
        path = name.split(".")
        owner = ".".join(path[: 2 if path[0] == "layers" else 1]) or "loss, inputs"
        row = rows.setdefault(owner, dict.fromkeys(COLORS, 0))
        for part, size in one.parts().items():
            row[part] += size
    order = sorted(rows, key=_place)
    figure = go.Figure()
    for part, color in COLORS.items():
        figure.add_bar(
            y=order,
            x=[rows[name][part] / 1e6 for name in order],
            orientation="h",
            name=part,
            marker={"color": color},
        )
    figure.update_layout(
        title=title,
        barmode="stack",
        xaxis={"title": "MB"},
        yaxis={"type": "category", "autorange": "reversed"},
        height=460,
    )
    words = ", ".join(f"{name} {_size(sum(rows[name].values()))}" for name in order)
    return describe(figure, f"{title}. {words}.")


def _place(name: str) -> tuple[int, int]:
    """Return a module's sort key, in the order of a forward."""
    first, _, number = name.partition(".")
    known = ("embed_tokens", "layers", "norm", "lm_head", "loss, inputs")
    return known.index(first) if first in known else len(known), int(number or 0)


def stretches(
    predicted: Mapping[int, float], measured: Mapping[int, float], *, title: str
) -> go.Figure:
    """Draw bytes of activations by the layers recomputed as one: a line, and measured points."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(predicted), y=[size / 1e3 for size in predicted.values()], mode="lines",
        name="predicted", line=draw.PREDICTED,
    )  # fmt: skip
    figure.add_scatter(
        x=list(measured), y=[size / 1e3 for size in measured.values()], mode="markers",
        name="measured", marker={"color": COLORS["activations"], "size": 11},
    )  # fmt: skip
    ticks = {"tickvals": list(measured), "ticktext": [str(x) for x in measured]}
    figure.update_layout(
        title=title,
        xaxis={"title": "layers recomputed as one", "type": "log", **ticks},
        yaxis={"title": "kB of activations", "rangemode": "tozero"},
    )
    words = ", ".join(f"{size / 1e3:.0f} kB at {x}" for x, size in measured.items())
    return describe(figure, f"{title}. Measured: {words}.")


def prices(rows: Mapping[str, tuple[float, Sequence[float]]], *, title: str) -> go.Figure:
    """Draw each method's bytes and time relative to plain training, on one logarithmic axis.

    rows: method -> (bytes over plain, samples of time over plain, whose mean has its interval).
    """
    names = list(rows)
    times = {name: Measured.of(samples) for name, (_, samples) in rows.items()}
    shown = list(times.values())
    figure = go.Figure()
    figure.add_scatter(
        x=[size for size, _ in rows.values()], y=names, mode="markers", name="bytes",
        marker={"color": PALETTE["blue"], "size": 12},
    )  # fmt: skip
    figure.add_scatter(
        x=[time.mean for time in shown],
        y=names,
        mode="markers",
        name="time of a step",
        marker={"color": PALETTE["vermillion"], "size": 11, "symbol": "x"},
        error_x={
            "array": [time.high - time.mean for time in shown],
            "arrayminus": [time.mean - time.low for time in shown],
            "thickness": 1.2,
        },
    )
    figure.add_vline(x=1, line=draw.PREDICTED)
    ticks = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    figure.update_layout(
        title=title,
        xaxis={
            "title": "over plain training",
            "type": "log",
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
        },
        yaxis={"autorange": "reversed"},
        legend={"xref": "container"},  # no room on a phone beside the long names
        height=140 + 30 * len(names),
    )
    words = "; ".join(
        f"{name}: bytes {size:.2f}, time {times[name].mean:.2f}" for name, (size, _) in rows.items()
    )
    return describe(figure, f"{title}. {words}.")
