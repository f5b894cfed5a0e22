"""A recorded generation, token by token: what was drafted, the random draw, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch

from labcore.checks import positive_int
from labcore.decoding.trace import Step
from labcore.ui import draw
from labcore.ui.theme import PALETTE

__all__ = ["Place", "WalkStep", "most_places", "walk", "walk_data"]

# Pale, so that dark text is readable on light and dark pages.
_TILES = {
    "accepted": ("#8fd3bd", "✓"),
    "rejected": ("#f2b48c", "✗"),
    "not judged": ("#d5d9dd", "–"),
    "next token": ("#9ccbea", "+"),
    "none": ("rgba(0,0,0,0)", ""),
}
_BARS = {"target p": "blue", "draft q": "orange", "residual": "green"}
_INK = "#222832"
_HIDDEN = {"visible": False}
_SHARES = {"range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1]}
_TAIL = 60  # tokens of the context to decode for the remark below the plot


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One position of a draft, or the one after it.

    names: of the tokens shown, the rest last; p, q, residual: their probabilities; q and residual
    are None if there is none. token: the drafted one. verdict: accepted, rejected, not judged, next
    token (after a fully accepted draft) or none. ratio: min(1, p / q); u: the draw, None in greedy
    decoding;
    here_p, here_q: of the drafted token.
    """

    names: tuple[str, ...]
    p: tuple[float, ...]
    q: tuple[float, ...] | None
    residual: tuple[float, ...] | None
    token: str
    verdict: str
    ratio: float | None
    u: float | None
    here_p: float
    here_q: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkStep:
    """One step of one row.

    tail: the end of the text before it; next_token: the target's token after the accepted ones;
    places: one for each drafted token and one after them.
    """

    tail: str
    next_token: str
    accepted: int
    places: tuple[Place, ...]


def walk_data(
    steps: Sequence[Step],
    decode: Callable[[list[int]], str],
    tokens: Sequence[int],
    *,
    top: int = 10,
) -> list[WalkStep]:
    """Return what `walk` shows of one row's steps, such as `trace.row(0)`, as plain data.

    decode: tokens to text, with special ones shown. tokens: prompt and output of the row. top: how
    many tokens get separate bars. The trace must come from `rejection_sampling` or `greedy_match`
    over chains. Raises ValueError for trees and for decisions of another verifier.
    """
    positive_int("top", top)
    return [_walk_step(step, decode, tokens, top) for step in steps]


def _walk_step(
    step: Step, decode: Callable[[list[int]], str], tokens: Sequence[int], top: int
) -> WalkStep:
    size = len(step.draft_tokens)
    if tuple(step.draft_parents) != tuple(range(-1, size - 1)):
        raise ValueError(
            f"a walk shows chains, got a draft with the parents {step.draft_parents}; "
            "take a proposer that drafts one token after the other"
        )
    # Greedy matching draws nothing; rejection sampling, once per judged token and for the next.
    if len(step.draws) not in (0, len(step.tried) + 1):
        raise ValueError(
            f"a walk shows rejection sampling, got {len(step.draws)} draws for {len(step.tried)} "
            "judged tokens; trace with the verifier 'rejection'"
        )
    accepted = len(step.path)
    behind = "next token" if accepted == size else "none"
    verdicts = ["accepted"] * accepted + ["rejected"] * (accepted < size)
    verdicts += ["not judged"] * (size - len(verdicts)) + [behind]
    places = []
    for at, verdict in enumerate(verdicts):
        judged = at < len(step.tried)
        ratio = step.ratios[at] if judged else None
        u = step.draws[at] if judged and step.draws else None
        odd = u is not None and ratio is not None and (u < ratio) != (verdict == "accepted")
        if u is not None and ratio is not None and odd and abs(u - ratio) > 1e-6:
            raise ValueError(
                f"a walk shows rejection sampling, got a draw of {u:.4g} for a ratio of "
                f"{ratio:.4g} whose token was {verdict}; trace with the verifier 'rejection'"
            )
        places.append(_place(step, at, verdict, ratio, u, decode, top))
    before = decode([int(token) for token in tokens[: step.context][-_TAIL:]])
    line = draw.letters(before)
    return WalkStep(
        tail="…" + line[-32:] if len(line) > 32 else line,
        next_token=draw.token(decode([step.next_token])),
        accepted=accepted,
        places=tuple(places),
    )


