"""The film of a step: what one GPU holds from the forward to the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from labcore.memory.accounting.prediction import Scene
from labcore.memory.accounting.prediction import film as scenes_of
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.figures.memory.choices import (
    CARDS,
    CHECKPOINTING,
    COLORS,
    MODELS,
    in_bytes,
    verdict,
)
from labcore.ui.figures.memory.tables import PLACES, film_table
from labcore.ui.twin import Formula

__all__ = ["FILM_FORMULA", "film"]

# Where each moment begins and ends, in percent of the width: a backward computes twice a forward.
SPANS = {"forward": (0, 30), "backward": (30, 90), "step": (92, 98), "end": (100, 100)}


def _laid_out(scenes: Sequence[Scene]) -> list[tuple[float, Scene]]:
    """Return scenes with their places on the axis; before the forward stands what does at its end.

    The scenes of forward and backward are evenly spaced, and the step's stands from 92 to 98.
    """
    found = [(0.0, scenes[-1])]
    for moment, (begin, end) in SPANS.items():
        own = [scene for scene in scenes if scene.moment == moment]
        if moment == "step":
            found += [(float(x), own[0]) for x in (begin, end)]
            continue
        found += [(begin + (end - begin) * n / len(own), at) for n, at in enumerate(own, 1)]
    return found


def film(
    model: str = "7B",
    card: str = "H100",
    length: int = 4096,
    batch: int = 1,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    checkpointing: str = "none",
    moment: float = 50,
) -> go.Figure:
    """Draw what one GPU holds along a step by `memory.film`, and the parts at one moment.

    model: a key of MODELS; card: of CARDS; checkpointing: of CHECKPOINTING. moment: where the
    cursor stands, in percent of the axis, on which moments are spaced evenly: the forward takes 30,
    the backward 60. Length, batch, dtype and optimizer are those of `estimate`.
    """
    shown = _laid_out(
        scenes_of(
            MODELS[model], batch=batch, length=length, dtype=dtype, optimizer=optimizer,
            checkpointing=CHECKPOINTING[checkpointing], device="gpu",
        )
    )  # fmt: skip
    capacity, peak = CARDS[card].gpu.memory, max(scene.held.total for _, scene in shown)
    at, now = [(x, scene) for x, scene in shown if x <= moment + 1e-9][-1]
    title = verdict(peak, capacity)
    cursor = f"{now.name}: {in_bytes(now.held.total)}"
    figure = _areas(shown, now, title=f"{title}<br>{cursor}", capacity=capacity, at=at)
    parts = ", ".join(f"{part} {in_bytes(size)}" for part, size in now.held.parts().items())
    return describe(figure, f"{title}. At the cursor, {cursor}: {parts}.")


def _areas(
    shown: Sequence[tuple[float, Scene]], now: Scene, *, title: str, capacity: float, at: float
) -> go.Figure:
    peak = max(scene.held.total for _, scene in shown)
    upright = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    words = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    return go.Figure(
        [
            {
                "x": [x for x, _ in shown],
                "y": [scene.held.parts()[part] / 1e9 for _, scene in shown],
                "name": f"{part} {in_bytes(now.held.parts()[part])}",
                "mode": "lines",
                "line": {"color": color, "width": 0.5},
                "fillcolor": color,
                "stackgroup": "held",
                "hoverinfo": "skip",
            }
            for part, color in COLORS.items()
        ],
        {
            "title": {"text": title, "pad": {"t": 18}},
            "xaxis": {"title": "the step, in the order in which it runs", "range": [0, 100],
                      "showticklabels": False},
            "yaxis": {"title": "GB", "range": [0, 1.1 * max(peak, capacity) / 1e9]},
            "shapes": [
                {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": capacity / 1e9,
                 "y1": capacity / 1e9, "line": draw.PREDICTED},
                {**upright, "x0": at, "x1": at, "line": {"width": 2}},
                *({**upright, "x0": x, "x1": x, "line": draw.PREDICTED} for x in (30, 90)),
            ],
            "annotations": [
                {"x": x, "text": text, **words}
                for x, text in ((0, "forward"), (30, "backward"), (90, "step"))
            ],
            "height": 520,
            "margin": {"t": 96},
        },
    )  # fmt: skip


def _film_data() -> dict[str, Any]:
    memories = {name: card.gpu.memory for name, card in CARDS.items()}
    return {"table": film_table(), "cards": memories, "places": PLACES}


FILM_FORMULA = Formula("memoryFilm", _film_data)
