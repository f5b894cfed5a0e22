"""Trees of candidates: which tokens of which heads are drafted together.

Letters: K heads, R ranks, N nodes. A node is its path of ranks (r0, r1, ...): head 0's token of
rank r0, followed by head 1's token of rank r1, and so on; rank 0 is the most likely token. A tree
is fixed before generation, and the heads fill in the tokens in each step.
Source: Cai et al., Medusa, 2024, arXiv 2401.10774.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from labcore.checks import positive_int

__all__ = [
    "Accuracies",
    "Tree",
    "chain_tree",
    "dense_tree",
    "expected_tokens",
    "node_chances",
    "sparse_tree",
]

Accuracies = Tensor | Sequence[Sequence[float]]
"""[K, R]: how often head i's token of rank r is the right one, for each rank alone."""
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Nodes in the order of a draft: each comes after its parent and its better-ranked siblings.

    choices: each node's path of ranks; none makes an empty tree.
    Raises TypeError for ranks that aren't ints; ValueError for ranks below 0, an empty path, a
    duplicate node, a node before its parent, and siblings out of the order of their ranks.
    """

    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        choices = tuple(tuple(choice) for choice in self.choices)
        object.__setattr__(self, "choices", choices)
        last: dict[Choice, int] = {(): -1}  # of each node so far, its last child's rank
        for choice in choices:
            if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in choice):
                raise TypeError(f"choices must hold paths of whole numbers, got {choice!r}")
            if not choice or min(choice) < 0:
                raise ValueError(f"a choice must hold ranks of at least 0, got {choice}")
            parent, rank = choice[:-1], choice[-1]
            if choice in last:
                raise ValueError(f"choices must differ, got {choice} twice")
            if parent not in last:
                raise ValueError(
                    f"a choice must come after its parent, got {choice} before {parent}; add the "
                    "parent or move it to the front"
                )
            if rank < last[parent]:
                raise ValueError(
                    f"siblings must be in the order of their ranks, got {choice} after rank "
                    f"{last[parent]}"
                )
            last[parent], last[choice] = rank, -1

    @property
    def size(self) -> int:
        """N: the number of nodes, without the token that they follow."""
        return len(self.choices)

    @cached_property
    def depth(self) -> int:
        """The number of nodes on the longest path, and so of heads used."""
        return max(map(len, self.choices), default=0)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Each node's parent, -1 for nodes that follow the prefix."""
        numbers = {choice: node for node, choice in enumerate(self.choices)}
        return tuple(numbers.get(choice[:-1], -1) for choice in self.choices)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The number of ancestors of each node, which is also the head that predicts its token."""
        return tuple(len(choice) - 1 for choice in self.choices)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node among its head's tokens."""
        return tuple(choice[-1] for choice in self.choices)

    def mask(self) -> Tensor:
        """Return which nodes each node sees: itself and its ancestors. bool [N, N]."""
        mask = torch.zeros(self.size, self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] = mask[parent]
            mask[node, node] = True
        return mask

    def paths(self) -> list[tuple[int, ...]]:
        """Return every path from the root to a leaf, as node numbers, in the leaves' order."""
        ways: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            ways.append((*(ways[parent] if parent >= 0 else ()), node))
        inner = set(self.parents)
        return [way for node, way in enumerate(ways) if node not in inner]

    def cut(self, depth: int) -> Tree:
        """Return the nodes of the first `depth` levels, in order. Raises ValueError below 0."""
        if depth < 0:
            raise ValueError(f"depth must be at least 0, got {depth}")
        return Tree(tuple(choice for choice in self.choices if len(choice) <= depth))


def chain_tree(depth: int) -> Tree:
    """Return the chain of the first `depth` heads' likeliest tokens. ValueError for depth < 1."""
    return dense_tree([1] * positive_int("depth", depth))


def dense_tree(widths: Sequence[int]) -> Tree:
    """Return every combination of the widths[i] most likely tokens of head i, level by level.

    widths: at least one, each at least 1; N is the sum of their running products. Errors as in
    `positive_int`.
    """
    if not len(widths):
        raise ValueError("widths must hold one number for each level, got none")
    ranks = [range(positive_int("widths[i]", width)) for width in widths]
    levels = (itertools.product(*ranks[: level + 1]) for level in range(len(ranks)))
    return Tree(tuple(itertools.chain.from_iterable(levels)))


