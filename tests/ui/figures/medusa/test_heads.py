"""Medusa's figures hold the numbers they are given, and draw each node and edge of a tree once."""

import itertools
import math
import random
import string

import plotly.graph_objects as go
import pytest
import torch

from labcore.decoding.medusa.trees import (
    chain_tree,
    dense_tree,
    expected_tokens,
    node_chances,
    sparse_tree,
)
from labcore.timing import quantiles
from labcore.ui.figures.medusa import heads as figures
from labcore.ui.figures.medusa import tree as trees
from tests.ui.figures.drawn import packed

TEMPERATURES = ("0", "1")
LETTERS_OF_A_PHONE = 41


@pytest.fixture
def accuracies(generator: torch.Generator) -> torch.Tensor:
    """[4, 6]: ranks fall, heads fall, a head's ranks sum to less than 1."""
    table = torch.rand(4, 6, generator=generator, dtype=torch.float64).sort(-1, True).values
    return table / table.sum(-1, keepdim=True) * torch.tensor([[0.9], [0.6], [0.4], [0.3]])


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str, axis: str | None = None):
    return next(
        item for item in figure.data if item.name == name and axis in (None, item.yaxis or "y")
    )


def small(figure: go.Figure) -> bool:
    return packed(figure) < 25_000


# Where the heads sit.


@pytest.mark.parametrize("projection", ["tied", "low_rank", "full"])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_every_head_stands_over_the_token_it_says(heads: int, projection: str) -> None:
    figure = trees.where_the_heads_sit(heads, projection)
    words = next(item for item in figure.data if item.mode == "text")
    at = {text: x for x, text in zip(words.x, words.text, strict=True)}
    assert [at[f"head<br>{i}"] == at[f"t+{i + 2}"] for i in range(heads)] == [True] * heads
    assert at["own<br>head"] == at["t+1"] and f"t+{heads + 2}" not in at
    boxes = {kind: trace(figure, kind).x.count(None) for kind in ("read", "frozen", "trained")}
    # Gaps are one less than boxes, and each kind has a box that explains it.
    assert boxes["read"] == 2 and trace(figure, "said").x.count(None) == heads + 1
    assert boxes["trained"] == heads * (1 if projection == "tied" else 2)
    assert boxes["frozen"] == 3
    assert f"{heads} trained heads say t+2 to t+{heads + 1}" in alt(figure)
    assert heads < 5 or small(figure)


def test_sketches_of_all_kinds_have_the_same_traces() -> None:
    kinds = {
        tuple((item.type, item.mode, item.name) for item in figure.data)
        for figure in itertools.starmap(
            trees.where_the_heads_sit, itertools.product((1, 2, 4), ("tied", "low_rank", "full"))
        )
    }
    assert len(kinds) == 1


def test_sketch_of_no_heads_or_another_projection_is_refused() -> None:
    with pytest.raises(ValueError, match="heads"):
        trees.where_the_heads_sit(0)
    with pytest.raises(ValueError, match="projection"):
        trees.where_the_heads_sit(2, "own")


# Accuracy, learning, cost, peers.


def test_accuracy_shows_the_first_guess_and_the_sum_of_the_best(accuracies) -> None:
    short = accuracies[:2, :3]
    figure = figures.accuracy_by_distance({"full": accuracies, "tied": short.tolist()}, title="x")
    assert list(trace(figure, "full, first guess").y) == accuracies[:, 0].tolist()
    assert list(trace(figure, "full, best 5").y) == pytest.approx(accuracies[:, :5].sum(1).tolist())
    # Where there are fewer ranks, all of them count.
    assert list(trace(figure, "tied, best 5").y) == pytest.approx(short.sum(1).tolist())
    assert list(trace(figure, "full, best 5").x) == [2, 3, 4, 5]
    assert figure.layout.xaxis.ticktext[1] == "3<br>head 1"
    assert f"head 0 {accuracies[0, 0]:.1%}" in alt(figure) and small(figure)


@pytest.mark.parametrize("steps", [1, 7, 250, 251, 1003])
def test_learning_curve_keeps_both_ends_and_only_measured_steps(steps: int, generator) -> None:
    losses = torch.rand(steps, 3, generator=generator, dtype=torch.float64)
    figure = figures.heads_learn(losses.tolist(), title="x", levels={"knowing nothing": 6.9})
    for i in range(3):
        line = trace(figure, f"head {i}")
        assert line.x[0] == 1 and line.x[-1] == steps and len(line.x) <= 251
        assert list(line.y) == [float(losses[x - 1, i]) for x in line.x]
        assert f"head {i} from {losses[0, i]:.2f} to {losses[-1, i]:.2f}" in alt(figure)
    assert set(trace(figure, "knowing nothing").y) == {6.9}
    assert steps < 1000 or small(figure)


def test_peers_stand_on_one_axis_from_plain_on() -> None:
    tokens = {"plain": [1.0], "chain": [1.7, 1.8, 1.9], "sparse": [2.0, 2.4]}
    speeds = {"plain": [1.0, 1.02], "chain": [1.1, 1.2, 1.5]}
    figure = figures.against_peers(speeds, tokens, title="x")
    for name, rows in (("tokens per step", tokens), ("speed over plain", speeds)):
        dots = trace(figure, name)
        found = [quantiles(samples) for samples in rows.values()]
        assert list(dots.y) == list(rows) and list(dots.x) == [middle for _, middle, _ in found]
        assert list(dots.error_x.array) == pytest.approx([h - m for _, m, h in found])
        assert list(dots.error_x.arrayminus) == pytest.approx([m - low for low, m, _ in found])
    assert figure.layout.shapes[0].x0 == 1
    assert "tokens per step: plain 1.00, chain 1.80, sparse 2.20" in alt(figure) and small(figure)


