"""What Medusa's heads learn, and how they compare with other guessers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import plotly.graph_objects as go
from torch import Tensor

from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["accuracy_by_distance", "against_peers", "heads_learn", "speed_by_requests"]

Table = Tensor | Sequence[Sequence[float]]
_MOST_POINTS = 250  # per curve, because the page contains each of them


def _rows(table: Table) -> list[list[float]]:
    return [[float(x) for x in row] for row in table]


def accuracy_by_distance(
    accuracies: Mapping[str, Table],
    *,
    title: str,
    top: int = 5,
) -> go.Figure:
    """Draw how often each head is right, with one guess (solid) and with `top` guesses (dashed).

    accuracies: name -> [K, R], as from `head_accuracies`: the share of head i's token of rank r.
    Head i predicts the token i + 2 places after the last one read.
    """
    figure, words, most = go.Figure(), [], 0
    for at, (name, table) in enumerate(accuracies.items()):
        rows = _rows(table)
        places, most = list(range(2, len(rows) + 2)), max(most, len(rows))
        best = [row[0] for row in rows]
        several = [list(accumulate(row))[min(top, len(row)) - 1] for row in rows]
        color = draw.COLORS[at % len(draw.COLORS)]
        marker = {"size": 10, "symbol": draw.SYMBOLS[at % len(draw.SYMBOLS)], "color": color}
        for label, y, dash in (
            (f"{name}, first guess", best, "solid"),
            (f"{name}, best {top}", several, "dash"),
        ):
            figure.add_scatter(
                x=places, y=y, mode="lines+markers", name=label, marker=marker,
                line={"color": color, "dash": dash},
            )  # fmt: skip
        words.append(
            f"{name}, first guess and best {top}: "
            + ", ".join(
                f"head {i} {one:.1%} and {more:.1%}"
                for i, (one, more) in enumerate(zip(best, several, strict=True))
            )
        )
    places = list(range(2, most + 2))
    figure.update_layout(
        title=title,
        xaxis={
            "title": "positions after the last token read",
            "tickvals": places,
            "ticktext": [f"{place}<br>head {place - 2}" for place in places],
            "range": [1.7, most + 1.3],
        },
        yaxis={"title": "right tokens", "range": [0, 1], "tickformat": ".0%"},
        height=480,
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


def heads_learn(
    per_head: Table,
    *,
    title: str,
    levels: Mapping[str, float] | None = None,
) -> go.Figure:
    """Draw each head's loss during its training.

    per_head: [steps, K] in nats per token, as in `HeadsCurve`; of more than 250 steps, every n-th
    and the last are drawn. levels: name -> a loss to compare with, dashed.
    """
    rows = _rows(per_head)
    stride = -(-len(rows) // _MOST_POINTS)
    kept = sorted({*range(0, len(rows), stride), len(rows) - 1})
    figure, words = go.Figure(), []
    for i in range(len(rows[0])):
        figure.add_scatter(
            x=[step + 1 for step in kept], y=[rows[step][i] for step in kept], mode="lines",
            name=f"head {i}", line={"color": draw.COLORS[i % len(draw.COLORS)]},
        )  # fmt: skip
        words.append(f"head {i} from {rows[0][i]:.2f} to {rows[-1][i]:.2f}")
    for (name, level), dash in zip(
        (levels or {}).items(), ("dash", "dot", "dashdot"), strict=False
    ):
        figure.add_scatter(
            x=[1, len(rows)],
            y=[level] * 2,
            mode="lines",
            name=name,
            line={**draw.PREDICTED, "dash": dash},
        )
        words.append(f"{name} {level:.2f}")
    figure.update_layout(
        title=title, xaxis={"title": "steps"}, yaxis={"title": "loss (nats per token)"}, height=440
    )
    return describe(draw.named_at_ends(figure), f"{title}. {', '.join(words)}.")


def against_peers(
    speeds: Mapping[str, Sequence[float]],
    tokens: Mapping[str, Sequence[float]],
    *,
    title: str,
) -> go.Figure:
    """Draw tokens per step and speedup over plain decoding for each way; the gap is the way's cost.

    speeds: way -> samples of tokens per second relative to plain decoding; tokens: way -> samples
    of tokens per step. Both show their median and middle 60 %, with a dashed line at 1.
    """
    figure, words = go.Figure(), []
    names = list(dict.fromkeys((*speeds, *tokens)))
    for label, rows, color, symbol in (
        ("tokens per step", tokens, "blue", "circle"),
        ("speed over plain", speeds, "vermillion", "x"),
    ):
        middles, bars = draw.medians(list(rows.values()))
        figure.add_scatter(
            x=middles, y=list(rows), error_x=bars, mode="markers", name=label,
            marker={"color": PALETTE[color], "size": 12, "symbol": symbol},
        )  # fmt: skip
        words.append(
            f"{label}: " + ", ".join(f"{n} {x:.2f}" for n, x in zip(rows, middles, strict=True))
        )
    figure.add_vline(x=1, line=draw.PREDICTED)
    figure.update_layout(
        title=title,
        xaxis={"title": "over plain decoding (times)", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "categoryarray": names, "categoryorder": "array"},
        legend={"xref": "container"},  # no room on a phone beside the names
        height=200 + 40 * len(names),
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


def speed_by_requests(
    speeds: Mapping[str, Mapping[int, float]], *, predicted: Mapping[str, Mapping[int, float]]
) -> go.Figure:
    """Draw the speed over plain decoding by the number of requests that are decoded at once.

    speeds: name -> requests -> tokens per second with heads over those without. predicted: the
    same by a formula, dashed.
    """
    figure, words = go.Figure(), []
    for at, (name, points) in enumerate(speeds.items()):
        color = draw.COLORS[at % len(draw.COLORS)]
        figure.add_scatter(
            x=list(points), y=list(points.values()), mode="lines+markers", name=name,
            marker={"size": 9, "symbol": draw.SYMBOLS[at % len(draw.SYMBOLS)]},
            line={"color": color},
        )  # fmt: skip
        words.append(f"{name}: " + ", ".join(f"{n} {y:.2f}" for n, y in points.items()))
    for name, points in predicted.items():
        figure.add_scatter(
            x=list(points), y=list(points.values()), mode="lines", name=name, line=draw.PREDICTED
        )
    counts = sorted({n for points in (*speeds.values(), *predicted.values()) for n in points})
    figure.add_hline(y=1, line={"dash": "dot", "width": 1.5})
    figure.update_layout(
        title="Heads against none, by requests at once",
        xaxis={"type": "log", "tickvals": counts, "title": "requests decoded at once"},
        yaxis={"title": "tokens per second, over plain", "rangemode": "tozero"},
        height=460,
    )
    return describe(figure, f"Speed with heads over plain. {'; '.join(words)}.")
