"""Trees: ancestors and nothing else are seen, paths cover all, no other tree expects more."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from math import prod

import pytest
import torch

from labcore.decoding.medusa.trees import (
    Tree,
    chain_tree,
    dense_tree,
    expected_tokens,
    node_chances,
    sparse_tree,
)
from labcore.models import tree_mask
from tests.decoding.medusa.grown import falling, random_tree


def trees_of(seed: int) -> list[Tree]:
    draw = random.Random(seed)
    sizes = [0, 1, 2, 7, 12, 33, 64]
    grown = [random_tree(draw, size) for size in sizes]
    rows = falling(draw, 4, 6)
    return [*grown, chain_tree(5), dense_tree([3, 2, 1, 2]), sparse_tree(rows, 41)]


def test_a_node_sees_itself_and_its_ancestors(seed: int) -> None:
    for tree in trees_of(seed):
        mask = tree.mask()
        assert mask.dtype == torch.bool and mask.shape == (tree.size, tree.size)
        for node, path in enumerate(tree.choices):
            seen = {tree.choices[other] for other in mask[node].nonzero().flatten().tolist()}
            assert seen == {path[: end + 1] for end in range(len(path))}
        # What an ancestor sees its descendants see too.
        assert torch.equal((mask.float() @ mask.float()) > 0, mask)
        parents = torch.tensor(tree.parents, dtype=torch.int32)[None]
        assert torch.equal(tree_mask(parents)[0], mask)
        assert tuple((mask.sum(1) - 1).tolist()) == tree.depths
        assert tree.depth == max(tree.depths, default=-1) + 1
        assert all(parent < node for node, parent in enumerate(tree.parents))


def test_paths_go_from_root_to_leaf_and_cover_every_choice(seed: int) -> None:
    for tree in trees_of(seed):
        paths = tree.paths()
        ends = [path[-1] for path in paths]
        leaves = set(range(tree.size)) - set(tree.parents)
        assert ends == sorted(leaves) and len(set(ends)) == len(ends)
        for path in paths:
            assert tree.parents[path[0]] == -1
            assert all(tree.parents[b] == a for a, b in itertools.pairwise(path))
            ranks = tuple(tree.ranks[node] for node in path)
            assert ranks == tree.choices[path[-1]]
        covered = {tree.choices[p[-1]][: end + 1] for p in paths for end in range(len(p))}
        assert covered == set(tree.choices)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (((0,), (1, 0)), r"parent, got \(1, 0\) before \(1,\)"),
        (((0, 0), (0,)), r"parent, got \(0, 0\) before \(0,\)"),
        (((0,), (0, 0, 0)), r"parent, got \(0, 0, 0\) before \(0, 0\)"),
        (((1,), (0,)), "order of their ranks"),
        (((0,), (0, 1), (1,), (0, 0)), "order of their ranks"),
        (((0,), (1,), (0,)), "twice"),
        (((0,), (0, 2), (0, 2)), "twice"),
        (((),), "at least 0"),
        (((0,), (0, -1)), "at least 0"),
    ],
)
def test_bad_choices_are_refused(choices: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tree(choices)


@pytest.mark.parametrize("rank", [0.0, True, "0"])
def test_ranks_are_whole_numbers(rank: object) -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        Tree(((rank,),))  # type: ignore[arg-type]


def test_a_cut_keeps_the_upper_levels_in_their_order(seed: int) -> None:
    for tree in trees_of(seed):
        for depth in range(tree.depth + 2):
            cut = tree.cut(depth)
            assert cut.choices == tuple(c for c in tree.choices if len(c) <= depth)
            kept = [node for node, level in enumerate(tree.depths) if level < depth]
            assert torch.equal(cut.mask(), tree.mask()[kept][:, kept])
            assert cut.depth == min(depth, tree.depth)
        assert tree.cut(tree.depth) == tree
    with pytest.raises(ValueError, match="at least 0"):
        chain_tree(2).cut(-1)


@pytest.mark.parametrize("widths", [[1], [7], [1, 1, 1, 1], [2, 3, 1], [4, 1, 3, 2]])
def test_a_dense_tree_is_every_combination(widths: list[int]) -> None:
    tree = dense_tree(widths)
    levels = range(1, len(widths) + 1)
    assert tree.size == sum(prod(widths[:level]) for level in levels)
    assert len(tree.paths()) == prod(widths)
    whole = {c for n in levels for c in itertools.product(*map(range, widths[:n]))}
    assert set(tree.choices) == whole
    assert list(tree.depths) == sorted(tree.depths)  # level by level, so that a cut is a prefix


def test_a_chain_is_one_path() -> None:
    tree = chain_tree(4)
    assert (
        tree.parents == (-1, 0, 1, 2) and tree.ranks == (0,) * 4 and tree.paths() == [(0, 1, 2, 3)]
    )
    assert torch.equal(tree.mask(), torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize(
    "make", [chain_tree, lambda n: dense_tree([2, n]), lambda n: sparse_tree([[0.5]], n)]
)
def test_sizes_are_at_least_one(make: Callable[[int], Tree]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make(0)
    with pytest.raises(ValueError, match="one number for each level"):
        dense_tree([])


@pytest.mark.parametrize(("heads", "ranks", "budget"), [(3, 2, 6), (2, 3, 7), (4, 1, 4), (1, 5, 5)])
@pytest.mark.parametrize("branching", [None, 2])
def test_no_tree_of_the_budget_expects_more(
    heads: int, ranks: int, budget: int, branching: int | None, seed: int
) -> None:
    rows = falling(random.Random(seed), heads, ranks)
    widest = min(ranks, branching or ranks)
    every = [
        choice
        for level in range(1, heads + 1)
        for choice in itertools.product(range(widest), repeat=level)
    ]
    for nodes in range(1, min(budget, len(every)) + 1):
        best = 0.0
        for chosen in itertools.combinations(every, nodes):
            if all(len(c) == 1 or c[:-1] in chosen for c in chosen):
                worth = sum(prod(rows[i][r] for i, r in enumerate(c)) for c in chosen)
                best = max(best, worth)
        tree = sparse_tree(torch.tensor(rows), nodes, branching=branching)
        assert tree.size == nodes
        assert expected_tokens(tree, rows) == pytest.approx(1 + best, abs=1e-6)


@pytest.mark.parametrize("sort", [True, False])
def test_a_smaller_budget_is_the_beginning_of_a_larger(sort: bool, seed: int) -> None:
    draw = random.Random(seed)
    rows = falling(draw, 4, 5)
    if not sort:  # small samples count a worse rank as the more accurate one
        for row in rows:
            draw.shuffle(row)
    whole = sparse_tree(rows, 60)
    for nodes in range(1, 61):
        assert sparse_tree(rows, nodes).choices == whole.choices[:nodes]
    chances = node_chances(whole, rows)
    if sort:
        assert chances == sorted(chances, reverse=True)
    for node, choice in enumerate(whole.choices):
        assert choice[-1] == 0 or (*choice[:-1], choice[-1] - 1) in whole.choices[:node]


def test_shorter_path_and_better_rank_win_among_equal_chances() -> None:
    halves = [[0.5, 0.5], [1.0, 0.0]]
    assert sparse_tree(halves, 4).choices == ((0,), (1,), (0, 0), (1, 0))
    assert sparse_tree([[0.0, 0.0]] * 2, 6) == dense_tree([2, 2])


def test_more_nodes_than_there_are_is_refused() -> None:
    assert sparse_tree([[0.5, 0.2]] * 3, 14).size == 14
    with pytest.raises(ValueError, match="at most 14"):
        sparse_tree([[0.5, 0.2]] * 3, 15)
    with pytest.raises(ValueError, match="at most 3"):
        sparse_tree([[0.5, 0.2]] * 3, 4, branching=1)


def test_expected_tokens_is_the_mean_over_every_outcome(seed: int) -> None:
    """Each head's label has some rank, or none of the table's; heads are independent."""
    draw = random.Random(seed)
    heads, ranks = 4, 3
    rows = falling(draw, heads, ranks)
    for tree in (random_tree(draw, 15, heads=heads, ranks=ranks), dense_tree([2, 1, 3])):
        mean, stands = 0.0, [0.0] * tree.size
        for outcome in itertools.product(range(ranks + 1), repeat=heads):
            chance = prod((*rows[i], 1 - sum(rows[i]))[rank] for i, rank in enumerate(outcome))
            right = [node for node, c in enumerate(tree.choices) if c == outcome[: len(c)]]
            mean += chance * (1 + len(right))
            for node in right:
                stands[node] += chance
        assert expected_tokens(tree, rows) == pytest.approx(mean, abs=1e-12)
        assert node_chances(tree, rows) == pytest.approx(stands, abs=1e-12)
    assert expected_tokens(Tree(()), rows) == 1


def test_accuracies_are_checked() -> None:
    for shape in ((0,), (1, 0), (2,), (1, 1, 1)):
        with pytest.raises(ValueError, match=r"\[K, R\]"):
            sparse_tree(torch.zeros(shape), 1)
    # Shares of all ranks up to one, and numbers that are no shares.
    for bad in ([[0.5, 0.7]], [[-0.1, 0.2]], [[float("nan")]]):
        with pytest.raises(ValueError, match="add up to at most 1"):
            node_chances(Tree(()), bad)
    with pytest.raises(ValueError, match="3 heads, got 2 heads"):
        node_chances(chain_tree(3), [[0.5, 0.1]] * 2)
    with pytest.raises(ValueError, match="3 ranks, got 2 ranks"):
        expected_tokens(dense_tree([3]), [[0.5, 0.1]] * 2)
