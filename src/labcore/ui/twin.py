"""The static twin of an explorer: its figure on a grid of control values, as one small JSON."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go

from labcore.ui import theme
from labcore.ui.compact import dumps, plain, pool
from labcore.ui.controls import Choice, Control, LogSlider, Toggle

__all__ = ["MIME", "MOST_BYTES", "MOST_FRAMES", "first_slice", "payload", "start", "still"]

MIME = "application/vnd.labcore.explorer+json"
MOST_CONTROLS = 4
MOST_FRAMES = 500
# A page may have 1.5 MB besides the shared libraries, and most pages have at least two explorers.
MOST_BYTES = 700_000
MOST_SLICE_BYTES = 300_000
_ACROSS = 2  # controls that move within a slice


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
    """Return the values of the moving controls: at most MOST_FRAMES frames in all.

    Choices and toggles keep every option, and sliders share the rest, the first of equal ones the
    most. What would leave a slider fewer than three positions is fixed at its default, last first.
    """
    moved = dict(list(controls.items())[:MOST_CONTROLS])
    while (counts := _counts(moved)) is None:
        name, control = moved.popitem()
        if not moved:
            raise ValueError(
                f"{name} has {len(control.positions())} options, but the static page shows at most "
                f"{MOST_FRAMES} frames; offer fewer options"
            )
    return {name: _values(control, counts[name]) for name, control in moved.items()}


def _counts(moved: Mapping[str, Control]) -> dict[str, int] | None:
    """Return how many positions each control keeps, or None if that would be too few."""
    counts = {name: len(control.positions()) for name, control in moved.items()}
    sliders = {n: counts[n] for n, c in moved.items() if not isinstance(c, (Choice, Toggle))}
    while math.prod(counts.values()) > MOST_FRAMES:
        longest = max(reversed(sliders), key=lambda name: counts[name], default="")
        if not longest or counts[longest] <= 3:
            return None
        counts[longest] -= 1
    return counts


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
    slices: list[list[dict[str, Any]]],
    controls: list[dict[str, Any]],
    fixed: list[dict[str, str]],
    alt: str,
) -> dict[str, Any]:
    """Return the payload. `parts` has what the first view or several slices need, by index.

    Each slice has its frames and the parts that it alone needs.
    """
    begins = start(controls)
    short, pooled = pool(slices)
    needed = [_parts_of(frames, pooled) for frames in short]
    times = Counter(index for used in needed for index in used)
    shared = {index for index, count in times.items() if count > 1} | needed[begins]
    packed: dict[str, Any] = {
        "version": 2,
        "alt": alt,
        "controls": controls,
        "fixed": fixed,
        "parts": {str(index): pooled[index] for index in sorted(shared)},
        "slices": [
            {
                "frames": frames,
                "parts": {str(index): pooled[index] for index in sorted(used - shared)},
            }
            for frames, used in zip(short, needed, strict=True)
        ],
        "templates": {mode: theme.template_dict(mode) for mode in ("light", "dark")},
        "height": slices[begins][0]["layout"].get("height") or theme.HEIGHT,
    }
    later = [one for place, one in enumerate(packed["slices"]) if place != begins]
    first = len(dumps({**packed, "slices": [packed["slices"][begins]]}).encode())
    most = max((len(dumps(one).encode()) for one in later), default=0)
    if first > MOST_BYTES or most > MOST_SLICE_BYTES:
        raise ValueError(
            f"this explorer loads {first:,} bytes with its page and up to {most:,} bytes for a "
            f"control; the limits are {MOST_BYTES:,} and {MOST_SLICE_BYTES:,}; draw fewer points "
            "or give a control fewer positions"
        )
    return packed


def start(controls: list[dict[str, Any]]) -> int:
    """Return the index of the slice that a page shows first."""
    index = 0
    for control in controls[_ACROSS:]:
        index = index * len(control["values"]) + control["start"]
    return index


def _parts_of(value: Any, pooled: list[Any]) -> set[int]:
    """Return the indices of the parts that `value` refers to, also through other parts."""
    found: set[int] = set()

    def look(item: Any) -> None:
        if isinstance(item, dict):
            if "$" in item and item["$"] not in found:
                found.add(item["$"])
                look(pooled[item["$"]])
            for inner in item.values():
                look(inner)
        elif isinstance(item, list):
            for inner in item:
                look(inner)

    look(value)
    return found


def first_slice(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payload with the first two controls alone, the others fixed where they start."""
    rest = packed["controls"][_ACROSS:]
    fixed = [{"label": one["label"], "value": one["values"][one["start"]]} for one in rest]
    return {
        **packed,
        "controls": packed["controls"][:_ACROSS],
        "fixed": [*fixed, *packed["fixed"]],
        "slices": [packed["slices"][start(packed["controls"])]],
    }


def payload(
    figure: Callable[..., go.Figure], *, controls: Mapping[str, Control], alt: str
) -> dict[str, Any]:
    """Return everything that the static page needs of an explorer.

    figure: takes any of the controls' values by name; the others stay at their defaults. A slice
    has the frames of the first two moved controls, in row-major order. There is a slice for each
    setting of the others, in that order too. Raises RuntimeError with the values at which the
    figure function failed, and ValueError if the frames are too large.
    """
    values = grid(controls)
    names = list(values)
    across, along = names[:_ACROSS], names[_ACROSS:]
    frames = []
    for point in itertools.product(*(values[name] for name in (*along, *across))):
        chosen = dict(zip((*along, *across), point, strict=True))
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
    size = math.prod(len(values[name]) for name in across)
    return _pack([frames[at : at + size] for at in range(0, len(frames), size)], moved, fixed, alt)


def still(spec: Mapping[str, Any], *, alt: str) -> dict[str, Any]:
    """Return the same for one plotly figure without controls; spec: its JSON, data and layout."""
    frame = _frame(go.Figure({"data": spec.get("data", []), "layout": spec.get("layout", {})}))
    return _pack([[frame]], [], [], alt)
