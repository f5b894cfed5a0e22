"""Figures of chosen trees agree with the library's own sums, replays and costs."""

import itertools
import math
import random

import plotly.graph_objects as go
import pytest
import torch

from labcore.decoding.medusa import (
    Tree,
    costs,
    dense_tree,
    expected_tokens,
    node_chances,
    replay_text,
    sparse_tree,
)
from labcore.decoding.theory.speedup import Roofline
from labcore.ui import Choice, IntSlider, LogSlider, explore, twin
from labcore.ui.compact import dumps
from labcore.ui.figures import medusa as figures

HEADS, RANKS, TEXTS = 3, 4, 5
LETTERS_OF_A_PHONE = 41
V = [1 + 0.1 * rows for rows in range(40)]
DRAFTING = [0.0, 0.1, 0.15, 0.25, 0.3]


def accuracies(chance: random.Random) -> list[list[float]]:
    """[K, R]: falling with the rank."""
    rows = [sorted((chance.random() for _ in range(RANKS)), reverse=True) for _ in range(HEADS)]
    return [[0.9 * one / sum(row) for one in row] for row in rows]


def guesses(seed: int) -> figures.Guesses:
    chance = random.Random(seed)
    shares = {warmth: accuracies(chance) for warmth in ("0", "0.7")}
    ranks = {
        warmth: [
            [[min(int(chance.expovariate(0.8)), 10) for _ in range(HEADS)] for _ in range(length)]
            for length in (1, 7, 23, 40, 61)
        ]
        for warmth in shares
    }
    tree = sparse_tree(shares["0"], 17, branching=3)
    return figures.Guesses(
        tree=tree, accuracies=shares, ranks=ranks, costs=V, drafting=DRAFTING[: HEADS + 1]
    )


def picked(data: figures.Guesses) -> dict:
    """The controls of the picker."""
    return {
        "nodes": data.nodes((0, 1, 2)),
        "temperature": Choice(options=("0", "0.7")),
        "ridge": LogSlider(low=8, high=512, default=300, points=13),
        "batch": Choice(options=(1, 8, 64)),
    }


def sweep(seed: int) -> figures.TreeSweep:
    chance = random.Random(seed)
    tokens = {}
    for warmth, heads, branching in itertools.product(("0", "1"), (1, 3), (1, 3)):
        shares = accuracies(chance)[:heads]
        most = min(12, sum(branching**level for level in range(1, heads + 1)))
        for nodes in range(1, most + 1):
            tree = sparse_tree(shares, nodes, branching=branching)
            expected = expected_tokens(tree, shares)
            middle = 1 + chance.uniform(0.6, 1) * (expected - 1)
            tokens[heads, branching, nodes, warmth] = expected, (middle, 0.97 * middle, 2 * middle)
    return figures.TreeSweep(tokens=tokens, costs=V, drafting=DRAFTING)


SWEPT = {
    "nodes": IntSlider(low=1, high=12, default=4),
    "ridge": LogSlider(low=8, high=512, default=300, points=13),
    "batch": Choice(options=(1, 4, 32)),
    "heads": Choice(options=(1, 3), default=3),
    "branching": Choice(options=(1, 3), default=3),
    "temperature": Choice(options=("0", "1")),
}


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def test_the_picker_shows_what_the_library_computes(seed: int) -> None:
    data, chance = guesses(seed), random.Random(seed)
    for _ in range(20):
        wanted = chance.sample(range(data.tree.size), chance.randrange(data.tree.size + 1))
        nodes = data.nodes(()).check("nodes", wanted)
        ridge, batch, warmth = chance.uniform(4, 600), chance.choice((1, 7, 90)), "0.7"
        figure = figures.tree_picker(nodes, warmth, ridge, batch, data=data)
        tree = Tree(tuple(data.tree.choices[node] for node in nodes))
        paths = [path for one in data.ranks[warmth] for path in replay_text(tree, one)]
        tokens = 1 + sum(map(len, paths)) / len(paths)
        expected = expected_tokens(tree, data.accuracies[warmth])
        there = Roofline.at_ridge(ridge).cost(tree.size + 1, batch=batch)
        there += figures.HEAD_SHARE * tree.depth
        here = V[tree.size] + DRAFTING[tree.depth]
        bars = figure.data[3]
        assert list(bars.x) == pytest.approx([expected, tokens, tokens / here, tokens / there])
        shown = dict(zip(figure.data[2].customdata, figure.data[2].text, strict=True))
        symbols = dict(zip(figure.data[2].customdata, figure.data[2].marker.symbol, strict=True))
        for node in range(data.tree.size):
            inside = node in nodes
            assert (symbols[node] == "circle") is inside
            assert shown[node].startswith("<b>") is inside
            if inside:
                took = sum(nodes.index(node) in path for path in paths) / len(paths)
                assert shown[node].endswith(f"/{100 * took + 1e-9:.0f} %")
        assert len(figure.layout.title.text) <= LETTERS_OF_A_PHONE
        assert f"{tokens:.2f} replayed" in alt(figure)


