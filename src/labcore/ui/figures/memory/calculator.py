"""What one GPU will hold, by `memory.estimate`: stacked bars beside the memory of common GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.memory import Breakdown, estimate
from labcore.memory.accounting.states import STAGES
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.memory.choices import CAPACITIES, CHECKPOINTING, COLORS, MODELS, in_bytes
from labcore.ui.figures.memory.tables import peak_table
from labcore.ui.twin import Formula

__all__ = ["STAGES_FORMULA", "stacks", "stages"]


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


def stages(
    optimizer: str = "adamw",
    checkpointing: str = "none",
    model: str = "7B",
    dtype: str = "bfloat16",
    batch: int = 1,
    length: int = 4096,
    devices: int = 8,
) -> go.Figure:
    """Draw the peak on one of `devices` GPUs by ZeRO stage, each with its batch.

    model: a key of MODELS; checkpointing: a key of CHECKPOINTING; the rest as in `estimate`.
    """
    held = _estimate(model, length, batch, dtype, optimizer, checkpointing)
    columns = {f"stage {stage}": held(zero_stage=stage, data_parallel=devices) for stage in STAGES}
    most, least = columns["stage 0"].total, min(held.total for held in columns.values())
    return _stacked(columns, f"Per GPU: {in_bytes(most)} without ZeRO, {in_bytes(least)} at best")


def _stages_data() -> dict[str, Any]:
    return {"table": peak_table(), "capacities": CAPACITIES}


STAGES_FORMULA = Formula("memoryStages", _stages_data)
