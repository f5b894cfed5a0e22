"""Which rank has which block of a divided product, and who sends what to whom in an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labcore.checks import one_of, positive_int
from labcore.parallel.collectives import ALL_REDUCES, expected
from labcore.ui import draw
from labcore.ui.explorer import describe
from labcore.ui.theme import PALETTE

__all__ = ["ALGORITHMS", "Message", "messages", "split_picture", "steps_view"]

ALGORITHMS = {  # the keys of ALL_REDUCES in words
    "ring": "ring",
    "halving_doubling": "halving-doubling",
    "one_shot": "one-shot",
    "two_shot": "two-shot",
}
_RANKS = tuple(PALETTE[name] for name in ("blue", "orange", "green", "purple"))
_EVERY = PALETTE["gray"]
_HIDDEN = {"visible": False}
_LOWER = "₀₁₂₃"
_FEW = 24  # with more messages, the names of their parts don't fit
_MANY = 64  # with more messages of one kind, they have no hover text
_NEAR = 0.15  # position of the names along the line from the sender; farther out, lines cross


class _Blocks:
    """Blocks by the rank that holds them, words and arrows: the same traces for every picture."""

    def __init__(self) -> None:
        names = [*(f"rank {rank}" for rank in range(len(_RANKS))), "every rank"]
        self.boxes: dict[str, tuple[list[float | None], list[float | None]]] = {
            name: ([], []) for name in names
        }
        self.words: list[tuple[float, float, str]] = []
        self.arrows: list[tuple[float, float, float, float]] = []

    def box(
        self, rank: int | None, left: float, low: float, wide: float, high: float, text: str
    ) -> None:
        """Add a block; rank None means that every rank has it."""
        x, y = self.boxes["every rank" if rank is None else f"rank {rank}"]
        gap = [None] if x else []
        x += [*gap, left, left + wide, left + wide, left, left]
        y += [*gap, low, low, low + high, low + high, low]
        self.words.append((left + wide / 2, low + high / 2, text))

    def traces(self) -> list[dict[str, Any]]:
        quiet: dict[str, Any] = {"type": "scatter", "hoverinfo": "skip"}
        found = []
        for (name, (x, y)), color in zip(self.boxes.items(), (*_RANKS, _EVERY), strict=True):
            found.append(
                {
                    **quiet, "x": x or [None], "y": y or [None], "mode": "lines", "name": name,
                    "fill": "toself", "fillcolor": draw.pale(color), "showlegend": bool(x),
                    "line": {"color": color, "width": 2},
                }
            )  # fmt: skip
        along: list[float | None] = []
        up: list[float | None] = []
        for x0, y0, x1, y1 in self.arrows:
            along += [*([None] if along else []), x0, x1]
            up += [*([None] if up else []), y0, y1]
        ink = {"color": PALETTE["gray"], "width": 2}
        found.append(
            {**quiet, "x": along, "y": up, "mode": "lines", "line": ink, "showlegend": False}
        )
        found.append(
            {
                **quiet, "x": [arrow[2] for arrow in self.arrows],
                "y": [arrow[3] for arrow in self.arrows], "mode": "markers", "showlegend": False,
                "marker": {"symbol": "triangle-down", "size": 12, "color": PALETTE["gray"]},
            }
        )  # fmt: skip
        found.append(
            {
                **quiet, "x": [x for x, _, _ in self.words], "y": [y for _, y, _ in self.words],
                "mode": "text", "text": [text for _, _, text in self.words], "showlegend": False,
                "textposition": "middle center", "textfont": {"size": 13},
            }
        )  # fmt: skip
        return found


def split_picture(by: str = "columns", ranks: int = 2) -> go.Figure:
    """Draw Y = XW divided among ranks: who has which block, and the collective that makes Y whole.

    by: "columns" (of W: each rank computes columns of Y) or "rows" (each computes its summand of
    all of Y). ranks: 2 to 4. Raises ValueError for others.
    """
    one_of("by", by, ("columns", "rows"))
    if positive_int("ranks", ranks) not in (2, 3, 4):
        raise ValueError(f"ranks must be from 2 to 4 to have a color each, got {ranks}")
    blocks, wide, tall, gap, low_x, low_y = _Blocks(), 3.0, 0.9, 0.7, 4.65, -0.2
    right, top = wide + gap, 2.9  # position of Y's parts; an arrow leads from them down to Y
    part, slim = wide / ranks, 1.8 / ranks
    every = range(ranks)
    blocks.words.append((wide + gap / 2, low_x + tall / 2, "×"))
    if by == "columns":
        blocks.box(None, 0, low_x, wide, tall, "X")
        for rank in every:
            low = _LOWER[rank]
            blocks.box(rank, right + rank * part, 4.2, part, 1.8, f"W{low}")
            blocks.box(rank, rank * (part + 0.1), top, part, tall, f"XW{low}")
        needed = "all-gather, or nothing<br>if rows of W follow"
        columns = ", ".join(f"XW{_LOWER[rank]}" for rank in every)
        title = "each rank has columns of Y"
        alt = (
            f"Y = [{columns}]. W is divided by columns among {ranks} ranks, and every rank has all "
            "of X. Rank r computes X times its columns of W, which are columns of Y. An "
            "all-gather makes Y whole on every rank; nothing is needed where a product divided by "
            "rows follows."
        )
    else:
        for rank in every:
            low = _LOWER[rank]
            blocks.box(rank, rank * part, low_x, part, tall, f"X{low}")
            blocks.box(rank, right, 6.0 - (rank + 1) * slim, wide, slim, f"W{low}")
            # Two per line, because each is as large as Y.
            top = 2.9 - 1.3 * (rank // 2)
            blocks.box(rank, rank % 2 * right, top, wide, tall, f"X{low}W{low}")
            if rank % 2:
                blocks.words.append((wide + gap / 2, top + tall / 2, "+"))
            elif rank:
                blocks.words.append((wide / 2, top + tall + 0.2, "+"))
        needed = "all-reduce: the sum"
        summands = " + ".join(f"X{_LOWER[rank]}W{_LOWER[rank]}" for rank in every)
        title = "each rank has a summand of Y"
        alt = (
            f"Y = {summands}. W is divided by rows among {ranks} ranks, and X by columns. Rank r "
            "computes its columns of X times its rows of W, a summand as large as Y. An "
            f"all-reduce adds the {ranks} summands, and every rank has Y."
        )
    begin, end = top - 0.15, low_y + tall + 0.12
    # Beside the arrow, at half the width that these words have on a phone.
    blocks.words.append((wide / 2 + 1.5, (begin + end) / 2, needed))
    blocks.arrows.append((wide / 2, begin, wide / 2, end))
    blocks.box(None, 0, low_y, wide, tall, "Y")
    figure = go.Figure(
        blocks.traces(),
        {
            "title": title,
            "xaxis": {"range": [-0.15, 2 * wide + gap + 0.15], **_HIDDEN},
            "yaxis": {"range": [-0.4, 6.2], **_HIDDEN},
            "height": 448,
            "margin": {"l": 8, "r": 8, "b": 48},
            "legend": {"xref": "container"},
        },
    )
    return describe(figure, alt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What one rank sends another in a step; parts: which of the tensor's N equal parts.

    summed: the parts are complete sums, which the receiver keeps; otherwise it adds them to its
    own.
    """

    step: int
    source: int
    target: int
    parts: tuple[int, ...]
    summed: bool


