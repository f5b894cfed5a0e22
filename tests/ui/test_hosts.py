"""Widgets reach the page under ipywidgets 7 and 8, and pass where Colab looks for them."""

from __future__ import annotations

from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from labcore.ui import hosts, predict

# As Colab's package does it: a hook of the display publisher names the loader of foreign widgets.
COLAB = """
import sys, types

def hook(message):
    data = message.get("content", {}).get("data", {})
    if "application/vnd.jupyter.widget-view+json" in data:
        message["content"]["metadata"]["loader"] = "foreign"
    return message

def enable_custom_widget_manager():
    get_ipython().display_pub.register_hook(hook)

output = types.ModuleType("google.colab.output")
output.enable_custom_widget_manager = enable_custom_widget_manager
for name in ("google", "google.colab"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["google.colab.output"] = output
"""
SHOWN = """
import plotly.graph_objects as go
from labcore.ui import Slider, explore, predict
guess = predict("How many?")
explore(lambda x: go.Figure(go.Scatter(y=[x])), alt="A point.", x=Slider(low=0, high=1, default=0))
"""


def outputs(*cells: str) -> list[list[dict]]:
    """What each cell puts out, from a kernel of its own."""
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=made)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")


def test_colab_widgets_name_the_loader_of_foreign_widgets(kernel: None) -> None:
    cells = outputs(COLAB, SHOWN, "guess", "guess.reveal(3)")
    for (shown,), words in zip(cells[1:], ("A point.", "Predict", "Measured"), strict=True):
        assert shown["output_type"] == "display_data"
        assert shown["metadata"]["loader"] == "foreign"
        assert words in shown["data"]["text/plain"]


def test_elsewhere_a_widget_is_the_value_of_its_cell(kernel: None) -> None:
    ((shown,), (guess,)) = outputs(SHOWN, "guess")
    assert shown["output_type"] == guess["output_type"] == "execute_result"
    assert hosts.VIEW in shown["data"] and hosts.VIEW in guess["data"]


def test_a_widget_needs_no_bundle_of_its_own() -> None:
    widget = SimpleNamespace(model_id="a")  # as in ipywidgets 7
    bundle = hosts.view(widget, "words")
    assert bundle["text/plain"] == "words"
    assert bundle[hosts.VIEW]["model_id"] == "a"


def test_outside_colab_ipython_is_sent_to_the_bundle() -> None:
    with pytest.raises(NotImplementedError):
        predict("How many?")._ipython_display_()
