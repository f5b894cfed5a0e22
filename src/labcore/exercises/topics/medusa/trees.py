"""Which paths a draft tree should hold, when a head's hits depend on the rank before."""

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
    """The nodes of each request's tree, the likeliest first, and the tokens that a step brings."""
    trees, tokens = [], 0.0
    for start, more in zip(first.tolist(), later.tolist(), strict=True):
        open_nodes: dict[_Path, float] = {(rank,): one for rank, one in enumerate(start)}
        tree: list[_Path] = []
        tokens += 1
        while open_nodes and len(tree) < budget:
            path = max(open_nodes, key=lambda one: open_nodes[one])
            chance = open_nodes.pop(path)
            tree.append(path)
            tokens += chance
            if len(path) <= len(more):
                row = more[len(path) - 1][path[-1]]
                open_nodes |= {(*path, rank): chance * rate for rank, rate in enumerate(row)}
        trees.append(tree)
    return trees, tokens


class _Rates:
    """One request's rates by path; `fault` says how a mistake reads them."""

    def __init__(self, fault: str, first: Tensor, later: Tensor) -> None:
        self.fault, self.first, self.later = fault, first.tolist(), later
        self.depth, self.ranks = len(later) + 1, range(len(self.first))

    def own(self, path: _Path) -> float:
        """The rate of a path's last node behind its parent."""
        if len(path) == 1:
            return float(self.first[path[0]])
        table = self.later[len(path) - 2]
        if self.fault == "best parent for all":
            return float(table[0, path[-1]])
        if self.fault == "mean of the parents":
            return float(table[:, path[-1]].mean())
        if self.fault == "rows and columns":
            return float(table[path[-1], path[-2]])
        return float(table[path[-2], path[-1]])

    def chance(self, path: _Path) -> float:
        found = 1.0
        for end in range(1, len(path) + 1):
            found *= self.own(path[:end])
        return found

    def below(self, path: _Path) -> list[_Path]:
        return [(*path, rank) for rank in self.ranks] if len(path) < self.depth else []

    def all_paths(self) -> list[_Path]:
        """Level by level."""
        return [
            path
            for depth in range(1, self.depth + 1)
            for path in itertools.product(self.ranks, repeat=depth)
        ]


def _greedy(rates: _Rates, budget: int, value: Callable[[_Path], float]) -> list[_Path]:
    """Again and again the best of the nodes whose parent is in the tree."""
    fault, tree = rates.fault, list[_Path]()
    open_nodes = rates.below(())
    if fault == "next rank only":
        open_nodes = open_nodes[:1]
    while open_nodes and len(tree) < budget:
        path = max(open_nodes, key=value)
        open_nodes.remove(path)
        tree.append(path)
        more = rates.below(path)
        if fault == "next rank only":
            more = more[:1]
            if path[-1] + 1 < len(rates.ranks):
                more.append((*path[:-1], path[-1] + 1))
        if fault == "one child a node":
            more = sorted(more, key=value)[-1:]
        open_nodes += more
    return tree


def _chosen(rates: _Rates, budget: int) -> list[_Path]:
    fault = rates.fault
    if fault == "level by level":
        return rates.all_paths()[:budget]
    if fault == "branch by branch":
        tree: list[_Path] = []
        stack = sorted(rates.below(()), key=rates.chance)
        while stack:
            tree.append(stack.pop())
            stack += sorted(rates.below(tree[-1]), key=rates.chance)
        return tree[:budget]
    if fault == "orphans":
        return sorted(rates.all_paths(), key=rates.own, reverse=True)[:budget]
    if fault == "own rate":
        return _greedy(rates, budget, rates.own)
    if fault == "sum of rates":
        return _greedy(
            rates,
            budget,
            lambda path: sum(rates.own(path[: end + 1]) for end in range(len(path))) / len(path),
        )
    if fault == "complete paths only":
        nodes: dict[_Path, None] = {}
        whole = [path for path in rates.all_paths() if len(path) == rates.depth]
        for path in sorted(whole, key=rates.chance, reverse=True):
            nodes |= {path[:end]: None for end in range(1, len(path) + 1)}
        return [*nodes][:budget]
    return _greedy(rates, budget - (fault == "root counted"), rates.chance)


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(first: Tensor, later: Tensor, *, budget: int) -> _Answer:
        trees, tokens = [], 0.0
        for start, more in zip(first, later, strict=True):
            rates = _Rates(fault, start, more)
            tree = _chosen(rates, budget)
            tokens += (fault != "free token forgotten") + sum(map(rates.chance, tree))
            trees.append(sorted(tree) if fault == "in order of ranks" else tree)
        return trees, tokens

    return answer


