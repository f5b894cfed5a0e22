import asyncio
import threading

import ipywidgets.widgets as widgets
import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
from plotly import callbacks

from labcore.ui import (
    Choice,
    IntSlider,
    LogSlider,
    Nodes,
    Question,
    Slider,
    Toggle,
    describe,
    explore,
    live,
    predict,
    quiz,
    show_source,
    theme,
)  # fmt: skip
from labcore.ui.figure_widget import WholeFigure


def waves(lr, n=2, kind="line", grid=True):
    x = np.linspace(0, 1, 17)
    make = go.Scatter if kind == "line" else go.Bar
    figure = go.Figure([make(x=x, y=x * lr + i, name=str(i)) for i in range(n)])
    figure.update_layout(title=f"{lr:.4g}", xaxis_showgrid=grid)
    if lr > 1:
        figure.add_annotation(text="high", x=0, y=0)
    return figure


CONTROLS = {
    "lr": Slider(low=0.1, high=100.0, default=0.1, step=0.1),
    "n": IntSlider(low=1, high=5, default=2),
    "kind": Choice(options=("line", "bar")),
    "grid": Toggle(default=True),
}


def shows(view, **values):
    """The widget shows what the figure function returns at `values`."""
    expected = waves(**values)
    assert len(view.figure.data) == len(expected.data)
    for shown, wanted in zip(view.figure.data, expected.data, strict=True):
        assert shown.type == wanted.type
        assert shown.name == wanted.name
        assert np.array_equal(shown.y, wanted.y)
    assert view.figure.layout.title.text == expected.layout.title.text
    assert view.figure.layout.xaxis.showgrid == expected.layout.xaxis.showgrid
    assert len(view.figure.layout.annotations) == len(expected.layout.annotations)


def test_a_logarithmic_slider_shows_what_a_reader_would_write() -> None:
    sizes = LogSlider(low=8, high=128, default=32, points=5, label="batch", unit="rows")
    rates = LogSlider(low=1e-3, high=10, default=0.05, points=5, label="rate")
    view = explore(lambda size, rate: go.Figure(), alt="Waves.", size=sizes, rate=rates).live
    size, rate = view.inputs["size"], view.inputs["rate"]
    assert size.description == "batch" and rate.description == "rate"
    labels = [text for text, _ in size.options]
    assert labels == ["8 rows", "16 rows", "32 rows", "64 rows", "128 rows"]
    assert [text for text, _ in rate.options] == ["0.001", "0.01", "0.05", "0.1", "1", "10"]
    assert (size.value, rate.value) == (32.0, 0.05)  # the default has a place


def test_each_control_moves_the_figure_in_place():
    view = explore(waves, alt="Waves.", **CONTROLS).live
    shown = view.figure
    shows(view, lr=0.1)
    view.inputs["lr"].value = 2.0
    shows(view, lr=2.0)
    view.inputs["lr"].value = 0.5
    shows(view, lr=0.5)  # the annotation is gone again
    view.inputs["grid"].value = False
    view.inputs["kind"].value = "bar"
    view.inputs["n"].value = 5
    shows(view, lr=0.5, n=5, kind="bar", grid=False)
    view.inputs["n"].value = 1
    shows(view, lr=0.5, n=1, kind="bar", grid=False)
    assert view.figure is shown
    assert view.message.value == ""


def test_a_click_puts_a_node_into_the_tree_and_takes_it_out():
    def drawn(tree):
        points = {"x": [0, 1, 2, 3], "y": [0, 1, 2, 3], "customdata": [-1, 0, 1, 2]}
        chosen = go.Scatter(**points, meta="tree", text=[str(at in tree) for at in range(-1, 3)])
        return go.Figure([go.Scatter(x=[0, 1], y=[1, 0]), chosen])

    nodes = Nodes(parents=(-1, 0, 1), default=(0,))
    view = explore(drawn, alt="A tree.", tree=nodes).live
    points = view.figure.data[1]

    def click(*at):
        points._dispatch_on_click(
            callbacks.Points(point_inds=list(at), trace_index=1), callbacks.InputDeviceState()
        )

    click(3)  # the third node, two levels down
    assert view.values()["tree"] == (0, 1, 2) and points.text == ("False", "True", "True", "True")
    click(2)
    assert view.values()["tree"] == (0,) and points.text == ("False", "True", "False", "False")
    click(0)  # the root is not a node
    assert view.values()["tree"] == (0,) and view.message.value == ""
    view.inputs["tree"].value = (2,)  # from the list: the ancestors come with it
    assert view.values()["tree"] == (0, 1, 2)


