import re
import xml.etree.ElementTree as ET

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.subplots import make_subplots

from labcore.ui import Choice, IntSlider, LogSlider, Slider, Toggle, describe, explore, twin
from labcore.ui.compact import dumps
from labcore.ui.picture import svg
from tests.ui.test_compact import restored


@pytest.fixture
def book(monkeypatch):
    monkeypatch.setenv("LABCORE_BOOK", "1")


def line(a, b=1, c="x", d=False):
    x = np.linspace(0, 1, 100)
    return go.Figure(go.Scatter(x=x, y=a * x + b, name=c)).update_layout(title=f"{a:.6g} {b} {d}")


LONG = Slider(low=0, high=100, default=37, step=1)
GRIDS = [
    {"a": LONG},
    {"a": LONG, "b": LONG},
    {"a": LONG, "b": Choice(options=tuple("abcdefg"))},
    {"a": Choice(options=tuple("abcdefg"), default="f"), "b": LONG},
    {"a": Toggle(), "b": IntSlider(low=0, high=1000, default=999)},
    {"a": LogSlider(low=1e-6, high=10, default=3e-4, points=200), "b": Toggle(default=True)},
    {"a": Slider(low=0, high=1, default=0.123), "b": Slider(low=0, high=1, default=1)},
    {"a": Choice(options=tuple(range(100))), "b": Choice(options=tuple(range(5)))},
    {"a": LONG, "b": Choice(options=tuple(range(60)))},
    {"a": Toggle(), "b": Toggle(), "c": LONG},
]


@pytest.mark.parametrize("controls", GRIDS)
def test_the_grid_is_small_ordered_and_holds_defaults_and_ends(controls):
    values = twin.grid(controls)
    assert list(values) == list(controls)[: len(values)]
    assert 1 <= len(values) <= 2
    frames = np.prod([len(points) for points in values.values()])
    assert 2 <= frames <= twin.MOST_FRAMES
    for name, points in values.items():
        control = controls[name]
        assert control.default in points
        assert len(set(points)) == len(points)
        if isinstance(control, (Choice, Toggle)):
            assert tuple(points) == control.positions()
        else:
            assert points == sorted(points)
            ends = {control.positions()[0], control.positions()[-1]}
            assert {points[0], points[-1]} <= ends | {control.default}


def test_too_many_choices_are_refused():
    with pytest.raises(ValueError, match="offer fewer options"):
        twin.grid({"a": Choice(options=tuple(range(121)))})


def test_frames_are_the_figures_in_row_major_order(book):
    a, b = Slider(low=0, high=2, default=1, step=1), IntSlider(low=0, high=3, default=2)
    explorer = explore(line, alt=" A  line. ", a=a, b=b, c=Choice(options=("x", "y")), d=Toggle())
    bundle = explorer._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == "A line."
    packed = bundle[twin.MIME]
    frames = restored(packed["frames"], packed["parts"])
    titles = [frame["layout"]["title"]["text"] for frame in frames]
    assert titles == [f"{i} {j} False" for i in range(3) for j in range(4)]
    assert np.allclose(frames[7]["data"][0]["y"], np.linspace(0, 1, 100) + 3, atol=1e-3)
    assert [c["start"] for c in packed["controls"]] == [1, 2]
    assert packed["fixed"] == [{"label": "c", "value": "x"}, {"label": "d", "value": "off"}]
    assert "template" not in frames[0]["layout"]
    assert dumps(packed["parts"]).count("0.0101,") == 1  # the axis that all frames share


def test_data_goes_to_the_figure_function(book):
    def swept(row, data):
        return go.Figure(go.Scatter(y=data[row]))

    table = np.asarray([[1.0, 2.0], [3.0, 4.0]])
    control = IntSlider(low=0, high=1, default=0)
    packed = explore(swept, alt="A row.", data=table, row=control)._repr_mimebundle_()[twin.MIME]
    frames = restored(packed["frames"], packed["parts"])
    assert [frame["data"][0]["y"] for frame in frames] == [[1, 2], [3, 4]]