def messages(algorithm: str, ranks: int) -> tuple[Message, ...]:
    """Return all messages of an all-reduce, in step order, as `labcore.parallel` sends them.

    algorithm: one of `ALL_REDUCES`. Raises ValueError for another, and for halving_doubling unless
    ranks is a power of two.
    """
    expected(algorithm, ranks, 0)  # raises for invalid arguments
    every = tuple(range(ranks))
    if algorithm == "ring":
        return _ring(ranks)
    if algorithm == "halving_doubling":
        return _halving_doubling(ranks)
    pairs = [(source, target) for source in every for target in every if source != target]
    if algorithm == "one_shot":
        return tuple(_message(0, source, target, every, False) for source, target in pairs)
    return (
        *(_message(0, source, target, (target,), False) for source, target in pairs),
        *(_message(1, source, target, (source,), True) for source, target in pairs),
    )


def _message(step: int, source: int, target: int, parts: Sequence[int], summed: bool) -> Message:
    return Message(step=step, source=source, target=target, parts=tuple(parts), summed=summed)


def _ring(ranks: int) -> tuple[Message, ...]:
    return tuple(
        # A part's sum starts after its owner and reaches it last; then it goes around again.
        _message(
            half * (ranks - 1) + step, rank, (rank + 1) % ranks,
            [(rank - step - (1 - half)) % ranks], bool(half),
        )
        for half in (0, 1)
        for step in range(ranks - 1)
        for rank in range(ranks)
    )  # fmt: skip


def _halving_doubling(ranks: int) -> tuple[Message, ...]:
    distances = [ranks >> (step + 1) for step in range(ranks.bit_length() - 1)]
    found = []
    for step, distance in enumerate(distances):
        for rank in range(ranks):  # sends the half that the other will sum
            first = (rank ^ distance) & -distance
            parts = range(first, first + distance)
            found.append(_message(step, rank, rank ^ distance, parts, False))
    for step, distance in enumerate(reversed(distances), start=len(distances)):
        for rank in range(ranks):  # sends everything it has
            first = rank & -distance
            parts = range(first, first + distance)
            found.append(_message(step, rank, rank ^ distance, parts, True))
    return tuple(found)