def test_each_edge_of_the_picker_is_drawn_once(seed: int) -> None:
    data = guesses(seed)
    nodes = data.nodes(()).check("nodes", (0, 3, 11))
    figure = figures.tree_picker(nodes, data=data)
    where = dict(
        zip(
            zip(figure.data[2].x, figure.data[2].y, strict=True),
            figure.data[2].customdata,
            strict=True,
        )
    )
    found: dict[int, int] = {}
    for line, inside in ((figure.data[0], False), (figure.data[1], True)):
        points = list(zip(line.x, line.y, strict=True))
        for at in range(0, len(points), 4):
            child = where[points[at + 2]]
            found[child] = where[points[at]]
            assert (child in nodes) is inside and points[at + 3] == (None, None)
    assert found == dict(enumerate(data.tree.parents))


def test_the_sweep_divides_tokens_by_what_a_step_costs(seed: int) -> None:
    data, chance = sweep(seed), random.Random(seed)
    for _ in range(20):
        chosen = {name: chance.choice(control.positions()) for name, control in SWEPT.items()}
        figure = figures.speed_by_tree(**chosen, data=data)
        rows = data.curve(chosen["heads"], chosen["branching"], chosen["temperature"])
        heads = chosen["heads"]
        here = [V[n + 1] + DRAFTING[heads] for n in range(len(rows))]
        there = [
            Roofline.at_ridge(chosen["ridge"]).cost(n + 2, batch=chosen["batch"])
            + figures.HEAD_SHARE * heads
            for n in range(len(rows))
        ]
        assert list(figure.data[0].y) == [row[0] for row in rows]
        assert list(figure.data[1].y) == [row[1] for row in rows]
        assert list(figure.data[1].error_y.array) == pytest.approx([r[3] - r[1] for r in rows])
        assert list(figure.data[3].y) == pytest.approx(here)
        assert list(figure.data[4].y) == pytest.approx(there)
        for line, costed in ((figure.data[6], here), (figure.data[7], there)):
            wanted = [row[1] / cost for row, cost in zip(rows, costed, strict=True)]
            assert list(line.y) == pytest.approx(wanted)
        at = min(chosen["nodes"], len(rows))
        assert (figure.data[8].x[0], figure.data[8].y[0]) == (at, figure.data[7].y[at - 1])
        assert len(figure.layout.title.text) <= LETTERS_OF_A_PHONE


def test_a_curve_that_was_not_measured_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="trees of 2 heads"):
        figures.speed_by_tree(heads=2, branching=3, data=sweep(seed))


@pytest.mark.parametrize("name", ["picker", "sweep"])
def test_the_page_computes_both_and_stays_small(name: str, seed: int, monkeypatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    if name == "picker":
        data, function = guesses(seed), figures.tree_picker
        controls = picked(data)
    else:
        data, function, controls = sweep(seed), figures.speed_by_tree, SWEPT
    shown = explore(function, alt="x", data=data, formula=data.formula(), **controls)
    packed = shown._repr_mimebundle_()[twin.MIME]
    assert len(packed["slices"]) == 1 and len(packed["slices"][0]["frames"]) == 1
    assert [control["name"] for control in packed["controls"]] == list(controls)
    assert len(dumps(packed)) < 60_000


def test_the_share_of_a_head_is_that_of_a_7b() -> None:
    config = figures.BACKBONES["Llama 2 7B"]
    share = costs.head_parameters(config, 1) / costs.parameters(config)
    assert share == pytest.approx(figures.HEAD_SHARE, abs=5e-4)


def test_the_bill_shows_bytes_and_operations_of_every_way() -> None:
    for model, heads, readings, kind in itertools.product(
        figures.BACKBONES, (1, 5), (1, 8), ("full", "tied")
    ):
        figure = figures.training_bill(model, heads, readings, kind)
        config = figures.BACKBONES[model]
        for at, way in enumerate(costs.WAYS):
            cost = costs.training_cost(config, heads, way, projection=kind, readings=readings)
            bars = [figure.data[part].x[at] for part in range(3)]
            assert bars == pytest.approx(
                [cost.weights / 1e9, cost.gradients / 1e9, cost.moments / 1e9]
            )
        whole = costs.training_cost(config, heads, costs.WAYS[0], projection=kind)
        assert figure.data[3].x[0] == 1 and figure.data[3].x[2] == pytest.approx(
            cost.flops / whole.flops
        )
        assert len(figure.layout.title.text) <= LETTERS_OF_A_PHONE
        assert model in alt(figure)


def test_an_empty_tree_is_plain_decoding(seed: int) -> None:
    data = guesses(seed)
    figure = figures.tree_picker((), data=data)
    assert list(figure.data[3].x) == pytest.approx([1, 1, 1, 1])
    assert set(figure.data[2].marker.symbol[1:]) == {"circle-open"}


def test_chances_are_drawn_by_their_roots(seed: int) -> None:
    data = guesses(seed)
    chances = node_chances(data.tree, data.accuracies["0"])
    figure = figures.tree_picker((0,), data=data)
    order = figure.data[2].customdata[1:]
    assert list(figure.data[2].marker.color[1:]) == pytest.approx(
        [math.sqrt(chances[node]) for node in order]
    )
    assert sorted(order) == list(range(data.tree.size))
    assert torch.equal(
        dense_tree([1]).mask(), torch.ones(1, 1, dtype=torch.bool)
    )  # a node sees itself
