"""What drafted tokens gain and cost, computed and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from labcore.decoding.theory import overlap
from labcore.ui import draw
from labcore.ui.controls import Choice, Slider
from labcore.ui.explorer import Explorer, describe, explore
from labcore.ui.theme import PALETTE

__all__ = [
    "acceptance_by_length",
    "costs",
    "exactness",
    "gate_tradeoff",
    "ngram_options",
    "opening",
    "predictions",
]


def acceptance_by_length(
    measured: Mapping[str, Mapping[int, Sequence[float]]],
    predicted: Mapping[str, Mapping[int, float]],
    *,
    title: str,
) -> go.Figure:
    """Draw tokens per step by draft length: dots measured, the closed form dashed.

    measured: name -> drafted tokens -> samples, shown by their median and middle 60 %; predicted:
    the same names -> drafted tokens -> `expected_tokens`.
    """
    figure, words = go.Figure(), []
    colors = {name: draw.COLORS[at % len(draw.COLORS)] for at, name in enumerate(measured)}
    for name, law in predicted.items():
        figure.add_scatter(
            x=list(law), y=list(law.values()), mode="lines", showlegend=False, hoverinfo="skip",
            line={**draw.PREDICTED, "color": colors.get(name, PALETTE["gray"])},
        )  # fmt: skip
    for at, (name, by_length) in enumerate(measured.items()):
        middles, bars = draw.medians(list(by_length.values()))
        figure.add_scatter(
            x=list(by_length), y=middles, error_y=bars, mode="markers", name=name,
            marker={
                "color": colors[name], "size": 10, "symbol": draw.SYMBOLS[at % len(draw.SYMBOLS)],
            },
        )  # fmt: skip
        law = predicted.get(name, {})
        words.append(
            f"{name}: "
            + ", ".join(
                f"{y:.2f}" + (f" (formula {law[x]:.2f})" if x in law else "") + f" at {x}"
                for x, y in zip(by_length, middles, strict=True)
            )
        )
    figure.add_scatter(
        x=[None], y=[None], mode="lines", line=draw.PREDICTED, name="if acceptance were independent"
    )
    every = sorted({x for by_length in measured.values() for x in by_length})
    figure.update_layout(
        title=title,
        xaxis={"title": "drafted tokens per step", "tickvals": every},
        yaxis={"title": "tokens per step", "rangemode": "tozero"},
        height=460,
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


def costs(v: Mapping[int, Sequence[float]], *, title: str) -> go.Figure:
    """Draw the time of a forward over several tokens, in one-token forwards, and paying for each.

    v: tokens -> samples of the ratio, shown by their median and middle 60 %.
    """
    middles, bars = draw.medians(list(v.values()))
    figure = go.Figure()
    figure.add_bar(
        x=list(v), y=middles, error_y=bars, name="measured", marker={"color": draw.MEASURED}
    )
    figure.add_scatter(
        x=[min(v), max(v)], y=[1, 1], mode="lines", name="verifying is free",
        line={**draw.PREDICTED, "color": PALETTE["green"]},
    )  # fmt: skip
    figure.add_scatter(
        x=list(v), y=list(v), mode="lines", name="each token costs the same",
        line=draw.PREDICTED,
    )  # fmt: skip
    figure.update_layout(
        title=title,
        xaxis={"title": "tokens of one forward", "tickvals": list(v)},
        yaxis={"title": "forwards over one token", "range": [0, 1.6 * max(middles)]},
        height=460,
    )
    words = ", ".join(f"{y:.2f} at {x}" for x, y in zip(v, middles, strict=True))
    return describe(figure, f"{title}. {words}.")


def predictions(
    rows: Mapping[str, tuple[float, Sequence[float]]], *, title: str, band: float = 0.15
) -> go.Figure:
    """Draw measured speedups by predicted ones, with the diagonal and a band around it.

    rows: name -> (predicted, samples measured), shown by their median and middle 60 %; band: the
    tolerated deviation of measured from predicted, relative to predicted.
    """
    every = [x for predicted, samples in rows.values() for x in (predicted, *samples)]
    low, high = 0.9 * min(every), 1.1 * max(every)
    figure, words = go.Figure(), []
    figure.add_scatter(
        x=[low, high, high, low],
        y=[low * (1 - band), high * (1 - band), high * (1 + band), low * (1 + band)],
        mode="lines", line={"width": 0, "color": PALETTE["gray"]}, fill="toself",
        fillcolor="rgba(128,128,128,0.25)", name=f"within {band:.0%}", hoverinfo="skip",
    )  # fmt: skip
    figure.add_scatter(
        x=[low, high], y=[low, high], mode="lines", line=draw.PREDICTED, name="as predicted"
    )
    for at, (name, (predicted, samples)) in enumerate(rows.items()):
        (middle,), bars = draw.medians([samples])
        figure.add_scatter(
            x=[predicted], y=[middle], error_y=bars, mode="markers", name=name,
            marker={
                "color": draw.COLORS[at % len(draw.COLORS)], "size": 12,
                "symbol": draw.SYMBOLS[at % len(draw.SYMBOLS)],
            },
        )  # fmt: skip
        words.append(f"{name}: {middle:.2f} measured, {predicted:.2f} predicted")
    figure.update_layout(
        title=title,
        xaxis={"title": "predicted speed-up", "range": [low, high]},
        yaxis={"title": "measured speed-up", "range": [low * (1 - band), high * (1 + band)]},
        height=500,
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


def ngram_options(
    rows: Mapping[str, Mapping[str, Sequence[float]]], *, title: str, unit: str = "tokens per step"
) -> go.Figure:
    """Draw tokens per step of n-gram lookup by its options, one symbol per kind of text.

    rows: options -> kind of text -> samples, shown by their median and middle 60 %. A dashed line
    is at 1, where nothing is gained.
    """
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    figure, words = go.Figure(), []
    for at, kind in enumerate(kinds):
        shown = {option: row[kind] for option, row in rows.items() if kind in row}
        middles, bars = draw.medians(list(shown.values()))
        figure.add_scatter(
            x=middles, y=list(shown), error_x=bars, mode="markers", name=kind,
            marker={
                "size": 12, "symbol": draw.SYMBOLS[at % len(draw.SYMBOLS)],
                "color": draw.COLORS[at % len(draw.COLORS)],
            },
        )  # fmt: skip
        words.append(
            f"{kind}: "
            + ", ".join(f"{option} {x:.2f}" for option, x in zip(shown, middles, strict=True))
        )
    figure.add_vline(x=1, line=draw.PREDICTED)
    figure.update_layout(
        title=title,
        xaxis={"title": unit},
        yaxis={"autorange": "reversed"},
        legend={"xref": "container"},  # no room on a phone beside the long names
        height=180 + 44 * len(rows),
    )
    return describe(figure, f"{title}. {'; '.join(words)}.")


def gate_tradeoff(
    slacks: Sequence[int | str],
    acceptance: Sequence[Sequence[float]],
    tokens_a_step: Sequence[Sequence[float]],
    cost: Sequence[Sequence[float]],
    *,
    title: str,
    cost_unit: str = "drafted per token",
) -> go.Figure:
    """Draw what a gate does to acceptance, tokens per step and drafting cost, in three panels.

    slacks: how many tokens a draft may contain that the n-gram didn't confirm, or the name of a
    setting; the others: samples for each, shown by their median and middle 60 %.
    """
    figure, words = go.Figure(), []
    panels = (
        ("acceptance", acceptance, "accepted of drafted", "blue"),
        ("tokens per step", tokens_a_step, "tokens per step", "green"),
        ("cost", cost, cost_unit, "vermillion"),
    )
    names = [str(slack) for slack in slacks]
    axes: dict[str, Any] = {}
    for at, (name, samples, unit, color) in enumerate(panels):
        middles, bars = draw.medians(samples)
        foot, letter = (2 - at) / 3, "" if at == 0 else str(at + 1)
        figure.add_scatter(
            x=names, y=middles, error_y=bars, mode="lines+markers", name=name, marker={"size": 9},
            line={"color": PALETTE[color]}, xaxis=f"x{letter}", yaxis=f"y{letter}",
        )  # fmt: skip
        axes[f"xaxis{letter}"] = {
            "type": "category", "anchor": f"y{letter}", "showticklabels": at == 2,
            "title": "unconfirmed tokens allowed" if at == 2 else None,
        }  # fmt: skip
        axes[f"yaxis{letter}"] = {
            "title": {"text": unit, "font": {"size": 12}}, "anchor": f"x{letter}",
            "domain": [foot + 0.03, foot + 0.3], "rangemode": "tozero", "nticks": 4,
        }  # fmt: skip
        words.append(
            f"{unit}: " + ", ".join(f"{y:.2f} at {x}" for x, y in zip(names, middles, strict=True))
        )
    figure.update_layout(title=title, showlegend=False, height=560, **axes)
    return describe(figure, f"{title}. {'; '.join(words)}.")


def opening() -> Explorer:
    """Return the explorer of `exactness` for seven tokens, with which the chapter opens."""
    names = ("self", "return", "if", "for", "def", "None", "the rest")
    p = torch.tensor([0.34, 0.22, 0.16, 0.10, 0.08, 0.06, 0.04])
    q = torch.tensor([0.10, 0.08, 0.42, 0.06, 0.04, 0.22, 0.08])
    return explore(
        exactness,
        alt="The output's distribution over seven tokens: accepted, and drawn after a rejection.",
        data=(names, p, q),
        toward_p=Slider(low=0.0, high=1.0, step=0.05, default=0.0, label="draft moves to p"),
        rule=Choice(options=overlap.RULES, default=overlap.RULES[0], label="after a rejection"),
    )


def exactness(
    toward_p: float = 0.0,
    rule: str = "residual",
    *,
    data: tuple[Sequence[str], Tensor, Tensor],
) -> go.Figure:
    """Draw what one step outputs: the accepted part and, on top, what follows a rejection.

    toward_p: how far the draft has moved from data's q (0) to p (1); rule: one of `overlap.RULES`,
    which draws the token after a rejection. data: the tokens' names, p [V] and q [V]; a diamond
    marks p, a ring the draft.
    """
    names, p, q = data
    draft = overlap.toward(p, q, toward_p)
    found = overlap.one_token(p, draft, rule)
    off = found.distance(p)
    verdict = "output exactly p" if off < 1e-6 else f"output {off:.3f} off p"
    title = f"{found.acceptance:.0%} accepted, {verdict}"
    highest = max(float(overlap.one_token(p, q, one).out.max()) for one in overlap.RULES)
    top = 1.08 * max(highest, float(q.max()), float(p.max()))
    x = list(names)
    figure = go.Figure(
        [
            _part(x, found.accepted, "accepted", "blue"),
            _part(x, found.replaced, "after a rejection", "orange"),
            {
                "x": x, "y": draft.tolist(), "mode": "markers", "name": "draft q",
                "marker": {"symbol": "circle", "size": 15, "color": "white",
                           "line": {"width": 2.5, "color": PALETTE["gray"]}},
            },
            {
                "x": x, "y": p.tolist(), "mode": "markers", "name": "target p",
                "marker": {"symbol": "diamond", "size": 9, "color": PALETTE["vermillion"],
                           "line": {"width": 1, "color": "white"}},
            },
        ],
        {
            "title": title,
            "barmode": "stack",
            "xaxis": {"title": "token", "type": "category"},
            "yaxis": {"title": "probability", "range": [0, top]},
            "height": 444,
        },
    )  # fmt: skip
    return describe(
        figure,
        f"{title}; its total variation distance from p is {off:.3f}. "
        f"After a rejection, the token is drawn from: {rule}.",
    )


def _part(x: list[str], heights: Tensor, name: str, color: str) -> dict[str, Any]:
    return {
        "type": "bar", "x": x, "y": heights.tolist(), "name": name,
        "marker": {"color": PALETTE[color]},
    }  # fmt: skip
