"""What training the heads takes, with and without the backbone, by formula."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labcore.decoding.medusa.costs import WAYS, training_cost
from labcore.models import LlamaConfig
from labcore.parallel.step import MODELS
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["BACKBONES", "training_bill"]

BACKBONES: Mapping[str, LlamaConfig] = {
    f"{family} {size}": MODELS[size]
    for size, family in (
        ("7B", "Llama 2"),
        ("13B", "Llama 2"),
        ("70B", "Llama 2"),
        ("8B", "Llama 3"),
    )
}
_PARTS = {"weights": PALETTE["blue"], "gradients": PALETTE["orange"], "moments": PALETTE["green"]}
_NAMES = ("backbone and heads", "frozen backbone", "stored states")


def training_bill(
    model: str = "Llama 2 7B", heads: int = 4, readings: int = 1, projection: str = "full"
) -> go.Figure:
    """Draw bytes and operations of the three ways to train the heads, for a model of BACKBONES.

    readings: how often a text is read. projection: as in `MedusaHeads`. Bytes are without
    activations.
    """
    config = BACKBONES[model]
    costs = [
        training_cost(config, heads, w, projection=projection, readings=readings) for w in WAYS
    ]
    held = [[getattr(cost, part) / 1e9 for part in _PARTS] for cost in costs]
    totals = [sum(one) for one in held]
    work = [cost.flops / costs[0].flops for cost in costs]
    figure = make_subplots(rows=2, cols=1, row_heights=[0.55, 0.45], vertical_spacing=0.25)
    for at, (part, color) in enumerate(_PARTS.items()):
        last = at == len(_PARTS) - 1
        figure.add_bar(
            x=[one[at] for one in held], y=_NAMES, orientation="h", name=part,
            marker_color=color, row=1, col=1, cliponaxis=False, textposition="outside",
            text=[f"{draw.digits(total)} GB" for total in totals] if last else None,
        )  # fmt: skip
    figure.add_bar(
        x=work, y=_NAMES, orientation="h", marker_color=PALETTE["gray"], showlegend=False,
        text=[f"{share:.0%}" for share in work], textposition="outside", cliponaxis=False,
        row=2, col=1,
    )  # fmt: skip
    figure.update_layout(
        barmode="stack",
        title=f"{draw.digits(totals[0])} GB, or {draw.digits(totals[1])} GB with it frozen",
        legend_traceorder="normal",
        height=440,
    )
    figure.update_yaxes(autorange="reversed", showline=False, ticks="")
    figure.update_xaxes(title="GB without activations", range=[0, 1.25 * totals[0]], row=1, col=1)
    figure.update_xaxes(title="operations", range=[0, 1.25], tickformat=".0%", row=2, col=1)
    told = ", ".join(
        f"{name} {total:.3g} GB and {share:.0%} of the operations"
        for name, total, share in zip(_NAMES, totals, work, strict=True)
    )
    return describe(figure, f"{model}, {heads} heads, each text read {readings} times: {told}.")
