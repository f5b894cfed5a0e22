"""A FigureWidget that arrives with its traces and updates however late plotly's code loads."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import traitlets

__all__ = ["WholeFigure"]


class WholeFigure(go.FigureWidget):
    """A FigureWidget that reaches the page with its traces, and whose messages wait for its code.

    plotly announces its FigureWidget empty and sends the traces afterward. If a busy page draws it
    in between, it never shows any.
    """

    # anywidget loads our small module, which loads plotly's; figure_widget.js says why. Colab has
    # plotly 5, whose FigureWidget has no module.
    if hasattr(go.FigureWidget, "_esm"):
        _esm = Path(__file__).with_suffix(".js")
        _plotly = traitlets.Unicode(str(go.FigureWidget._esm)).tag(sync=True)
    _filled = False

    def __init__(self, figure: go.Figure) -> None:
        super().__init__(figure)
        self._filled = True
        self.open()

    def open(self) -> None:
        """Announce the widget to the page once it has its traces."""
        if self._filled:
            super().open()
