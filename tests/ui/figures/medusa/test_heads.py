"""Medusa's figures hold the numbers they are given, and draw each node and edge of a tree once."""

import itertools
import math
import random
import re
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
from labcore.ui import Choice, IntSlider, explore, twin
from labcore.ui.compact import dumps
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


# Tokens by tree.


def swept(accuracies: torch.Tensor, most: int = 31) -> figures.TreeSweep:
    tokens = {}
    for heads, branching in itertools.product((1, 2, 4), (1, 3)):
        whole = sum(branching**level for level in range(1, heads + 1))
        for nodes in range(1, min(whole, most) + 1):
            tree = sparse_tree(accuracies[:heads], nodes, branching=branching)
            expected = expected_tokens(tree, accuracies)
            for warmth in TEMPERATURES:
                middle = 1 + 0.9 * (expected - 1)
                found = (middle, middle - 0.05, middle + 0.03) if nodes % 3 == 1 else None
                tokens[heads, branching, nodes, warmth] = (expected, found)
    return figures.TreeSweep(
        tokens=tokens, costs={2: 1.1, 5: 1.4, 32: 3.0}, draft_cost={1: 0.1, 2: 0.15, 4: 0.3}
    )


def test_tokens_by_tree_divides_tokens_by_what_a_step_costs(accuracies) -> None:
    data = swept(accuracies)
    figure = figures.tokens_by_tree(7, 4, 3, "0", data=data)
    sizes = range(1, 32)
    cost = {n: data.step_cost(4, n) for n in sizes}
    assert cost[1] == pytest.approx(1.4) and cost[4] == pytest.approx(1.7)
    assert cost[2] == pytest.approx(1.1 + 0.1 + 0.3)  # a third of the way from 2 to 5
    above = trace(figure, "expected")
    assert list(above.x) == list(sizes)
    assert list(above.y) == [data.tokens[4, 3, n, "0"][0] for n in sizes]
    shown = trace(figure, "measured")
    found = {n: data.tokens[4, 3, n, "0"][1] for n in sizes if n % 3 == 1}
    assert dict(zip(shown.x, shown.y, strict=True)) == {n: one[0] for n, one in found.items()}
    assert list(shown.error_y.arrayminus) == pytest.approx([0.05] * len(found))
    assert list(shown.error_y.array) == pytest.approx([0.03] * len(found))
    speed = trace(figure, "speed, expected")
    assert list(speed.y) == pytest.approx(
        [y / cost[n] for n, y in zip(sizes, above.y, strict=True)]
    )
    fast = trace(figure, "speed, measured tokens")
    assert list(fast.y) == pytest.approx([one[0] / cost[n] for n, one in found.items()])
    assert list(trace(figure, "if every forward cost 1").y) == list(above.y)
    ring = trace(figure, "chosen tree")
    assert (ring.x[0], ring.y[0]) == (7, pytest.approx(found[7][0] / cost[7]))
    told = f"{ring.y[0]:.2f}x plain: {found[7][0]:.2f} measured at cost {cost[7]:.2f}"
    assert figure.layout.title.text == told
    assert alt(figure) == f"7 nodes: {told}, {above.y[6]:.2f} tokens per step expected."
    assert small(figure)


def test_whole_tree_caps_budgets_and_gaps_show_expected_tokens(
    accuracies,
) -> None:
    data = swept(accuracies)
    assert trace(figures.tokens_by_tree(20, 1, 3, "1", data=data), "chosen tree").x[0] == 3
    figure = figures.tokens_by_tree(5, 4, 3, "1", data=data)
    title = figure.layout.title.text
    assert "measured" not in title and "expected" in title
    expected = data.tokens[4, 3, 5, "1"][0]
    assert trace(figure, "chosen tree").y[0] == pytest.approx(expected / data.step_cost(4, 5))


def test_the_sweep_says_what_it_lacks(accuracies) -> None:
    data = swept(accuracies)
    with pytest.raises(ValueError, match="trees of 3 heads"):
        figures.tokens_by_tree(5, 3, 3, "0", data=data)
    with pytest.raises(ValueError, match="costs must reach 33 tokens"):
        data.step_cost(4, 32)
    with pytest.raises(ValueError, match="draft_cost must have 3 heads"):
        data.step_cost(3, 4)
    flat = figures.TreeSweep(tokens=data.tokens, costs={5: 2.0}, draft_cost=0.25)
    assert flat.step_cost(9, 2) == pytest.approx(1.75)  # 1 is known: v(1) = 1


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


