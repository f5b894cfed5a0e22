"""The live side of an explorer: ipywidgets controls over a plotly FigureWidget."""

from __future__ import annotations

import asyncio
import html
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from labcore.ui.controls import Choice, Control, IntSlider, LogSlider, Nodes, Slider, Toggle
from labcore.ui.figure_widget import WholeFigure

__all__ = ["LiveView", "update_in_place"]

# A moving slider sends many values; those that arrive within this time make one call.
_GATHER_S = 0.004
_PATIENCE_S = 1.0
_HIDDEN = (
    "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap"
)


def _label(name: str, control: Control) -> str:
    """The control's label, with the unit where the value is shown as a bare number."""
    label = control.label or name.replace("_", " ")
    bare = control.unit and isinstance(control, Slider | IntSlider)
    return f"{label} ({control.unit})" if bare else label


def _input(name: str, control: Control, letters: int) -> widgets.Widget:
    """Make the ipywidget for `control`; letters: length of the longest label, for alignment."""
    common: dict[str, Any] = {
        "description": _label(name, control),
        "style": {"description_width": f"{letters}ch"},
        "layout": {"width": "min(32rem, 98%)"},
        "value": control.default,
    }
    if isinstance(control, Slider):
        # Not "g", which pads with zeros: 0.05 would read 0.05000.
        texts = [f"{value:.12g}" for value in control.positions()]
        places = max(len(text.partition(".")[2]) for text in texts)
        return widgets.FloatSlider(
            min=control.low, max=control.high, step=control.step,
            readout_format=f".{places}f", **common,
        )  # fmt: skip
    if isinstance(control, IntSlider):
        return widgets.IntSlider(min=control.low, max=control.high, step=control.step, **common)
    if isinstance(control, LogSlider):  # FloatLogSlider would pad 8 to 8.00
        values = sorted({*control.positions(), float(control.default)})
        options = [(control.text(value), value) for value in values]
        return widgets.SelectionSlider(options=options, **common)
    if isinstance(control, Choice):
        options = [(control.text(option), option) for option in control.positions()]
        return widgets.Dropdown(options=options, **common)
    if isinstance(control, Toggle):
        return widgets.Checkbox(**common)
    if isinstance(control, Nodes):
        names = control.names or [str(node) for node in range(len(control.parents))]
        options = [(f"{node}: {name}", node) for node, name in enumerate(names)]
        return widgets.SelectMultiple(options=options, rows=4, **common)
    raise TypeError(f"{name}: no widget for {type(control).__name__}")


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return np.array_equal(np.asarray(old, object), np.asarray(new, object))
    return type(old) is type(new) and bool(old == new)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the property paths whose values differ, with the new value; None if it's gone."""
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        # meta can hold any dictionary, and plotly has no paths into it.
        if key != "meta" and isinstance(before, dict) and isinstance(after, dict):
            yield from ((f"{key}.{path}", value) for path, value in _changes(before, after))
        elif not _same(before, after):
            yield key, after


def _plain(figure: go.Figure) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    traces = [trace.to_plotly_json() for trace in figure.data]
    layout = figure.layout.to_plotly_json()
    layout.pop("template", None)
    return traces, layout


def update_in_place(shown: go.FigureWidget, last: go.Figure, fresh: go.Figure) -> None:
    """Make `shown` display `fresh` instead of `last`, in one message with only what differs.

    It compares with `last`, not with `shown`, so what the reader did (zoom, a hidden trace) stays.
    """
    old_traces, old_layout = _plain(last)
    new_traces, new_layout = _plain(fresh)
    same_kind = [t["type"] for t in old_traces] == [t["type"] for t in new_traces]
    if not same_kind:
        shown.data = ()
        shown.add_traces(fresh.data)
    with shown.batch_update():
        if same_kind:
            for trace, old, new in zip(shown.data, old_traces, new_traces, strict=True):
                for path, value in _changes(old, new):
                    trace[path] = value
        for path, value in _changes(old_layout, new_layout):
            shown.layout[path] = value


class LiveView:
    """The controls, figure and messages of one explorer in a running kernel.

    box: what is displayed. inputs: the control widgets by name. figure: the FigureWidget. message:
    the figure function's error, or empty. progress: shown while a call takes longer than a second.
    """

    def __init__(
        self,
        compute: Callable[..., go.Figure],
        first: go.Figure,
        *,
        controls: Mapping[str, Control],
        alt: str,
    ) -> None:
        self._compute = compute
        self._controls = dict(controls)
        self._last = first
        self._scheduled = False
        letters = max(len(_label(name, control)) for name, control in controls.items()) + 1
        self.inputs = {name: _input(name, control, letters) for name, control in controls.items()}
        self.figure = WholeFigure(first)
        self.message = widgets.HTML()
        self.progress = widgets.HTML(
            '<label>computing <progress aria-label="computing"></progress></label>',
            layout={"display": "none"},
        )
        for name, control in controls.items():
            if isinstance(control, Nodes):
                self._click(name, control)
        description = widgets.HTML(f'<div style="{_HIDDEN}">{html.escape(alt)}</div>')
        for widget in self.inputs.values():
            widget.observe(self._request, names="value")
        self.box = widgets.VBox(
            [*self.inputs.values(), self.progress, self.message, self.figure, description]
        )

    def _click(self, name: str, nodes: Nodes) -> None:
        """Let a click on a node's point put the node into the tree or take it out."""

        def clicked(trace: Any, points: Any, _state: Any) -> None:
            for at in points.point_inds:
                if (node := int(trace.customdata[at])) >= 0:
                    self.inputs[name].value = nodes.toggled(self.values()[name], node)

        for trace in self.figure.data:
            if trace.meta == name:
                trace.on_click(clicked)

    def values(self) -> dict[str, Any]:
        """Return the current value of every control."""
        return {
            name: self._controls[name].check(name, widget.value)
            for name, widget in self.inputs.items()
        }

    def _request(self, _change: Any) -> None:
        if self._scheduled:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # plain Python, no event loop
            self._render()
            return
        self._scheduled = True
        loop.call_later(_GATHER_S, self._render)

    def _render(self) -> None:
        self._scheduled = False
        try:
            with self._patience():
                fresh = self._compute(**self.values())
                update_in_place(self.figure, self._last, fresh)
            self._last = fresh
            self.message.value = ""
        except Exception as error:
            self.message.value = self._report(error)

    def _report(self, error: Exception) -> str:
        at = ", ".join(f"{name}={widget.value!r}" for name, widget in self.inputs.items())
        lines = "".join(traceback.format_exception(error))
        return (
            '<div role="alert" style="border-left:4px solid #D55E00;padding:.25rem .75rem">'
            f"<strong>{html.escape(type(error).__name__)}</strong>: {html.escape(str(error))}<br>"
            f"at {html.escape(at)}; the figure below shows the previous values"
            f"<details><summary>Traceback</summary><pre>{html.escape(lines)}</pre></details></div>"
        )

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Show the progress bar once the body has run for a second."""
        lock, done = threading.Lock(), False

        def show() -> None:
            with lock:
                if not done:
                    self.progress.layout.display = ""

        timer = threading.Timer(_PATIENCE_S, show)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with lock:
                done = True
            if self.progress.layout.display != "none":
                self.progress.layout.display = "none"
