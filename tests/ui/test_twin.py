import itertools

import numpy as np
import plotly.graph_objects as go
import pytest

from labcore.ui import (
    Choice,
    IntSlider,
    LogSlider,
    Nodes,
    Slider,
    Toggle,
    describe,
    explore,
    twin,
)
from labcore.ui.compact import dumps
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
    {"a": Toggle(), "b": Toggle(), "c": Toggle(), "d": LONG},
    {"a": Toggle(), "b": Toggle(), "c": LONG},
    {"a": LONG, "b": LONG, "c": Toggle(), "d": Choice(options=tuple("abc"))},
]


@pytest.mark.parametrize("controls", GRIDS)
def test_the_grid_is_small_ordered_and_holds_defaults_and_ends(controls):
    values = twin.grid(controls)
    assert list(values) == list(controls)
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


@pytest.mark.parametrize(
    ("controls", "got"),
    [
        ({"a": Choice(options=tuple(range(501)))}, "got 501 a;"),
        ({"a": LONG, "b": Choice(options=tuple(range(167)))}, "got 101 a x 167 b;"),
        ({name: Toggle() for name in "abcde"}, "got 2 a x 2 b x 2 c x 2 d x 2 e;"),
    ],
)
def test_a_control_that_would_not_move_is_refused(controls, got):
    with pytest.raises(ValueError, match=got):
        twin.grid(controls)


def test_nodes_of_a_tree_need_a_formula(book):
    nodes = Nodes(parents=(-1, 0, 0), default=(2,), names=("a", "b", "c"), label="tree")
    with pytest.raises(ValueError, match="a chooses nodes of a tree, which needs a formula"):
        explore(lambda a: go.Figure(), alt="x", a=nodes)
    formula = twin.Formula("none", lambda: {})
    shown = explore(lambda a: go.Figure(), alt="x", formula=formula, a=nodes)
    packed = shown._repr_mimebundle_()[twin.MIME]
    assert packed["controls"] == [
        {
            "name": "a",
            "label": "tree",
            "kind": "nodes",
            "values": ["a", "b", "c"],
            "start": [0, 2],
            "parents": [-1, 0, 0],
        }
    ]


def frames_of(packed, index=0):
    piece = packed["slices"][index]
    assert not packed["parts"].keys() & piece["parts"].keys()
    parts = {**packed["parts"], **piece["parts"]}
    return restored(piece["frames"], {int(place): part for place, part in parts.items()})


def test_frames_are_the_figures_in_row_major_order(book):
    a, b = Slider(low=0, high=2, default=1, step=1), IntSlider(low=0, high=3, default=2)
    explorer = explore(line, alt=" A  line. ", a=a, b=b, c=Choice(options=("x", "y")), d=Toggle())
    bundle = explorer._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == "A line."
    packed = bundle[twin.MIME]
    assert len(packed["slices"]) == 4 and packed["fixed"] == []
    for index, (name, on) in enumerate(itertools.product("xy", (False, True))):
        frames = frames_of(packed, index)
        titles = [frame["layout"]["title"]["text"] for frame in frames]
        assert titles == [f"{i} {j} {on}" for i in range(3) for j in range(4)]
        assert {frame["data"][0]["name"] for frame in frames} == {name}
        assert np.allclose(frames[7]["data"][0]["y"], np.linspace(0, 1, 100) + 3, atol=1e-3)
        assert "template" not in frames[0]["layout"]
    assert [c["start"] for c in packed["controls"]] == [1, 2, 0, 0]
    assert dumps(packed["parts"]).count("0.0101,") == 1  # the axis that all frames share


def test_a_part_is_stored_where_it_is_needed(book):
    def swept(a, b, c):
        y = list(range(60 if a else 70)) if c == "own" else list(range(80))
        return go.Figure(go.Scatter(x=list(range(50)), y=y))

    controls = {"a": Toggle(), "b": Toggle(), "c": Choice(options=("first", "own", "last"))}
    packed = explore(swept, alt="x", **controls)._repr_mimebundle_()[twin.MIME]
    texts = [dumps(piece["parts"]) for piece in packed["slices"]]
    assert texts[0] == texts[2] == "{}" and "59]" in texts[1] and "69]" in texts[1]
    assert "49]" in dumps(packed["parts"]) and "79]" in dumps(packed["parts"])
    first = twin.first_slice(packed)
    assert len(first["slices"]) == 1 and len(first["controls"]) == 2
    assert first["fixed"] == [{"label": "c", "value": "first"}]
    assert frames_of(first) == frames_of(packed)


def test_the_first_slice_is_that_of_the_defaults(book):
    def swept(a, b, c, d):
        return go.Figure(go.Bar(y=[a + b + c + d]))

    controls = {name: IntSlider(low=0, high=2, default=1) for name in "abcd"}
    packed = explore(swept, alt="x", **controls)._repr_mimebundle_()[twin.MIME]
    assert twin.start(packed) == 4 and len(packed["slices"]) == 9
    assert frames_of(packed, 4)[0]["data"][0]["y"] == [2]


def test_data_goes_to_the_figure_function(book):
    def swept(row, data):
        return go.Figure(go.Scatter(y=data[row]))

    table = np.asarray([[1.0, 2.0], [3.0, 4.0]])
    control = IntSlider(low=0, high=1, default=0)
    packed = explore(swept, alt="A row.", data=table, row=control)._repr_mimebundle_()[twin.MIME]
    assert [frame["data"][0]["y"] for frame in frames_of(packed)] == [[1, 2], [3, 4]]


def test_a_failing_frame_names_its_values(book):
    def inverse(n):
        return go.Figure(go.Bar(y=[1 / n]))

    with pytest.raises(RuntimeError, match=r"at n=0: ZeroDivisionError"):
        explore(inverse, alt="x", n=IntSlider(low=-2, high=2, default=1))


@pytest.mark.parametrize("controls", [{}, {"b": Toggle(), "c": Toggle()}])
def test_frames_that_would_swell_the_page_are_refused(book, controls):
    def noise(n, b=False, c=False):
        # Small where the page begins, large where it may lead.
        size = 3000 if not controls or c else 3
        return go.Figure(go.Scatter(y=np.random.default_rng(n).normal(size=size)))

    with pytest.raises(ValueError, match="draw fewer points"):
        explore(noise, alt="Noise.", n=IntSlider(low=0, high=119, default=0), **controls)


def test_describe_puts_the_alternative_into_the_figure():
    figure = describe(go.Figure(layout={"meta": {"kept": 1}}), "Two  bars.")
    assert figure.layout.meta == {"kept": 1, "alt": "Two bars."}
    with pytest.raises(ValueError, match="alt must say"):
        describe(figure, " ")
