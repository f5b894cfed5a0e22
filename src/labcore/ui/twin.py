"""The static twin of an explorer: its figure on a grid of control values, as one small JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go

from labcore.ui import theme
from labcore.ui.compact import dumps, plain, pool
from labcore.ui.controls import Choice, Control, LogSlider, Toggle

__all__ = ["MIME", "MOST_BYTES", "MOST_FRAMES", "payload", "still"]

MIME = "application/vnd.labcore.explorer+json"
MOST_FRAMES = 120
# A page may have 1.5 MB besides the shared libraries, and most pages have at least two explorers.
MOST_BYTES = 700_000


def _thinned(control: Control, count: int) -> list[Any]:
    """Return at most `count` positions of a slider: the default, both ends, and equal strides."""
    positions = list(control.positions())
    default = control.default
    log = isinstance(control, LogSlider)

    def distance(index: int) -> float:
        value = positions[index]
        return abs(math.log(value / default)) if log else abs(value - default)

    start = min(range(len(positions)), key=distance)
    positions[start] = default  # the default may be between two positions
    for stride in range(1, len(positions) + 1):
        kept = sorted({0, *range(start % stride, len(positions), stride), len(positions) - 1})
        if len(kept) <= count:
            break
    return [positions[index] for index in kept]


def grid(controls: Mapping[str, Control]) -> dict[str, list[Any]]:
    """Return the values of the first two controls at which frames are made, at most MOST_FRAMES.

    Choices and toggles keep every option. Of two sliders, the first keeps more positions. A second
    control that would leave the first fewer than three positions is fixed at its default.
    """
    moved = list(controls.items())[:2]
    whole = [len(c.positions()) if isinstance(c, (Choice, Toggle)) else None for _, c in moved]
    if whole[0] is not None and whole[0] > MOST_FRAMES:
        raise ValueError(
            f"{moved[0][0]} has {whole[0]} options, but the static page shows at most "
            f"{MOST_FRAMES} frames; offer fewer options"
        )
    if len(moved) == 1:
        return {moved[0][0]: _values(moved[0][1], MOST_FRAMES)}
    (first, a), (second, b) = moved
    if whole[0] is not None:
        room = MOST_FRAMES // whole[0]
        least = whole[1] if whole[1] is not None else 2
        if room < least:
            return {first: _values(a, MOST_FRAMES)}
        return {first: _values(a, MOST_FRAMES), second: _values(b, room)}
    for_b = whole[1] if whole[1] is not None else min(len(b.positions()), 8)
    if MOST_FRAMES // for_b < 3:
        return {first: _values(a, MOST_FRAMES)}
    values_a = _values(a, MOST_FRAMES // for_b)
    return {first: values_a, second: _values(b, MOST_FRAMES // len(values_a))}


def _values(control: Control, count: int) -> list[Any]:
    if isinstance(control, (Choice, Toggle)):
        return list(control.positions())
    return _thinned(control, count)


def _described(name: str, control: Control, values: list[Any]) -> dict[str, Any]:
    kind = "range"
    if isinstance(control, Toggle):
        kind = "toggle"
    elif isinstance(control, Choice):
        kind = "select"
    return {
        "name": name,
        "label": control.label or name.replace("_", " "),
        "kind": kind,
        "values": [control.text(value) for value in values],
        "start": values.index(control.default),
    }


def _frame(figure: go.Figure) -> dict[str, Any]:
    """Return traces and layout of `figure`, small and without the template, which the page has."""
    spec = figure.to_dict()
    layout = {k: v for k, v in spec.get("layout", {}).items() if k not in ("template", "width")}
    return {"data": plain(spec.get("data", [])), "layout": plain(layout)}


def _pack(
    frames: list[dict[str, Any]],
    controls: list[dict[str, Any]],
    fixed: list[dict[str, str]],
    alt: str,
) -> dict[str, Any]:
    short, parts = pool(frames)
    packed = {
        "version": 1,
        "alt": alt,
        "controls": controls,
        "fixed": fixed,
        "frames": short,
        "parts": parts,
        "templates": {mode: theme.template_dict(mode) for mode in ("light", "dark")},
        "height": frames[0]["layout"].get("height") or theme.HEIGHT,
    }
    size = len(dumps(packed).encode())
    if size > MOST_BYTES:
        raise ValueError(
            f"the {len(frames)} frames of this explorer take {size:,} bytes on the static page; "
            f"the limit is {MOST_BYTES:,}; draw fewer points or give a control fewer positions"
        )
    return packed


def payload(
    figure: Callable[..., go.Figure], *, controls: Mapping[str, Control], alt: str
) -> dict[str, Any]:
    """Return everything that the static page needs of an explorer.

    figure: takes any of the controls' values by name; the others stay at their defaults. Frames are
    in row-major order of the moved controls. Raises RuntimeError with the values at which the
    figure function failed, and ValueError if the frames are too large.
    """
    values = grid(controls)
    frames = []
    for point in itertools.product(*values.values()):
        chosen = dict(zip(values, point, strict=True))
        try:
            frames.append(_frame(figure(**chosen)))
        except Exception as error:
            at = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
            raise RuntimeError(
                f"the figure function failed at {at}: {type(error).__name__}: {error}"
            ) from error
    moved = [_described(name, controls[name], points) for name, points in values.items()]
    fixed = [
        {"label": c.label or name.replace("_", " "), "value": c.text(c.default)}
        for name, c in controls.items()
        if name not in values
    ]
    return _pack(frames, moved, fixed, alt)


def still(spec: Mapping[str, Any], *, alt: str) -> dict[str, Any]:
    """Return the same for one plotly figure without controls; spec: its JSON, data and layout."""
    frame = _frame(go.Figure({"data": spec.get("data", []), "layout": spec.get("layout", {})}))
    return _pack([frame], [], [], alt)
