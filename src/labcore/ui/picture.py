"""A figure as an SVG picture, for readers whose browser runs no JavaScript.

It draws what plotly's own JSON says through matplotlib, so no browser is needed in a build.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from labcore.ui.theme import PALETTE

__all__ = ["svg"]

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "star": "*",
    "triangle-up": "^", "triangle-down": "v",
}  # fmt: skip
_MAPS = {
    "rdbu": "RdBu",
    "viridis": "viridis",
    "cividis": "cividis",
    "greys": "Greys",
    "blues": "Blues",
}
_MAPS_DEFAULT = "viridis"


def svg(figure: Mapping[str, Any]) -> str:
    """`figure` (plotly JSON: data, layout) as SVG text, the same for the same figure.

    Draws scatter, scattergl, bar, heatmap, contour and histogram traces in one or more pairs of
    axes. Raises TypeError for another trace type.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    data, layout = list(figure.get("data", [])), figure.get("layout", {})
    for trace in data:
        kind = trace.get("type", "scatter")
        if kind not in KINDS:
            raise TypeError(
                f"a {kind} trace has no picture for readers without JavaScript; "
                f"use one of {', '.join(sorted(KINDS))}"
            )
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "labcore", "font.size": 11}
    with mpl.rc_context(style):
        canvas = Figure(figsize=(7.2, float(layout.get("height") or 420) / 100))
        FigureCanvasSVG(canvas)
        pairs = _axes(canvas, data, layout)
        shades = list(PALETTE.values())
        bars: dict[Any, list[tuple[Mapping[str, Any], str]]] = {}
        for number, trace in enumerate(data):
            if trace.get("visible", True) is not True:
                continue
            axes = pairs[trace.get("xaxis", "x"), trace.get("yaxis", "y")]
            color, kind = shades[number % len(shades)], trace.get("type", "scatter")
            if kind == "bar":
                bars.setdefault(axes, []).append((trace, color))
            else:
                _DRAW[kind](axes, trace, color)
        for axes, together in bars.items():
            _bars(axes, together, stacked=layout.get("barmode") in ("stack", "relative"))
        for shape in layout.get("shapes", []):
            _shape(next(iter(pairs.values())), shape)
        for axes in pairs.values():
            handles, labels = axes.get_legend_handles_labels()
            if len(labels) > 1 and layout.get("showlegend", True):
                axes.legend(handles, labels, fontsize=9, frameon=False)
        _title(canvas, layout)
        if len(pairs) > 1:
            _headings(pairs, layout)
        canvas.tight_layout()
        out = io.StringIO()
        canvas.savefig(
            out,
            format="svg",
            metadata={"Date": None, "Creator": None},
            bbox_inches="tight",  # a row's heading may stand left of what the layout foresaw
            pad_inches=0.05,
        )
    # Hundredths of a point are finer than any screen.
    return re.sub(r' d="[^"]*"', _shorter, out.getvalue())


def _shorter(path: re.Match[str]) -> str:
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", path.group())


def _text(part: Any) -> str:
    """The text of a plotly title, without its HTML."""
    text = part.get("text", "") if isinstance(part, Mapping) else (part or "")
    plain = re.sub(r"<[^>]+>", " ", str(text).replace("<br>", "\n"))
    return html.unescape(plain).replace("$", r"\$")


def _title(canvas: Any, layout: Mapping[str, Any]) -> None:
    title = _text(layout.get("title"))
    if title:
        canvas.suptitle(title, fontsize=12, x=0.02, ha="left")


