"""explore(): one figure function shown as a live widget or as its twin on the static page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go

from labcore import device
from labcore.checks import one_of
from labcore.ui import twin
from labcore.ui.controls import Control
from labcore.ui.hosts import Displayed, view
from labcore.ui.live import LiveView

__all__ = ["Explorer", "describe", "explore"]


def describe(figure: go.Figure, alt: str) -> go.Figure:
    """Give `figure` its text alternative for the static page, and return it.

    alt: what the figure shows, for readers who can't see it. Raises ValueError if it's empty.
    """
    figure.update_layout(meta={**(figure.layout.meta or {}), "alt": _alt(alt)})
    return figure


def explore(
    figure_fn: Callable[..., go.Figure],
    *,
    alt: str,
    data: Any = None,
    formula: twin.Formula | None = None,
    **controls: Control,
) -> Explorer:
    """Show `figure_fn` with a control for each argument named in `controls`.

    figure_fn takes the controls' values as keyword arguments, and `data` if given, and returns a
    plotly Figure. Calls of at most 30 ms let the figure keep up with the slider. alt says in words
    what the figure shows. List controls in order of importance: the static page loads a slice of
    frames when another one than the first two moves. It has at most four, unless it computes the
    figure by `formula`.
    Raises TypeError for a control that the function doesn't take, ValueError for an empty alt or no
    control, and whatever the figure function raises at the defaults (in the static build, at any
    frame).
    """
    return Explorer(figure_fn, alt=alt, data=data, formula=formula, controls=controls)


def _alt(alt: Any) -> str:
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(
            f"alt must say in words what the figure shows, got {alt!r}; "
            "screen readers read it to people who can't see the figure"
        )
    return " ".join(alt.split())


class Explorer(Displayed):
    """The result of `explore`; end a cell with it to display it."""

    def __init__(
        self,
        figure_fn: Callable[..., go.Figure],
        *,
        alt: str,
        data: Any,
        controls: Mapping[str, Control],
        formula: twin.Formula | None = None,
    ) -> None:
        if not callable(figure_fn):
            raise TypeError(f"figure_fn must be a function, got {figure_fn!r}")
        self.alt = _alt(alt)
        self.controls = dict(controls)
        self._figure_fn = figure_fn
        self._extra = {} if data is None else {"data": data}
        self._check_controls()
        self._live: LiveView | None = None
        # Make the frames or the first figure now. IPython only prints errors raised during
        # display, so a build would pass with a hole in the page.
        self._payload: dict[str, Any] | None = None
        self._first: go.Figure | None = None
        if device.building_book():
            self._payload = twin.payload(
                self.figure, controls=self.controls, alt=self.alt, formula=formula
            )
        else:
            self._first = self.figure()

    def _check_controls(self) -> None:
        if not self.controls:
            raise ValueError(
                "explore needs at least one control, such as lr=LogSlider(low=1e-4, high=1, "
                "default=1e-2), got none; to show a figure without one, end the cell with it"
            )
        for name, control in self.controls.items():
            if not isinstance(control, Control):
                raise TypeError(
                    f"{name} must be a Slider, IntSlider, LogSlider, Choice, Toggle or Nodes, "
                    f"got {control!r}"
                )
        given = {**self.controls, **self._extra}
        signature = inspect.signature(self._figure_fn)
        try:
            signature.bind(**given)
        except TypeError as problem:
            function = getattr(self._figure_fn, "__name__", "figure_fn")
            raise TypeError(
                f"{function}{signature} cannot be called with the controls "
                f"{', '.join(given)}: {problem}"
            ) from None

    def values(self, **chosen: Any) -> dict[str, Any]:
        """Return the controls' defaults updated by `chosen`. ValueError for values out of range."""
        values = {name: control.default for name, control in self.controls.items()}
        for name, value in chosen.items():
            one_of("control", name, self.controls)
            values[name] = self.controls[name].check(name, value)
        return values

    def figure(self, **chosen: Any) -> go.Figure:
        """Return the figure at the controls' defaults updated by `chosen`."""
        figure = self._figure_fn(**self.values(**chosen), **self._extra)
        if not isinstance(figure, go.Figure):
            function = getattr(self._figure_fn, "__name__", "figure_fn")
            raise TypeError(f"{function} must return a plotly Figure, got {type(figure).__name__}")
        return figure

    @property
    def live(self) -> LiveView:
        """The widget side: its controls, its figure and its message, made on first use."""
        if self._live is None:
            first = self.figure() if self._first is None else self._first
            self._live = LiveView(self.figure, first, controls=self.controls, alt=self.alt)
        return self._live

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        if self._payload is not None:
            return {twin.MIME: self._payload, "text/plain": self.alt}
        return view(self.live.box, self.alt)
