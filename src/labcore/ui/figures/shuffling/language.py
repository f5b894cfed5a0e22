"""The language model's losses, in other orders of the data and after damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import plotly.graph_objects as go

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["language_losses"]


def language_losses(
    runs: Mapping[str, Sequence[Sequence[float]]],
    *,
    title: str,
    loss: str = "training loss",
    first: int = 0,
    start: int = 0,
    bad: tuple[int, int] | None = None,
) -> go.Figure:
    """Draw the loss of each step, the mean over seeds, one line per name.

    runs: name -> losses by seed, in nats per token. loss: what they are, for the axis. first: the
    step of the first loss. start: the first step to draw. bad: the first and the last damaged step,
    shaded.
    """
    figure, said = go.Figure(), []
    for (name, losses), color in zip(runs.items(), PALETTE.values(), strict=False):
        every = enumerate((fmean(step) for step in zip(*losses, strict=True)), first)
        steps, means = zip(*((step, mean) for step, mean in every if step >= start), strict=True)
        figure.add_scatter(
            x=steps,
            y=[round(mean, 3) for mean in means],
            mode="lines",
            name=name,
            line={"color": color, "width": 2},
        )
        said.append(f"{name}: highest {max(means):.2f}, last {means[-1]:.2f}")
    if bad is not None:
        figure.add_vrect(
            x0=bad[0] - 0.5, x1=bad[1] + 0.5, fillcolor=PALETTE["gray"], opacity=0.3,
            line={"width": 0},
        )  # fmt: skip
    figure.update_layout(
        title=title,
        xaxis={"title": "step" + ("; gray: the damaged steps" if bad else "")},
        yaxis={"title": f"{loss}, nats per token"},
    )
    return describe(draw.named_at_ends(figure), f"{title}. {'; '.join(said)}.")
