"""The gain of speculation by batch size: GPUs by their data sheets, this CPU as measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from labcore.decoding.theory.speedup import Roofline, expected_tokens, speedup
from labcore.parallel.step import GPUS, MODELS
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE
from labcore.ui.twin import Formula

__all__ = ["gain_by_batch", "gain_formula"]

BATCHES = tuple(2**power for power in range(10))
_NAMES = {"H100": "H100 SXM", "A100": "A100 SXM"}
_COLORS = {"H100": "green", "A100": "blue", "this CPU": "vermillion"}
_SHARED = 8  # GPUs that hold the weights and the cache
_ROOM = 80e9  # bytes of memory of each


def gain_by_batch(
    alpha: float = 0.7,
    draft_cost: float = 0.05,
    gamma: int = 4,
    batch: float = 1,
    context: float = 1024,
    model: str = "8B",
    *,
    data: Mapping[int, float],
) -> go.Figure:
    """Draw speed over plain decoding by batch size, with dots at the chosen batch.

    alpha: P(a drafted token is accepted | those before it are); draft_cost: of a drafted token, in
    plain steps of the same batch; gamma: drafted tokens per step; batch: rows; context: tokens of
    each row; model: a name in `parallel.step.MODELS`. data: this CPU's measured time of one forward
    over so many tokens, in forwards over one.
    GPUs follow their `Roofline`, eight of them sharing the work; a curve ends where weights and
    cache no longer fit into them, or where nothing was measured.
    """
    rows = BATCHES[_place(batch)]
    curves: dict[str, list[float | None]] = {
        name: [_on_gpu(name, model, alpha, draft_cost, gamma, one, context) for one in BATCHES]
        for name in _NAMES
    }
    curves["this CPU"] = [_measured(data, alpha, draft_cost, gamma, one) for one in BATCHES]
    figure = go.Figure()
    figure.add_scatter(
        x=[BATCHES[0], BATCHES[-1]], y=[1, 1], mode="lines", line=draw.PREDICTED, showlegend=False,
        hoverinfo="skip",
    )  # fmt: skip
    for name, gains in curves.items():
        figure.add_scatter(
            x=list(BATCHES), y=gains, mode="lines", name=name,
            line={"color": PALETTE[_COLORS[name]], "width": 3},
        )  # fmt: skip
    here = {name: gains[_place(batch)] for name, gains in curves.items()}
    figure.add_scatter(
        x=[rows] * len(here), y=list(here.values()), mode="markers", name="your batch",
        marker={"size": 13, "color": [PALETTE[_COLORS[name]] for name in here],
                "line": {"width": 2, "color": PALETTE["gray"]}},
    )  # fmt: skip
    # A half rounds up, as on the page.
    told = {name: "none" if y is None else f"{y + 1e-9:.2f}x" for name, y in here.items()}
    figure.update_layout(
        title=f"Batch {rows}: H100 {told['H100']}, A100 {told['A100']}",
        xaxis={
            "title": "rows in the batch", "type": "log", "tickvals": list(BATCHES),
            "ticktext": [str(one) for one in BATCHES],
            "range": [-0.06, math.log10(BATCHES[-1]) + 0.06],
        },
        yaxis={"title": "speed over plain decoding", "range": [0, _top(alpha, gamma)]},
        height=460,
    )  # fmt: skip
    spoken = ", ".join(f"{name} {gain}" for name, gain in told.items())
    return describe(
        figure,
        f"Speed over plain decoding at a batch of {rows}: {spoken}; alpha {alpha:g}, {gamma} "
        f"drafted at {draft_cost:g} each, {context:.0f} tokens of context, {model}.",
    )


def gain_formula(measured: Mapping[int, float]) -> Formula:
    """Return the same for the page's script; measured: as in `gain_by_batch`."""
    models = {}
    for name, config in MODELS.items():
        one = Roofline.of(config, flops=1.0, bandwidth=1.0)
        models[name] = {
            "weights": one.weights, "cache": one.cache, "attention": one.attention,
        }  # fmt: skip
    gpus = [[GPUS[name].flops, GPUS[name].bandwidth] for name in _NAMES.values()]

    def data() -> dict[str, Any]:
        return {
            "models": models, "gpus": gpus, "batches": list(BATCHES), "room": _SHARED * _ROOM,
            "measured": [list(pair) for pair in sorted(measured.items())],
        }  # fmt: skip

    return Formula("speculativeBatches", data)


def _place(batch: float) -> int:
    return round(math.log2(batch))


def _top(alpha: float, gamma: int) -> float:
    return max(2.0, 1.1 * expected_tokens(alpha, gamma))


def _on_gpu(
    name: str, model: str, alpha: float, draft_cost: float, gamma: int, batch: int, context: float
) -> float | None:
    gpu = GPUS[_NAMES[name]]
    roof = Roofline.of(MODELS[model], flops=gpu.flops, bandwidth=gpu.bandwidth)
    if 2 * roof.weights + batch * context * roof.cache > _SHARED * _ROOM:
        return None
    cost = roof.cost(gamma + 1, batch=batch, context=round(context))
    return speedup(alpha, gamma, verify_cost=cost, draft_cost=draft_cost)


def _measured(
    data: Mapping[int, float], alpha: float, draft_cost: float, gamma: int, batch: int
) -> float | None:
    if batch * (gamma + 1) > max(data):
        return None
    cost = _between(data, batch * (gamma + 1)) / _between(data, batch)
    return speedup(alpha, gamma, verify_cost=cost, draft_cost=draft_cost)


def _between(data: Mapping[int, float], tokens: int) -> float:
    """Return a measured cost, or the straight line between its neighbors."""
    known = sorted(data)
    high = next(one for one in known if one >= tokens)
    if high == tokens:
        return data[high]
    low = max(one for one in known if one < tokens)
    share = (tokens - low) / (high - low)
    return data[low] + share * (data[high] - data[low])
