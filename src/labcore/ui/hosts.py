"""How a widget reaches the page with ipywidgets 7 and 8, and in Colab."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from IPython.display import display

from labcore import device

__all__ = ["STYLE", "VIEW", "Displayed", "enable_widgets", "style", "view"]

STYLE = Path(__file__).with_name("cards.css")
VIEW = "application/vnd.jupyter.widget-view+json"


def view(widget: Any, plain: str) -> dict[str, Any]:
    """Return the MIME bundle of `widget`, with `plain` as text; ipywidgets 7 has no public one."""
    model = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {VIEW: model, "text/plain": plain}


def style() -> str:
    """Return the style of cards and intervals as HTML; "" for a page, which loads the file."""
    return "" if device.building_book() else f"<style>{STYLE.read_text(encoding='utf-8')}</style>"


def in_colab() -> bool:
    """Return whether this kernel runs in Colab."""
    return "google.colab" in sys.modules


def enable_widgets() -> None:
    """Let Colab load plotly's widgets, which it doesn't ship; does nothing elsewhere."""
    if in_colab():
        import_module("google.colab.output").enable_custom_widget_manager()


class Displayed:
    """An object that shows its MIME bundle as a cell's value or, in Colab, as an output.

    Colab names the loader of third-party widgets in outputs only, not in a cell's value.
    """

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        if not in_colab():
            raise NotImplementedError  # IPython then uses _repr_mimebundle_
        display(self._repr_mimebundle_(), raw=True)