def test_what_the_reader_did_to_the_figure_stays():
    view = explore(waves, alt="Waves.", **CONTROLS).live
    view.figure.layout.yaxis.range = (0, 0.5)
    view.figure.data[1].visible = "legendonly"
    view.inputs["lr"].value = 0.7
    shows(view, lr=0.7)
    assert view.figure.layout.yaxis.range == (0, 0.5)
    assert view.figure.data[1].visible == "legendonly"


def test_a_described_figure_moves():
    def described(lr):
        return describe(waves(lr), f"Waves, {lr:.1f} high.")

    view = explore(described, alt="Waves.", lr=CONTROLS["lr"]).live
    view.inputs["lr"].value = 0.5
    assert view.message.value == ""
    shows(view, lr=0.5)
    assert view.figure.layout.meta == {"alt": "Waves, 0.5 high."}


def test_one_change_is_one_message(monkeypatch):
    view = explore(waves, alt="Waves.", **CONTROLS).live
    sent = []
    monkeypatch.setattr(
        type(view.figure), "_send_update_msg", lambda _self, *args, **kw: sent.append((args, kw))
    )
    view.inputs["lr"].value = 0.3
    assert len(sent) == 1


def test_values_that_come_while_a_slider_moves_make_one_call(monkeypatch):
    monkeypatch.setattr(live, "_GATHER_S", 1.0)  # longer than a busy machine takes for the values
    calls = []

    def counted(lr):
        calls.append(lr)
        return waves(lr)

    view = explore(counted, alt="Waves.", lr=CONTROLS["lr"]).live
    calls.clear()

    async def drag():
        for value in np.linspace(0.2, 0.9, 15):
            view.inputs["lr"].value = float(value)
            await asyncio.sleep(0)
        while not calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)

    asyncio.run(drag())
    assert calls == [0.9]
    shows(view, lr=0.9)


def test_error_is_shown_with_its_values_and_goes_when_it_is_over():
    def fussy(lr):
        if lr > 1:
            raise ValueError("<too> high")
        return waves(lr)

    view = explore(fussy, alt="Waves.", lr=CONTROLS["lr"]).live
    view.inputs["lr"].value = 2.0
    assert "ValueError" in view.message.value
    assert "&lt;too&gt; high" in view.message.value
    assert "lr=2.0" in view.message.value
    assert "Traceback" in view.message.value
    shows(view, lr=0.1)
    view.inputs["lr"].value = 0.5
    assert view.message.value == ""
    shows(view, lr=0.5)


def test_the_progress_bar_shows_only_while_a_call_is_slow(monkeypatch):
    monkeypatch.setattr(live, "_PATIENCE_S", 0.02)
    seen = []
    shown = threading.Event()

    def slow(wait):
        if wait:
            shown.wait(10)
        seen.append(view.progress.layout.display if wait else "")
        return go.Figure(go.Scatter(y=[1, 2]))

    view = None
    view = explore(slow, alt="x", wait=Toggle()).live
    view.progress.layout.observe(lambda _change: shown.set(), names="display")
    assert view.progress.layout.display == "none"
    view.inputs["wait"].value = True
    assert seen[-1] == ""
    assert len(seen) == 2
    assert view.progress.layout.display == "none"
    monkeypatch.setattr(live, "_PATIENCE_S", 60)
    shown.clear()
    view.inputs["wait"].value = False
    for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
        timer.join(30)
        assert not timer.is_alive()  # a quick call takes its timer away
    assert not shown.is_set()