def grown(accuracies) -> dict:
    data = {}
    for heads, branching, warmth in itertools.product((2, 4), (2, 3), TEMPERATURES):
        most = min(15, sum(branching**level for level in range(1, heads + 1)))
        tree = sparse_tree(accuracies[:heads], most, branching=branching)
        chances = node_chances(tree, accuracies)
        data[heads, branching, warmth] = trees.TreeRun(
            tree=tree, chances=chances, measured=chances if warmth == "0" else None
        )
    return data


def test_the_explorer_shows_the_tree_of_each_budget(accuracies) -> None:
    data = grown(accuracies)
    for nodes in (1, 5, 15):
        figure = trees.tree_explorer(nodes, 4, 3, "0", data=data)
        tree = sparse_tree(accuracies, nodes, branching=3)
        assert sorted(drawn(figure).values()) == list(range(-1, nodes))
        order = [int(text) for text in figure.layout.yaxis.ticktext]
        assert torch.equal(torch.tensor(trace(figure, "mask").z) > 0, tree.mask()[order][:, order])
        told = figure.layout.title.text
        assert f"{expected_tokens(tree, accuracies):.2f} tokens/step expected" in told
    assert "6 nodes" in alt(trees.tree_explorer(15, 2, 2, "1", data=data))
    for nodes, heads, branching in itertools.product((1, 3, 7, 15), (2, 4), (2, 3)):
        figure = trees.tree_explorer(nodes, heads, branching, "0", data=data)
        told = figure.layout.xaxis.title.text
        assert told in alt(figure)
        used = {len(c) - 1 for c in data[heads, branching, "0"].tree.choices[:nodes]}
        idle = [str(head) for head in range(heads) if head not in used]
        found = re.fullmatch(r"head \((.+) unused\)", told)
        named = found.group(1).split(" to ") if found else []
        assert found or told == "head"
        assert named == (idle if len(idle) < 3 else [idle[0], idle[-1]]), told
    with pytest.raises(ValueError, match="data must have the tree of 3 heads"):
        trees.tree_explorer(4, 3, 3, "0", data=data)


# Explorers.


def explorers(accuracies) -> dict:
    return {
        "tokens": (
            figures.tokens_by_tree,
            swept(accuracies),
            {
                "nodes": IntSlider(low=1, high=31, default=8, step=3),
                "branching": Choice(options=(1, 3), default=3),
                "heads": Choice(options=(1, 2, 4), default=4),
                "temperature": Choice(options=TEMPERATURES),
            },
        ),
        "tree": (
            trees.tree_explorer,
            grown(accuracies),
            {
                "nodes": IntSlider(low=1, high=15, default=8, step=7),
                "heads": Choice(options=(2, 4), default=4),
                "branching": Choice(options=(2, 3), default=3),
                "temperature": Choice(options=TEMPERATURES),
            },
        ),
    }


@pytest.mark.parametrize("name", ["tokens", "tree"])
def test_frames_share_traces_and_axes_and_titles_fit_a_phone(name: str, accuracies) -> None:
    function, data, controls = explorers(accuracies)[name]
    kinds = set()
    for point in itertools.product(*(control.positions() for control in controls.values())):
        figure = function(**dict(zip(controls, point, strict=True)), data=data)
        layout = figure.layout
        kinds.add(
            (
                tuple((item.type, item.name) for item in figure.data),
                *(layout[axis].range for axis in ("xaxis", "yaxis", "xaxis2", "yaxis2")),
                layout.height,
            )
        )
        lines = layout.title.text.split("<br>")
        assert len(lines) == 1 and max(map(len, lines)) <= LETTERS_OF_A_PHONE, lines
    assert len(kinds) == 1


@pytest.mark.parametrize("name", ["tokens", "tree"])
def test_the_static_page_carries_both_explorers(name: str, accuracies, monkeypatch) -> None:
    function, data, controls = explorers(accuracies)[name]
    monkeypatch.setenv("LABCORE_BOOK", "1")
    shown = explore(function, alt="x", data=data, **controls)
    packed = shown._repr_mimebundle_()[twin.MIME]
    assert sum(len(one["frames"]) for one in packed["slices"]) <= twin.MOST_FRAMES
    assert [control["name"] for control in packed["controls"]] == list(controls)
    assert len(dumps(twin.first_slice(packed))) < 250_000
