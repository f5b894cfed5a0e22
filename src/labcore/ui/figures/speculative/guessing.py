"""Text as it's written: token by token and in bursts, each token colored by who guessed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from labcore.studies.speculative.guesses import GUESSERS, Written
from labcore.ui import draw
from labcore.ui.explorer import describe

__all__ = ["bursts", "guessed", "guessed_by"]

COLUMNS = 40  # letters per line, which a phone has room for
ROWS = 18  # lines of the longest of the forty
_KEPT = 80  # letters of the prompt's end
_COLORS = {"prompt": "#e4e7ea", "target": "#f2b48c", "draft model": "#9ccbea", "n-grams": "#8fd3bd"}
_LETTERS = {"t": "target", "d": "draft model", "n": "n-grams"}
_INK = "#222832"
_LAYOUT = {
    "xaxis": {"visible": False, "range": [0, COLUMNS + 1]}, "barmode": "overlay", "bargap": 0.08,
    "margin": {"l": 10, "r": 10},
}  # fmt: skip


class _Cell(NamedTuple):
    """A piece of a line. row, column: where it begins; who: a key of _COLORS."""

    text: str
    row: int
    column: int
    who: str


def guessed_by(
    prompt: str,
    guesser: str = GUESSERS[-1],
    temperature: float = 0.0,
    *,
    data: Mapping[str, Mapping[str, Written]],
) -> go.Figure:
    """Draw a recorded continuation by who guessed its tokens.

    data: prompt -> "<guesser>, <temperature>" -> continuation, as `guesses.forty` returns it.
    """
    written = data[prompt][f"{guesser}, {temperature:g}"]
    figure, per_pass = guessed(written, rows=ROWS), len(written.who) / _steps(written.who)
    name = guesser[0].upper() + guesser[1:]
    figure.layout.title.text = f"{name}: {per_pass:.2f} tokens per pass"
    return figure


def guessed(written: Written, *, rows: int = 0) -> go.Figure:
    """Draw one continuation by who guessed its tokens. rows: lines to leave room for, at least."""
    cells = _cells(written)
    steps, tokens = _steps(written.who), len(written.who)
    lines = max(rows, 1 + max((cell.row for cell in cells), default=0))
    count = {who: written.who.count(letter) for letter, who in _LETTERS.items()}
    spoken = ", ".join(f"{n} by the {who}" for who, n in count.items())
    figure = go.Figure(
        _bars(cells, "y"),
        {
            **_LAYOUT,
            "title": f"{tokens} tokens in {steps} passes: {tokens / steps:.2f} per pass",
            "yaxis": {"visible": False, "range": [lines, -0.6]},
            "height": 130 + 24 * lines,
        },
    )
    return describe(figure, f"{tokens} tokens in {steps} passes of the target. Chosen: {spoken}.")


def bursts(passes: int, *, data: Written) -> go.Figure:
    """Draw what has been written after so many passes, one token per pass and in bursts.

    data: a continuation with guesses. Above is the same text as the target writes it alone.
    """
    alone = Written(prompt=data.prompt, tokens=data.tokens, who="t" * len(data.who))
    shown = [_cut(one, passes) for one in (alone, data)]
    lines = 1 + max(cell.row for cell in _cells(data))
    plain, drafted = (len(one.who) for one in shown)
    panel = {"visible": False, "range": [lines, -1.8]}
    figure = go.Figure(
        [bar for axis, one in zip(("y", "y2"), shown, strict=True)
         for bar in _bars(_cells(one), axis)],
        {
            **_LAYOUT,
            "title": f"After {passes} passes: {plain} tokens, and {drafted}",
            "yaxis": {**panel, "domain": [0.51, 1]},
            "yaxis2": {**panel, "domain": [0, 0.49]},
            "annotations": [
                {"text": text, "x": 0, "xref": "paper", "y": -1.1, "yref": axis,
                 "showarrow": False, "xanchor": "left", "font": {"size": 13}}
                for text, axis in (("<b>the target alone</b>", "y"), ("<b>with guesses</b>", "y2"))
            ],
            "height": 150 + 2 * 22 * (lines + 1),
        },
    )  # fmt: skip
    return describe(
        figure,
        f"After {passes} passes of the target: {plain} tokens without guesses, {drafted} with.",
    )


def _steps(who: str) -> int:
    """Return the number of steps: each but perhaps the last ends with a token of the target."""
    return who.count("t") + (not who.endswith("t"))


def _cut(written: Written, passes: int) -> Written:
    """Return what the first passes wrote."""
    end = steps = 0
    while end < len(written.who) and steps < passes:
        steps += written.who[end] == "t"
        end += 1
    return Written(prompt=written.prompt, tokens=written.tokens[:end], who=written.who[:end])


def _cells(written: Written) -> list[_Cell]:
    """Return the pieces of a text in lines of at most COLUMNS letters."""
    tail = written.prompt[-_KEPT:]
    if len(tail) < len(written.prompt) and "\n" in tail[:-1]:
        tail = tail[tail.index("\n") + 1 :]
    pieces = [(line, "prompt") for line in tail.splitlines(keepends=True)]
    pieces += [
        (text, _LETTERS[letter]) for text, letter in zip(written.tokens, written.who, strict=True)
    ]
    cells, row, column = [], 0, 0
    for text, who in pieces:
        parts = text.split("\n")
        for number, part in enumerate(parts):
            if number:
                row, column = row + 1, 0
            shown = part + ("↵" if number < len(parts) - 1 and who != "prompt" else "")
            while shown:
                if column and column + len(shown) > COLUMNS:
                    row, column = row + 1, 0
                cells.append(_Cell(shown[:COLUMNS], row, column, who))
                column += min(len(shown), COLUMNS)
                shown = shown[COLUMNS:]
    return cells


def _bars(cells: Sequence[_Cell], axis: str) -> list[dict[str, Any]]:
    """Return the cells as bars, one trace per color, the same traces for each text."""
    # Plain dicts in one call; adding traces and updating the layout takes three times as long.
    found = []
    for who, color in _COLORS.items():
        mine = [cell for cell in cells if cell.who == who]
        mine = mine or [_Cell("", 0, 0, who)]  # keeps the color in the legend
        found.append({
            "type": "bar", "orientation": "h", "name": who, "legendgroup": who, "yaxis": axis,
            "x": [len(cell.text) for cell in mine], "base": [cell.column for cell in mine],
            "y": [cell.row for cell in mine], "width": 0.92, "showlegend": axis == "y",
            "text": [draw.escaped(cell.text.replace(" ", "\u00a0")) for cell in mine],
            "textposition": "inside", "insidetextanchor": "start", "constraintext": "none",
            "textangle": 0, "hoverinfo": "skip",
            "insidetextfont": {"family": "monospace", "size": 12, "color": _INK},
            "marker": {"color": color, "line": {"width": 1, "color": "white"}},
        })  # fmt: skip
    return found
