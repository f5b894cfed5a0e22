"""How many requests keep two promises, by load: replicas that do everything, or one per phase."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from labcore.checks import one_of
from labcore.studies.inflight.goodput import GOAL, WAYS, Times, attained, best
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["goodput_curves"]

_COLORS = (PALETTE["gray"], PALETTE["blue"], PALETTE["vermillion"])


def goodput_curves(
    prompt: int = 512,
    ttft: float = 1.0,
    tpot_ms: int = 12,
    transfer: int = 10,
    *,
    data: Mapping[tuple[str, int, int], Mapping[float, Times]],
) -> go.Figure:
    """Draw the share of requests that meet both limits by load, for two replicas in three ways.

    prompt: mean tokens of a prompt. ttft: limit in seconds on the time to the first token. tpot_ms:
    limit in milliseconds on the time per further token. transfer: microseconds per token that is
    sent. data: such as `goodput.sweep()`. Raises ValueError for a combination that isn't in it.
    """
    one_of("prompt and transfer", (prompt, transfer), sorted({key[1:] for key in data}))
    limits = {"ttft": ttft, "tpot": 1e-3 * tpot_ms}
    lines, told = [], []
    names = [*WAYS[:-1], f"{WAYS[-1]}, {transfer} µs per token"]
    for way, name, color in zip(WAYS, names, _COLORS, strict=True):
        by_rate = data[way, prompt, transfer]
        shares = [attained(times, **limits) for times in by_rate.values()]
        told.append((way, best(by_rate, **limits), shares))
        lines.append(
            {
                "type": "scatter", "x": list(by_rate), "y": [100 * one for one in shares],
                "mode": "lines+markers", "name": name,
                "line": {"color": color, "width": 3}, "marker": {"size": 8, "color": color},
            }
        )  # fmt: skip
    rates = list(data[WAYS[0], prompt, transfer])
    most = {
        rate: f"at least {rate:g}" if rate == rates[-1] else f"{rate:g}" for rate in (0, *rates)
    }
    words = "; ".join(f"{way}: {most[rate]} per second" for way, rate, _ in told)
    title = f"Per s, TTFT ≤ {ttft:g} s, TPOT ≤ {tpot_ms} ms:<br>" + ", ".join(
        f"{word} {most[rate]}"
        for word, (_, rate, _) in zip(("whole", "chunks", "apart"), told, strict=True)
    )
    return describe(
        go.Figure(
            [
                *lines,
                {
                    "type": "scatter", "x": [rates[0], rates[-1]], "y": [100 * GOAL, 100 * GOAL],
                    "mode": "lines", "name": f"{GOAL:.0%}", "line": draw.PREDICTED,
                    "hoverinfo": "skip",
                },
            ],
            {
                "title": title,
                "xaxis": {
                    "title": "requests per second", "type": "log", "tickvals": rates,
                    "ticktext": [f"{rate:g}" for rate in rates], "tickangle": 0,
                },
                "yaxis": {"title": "% that meet both limits", "range": [-3, 103]},
                "height": 440, "margin": {"t": 64}, "legend": {"xref": "container"},
            },
        ),
        f"Prompts of {prompt} tokens, first token within {ttft:g} s and {tpot_ms} ms per further "
        f"token, {transfer} µs per token sent. Goodput at {GOAL:.0%}: {words}.",
    )  # fmt: skip