def sparse_tree(accuracies: Accuracies, nodes: int, *, branching: int | None = None) -> Tree:
    """Return the tree of `nodes` nodes with the most expected tokens.

    accuracies: [K, R], each at least 0, adding up to at most 1 per head. branching: the most
    children of a node; None is R. The tree grows greedily: the next node is the one whose path has
    the largest product of accuracies. Ties go to the shorter path, then to the better ranks. So the
    first n nodes are the tree for a budget of n. That is the best tree if accuracies fall with the
    rank; a worse rank that is more accurate still comes after the better rank.
    Raises ValueError for other accuracies and for more nodes than there are.
    Source: Cai et al., 2024, arXiv 2401.10774, which calls it sparse tree attention.
    """
    table = _table(accuracies)
    widest = len(table[0])
    if branching is not None:
        widest = min(widest, positive_int("branching", branching))
    most = sum(widest**level for level in range(1, len(table) + 1))
    if positive_int("nodes", nodes) > most:
        raise ValueError(
            f"nodes must be at most {most}, all that {len(table)} heads and {widest} ranks make, "
            f"got {nodes}"
        )
    # A chosen node adds its first child and its next sibling; neither is likelier than the node.
    front: list[tuple[float, int, Choice]] = [(-table[0][0], 1, (0,))]
    chosen: list[Choice] = []
    while len(chosen) < nodes:
        _, depth, choice = heapq.heappop(front)
        chosen.append(choice)
        following: list[Choice] = []
        if depth < len(table):
            following.append((*choice, 0))
        if choice[-1] + 1 < widest:
            following.append((*choice[:-1], choice[-1] + 1))
        for path in following:
            heapq.heappush(front, (-_chance(path, table), len(path), path))
    return Tree(tuple(chosen))


def node_chances(tree: Tree, accuracies: Accuracies) -> list[float]:
    """Return the probability that each node is accepted, if heads were right independently.

    accuracies: [K, R]. The result is the product along each node's path, [N]. Raises ValueError for
    accuracies that `sparse_tree` doesn't accept, and for a tree with more levels or ranks than they
    have.
    """
    table = _table(accuracies)
    for name, need, have in (
        ("heads", tree.depth, len(table)),
        ("ranks", 1 + max(tree.ranks, default=-1), len(table[0])),
    ):
        if need > have:
            raise ValueError(f"accuracies must cover the tree's {need} {name}, got {have} {name}")
    return [_chance(choice, table) for choice in tree.choices]


def expected_tokens(tree: Tree, accuracies: Accuracies) -> float:
    """Return tokens per step if heads were right independently: 1 + the sum of `node_chances`.

    At most one node per level is accepted, and the target adds its own token. Heads aren't
    independent: one is more likely to be right if the one before was, so measured numbers differ.
    Errors as in `node_chances`.
    """
    return 1 + sum(node_chances(tree, accuracies))


def _chance(choice: Choice, table: Sequence[Sequence[float]]) -> float:
    return prod(table[head][rank] for head, rank in enumerate(choice))


def _table(accuracies: Accuracies) -> list[list[float]]:
    """Check the accuracies, and return them [K, R] as Python floats."""
    wide = torch.as_tensor(accuracies, dtype=torch.float64)
    if wide.ndim != 2 or not wide.numel():
        raise ValueError(f"accuracies must be [K, R], both above 0, got {tuple(wide.shape)}")
    if not (wide.min() >= 0 and wide.sum(1).max() <= 1 + 1e-6):
        raise ValueError(
            "accuracies must be at least 0 and add up to at most 1 in each head, got "
            f"{wide.min().item():.3g} as the minimum and {wide.sum(1).max().item():.3g} as the "
            "largest sum; pass each rank's own share, not cumulative shares"
        )
    table: list[list[float]] = wide.tolist()
    return table
