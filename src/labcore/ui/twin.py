"""The static twin of an explorer: its figure on a grid of control values, as one small JSON."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from labcore.ui import theme
from labcore.ui.compact import dumps, plain, pool
from labcore.ui.controls import Choice, Control, LogSlider, Nodes, Toggle

__all__ = [
    "FORMULAS",
    "MIME",
    "MOST_BYTES",
    "MOST_FRAMES",
    "Formula",
    "first_slice",
    "payload",
    "start",
    "still",
]

MIME = "application/vnd.labcore.explorer+json"
MOST_CONTROLS = 4
MOST_FRAMES = 500
# A page may have 1.5 MB besides the shared libraries, and most pages have at least two explorers.
MOST_BYTES = 700_000
MOST_SLICE_BYTES = 300_000
_ACROSS = 2  # controls that move within a slice
FORMULAS = Path(__file__).with_name("formulas.js")
"""The functions by which a page computes figures."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A figure that the static page computes, so that all its controls move, at any value.

    name: of the function in FORMULAS that writes what changes into the figure's frame.
    data: returns the numbers that the function needs, as JSON values, when the book is built.
    """

    name: str
    data: Callable[[], Any]


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
    """Return the values that each control takes on the page: at most MOST_FRAMES frames in all.

    Choices and toggles keep every option, and sliders share the rest, the first of equal ones the
    most. Raises ValueError for more than MOST_CONTROLS controls, and if a slider would keep fewer
    than three positions, and for `Nodes`, of which there are too many sets.
    """
    for name, control in controls.items():
        if isinstance(control, Nodes):
            raise ValueError(f"{name} chooses nodes of a tree, which needs a formula; got none")
    counts = {name: len(control.positions()) for name, control in controls.items()}
    sliders = {n: counts[n] for n, c in controls.items() if not isinstance(c, (Choice, Toggle))}
    while math.prod(counts.values()) > MOST_FRAMES or len(counts) > MOST_CONTROLS:
        longest = max(reversed(sliders), key=lambda name: counts[name], default="")
        if len(counts) > MOST_CONTROLS or not longest or counts[longest] <= 3:
            options = " x ".join(f"{len(one.positions())} {name}" for name, one in controls.items())
            raise ValueError(
                f"an explorer moves at most {MOST_CONTROLS} controls and {MOST_FRAMES} frames on "
                f"the static page, got {options}; offer fewer options or controls, or a formula"
            )
        counts[longest] -= 1
    return {name: _values(control, counts[name]) for name, control in controls.items()}


def _values(control: Control, count: int) -> list[Any]:
    if isinstance(control, (Choice, Toggle, Nodes)):
        return list(control.positions())
    return _thinned(control, count)


def _described(name: str, control: Control, values: list[Any]) -> dict[str, Any]:
    label = control.label or name.replace("_", " ")
    if isinstance(control, Nodes):
        names = control.names or [str(node) for node in range(len(control.parents))]
        return {
            "name": name,
            "label": label,
            "kind": "nodes",
            "values": list(names),
            "start": list(control.default),
            "parents": list(control.parents),
        }
    kind = "range"
    if isinstance(control, Toggle):
        kind = "toggle"
    elif isinstance(control, Choice):
        kind = "select"
    return {
        "name": name,
        "label": label,
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
    alt: str,
    formula: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the payload. `parts` has what the first view or several slices need, by index.

    Each slice has its frames and the parts that it alone needs.
    """
    packed: dict[str, Any] = {"version": 2, "alt": alt, "controls": controls, "fixed": []}
    packed |= {"formula": formula} if formula else {}
    begins = start(packed)
    short, pooled = pool(slices)
    needed = [_parts_of(frames, pooled) for frames in short]
    times = Counter(index for used in needed for index in used)
    shared = {index for index, count in times.items() if count > 1} | needed[begins]
    packed |= {
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


def start(packed: Mapping[str, Any]) -> int:
    """Return the index of the slice that a page shows first."""
    index = 0
    for control in () if "formula" in packed else packed["controls"][_ACROSS:]:
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
    """Return the payload with the first two controls alone, the others fixed where they start.

    A formula keeps all its controls.
    """
    if "formula" in packed:
        return {**packed}
    rest = packed["controls"][_ACROSS:]
    fixed = [{"label": one["label"], "value": one["values"][one["start"]]} for one in rest]
    return {
        **packed,
        "controls": packed["controls"][:_ACROSS],
        "fixed": fixed,
        "slices": [packed["slices"][start(packed)]],
    }


def payload(
    figure: Callable[..., go.Figure],
    *,
    controls: Mapping[str, Control],
    alt: str,
    formula: Formula | None = None,
) -> dict[str, Any]:
    """Return everything that the static page needs of an explorer.

    figure: takes any of the controls' values by name; the others stay at their defaults. A slice
    has the frames of the first two moved controls, in row-major order. There is a slice for each
    setting of the others, in that order too. Raises RuntimeError with the values at which the
    figure function failed, and ValueError if the frames are too large. With a formula, there is one
    frame, at the defaults, and the page computes the others.
    """
    if formula:
        values = {name: _values(one, len(one.positions())) for name, one in controls.items()}
        moved = [_described(name, controls[name], points) for name, points in values.items()]
        told = {"name": formula.name, "values": values, "data": formula.data()}
        return _pack([[_frame(figure())]], moved, alt, told)
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
    size = math.prod(len(values[name]) for name in across)
    return _pack([frames[at : at + size] for at in range(0, len(frames), size)], moved, alt)


def still(spec: Mapping[str, Any], *, alt: str) -> dict[str, Any]:
    """Return the same for one plotly figure without controls; spec: its JSON, data and layout."""
    frame = _frame(go.Figure({"data": spec.get("data", []), "layout": spec.get("layout", {})}))
    return _pack([[frame]], [], alt)
