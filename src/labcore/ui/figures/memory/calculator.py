"""What one GPU will hold, by `memory.estimate`: stacked bars beside the memory of common GPUs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.memory import Breakdown, estimate
from labcore.memory.accounting.part import Part
from labcore.memory.accounting.prediction import DTYPES, MOMENTS
from labcore.memory.accounting.states import STAGES
from labcore.models import LlamaConfig
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = [
    "CAPACITIES",
    "CHECKPOINTING",
    "COLORS",
    "MODELS",
    "MOMENTS_FORMULA",
    "OPTIMIZERS",
    "STAGES_FORMULA",
    "in_bytes",
    "moments",
    "stacks",
    "stages",
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
OPTIMIZERS = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "lion": "Lion",
    "adafactor": "Adafactor",
    "sm3": "SM3",
    "adamw8bit": "AdamW, 8 bits",
}
CHECKPOINTING: Mapping[str, int | str | None] = {
    "none": None,
    "selective": "selective",
    "every 4 layers": 4,
    "every layer": 1,
}


def in_bytes(count: float) -> str:
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
        + ", ".join(f"{part} {in_bytes(size)}" for part, size in held.parts().items() if size)
        + f", together {in_bytes(held.total)}"
        for name, held in columns.items()
    )
    return describe(_stacked(columns, title), f"{title}. {words}.".replace("<br>", " "))


def _estimate(
    model: str, length: int, batch: int, dtype: str, optimizer: str, checkpointing: str
) -> Callable[..., Breakdown]:
    """Return `estimate` for one GPU at these settings; the rest is given by name."""
    return functools.partial(
        estimate, MODELS[model], batch=batch, length=length, dtype=dtype, optimizer=optimizer,
        checkpointing=CHECKPOINTING[checkpointing], device="gpu",
    )  # fmt: skip


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
    held = _estimate(model, length, batch, dtype, optimizer, checkpointing)
    columns = {moment: held(moment=moment) for moment in MOMENTS}
    highest = max(columns, key=lambda moment: columns[moment].total)
    return _stacked(columns, f"Peak: {in_bytes(columns[highest].total)}, in the {highest}")


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
    held = _estimate(model, length, batch, dtype, optimizer, checkpointing)
    columns = {f"stage {stage}": held(zero_stage=stage, data_parallel=devices) for stage in STAGES}
    most, least = columns["stage 0"].total, min(held.total for held in columns.values())
    return _stacked(columns, f"Per GPU: {in_bytes(most)} without ZeRO, {in_bytes(least)} at best")


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