def test_a_failing_frame_names_its_values(book):
    def inverse(n):
        return go.Figure(go.Bar(y=[1 / n]))

    with pytest.raises(RuntimeError, match=r"at n=0: ZeroDivisionError"):
        explore(inverse, alt="x", n=IntSlider(low=-2, high=2, default=1))


def test_frames_that_would_swell_the_page_are_refused(book):
    def noise(n):
        return go.Figure(go.Scatter(y=np.random.default_rng(n).normal(size=3000)))

    with pytest.raises(ValueError, match="draw fewer points"):
        explore(noise, alt="Noise.", n=IntSlider(low=0, high=119, default=0))


def test_an_unknown_trace_has_no_picture(book):
    with pytest.raises(TypeError, match="a pie trace has no picture"):
        explore(lambda n: go.Figure(go.Pie(values=[1, n])), alt="x",
                n=IntSlider(low=1, high=2, default=1))  # fmt: skip


KINDS = {
    "lines": go.Scatter(x=[1, 2, 3], y=[1, None, 2], mode="lines", line={"dash": "dot"}),
    "markers": go.Scatter(x=["a", "b"], y=[1, 2], mode="markers", marker={"symbol": "x"}),
    "band": go.Scatter(x=[0, 1, 1, 0], y=[0, 0, 1, 1], fill="toself", fillcolor="rgba(9,9,9,.2)"),
    "bars": go.Bar(x=["a", "b"], y=[1, 2], orientation="v"),
    "sideways": go.Bar(y=["a", "b"], x=[1, 2], orientation="h"),
    "heatmap": go.Heatmap(z=[[1, 2], [3, None]], x=["p", "q"], colorscale="RdBu"),
    "contour": go.Contour(z=[[1, 2, 3], [2, 3, 4]], contours={"start": 1, "end": 4, "size": 0.5}),
    "rings": go.Contour(z=[[1, 2, 3], [2, 3, 4]], contours={"coloring": "lines"}),
    "spread": go.Scatter(
        x=[1, 2],
        y=[1, 2],
        error_y={"array": [0.1, 0.2]},
        error_x={"array": [0.1, 0.1], "arrayminus": [0.2, 0.1]},
    ),
    "words": go.Scatter(x=[1, 2], y=[1, 2], mode="markers+text", text=["start", "end"]),
    "histogram": go.Histogram(x=[1, 2, 2, 3]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_trace_has_a_picture(kind):
    figure = go.Figure([KINDS[kind]]).update_layout(title="<b>One</b> $2", xaxis_title="time")
    packed = twin.still(figure.to_dict(), alt="x")
    root = ET.fromstring(packed["picture"])
    assert root.tag.endswith("svg")
    # Only what is drawn inside the axes is clipped to them, or embedded as an image.
    hidden = svg({"data": [{**figure.to_dict()["data"][0], "visible": False}], "layout": {}})
    drawn = re.compile('clip-path="url|<image')
    assert drawn.search(packed["picture"])
    assert not drawn.search(hidden)
    assert "One" in packed["picture"]
    assert "<b>" not in packed["picture"]
    assert twin.still(figure.to_dict(), alt="x")["picture"] == packed["picture"]


def test_bars_are_stacked_or_stand_side_by_side():
    figure = go.Figure([go.Bar(x=["a", "b"], y=[1, 2]), go.Bar(x=["b", "a"], y=[3, 4])])
    beside = _bar_boxes(figure)
    stacked = _bar_boxes(figure.update_layout(barmode="stack"))
    lefts = [round(left, 1) for left, _ in beside]
    assert len(set(lefts)) == 4
    assert len({round(left, 1) for left, _ in stacked}) == 2
    assert len({round(bottom, 1) for _, bottom in beside}) == 1
    assert len({round(bottom, 1) for _, bottom in stacked}) == 3  # the axis, on 1, on 2


def _bar_boxes(figure):
    """Left and bottom (largest y: SVG counts downwards) of each bar drawn."""
    picture = twin.still(figure.to_dict(), alt="x")["picture"]
    paths = re.findall(r'<path d="([^"]*)" clip-path', picture)
    corners = [[float(n) for n in re.findall(r"[\d.]+", path)] for path in paths]
    return [(min(box[0::2]), max(box[1::2])) for box in corners]


def test_lines_across_the_figure_are_drawn():
    figure = go.Figure(go.Scatter(y=[1, 2]))
    before = twin.still(figure.to_dict(), alt="x")["picture"].count('clip-path="url')
    figure.add_hline(y=1.5, line={"dash": "dot"}).add_vline(x=0.5)
    figure.add_shape(type="line", x0=0, x1=1, y0=1, y1=2)
    assert twin.still(figure.to_dict(), alt="x")["picture"].count('clip-path="url') == before + 3


def test_log_axes_and_two_pairs_of_axes_are_drawn():
    figure = go.Figure([go.Scatter(x=[1, 10], y=[1, 2]), go.Bar(y=[1], xaxis="x2", yaxis="y2")])
    figure.update_layout(xaxis={"type": "log", "range": [0, 2], "domain": [0, 0.4]},
                         xaxis2={"domain": [0.6, 1]}, yaxis2={"anchor": "x2"})  # fmt: skip
    picture = twin.still(figure.to_dict(), alt="x")["picture"]
    assert 'id="axes_2"' in picture
    assert "10" in picture


def test_describe_puts_the_alternative_into_the_figure():
    figure = describe(go.Figure(layout={"meta": {"kept": 1}}), "Two  bars.")
    assert figure.layout.meta == {"kept": 1, "alt": "Two bars."}
    with pytest.raises(ValueError, match="alt must say"):
        describe(figure, " ")


def test_a_grid_of_axes_stays_a_grid_with_its_titles():
    figure = make_subplots(rows=3, cols=2, column_titles=["first", "second"])
    for place in range(6):
        figure.add_scatter(y=[1, 2], row=place // 2 + 1, col=place % 2 + 1)
    top = figure.get_subplot(2, 1).yaxis.domain[1]
    figure.add_annotation(text="B", x=0, y=top - 0.1, xref="paper", yref="paper", showarrow=False)
    picture = svg(figure.update_layout(height=900).to_dict())
    frames = [
        tuple(float(n) for n in re.findall(r"[\d.]+", path)[:2])
        for path in re.findall(r'id="axes_\d">\s*<g[^>]*>\s*<path d="([^"]*)"', picture)
    ]
    assert [len({round(at) for at in side}) for side in zip(*frames, strict=True)] == [2, 3]
    assert len(frames) == 6 and {">first<", ">second<", ">B<"} <= {*re.findall(">[^<>]+<", picture)}


def test_a_picture_has_the_rows_heights_the_bars_texts_and_colors_and_no_hidden_axis():
    figure = go.Figure()
    colors = ["#8fd3bd", "rgba(242,180,140,1)"]
    figure.add_bar(x=[1, 2], y=[1, 1], text=["a &lt; b", "c"], marker={"color": colors})
    figure.add_scatter(x=[0, 1], y=[0.25, 0.75], xaxis="x2", yaxis="y2")
    figure.update_layout(
        title="1 &lt; 2",
        xaxis={"visible": False, "title": "never"},
        yaxis={"domain": [0.9, 1], "visible": False},
        xaxis2={"anchor": "y2", "title": "seen"},
        yaxis2={"domain": [0, 0.7], "anchor": "x2"},
    )
    picture = svg(figure.to_dict())
    texts = [
        "".join(each.itertext()).strip()
        for each in ET.fromstring(picture).iter()
        if "text" in each.tag
    ]
    assert {"1 < 2", "a < b", "c", "seen"} <= set(texts) and "never" not in texts
    assert all(color in picture for color in ("#8fd3bd", "#f2b48c"))
    edges = [
        [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", path)]
        for path in re.findall(r'id="patch_\d+">\s*<path d="([^"]*)"', picture)
    ]
    heights = sorted({round(max(ys) - min(ys)) for ys in edges[1:] if max(ys) > min(ys) + 1})
    assert heights[-1] > 5 * heights[0] > 0