def _names(parts: Sequence[int]) -> str:
    """Return parts as letters: a, b, c."""
    return "".join(chr(ord("a") + part) for part in parts)


def steps_view(algorithm: str = "ring", ranks: int = 4) -> go.Figure:
    """Draw who sends which parts to whom in each step of an all-reduce, from left to right.

    algorithm: one of `ALL_REDUCES`; ranks: 2 to 16. Vermillion messages carry partial sums, blue
    ones complete sums. Letters name a message's parts if there are few messages and each is its
    sender's only one in that step.
    Raises ValueError for others, and for halving_doubling unless ranks is a power of two.
    """
    one_of("algorithm", algorithm, ALL_REDUCES)
    if not 2 <= positive_int("ranks", ranks) <= 16:
        raise ValueError(f"ranks must be from 2 to 16, got {ranks}")
    sent, does = messages(algorithm, ranks), expected(algorithm, ranks, 1.0)
    traces = [
        _sent([one for one in sent if one.summed == summed], color, name)
        for summed, color, name in (
            (False, "vermillion", "summands"),
            (True, "blue", "whole sums"),
        )
    ]
    columns = range(does.steps + 1)
    traces.append(
        {
            "type": "scatter", "x": [x for x in columns for _ in range(ranks)],
            "y": [y for _ in columns for y in range(ranks)], "mode": "markers", "name": "rank",
            "hoverinfo": "skip",
            "marker": {"size": 9 if len(columns) < 16 else 5, "color": PALETTE["gray"]},
        }
    )  # fmt: skip
    # If a rank sends several messages per step, their names would overlap.
    shown = sent if len(sent) <= min(_FEW, ranks * does.steps) else ()
    traces.append(
        {
            "type": "scatter", "mode": "text", "hoverinfo": "skip", "showlegend": False,
            "x": [one.step + _NEAR for one in shown],
            "y": [(1 - _NEAR) * one.source + _NEAR * one.target for one in shown],
            "text": [_names(one.parts) for one in shown], "textfont": {"size": 13},
            "textposition": [  # beside the line, for both directions
                f"{'top' if one.target > one.source else 'bottom'} right" for one in shown
            ],
        }
    )  # fmt: skip
    name = ALGORITHMS[algorithm]
    steps = f"{does.steps} {'step' if does.steps == 1 else 'steps'}"
    tensors = f"{does.bytes:.3g} {'tensor' if does.bytes == 1 else 'tensors'}"
    in_messages = f"{does.messages} {'message' if does.messages == 1 else 'messages'}"
    side = max(0.3, 0.03 * does.steps)
    figure = go.Figure(
        traces,
        {
            "title": f"{name}: each sends {tensors}",
            "xaxis": {
                "title": "steps done", "range": [-side, does.steps + side], "zeroline": False,
                "dtick": 1 if does.steps <= 8 else 2 if does.steps <= 16 else 5,
            },
            "yaxis": {
                "title": "rank", "range": [ranks - 0.5, -0.5], "dtick": 1, "zeroline": False,
            },
            "height": 444,
        },
    )  # fmt: skip
    words = "; ".join(_told(step, [one for one in sent if one.step == step], ranks)
                      for step in range(does.steps))  # fmt: skip
    return describe(
        figure,
        f"{name}, {ranks} ranks, {steps}: each rank sends {tensors} in {in_messages}. {words}.",
    )


def _sent(some: Sequence[Message], color: str, name: str) -> dict[str, Any]:
    """Return messages as lines from the sender to the receiver one step later."""
    x: list[float | None] = []
    y: list[float | None] = []
    words: list[str] = []
    for one in some:
        gap = [None] if x else []
        x += [*gap, one.step, one.step + 1]
        y += [*gap, one.source, one.target]
        text = f"rank {one.source} to rank {one.target}: {_names(one.parts)}"
        words += [*[""] * len(gap), text, text]
    told = 0 < len(some) <= _MANY
    return {
        "type": "scatter", "x": x or [None], "y": y or [None], "mode": "lines", "name": name,
        "hovertext": words if told else None, "hoverinfo": "text" if told else "skip",
        "line": {"color": PALETTE[color], "width": 2},
    }  # fmt: skip


def _told(step: int, some: Sequence[Message], ranks: int) -> str:
    """Describe a step: every message if there are few, else what one rank sends."""
    few = len(some) <= 8
    shown = some if few else [one for one in some if one.source == 0]
    kind = "whole sums" if some[0].summed else "summands"
    words = ", ".join(f"{one.source} to {one.target} {_names(one.parts)}" for one in shown)
    return f"step {step + 1}, {kind}: {words}" + ("" if few else f" and so on of {ranks} ranks")