def rates(draw: torch.Generator, requests: int, heads: int, ranks: int) -> dict[str, Tensor]:
    """Hits by rank: most on the first ones, fewer behind a parent of a later rank, with noise."""
    falling = 0.45 ** torch.arange(ranks, dtype=torch.float64)

    def some(*shape: int) -> Tensor:
        noise = torch.randn(*shape, ranks, generator=draw, dtype=torch.float64)
        weights = falling * (0.55 * noise).exp()
        sums = 0.45 + 0.5 * torch.rand(*shape, 1, generator=draw, dtype=torch.float64)
        return sums * weights / weights.sum(-1, keepdim=True)

    behind = 0.85 ** torch.arange(ranks, dtype=torch.float64)[:, None]
    return {"first": some(requests), "later": some(requests, heads - 1, ranks) * behind}


@functools.cache
def _drawn(seed: int) -> tuple[dict[str, Tensor], ...]:
    """Cases that tell all answers apart, whatever a student's budget is."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        cases = tuple(rates(draw, 1, *shape) for shape in SHAPES)
        if all(_telling(cases, budget) for budget in (NOBODYS, *BUDGETS)):
            return cases


def _telling(cases: Sequence[Mapping[str, Any]], budget: int) -> bool:
    """By the trees, or by what they bring."""
    functions = [sparse_tree, *(_wrongly(name) for name in _HINTS)]
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


_HINTS = {
    "level by level": "Your tree fills one level after the other, whatever the rates are. A second "
    "token behind a likely one is often worth more than a fourth one at the start.",
    "branch by branch": "Your tree follows a branch to its end before it begins another. The last "
    "nodes of a long path are reached rarely.",
    "orphans": "Your tree holds nodes whose parent is not in it. They can never be accepted.",
    "own rate": "You compare nodes by their last rate. A node counts only where all above it are "
    "right as well.",
    "sum of rates": "You compare nodes by the mean of the rates on their paths. It stays high for "
    "a path that one weak node makes unlikely.",
    "best parent for all": "You take the rates behind the parent of rank 0 for all parents. Behind "
    "other ranks the heads hit differently.",
    "mean of the parents": "You take the mean over the parents' ranks. How often a node is right "
    "depends on the rank that it follows.",
    "rows and columns": "You exchange the parent's rank with the node's own.",
    "next rank only": "With you a node's sibling is considered only when the rank before it is in "
    "the tree. The rates in the cases do not always fall with the rank.",
    "one child a node": "Each of your nodes has one child at most.",
    "complete paths only": "You choose whole paths down to the last head, each with all of its "
    "nodes. A path may end earlier where going on is worth less than beginning another.",
    "root counted": "Your tree has one node less than it may. The root is no node of it.",
    "in order of ranks": "Your trees hold the right nodes in another order than the one asked for.",
    "free token forgotten": "Your trees are right. Your tokens lack the one that a request gets in "
    "each step whether or not a node is accepted.",
}

SPARSE_TREE = Exercise(
    id="medusa.sparse_tree",
    reference=sparse_tree,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_budget,
    returns=("trees", "tokens"),
    rtol=1e-9,
    explanation="A node adds the chance that it is accepted, which is the product of the rates on "
    "its path, as the accepted path is as long as the number of its nodes. A rate is at most 1, so "
    "no node is likelier than its parent: the likeliest nodes of all paths always form a tree, and "
    "taking the best open node again and again finds them. Medusa measures one rate for each head "
    "and rank and multiplies these, as if hits were independent; rates behind the parent's rank "
    "cost a larger table and say more. This reference gives each request the whole budget.",
)
