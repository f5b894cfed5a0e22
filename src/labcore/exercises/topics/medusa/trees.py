"""Choose the paths of a draft tree when a head's hit rate depends on the rank of the parent."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["BUDGETS", "NOBODYS", "SPARSE_TREE", "rates"]

NOBODYS = 8
BUDGETS = (7, 9, 11, 13)
SHAPES = ((3, 3), (3, 4), (4, 3), (2, 4))  # K heads, R ranks
_Path = tuple[int, ...]
_Answer = tuple[list[list[_Path]], float]


def sparse_tree(first: Tensor, later: Tensor, *, budget: int) -> _Answer:
    """Return each request's nodes, most likely first, and the expected tokens per step."""
    trees, tokens = [], 0.0
    for start, more in zip(first.tolist(), later.tolist(), strict=True):
        open_nodes: dict[_Path, float] = {(rank,): rate for rank, rate in enumerate(start)}
        tree: dict[_Path, float] = {}  # node -> probability that it is accepted
        while open_nodes and len(tree) < budget:
            path = max(open_nodes, key=lambda one: open_nodes[one])
            chance = tree[path] = open_nodes.pop(path)
            if len(path) <= len(more):
                row = more[len(path) - 1][path[-1]]
                open_nodes |= {(*path, rank): chance * rate for rank, rate in enumerate(row)}
        trees.append([*tree])
        tokens = sum(tree.values(), tokens + 1)
    return trees, tokens


def _on_path(path: _Path, start: Sequence[float], more: Sequence[Any]) -> list[float]:
    """Return the rate of each node on a path, given the node above it."""
    later = zip(more, itertools.pairwise(path), strict=False)
    return [start[path[0]], *(table[above][rank] for table, (above, rank) in later)]


def rates(draw: torch.Generator, requests: int, heads: int, ranks: int) -> dict[str, Tensor]:
    """Draw noisy hit rates that fall with a node's rank and with its parent's rank."""
    falling = 0.45 ** torch.arange(ranks, dtype=torch.float64)

    def some(*shape: int) -> Tensor:
        noise = torch.randn(*shape, ranks, generator=draw, dtype=torch.float64)
        weights = falling * (0.55 * noise).exp()
        sums = 0.45 + 0.5 * torch.rand(*shape, 1, generator=draw, dtype=torch.float64)
        return sums * weights / weights.sum(-1, keepdim=True)

    by_parent = 0.85 ** torch.arange(ranks, dtype=torch.float64)[:, None]
    return {"first": some(requests), "later": some(requests, heads - 1, ranks) * by_parent}


@functools.cache
def _drawn(seed: int) -> tuple[dict[str, Tensor], ...]:
    """Draw cases that distinguish all answers for each budget."""
    draw = torch.Generator().manual_seed(seed)
    functions = [sparse_tree, *(function for function, _ in SPARSE_TREE.wrong.values())]
    while True:
        cases = tuple(rates(draw, 1, *shape) for shape in SHAPES)
        if all(_telling(functions, cases, budget) for budget in (NOBODYS, *BUDGETS)):
            return cases


def _telling(
    functions: Sequence[Callable[..., _Answer]], cases: Sequence[Mapping[str, Any]], budget: int
) -> bool:
    """Return whether no two functions agree on all trees and tokens."""
    given = []
    for fn in functions:
        found = [fn(**case, budget=budget) for case in cases]
        given.append([(trees, round(tokens, 4)) for trees, tokens in found])
    return all(one != other for one, other in itertools.combinations(given, 2))


def _cases(seed: int) -> list[dict[str, Any]]:
    return [{name: value.clone() for name, value in case.items()} for case in _drawn(seed)]


def _own_budget(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"medusa.sparse_tree:{student}")
    return {"budget": chance.choice(BUDGETS) if student else NOBODYS}


