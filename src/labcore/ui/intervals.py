"""Numbers with their intervals: a table in which one axis runs through all rows.

The drawing is plain HTML, so it needs no JavaScript and works in print and in slides too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from labcore.claims import Measured, Rule

__all__ = ["Kind", "Row", "drawn", "in_words", "number"]

Kind = Literal["ours", "peer", "live", "predicted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A number with its name.

    kind: who it belongs to, which gives color and shape. verdict: shown beside it, "" for none.
    """

    name: str
    measured: Measured
    kind: Kind = "ours"
    verdict: str = ""


def number(value: float) -> str:
    """Return a number with three significant digits, and thousands separators from 10,000 on."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.2e}".replace(".00e", "e")
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e" in text or abs(value) >= 1000 else text


def in_words(measured: Measured, unit: str = "") -> str:
    """Return a number with its 95% interval and its unit."""
    text = number(measured.mean)
    if measured.low != measured.high and math.isfinite(measured.high):
        text += f" [{number(measured.low)}, {number(measured.high)}]"
    return f"{text} {'times' if _is_ratio(unit) else unit}".strip()


def _is_ratio(unit: str) -> bool:
    return unit == "ratio" or " / " in unit


def drawn(rows: Sequence[Row], *, unit: str = "", rule: Rule | None = None) -> str:
    """Return the HTML table of `rows`, whose numbers share a unit and are drawn on one axis.

    rule: its bound and the side on which it holds are drawn too.
    Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("a table of intervals needs at least one row, got none")
    bound = None if rule is None else rule.at_most if rule.at_most is not None else rule.at_least
    place, ticks = _axis(rows, bound)
    judging = "" if rule is None or bound is None else _region(place(bound), rule)
    marks = "".join(
        f'<span class="tick" style="left:{place(tick):.1f}%">{number(tick)}</span>'
        for tick in ticks
    )
    spread = any(row.measured.low < row.measured.high for row in rows)
    heading = "mean [95% interval]" if spread else "value"
    heading += f", {unit}" if unit and not _is_ratio(unit) else ""
    judged = any(row.verdict for row in rows)
    body = "".join(_row(row, place) for row in rows)
    columns = '<col class="name"><col class="drawing"><col class="value">'
    return (
        '<div class="labcore-intervals" tabindex="0"><table><colgroup>'
        f"{columns}{'<col class=verdict>' if judged else ''}</colgroup><thead><tr><td></td>"
        f'<td><div class="axis" aria-hidden="true">{marks}</div></td>'
        f"<td><small>{html.escape(heading)}</small></td>{'<td></td>' if judged else ''}</tr>"
        f"</thead><tbody{judging}>{body}</tbody></table></div>"
    )


def _row(row: Row, place: Callable[[float], float]) -> str:
    one = row.measured
    bar = ""
    if math.isfinite(one.high) and one.low < one.high:
        low, high = place(one.low), place(one.high)
        bar = f'<span class="bar" style="left:{low:.1f}%;width:{high - low:.1f}%"></span>'
    dot = f'<span class="dot" style="left:{place(one.mean):.1f}%"></span>'
    verdict = f"<td>{html.escape(row.verdict)}</td>" if row.verdict else ""
    return (
        f'<tr class="{row.kind}"><th scope="row">{html.escape(row.name)}</th>'
        f'<td><div class="axis">{bar}{dot}</div></td>'
        f"<td>{in_words(one)}</td>{verdict}</tr>"
    )


def _region(bound: float, rule: Rule) -> str:
    left, width = (0.0, bound) if rule.at_most is not None else (bound, 100 - bound)
    side = f"--from:{left:.1f}%;--wide:{width:.1f}%;--bound:{bound:.1f}%"
    return f' class="judged" style="{side}"'


def _axis(rows: Sequence[Row], bound: float | None) -> tuple[Callable[[float], float], list[float]]:
    """Return the place of a value, in percent of the axis, and the values to mark."""
    numbers = [one for row in rows for one in (row.measured.low, row.measured.high)]
    numbers += [row.measured.mean for row in rows] + ([] if bound is None else [bound])
    numbers = [one for one in numbers if math.isfinite(one)]
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= 30
    if log:
        low, high = math.log10(low), math.log10(high)
    elif 0 < low < high / 3:
        low = 0.0
    # Numbers that are equal but for rounding must not look far apart.
    margin = max(0.06 * (high - low), 0.05 * max(abs(low), abs(high))) or 1.0
    start, end = low - margin, high + margin

    def place(value: float) -> float:
        at = math.log10(value) if log else value
        return 100 * (at - start) / (end - start)

    if log:
        decades = range(math.ceil(start), math.floor(end) + 1)
        if len(decades) < 2:  # little more than 30 fold
            one = 10.0 ** decades[0]
            return place, [mark for mark in (0.3 * one, one, 3 * one) if 0 <= place(mark) <= 100]
        return place, [10.0**power for power in decades[:: -(-len(decades) // 4)]]
    step = _step((end - start) / 5)
    first = math.ceil(start / step)
    return place, [step * count for count in range(first, math.floor(end / step) + 1)]


def _step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= about * 0.999)
