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

__all__ = ["STYLE", "Kind", "Row", "drawn", "in_words", "number"]

Kind = Literal["ours", "peer", "live", "predicted"]

# Pages that load no stylesheet of the course (JupyterLab, Colab) need the style with the markup.
STYLE = (
    ".labcore-intervals{overflow-x:auto}"
    ".labcore-intervals table{border-collapse:collapse;width:100%;min-width:34em;"
    "table-layout:fixed;font-size:.95em}"
    ".labcore-intervals col.name{width:31%}.labcore-intervals col.value{width:24%}"
    ".labcore-intervals col.verdict{width:19%}"
    ".labcore-intervals :is(th,td){padding:.2em .6em;text-align:left;font-weight:normal;"
    "border:0;background:none}"
    ".labcore-intervals .axis{position:relative;height:1.5em}"
    ".labcore-intervals .axis>*{position:absolute;top:0;bottom:0}"
    ".labcore-intervals .good{background:#009e7326}"
    ".labcore-intervals .bound{border-left:2px dashed currentColor;opacity:.6}"
    ".labcore-intervals .bar{border-top:3px solid;top:calc(50% - 1.5px);bottom:auto}"
    ".labcore-intervals .dot{width:.7em;height:.7em;margin-left:-.35em;top:calc(50% - .35em);"
    "bottom:auto;border:2px solid;border-radius:50%;box-sizing:border-box}"
    ".labcore-intervals .ours .dot{background:currentColor}"
    ".labcore-intervals :is(.ours .axis){color:#2f86c5}"
    ".labcore-intervals :is(.peer .axis){color:#b97a00}"
    ".labcore-intervals :is(.live .axis){color:#d5602b}"
    ".labcore-intervals :is(.predicted .axis){color:#009e73}"
    ".labcore-intervals .predicted .dot{border-radius:0;transform:rotate(45deg)}"
    ".labcore-intervals .tick{transform:translateX(-50%);font-size:.8em;white-space:nowrap}"
    ".labcore-intervals .value{font-variant-numeric:tabular-nums}"
)


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
    behind = "" if rule is None or bound is None else _region(place(bound), rule)
    marks = "".join(
        f'<span class="tick" style="left:{place(tick):.1f}%">{number(tick)}</span>'
        for tick in ticks
    )
    heading = "mean [95% interval]" + (f", {unit}" if unit and not _is_ratio(unit) else "")
    judged = any(row.verdict for row in rows)
    body = "".join(_row(row, place, behind) for row in rows)
    columns = '<col class="name"><col class="drawing"><col class="value">'
    return (
        '<div class="labcore-intervals" tabindex="0"><table><colgroup>'
        f"{columns}{'<col class=verdict>' if judged else ''}</colgroup><thead><tr><td></td>"
        f'<td><div class="axis" aria-hidden="true">{marks}</div></td>'
        f"<td><small>{html.escape(heading)}</small></td>{'<td></td>' if judged else ''}</tr>"
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Row, place: Callable[[float], float], behind: str) -> str:
    one = row.measured
    bar = ""
    if math.isfinite(one.high) and one.low < one.high:
        low, high = place(one.low), place(one.high)
        bar = f'<span class="bar" style="left:{low:.1f}%;width:{high - low:.1f}%"></span>'
    dot = f'<span class="dot" style="left:{place(one.mean):.1f}%"></span>'
    verdict = f"<td>{html.escape(row.verdict)}</td>" if row.verdict else ""
    return (
        f'<tr class="{row.kind}"><th scope="row">{html.escape(row.name)}</th>'
        f'<td><div class="axis" aria-hidden="true">{behind}{bar}{dot}</div></td>'
        f'<td class="value">{in_words(one)}</td>{verdict}</tr>'
    )


def _region(bound: float, rule: Rule) -> str:
    left, width = (0.0, bound) if rule.at_most is not None else (bound, 100 - bound)
    return (
        f'<span class="good" style="left:{left:.1f}%;width:{width:.1f}%"></span>'
        f'<span class="bound" style="left:{bound:.1f}%"></span>'
    )


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
        every = max(1, -(-len(decades) // 4))
        return place, [10.0**power for power in decades[::every]] or [10**low]
    step = _step((end - start) / 5)
    first = math.ceil(start / step)
    return place, [step * count for count in range(first, math.floor(end / step) + 1)]


def _step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= about * 0.999)