def test_requests_are_drawn_with_their_prediction() -> None:
    speeds = {"a model": {1: 1.2, 8: 1.1, 64: 0.7}, "another": {1: 1.1, 16: 0.9}}
    figure = figures.speed_by_requests(speeds, predicted={"by formula": {1: 1.2, 64: 1.1}})
    for name, points in {**speeds, "by formula": {1: 1.2, 64: 1.1}}.items():
        line = trace(figure, name)
        assert dict(zip(line.x, line.y, strict=True)) == points
    assert list(figure.layout.xaxis.tickvals) == [1, 8, 16, 64]
    assert "another: 1 1.10, 16 0.90" in alt(figure) and small(figure)


# The tree.


def shapes(accuracies) -> list:
    return [
        chain_tree(1), chain_tree(4), dense_tree([3, 2, 2]), dense_tree([5]),
        *(sparse_tree(accuracies, n) for n in (2, 13, 31)),
    ]  # fmt: skip


def drawn(figure: go.Figure) -> dict[tuple[float, float], int]:
    """Where each node is drawn, by the number that stands at its row; the root is -1."""
    rows = dict(
        zip(figure.layout.yaxis.tickvals, map(int, figure.layout.yaxis.ticktext), strict=True)
    )
    nodes = trace(figure, "nodes")
    return {(x, y): rows[y] if y >= 0 else -1 for x, y in zip(nodes.x, nodes.y, strict=True)}


def test_every_node_and_every_edge_is_drawn_once(accuracies) -> None:
    for tree in shapes(accuracies):
        figure = trees.tree_view(tree, node_chances(tree, accuracies))
        places = drawn(figure)
        assert sorted(places.values()) == list(range(-1, tree.size))
        assert {node: x for (x, _), node in places.items()} == {-1: -1} | dict(
            enumerate(tree.depths)
        )
        edges = trace(figure, "edges")
        points = list(zip(edges.x, edges.y, strict=True))
        parts = [points[at : at + 3] for at in range(0, len(points), 4)]
        assert all(points[at] == (None, None) for at in range(3, len(points), 4))
        found = sorted((places[part[-1]], places[part[0]]) for part in parts)
        assert found == list(enumerate(tree.parents))
        # Branch by branch: what is behind a node stands in the rows right below it.
        rows = [node for _, node in sorted((y, node) for (_, y), node in places.items())][1:]
        for node, column in zip(rows, tree.mask()[rows][:, rows].T, strict=True):
            below = column.nonzero().flatten().tolist()
            assert below == list(range(rows.index(node), rows.index(node) + len(below)))


def test_the_heatmap_is_the_trees_mask(accuracies) -> None:
    for tree in shapes(accuracies):
        figure = trees.tree_view(tree, node_chances(tree, accuracies))
        order = [int(text) for text in figure.layout.yaxis.ticktext]
        cells = torch.tensor(trace(figure, "mask").z)
        assert torch.equal(cells > 0, tree.mask()[order][:, order])
        assert torch.equal(cells == 2, torch.eye(tree.size, dtype=torch.bool))
        if tree.size <= 12:
            assert list(figure.layout.xaxis2.ticktext) == list(figure.layout.yaxis.ticktext)
    assert tree.size == 31 and small(figure)


def test_nodes_say_their_rank_or_token_and_both_shares(accuracies, seed: int) -> None:
    tree = sparse_tree(accuracies, 9)
    chances = node_chances(tree, accuracies)
    measured = [0.8 * chance for chance in chances]
    texts = [
        "".join(random.Random(seed + at).choices(string.ascii_letters, k=4)) for at in range(9)
    ]
    texts[0] = "<b>"
    for tokens in (None, texts):
        figure = trees.tree_view(tree, chances, measured, tokens)
        nodes = trace(figure, "nodes")
        for at, node in enumerate(map(int, figure.layout.yaxis.ticktext), start=1):
            name = str(tree.ranks[node]) if tokens is None else tokens[node]
            name = name.replace("<b>", "&lt;b&gt;")
            assert nodes.text[at].startswith(f"<b>{name}</b>  {trees._share(chances[node])}/")
            assert f"expected {chances[node]:.2%}" in nodes.hovertext[at]
            assert f"measured {measured[node]:.2%}" in nodes.hovertext[at]
            assert f"ranks {', '.join(map(str, tree.choices[node]))}" in nodes.hovertext[at]
            assert nodes.marker.color[at] == pytest.approx(math.sqrt(chances[node]))
    assert f"{expected_tokens(tree, accuracies):.2f} tokens/step expected" in alt(figure)
    assert f"{1 + sum(measured):.2f} measured" in figure.layout.title.text
    assert trees._share(0.001) == "<1" and trees._share(0.0) == "0" and trees._share(0.5) == "50"


def test_lists_of_another_length_and_no_nodes_are_refused(accuracies) -> None:
    tree = chain_tree(3)
    for name, given in (
        ("chances", ([0.5],)),
        ("measured", ([0.5] * 3, [0.5] * 4)),
        ("tokens", ([0.5] * 3, None, ["a"])),
    ):
        with pytest.raises(ValueError, match=f"{name} must have one entry for each of the 3"):
            trees.tree_view(tree, *given)
    with pytest.raises(ValueError, match="nodes of the tree"):
        trees.tree_view(chain_tree(1).cut(0), [])