# The order of a sum decides its last bits.
_SUM = ("sum(tree.values(), tokens + 1)", "tokens + (1 + sum(tree.values()))")
_MISTAKES = [
    Mistake("level by level",
            [_SUM, ("max(open_nodes, key=lambda one: open_nodes[one])", "next(iter(open_nodes))")],
            "Your tree fills one level after another, whatever the rates are. A second token after "
            "a likely one is often worth more than the fourth choice for the first token."),
    Mistake("branch by branch",
            [_SUM, ("one: open_nodes[one]", "one: (len(one), open_nodes[one])")],
            "Your tree follows a branch to its end before it starts another. The last nodes of a "
            "long path are rarely reached."),
    Mistake("orphans",
            [_SUM, (" and len(tree) < budget", ""), ("        trees.",
             "        tree = {one: tree[one] for one in sorted(tree, key=lambda one: (\n"
             "            -_on_path(one, start, more)[-1], len(one), one))[:budget]}\n"
             "        trees.")],
            "Your tree contains nodes without their parents. They can never be accepted."),
    Mistake("own rate", [_SUM, ("one: open_nodes[one]", "one: _on_path(one, start, more)[-1]")],
            "You compare nodes by their own rate. A node counts only if all nodes above it are "
            "right too."),
    Mistake("sum of rates",
            [_SUM, ("one: open_nodes[one]", "one: sum(_on_path(one, start, more)) / len(one)")],
            "You compare nodes by the mean rate on their paths. The mean stays high even if one "
            "weak node makes the path unlikely."),
    Mistake("best parent for all", [_SUM, ("[path[-1]]", "[0]")],
            "You use the rates after rank 0 for all parents. After other ranks, the heads have "
            "different hit rates."),
    Mistake("mean of the parents",
            [_SUM, ("more[len(path) - 1][path[-1]]",
             "[sum(one) / len(one) for one in zip(*more[len(path) - 1], strict=True)]")],
            "You take the mean over the parents' ranks. How often a node is right depends on the "
            "rank of its parent."),
    Mistake("rows and columns",
            [_SUM, ("more[len(path) - 1][path[-1]]",
             "[one[path[-1]] for one in more[len(path) - 1]]")],
            "You swap the parent's rank and the node's own."),
    Mistake("next rank only",
            [_SUM, ("max(open_nodes,",
             "max((one for one in open_nodes if (*one[:-1], one[-1] - 1) not in open_nodes),")],
            "You consider a sibling only once the previous rank is in the tree. The rates in the "
            "cases do not always fall with the rank."),
    Mistake("one child per node",
            [_SUM, ("for rank, rate in enumerate(row)}",
             "for rank, rate in enumerate(row) if rate == max(row)}")],
            "Each of your nodes has at most one child."),
    Mistake("complete paths only",
            [_SUM, (" and len(tree) < budget", ""), ("        trees.",
             "        best = sorted(tree, key=lambda one: (-len(one), -tree[one]))\n"
             "        nodes = {one[: n + 1]: 0 for one in best for n in range(len(one))}\n"
             "        tree = {one: tree[one] for one in [*nodes][:budget]}\n        trees.")],
            "You choose whole paths down to the last head. A path may end earlier, if starting "
            "another one is worth more than continuing."),
    Mistake("root counted", [_SUM, ("< budget", "< budget - 1")],
            "Your tree has one node fewer than allowed. The root doesn't count as a node."),
    Mistake("in order of ranks", [_SUM, ("[*tree]", "sorted(tree)")],
            "Your trees contain the right nodes in the wrong order."),
    Mistake("free token forgotten", ("tokens + 1", "tokens"),
            "Your trees are right. Your tokens lack the one that a request gets in each step, "
            "whether or not a node is accepted."),
]  # fmt: skip

SPARSE_TREE = Exercise(
    id="medusa.sparse_tree",
    points=6,
    beyond=2,
    reference=sparse_tree,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_budget,
    returns=("trees", "tokens"),
    rtol=1e-9,
    explanation="The length of the accepted path is the number of accepted nodes, so a node adds "
    "its probability of being accepted: the product of the rates on its path. A rate is at most 1, "
    "so no node is likelier than its parent. The most likely nodes of all paths therefore always "
    "form a tree, and you find them by taking the best open node again and again. Medusa measures "
    "one rate per head and rank and multiplies these, as if hits were independent; rates that "
    "depend on the parent's rank need a larger table and are more accurate. This reference gives "
    "each request the whole budget.",
    hints=(
        "In the example, the tree starts with (0,). Which nodes could come next, and how likely "
        "is each of them to be accepted?",
        "A node adds its probability of being accepted to the expected tokens: the product of "
        "the rates on its path. Start with a pool of all paths of one rank, move the most likely "
        "path of the pool into the tree, add its children to the pool, and repeat until the "
        "budget is used up or the pool is empty.",
        "`later[b, len(path) - 1, path[-1]]` holds the rates of all children of `path`, found by "
        "the length of the path and its last rank. Multiply them by the probability of `path`. "
        "Use this line only if `len(path) <= later.shape[1]`, since a path of K ranks has no "
        "children.",
    ),
)