def _axes(canvas: Any, data: list[Any], layout: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """One matplotlib axes for each pair of plotly axes in use, in the grid of their domains."""
    pairs = list(dict.fromkeys((t.get("xaxis", "x"), t.get("yaxis", "y")) for t in data))
    pairs = pairs or [("x", "y")]
    left = {x: _domain(layout, "x", x)[0] for x, _ in pairs}
    low = {y: _domain(layout, "y", y)[0] for _, y in pairs}
    columns, rows = sorted({*left.values()}), sorted({*low.values()}, reverse=True)
    tall = {low[y]: _domain(layout, "y", y)[1] - low[y] for _, y in pairs}
    grid = canvas.add_gridspec(len(rows), len(columns), height_ratios=[tall[at] for at in rows])
    made = {}
    for x, y in pairs:
        axes = canvas.add_subplot(grid[rows.index(low[y]), columns.index(left[x])])
        for letter, name in (("x", x), ("y", y)):
            spec = layout.get(f"{letter}axis{name[1:]}", {})
            getattr(axes, f"set_{letter}label")(_text(spec.get("title")))
            if spec.get("visible") is False:
                getattr(axes, f"{letter}axis").set_visible(False)
            if spec.get("type") == "log":
                getattr(axes, f"set_{letter}scale")("log")
            limits = spec.get("range")
            if limits and all(isinstance(v, (int, float)) for v in limits):
                if spec.get("type") == "log":
                    limits = [10**v for v in limits]
                getattr(axes, f"set_{letter}lim")(*limits)
            elif spec.get("autorange") == "reversed":
                getattr(axes, f"invert_{letter}axis")()
        axes.spines[["top", "right"]].set_visible(False)
        made[x, y] = axes
    return made


def _domain(layout: Mapping[str, Any], letter: str, name: str) -> tuple[float, float]:
    """The part of the canvas that an axis takes, from 0 to 1."""
    low, high = layout.get(f"{letter}axis{name[1:]}", {}).get("domain") or (0, 1)
    return low, high


def _headings(pairs: Mapping[tuple[str, str], Any], layout: Mapping[str, Any]) -> None:
    """The titles of a grid: above its first row, and at the left of each row."""
    for note in layout.get("annotations", []):
        if (note.get("xref"), note.get("yref")) != ("paper", "paper"):
            continue
        for (x, y), axes in pairs.items():
            (left, right), (low, high) = _domain(layout, "x", x), _domain(layout, "y", y)
            if left < note["x"] < right and high == note["y"]:
                axes.set_title(_text(note), fontsize=9)
            elif left == note["x"] == 0 and low < note["y"] < high:
                axes.set_ylabel(f"{_text(note).strip()}   {axes.get_ylabel()}".strip())


def _numbers(values: Any) -> Any:
    """Floats with NaN for None, or the values as they are (categories)."""
    try:
        return np.asarray([np.nan if v is None else v for v in values], float)
    except (TypeError, ValueError):
        return [str(v) for v in values]


def _xy(trace: Mapping[str, Any]) -> tuple[Any, Any]:
    x, y = trace.get("x"), trace.get("y")
    if y is None:
        y = range(len(x or []))
    if x is None:
        x = range(len(y))
    return _numbers(x), _numbers(y)


def _color(value: Any, fallback: str) -> Any:
    """A CSS color as matplotlib takes it; plotly's default where it is not one color."""
    if not isinstance(value, str):
        return fallback
    rgba = re.fullmatch(r"rgba?\(([^)]*)\)", value)
    if rgba:
        parts = [float(p) for p in rgba.group(1).split(",")]
        return (*(p / 255 for p in parts[:3]), *parts[3:])
    return value


def _scatter(axes: Any, trace: Mapping[str, Any], color: str) -> None:
    x, y = _xy(trace)
    line, marker = trace.get("line") or {}, trace.get("marker") or {}
    mode = trace.get("mode") or ("lines+markers" if len(x) < 20 else "lines")
    ink = _color(line.get("color"), _color(marker.get("color"), color))
    name = trace.get("name") if trace.get("showlegend", True) else None
    options: dict[str, Any] = {"color": ink, "alpha": trace.get("opacity", 1)}
    if "lines" in mode:
        options |= {"linestyle": _DASHES.get(line.get("dash", "solid"), "--")}
        options |= {"linewidth": line.get("width", 2.5) * 0.7}
        if line.get("shape") in ("hv", "vh"):
            options |= {"drawstyle": "steps-post" if line["shape"] == "hv" else "steps-pre"}
    else:
        options |= {"linestyle": "none"}
    if "markers" in mode:
        size, symbol = marker.get("size", 6), marker.get("symbol", "circle")
        options |= {"marker": _MARKERS.get(symbol if isinstance(symbol, str) else "circle", "o")}
        options |= {"markersize": (size if isinstance(size, (int, float)) else 6) * 0.8}
        options |= {"markerfacecolor": _color(marker.get("color"), ink)}
    axes.plot(x, y, label=name, **options)
    _errors(axes, trace, x, y, ink)
    if "text" in mode and isinstance(trace.get("text"), list):
        for px, py, word in zip(x, y, trace["text"], strict=False):
            offset = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            axes.annotate(_text(word), (px, py), fontsize=9, **offset)
    if trace.get("fill") in ("tozeroy", "toself", "tonexty"):
        fill = _color(trace.get("fillcolor"), color)
        if trace["fill"] == "toself":
            axes.fill(x, y, color=fill, alpha=0.25, linewidth=0)
        else:
            axes.fill_between(x, y, 0, color=fill, alpha=0.25, linewidth=0)


def _bars(axes: Any, bars: list[tuple[Mapping[str, Any], str]], *, stacked: bool) -> None:
    """The bar traces of one pair of axes: on each other, or side by side."""
    width = 0.8 if stacked else 0.8 / len(bars)
    sideways = bars[0][0].get("orientation") == "h"
    names: dict[str, int] = {}
    tops: dict[float, float] = {}
    for number, (trace, color) in enumerate(bars):
        x, y = _xy(trace)
        where, sizes = (y, x) if sideways else (x, y)
        if isinstance(where, list):
            where = [names.setdefault(name, len(names)) for name in where]
        at = np.asarray(where, float)
        base = np.asarray([tops.get(float(v), 0.0) for v in at]) if stacked else np.zeros(len(at))
        tops |= {float(v): float(b + s) for v, b, s in zip(at, base, sizes, strict=True)}
        place = at if stacked else at + (number - (len(bars) - 1) / 2) * width
        told = (trace.get("marker") or {}).get("color")
        many = told if isinstance(told, list) else None
        ink = _color(told, color) if many is None else [_color(one, color) for one in many]
        draw = axes.barh if sideways else axes.bar
        drawn = draw(place, sizes, width, base, color=ink, alpha=0.85, label=trace.get("name"))
        if isinstance(trace.get("text"), list):
            axes.bar_label(drawn, [_text(word) for word in trace["text"]], label_type="center")
        ends = (sizes, place) if sideways else (place, sizes)
        _errors(axes, trace, ends[0], ends[1], "#444444")
    if names:
        (axes.set_yticks if sideways else axes.set_xticks)(list(names.values()), list(names))


def _errors(axes: Any, trace: Mapping[str, Any], x: Any, y: Any, ink: Any) -> None:
    for side in ("x", "y"):
        error = trace.get(f"error_{side}") or {}
        if error.get("array") is not None and error.get("visible", True):
            above = np.asarray(error["array"], float)
            below = np.asarray(error.get("arrayminus", above), float)
            bars: dict[str, Any] = {f"{side}err": [below, above]}
            axes.errorbar(x, y, fmt="none", ecolor=ink, elinewidth=1, capsize=2, **bars)


def _shape(axes: Any, shape: Mapping[str, Any]) -> None:
    """A line of the layout, such as add_hline and add_vline make; other shapes are left out."""
    if shape.get("type") != "line":
        return
    line = shape.get("line") or {}
    style = {
        "color": _color(line.get("color"), "#666666"),
        "linestyle": _DASHES.get(line.get("dash", "solid"), "--"),
        "linewidth": line.get("width", 2) * 0.7,
    }
    if "domain" in str(shape.get("xref")) or shape.get("xref") == "paper":
        axes.axhline(shape["y0"], **style)
    elif "domain" in str(shape.get("yref")) or shape.get("yref") == "paper":
        axes.axvline(shape["x0"], **style)
    else:
        axes.plot([shape["x0"], shape["x1"]], [shape["y0"], shape["y1"]], **style)


def _histogram(axes: Any, trace: Mapping[str, Any], color: str) -> None:
    values = np.asarray(_numbers(trace.get("x") or trace.get("y") or []), float)
    axes.hist(values[np.isfinite(values)], bins=trace.get("nbinsx") or 30, color=color, alpha=0.85)


def _map(trace: Mapping[str, Any]) -> Any:
    """The trace's colors as a matplotlib color map."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = trace.get("colorscale")
    if isinstance(scale, list):
        stops = [(float(at), _color(color, "#808080")) for at, color in scale]
        found: Any = LinearSegmentedColormap.from_list("trace", stops)
    else:
        import matplotlib as mpl

        found = mpl.colormaps[_MAPS.get(str(scale).lower(), _MAPS_DEFAULT)]
    return found.reversed() if trace.get("reversescale") else found


def _surface(trace: Mapping[str, Any]) -> tuple[Any, Any, np.ndarray]:
    z = np.asarray([[np.nan if v is None else v for v in row] for row in trace["z"]], float)
    x = _numbers(trace["x"]) if trace.get("x") is not None else np.arange(z.shape[1], dtype=float)
    y = _numbers(trace["y"]) if trace.get("y") is not None else np.arange(z.shape[0], dtype=float)
    return x, y, z


def _heatmap(axes: Any, trace: Mapping[str, Any], _color: str) -> None:
    x, y, z = _surface(trace)
    names = [isinstance(side, list) for side in (x, y)]
    x0, y0 = (np.arange(n, dtype=float) if named else side
              for named, side, n in zip(names, (x, y), reversed(z.shape), strict=True))  # fmt: skip
    mesh = axes.pcolormesh(
        x0, y0, z, cmap=_map(trace), vmin=trace.get("zmin"), vmax=trace.get("zmax"),
        shading="nearest", rasterized=True,
    )  # fmt: skip
    if names[0]:
        axes.set_xticks(x0, x)
    if names[1]:
        axes.set_yticks(y0, y)
    if trace.get("showscale", True):
        axes.figure.colorbar(mesh, ax=axes)


def _contour(axes: Any, trace: Mapping[str, Any], _color: str) -> None:
    x, y, z = _surface(trace)
    how = trace.get("contours") or {}
    levels: Any = trace.get("ncontours") or 15
    if {"start", "end", "size"} <= how.keys():
        levels = np.arange(how["start"], how["end"] + how["size"] / 2, how["size"])
    draw = axes.contour if how.get("coloring") in ("lines", "none") else axes.contourf
    drawn = draw(x, y, z, levels=levels, cmap=_map(trace), alpha=trace.get("opacity"))
    drawn.set_rasterized(True)  # hundreds of paths otherwise
    if trace.get("showscale", True) and how.get("coloring") != "none":
        axes.figure.colorbar(drawn, ax=axes)


_DRAW: dict[str, Callable[[Any, Mapping[str, Any], str], None]] = {
    "scatter": _scatter,
    "scattergl": _scatter,
    "heatmap": _heatmap,
    "contour": _contour,
    "histogram": _histogram,
}
KINDS = {*_DRAW, "bar"}
