"""Trees and accuracies by chance, and tokens for the nodes of a tree."""

from __future__ import annotations

import random

from labcore.decoding.medusa.trees import Tree


def random_tree(draw: random.Random, size: int, *, heads: int = 5, ranks: int = 9) -> Tree:
    """Nodes under random parents in random order; ranks may have gaps. At most `size` nodes."""
    last: dict[tuple[int, ...], int] = {(): -1}
    for _ in range(size):
        parent = draw.choice([choice for choice in last if len(choice) < heads])
        rank = last[parent] + draw.choice([1, 1, 2])
        if rank < ranks:
            last[parent] = rank
            last[(*parent, rank)] = -1
    return Tree(tuple(last)[1:])


def falling(draw: random.Random, heads: int, ranks: int) -> list[list[float]]:
    """Accuracies that fall with the rank, each head's below 1 in all."""
    rows = []
    for _ in range(heads):
        row = sorted((draw.expovariate(1) for _ in range(ranks)), reverse=True)
        whole = sum(row) + draw.expovariate(1)
        rows.append([share / whole for share in row])
    return rows


def siblings_differ(tree: Tree, vocab: int, draw: random.Random) -> list[int]:
    """A token for each node, siblings with different ones, others maybe with the same."""
    order = [draw.sample(range(vocab), vocab) for _ in range(tree.depth)]
    return [order[level][rank] for level, rank in zip(tree.depths, tree.ranks, strict=True)]