def _place(
    step: Step,
    at: int,
    verdict: str,
    ratio: float | None,
    u: float | None,
    decode: Callable[[list[int]], str],
    top: int,
) -> Place:
    drafted = step.draft_tokens[at] if at < len(step.draft_tokens) else None
    p = step.p[at].double()
    q = None
    if drafted is not None:
        q = torch.zeros_like(p) if step.q is None else step.q[at].double()
        if step.q is None:
            q[drafted] = 1
    residual = (
        step.residual.double() if verdict == "rejected" and step.residual is not None else None
    )
    wanted = {drafted} if drafted is not None else set()
    if verdict in ("rejected", "next token"):
        wanted.add(step.next_token)
    size = p if q is None else torch.maximum(p, q)
    for token in size.argsort(descending=True, stable=True).tolist():
        if len(wanted) >= min(top, len(p)) or size[token] <= 0:
            break
        wanted.add(token)
    shown = sorted(wanted, key=lambda token: (-float(p[token]), token))
    return Place(
        names=_names([decode([token]) for token in shown], shown, top),
        p=_heights(p, shown, top),
        q=None if q is None else _heights(q, shown, top),
        residual=None if residual is None else _heights(residual, shown, top),
        token="" if drafted is None else draw.token(decode([drafted])),
        verdict=verdict,
        ratio=ratio,
        u=u,
        here_p=0.0 if drafted is None else float(p[drafted]),
        here_q=0.0 if drafted is None or q is None else float(q[drafted]),
    )


def _names(texts: Sequence[str], tokens: Sequence[int], top: int) -> tuple[str, ...]:
    """Return distinct names for the rows; tokens that look alike get their number."""
    plain = [draw.token(text) for text in texts]
    names = [
        f"{draw.token(text, 6)} {token}" if plain.count(name) > 1 else name
        for text, name, token in zip(texts, plain, tokens, strict=True)
    ]
    # Blank rows keep the axis the same in all frames.
    return (*names, *_blanks(max(top, 2) - len(names)), "all others")


def _heights(row: torch.Tensor, shown: Sequence[int], top: int) -> tuple[float, ...]:
    heights = [float(row[token]) for token in shown]
    rest = max(0.0, float(row.sum()) - sum(heights))
    blanks = [0.0] * (max(top, 2) - len(heights))
    return (*heights, *blanks, rest if rest > 1e-9 else 0.0)


def most_places(data: Sequence[WalkStep]) -> int:
    """Return the highest position that `walk` can show: the one after the longest draft."""
    return max(len(step.places) for step in data)


def walk(step: int = 1, position: int = 1, *, data: Sequence[WalkStep]) -> go.Figure:
    """Draw one position of one step: the draft and verdicts, the draw, and both distributions.

    step: from 1; position: from 1; the last is the one after the longest draft. data: from
    `walk_data`. Positions after a shorter draft are empty.
    """
    now, most = data[step - 1], most_places(data)
    at = position - 1
    place = now.places[at] if at < len(now.places) else None
    rows = len(now.places[0].names)
    title, shares, remark = _verdict(now, place)
    # Plain dicts in one call; adding traces and updating the layout takes three times as long.
    return go.Figure(
        [_tiles(now, at, most), *_gauge(place), *_bars(place, rows)],
        {
            "title": title,
            "barmode": "group",
            "bargap": 0.15,
            "height": 618,
            "margin": {"l": 92},
            "xaxis": {"domain": [0, 1], "anchor": "y", "range": [0.4, most + 0.6], **_HIDDEN},
            "yaxis": {"domain": [0.88, 1], "anchor": "x", "range": [0, 1], **_HIDDEN},
            "xaxis2": {"anchor": "y2", "title": f"the draw u against p/q{shares}", **_SHARES},
            "yaxis2": {"domain": [0.72, 0.79], "anchor": "x2", "range": [-1, 1], **_HIDDEN},
            "xaxis3": {
                "anchor": "y3", **_SHARES,
                "title": f"probability{remark}<br>after: {draw.escaped(now.tail)}",
            },
            "yaxis3": {
                "domain": [0, 0.6], "anchor": "x3", "type": "category", "automargin": False,
                "range": [rows - 0.5, -0.5], "tickfont": {"size": 12}, "dtick": 1,
            },
        },
    )  # fmt: skip