def test_a_front_end_without_widgets_still_has_the_text():
    explorer = explore(waves, alt="Waves in time.", **CONTROLS)
    bundle = explorer._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == "Waves in time."
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_the_first_error_is_the_cells_own():
    with pytest.raises(ZeroDivisionError):
        explore(lambda n: 1 / n, alt="x", n=IntSlider(low=0, high=2, default=0))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: explore(waves, alt="", **CONTROLS), ValueError, "alt must say"),
        (lambda: explore(waves, alt="x"), ValueError, "at least one control, .*got none"),
        (lambda: explore(waves, alt="x", lr=3), TypeError, "lr must be a Slider"),
        (lambda: explore(waves, alt="x", rate=Toggle()), TypeError, "cannot be called with"),
        (lambda: explore(waves, alt="x", data=1, **CONTROLS), TypeError, "lr, n, kind, grid, data"),
        (lambda: explore(3, alt="x", lr=Toggle()), TypeError, "must be a function"),
        (lambda: explore(lambda a: 3, alt="x", a=Toggle()), TypeError, "return a plotly Figure"),
        (lambda: explore(waves, alt="x", **CONTROLS).figure(lr=999), ValueError, "between 0.1"),
        (lambda: explore(waves, alt="x", **CONTROLS).figure(grids=True), ValueError, "mean 'grid'"),
        (lambda: predict(" "), ValueError, "question must be"),
        (lambda: predict("How?").reveal(float("nan")), ValueError, "finite number"),
        (lambda: predict("How?").reveal(1, digits=0), ValueError, "digits must be"),
        (lambda: quiz([]), ValueError, "one Question"),
        (lambda: quiz(["a"]), TypeError, "Question objects"),
        (lambda: Question("a?", ("x", "y"), 2, "w"), ValueError, "index from 0 to 1"),
        (lambda: Question("a?", ("x", "y"), True, "w"), TypeError, "option's index"),
        (lambda: Question("a?", ("x",), 0, "w"), ValueError, "two options"),
        (lambda: Question("a?", ("x", "y"), 0, ""), ValueError, "say why"),
        (lambda: show_source(), ValueError, "got nothing"),
        (lambda: show_source(np.linspace), ValueError, "only labcore's code, got linspace"),
        (lambda: theme.template("dim"), ValueError, "'light' or 'dark'"),
    ],
)
def test_bad_input_says_what_to_do(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_the_theme_is_plotlys_default_and_readable_in_both_modes():
    assert pio.templates.default == theme.NAME
    assert go.Figure().layout.template.layout.font.size >= 14
    light, dark = (theme.template(mode).layout for mode in ("light", "dark"))
    assert _contrast(light.font.color, "#ffffff") > 7
    assert _contrast(dark.font.color, "#121212") > 7
    # Lines and markers: 3:1 beside their ground, as WCAG 1.4.11 asks of graphics.
    assert all(_contrast(color, "#121212") > 3 for color in dark.colorway)
    assert sum(_contrast(color, "#ffffff") > 3 for color in light.colorway) >= 4


def _contrast(one: str, other: str) -> float:
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_slider_values_are_checked_at_the_figure():
    explorer = explore(waves, alt="x", lr=Slider(low=0, high=1, default=0.5))
    assert explorer.figure(lr=0.25).layout.title.text == "0.25"
    assert explorer.values() == {"lr": 0.5}


def test_the_page_hears_of_a_figure_with_its_traces(monkeypatch):
    opened = []
    create = widgets.widget.comm.create_comm
    monkeypatch.setattr(
        widgets.widget.comm, "create_comm", lambda **told: opened.append(told) or create(**told)
    )
    figure = WholeFigure(waves(0.1, n=3))
    states = [told["data"]["state"] for told in opened]
    assert [len(s["_widget_data"]) for s in states if "_widget_data" in s] == [3]
    assert figure.comm is not None


@pytest.mark.parametrize(("step", "said"), [(0.05, ".2f"), (1.0, ".0f"), (0.125, ".3f")])
def test_a_sliders_value_has_the_digits_of_its_steps(step, said):
    shown = explore(waves, alt="x", lr=Slider(low=0, high=2, default=1, step=step)).live
    (slider,) = [one for one in shown.box.children if isinstance(one, widgets.FloatSlider)]
    assert slider.readout_format == said