def _tiles(now: WalkStep, at: int, most: int) -> dict[str, Any]:
    """Return the draft, one tile per token, with the position outlined."""
    verdicts = [place.verdict for place in now.places]
    names = [place.token for place in now.places]
    names[-1] = now.next_token if verdicts[-1] == "next token" else ""
    verdicts += ["none"] * (most - len(verdicts))
    names += [""] * (most - len(names))
    edges = [3 if place == at else 0 for place in range(most)]
    return {
        "type": "bar", "x": list(range(1, most + 1)), "y": [1] * most, "showlegend": False,
        "text": [
            f"{_TILES[verdict][1]}<br>{draw.escaped(name if len(name) <= 7 else name[:6] + '…')}"
            for verdict, name in zip(verdicts, names, strict=True)
        ],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "insidetextfont": {"color": _INK, "size": 13}, "hoverinfo": "skip",
        "marker": {
            "color": [_TILES[verdict][0] for verdict in verdicts],
            "line": {"width": edges, "color": PALETTE["gray"]},
        },
    }  # fmt: skip


def _gauge(place: Place | None) -> list[dict[str, Any]]:
    """Return a gauge: from 0 to the ratio a draw accepts, above it rejects."""
    ratio = None if place is None else place.ratio
    drawn = None if place is None else place.u
    common: dict[str, Any] = {"xaxis": "x2", "yaxis": "y2"}
    zones = [
        {
            "x": [None, None] if ratio is None else list(ends), "y": [0, 0], "mode": "lines",
            "name": name, "showlegend": False, "hoverinfo": "skip",
            "line": {"width": 22, "color": _TILES[state][0]}, **common,
        }
        for name, state, ends in (
            ("accepts", "accepted", (0, ratio)), ("rejects", "rejected", (ratio, 1)),
        )
    ]  # fmt: skip
    marker = {"symbol": "diamond", "size": 15, "color": PALETTE["purple"],
              "line": {"width": 2, "color": _INK}}  # fmt: skip
    dot = {"x": [drawn], "y": [0], "mode": "markers", "name": "draw u", "marker": marker}
    return [*zones, {**dot, **common}]


def _bars(place: Place | None, rows: int) -> list[dict[str, Any]]:
    """Return p, q and the residual by token; empty if the position has none."""
    names = _blanks(rows) if place is None else list(place.names)
    shown = (None, None, None) if place is None else (place.p, place.q, place.residual)
    return [
        {
            "type": "bar", "x": list(row or (None,) * rows),
            "y": [draw.label(each) for each in names],
            "orientation": "h", "name": name, "marker": {"color": PALETTE[color]},
            "xaxis": "x3", "yaxis": "y3",
        }
        for (name, color), row in zip(_BARS.items(), shown, strict=True)
    ]  # fmt: skip


def _blanks(count: int) -> list[str]:
    """Return names that show nothing and are all different."""
    return [" " * (at + 1) for at in range(count)]


def _verdict(now: WalkStep, place: Place | None) -> tuple[str, str, str]:
    """Return what happens at a position, p and q, and a remark on the probabilities."""
    if place is None or place.verdict == "none":
        return "nothing here", "", ""
    token, following = draw.escaped(place.token), draw.escaped(now.next_token)
    if place.verdict == "next token":
        all_of = f"all {now.accepted} accepted: bonus" if now.accepted else "no draft:"
        return f'{all_of} "{following}"', "", "; drawn from p itself"
    if place.verdict == "not judged":
        return f'"{token}" is not judged', "", "; a token before it was rejected"
    taken = place.verdict == "accepted"
    shares = f" = {place.here_p:.2g}/{place.here_q:.2g}"
    if place.u is None:
        said = f'accept "{token}"' if taken else f'reject "{token}"'
        return f"greedy: {said}", shares, "" if taken else f'; the target says "{following}"'
    u, ratio = _apart(place.u, place.ratio or 0.0)
    if taken:
        return f'u = {u} < {ratio}: accept "{token}"', shares, ""
    return f'u = {u} ≥ {ratio}: reject "{token}"', shares, f'; the residual draws "{following}"'


def _apart(one: float, other: float) -> tuple[str, str]:
    """Format both numbers with enough digits to differ, at least two."""
    for digits in range(2, 7):
        texts = _digits(one, digits), _digits(other, digits)
        if texts[0] != texts[1]:
            break
    return texts


def _digits(value: float, digits: int) -> str:
    """Format with `digits` decimal places, or significant digits if those would be zeros."""
    return f"{value:.{digits}g}" if 0 < value < 0.01 else f"{value:.{digits}f}"
