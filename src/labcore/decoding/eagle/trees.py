"""Dynamic draft trees: candidates by the head's confidence, and how many of them pay.

A candidate's confidence is the product of the head's probabilities along its path, which estimates
the chance that the target accepts it. So the expected tokens of a step are 1 + the sum of the
drafted confidences, and a node pays while its confidence is above what its row costs.
Source: Li et al., EAGLE-2, 2024, arXiv 2406.16858, which keeps a fixed number of nodes; here the
number follows from costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from labcore.checks import positive_int
from labcore.decoding.contract import Draft

__all__ = ["Costs", "Grown"]


@dataclass(slots=True)
class Grown:
    """Candidates in the order of their making, level by level, siblings by rank.

    tokens, parents, confidence: of each candidate, -1 for a parent that is the prefix. levels: the
    number of candidates after each level.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)  # the parents of the last level

    def add(
        self,
        ends: Sequence[int],
        chances: Sequence[Sequence[float]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Add a level: for each of the candidates `ends`, its children with their chances."""
        self._ends = list(ends)
        for parent, some, names in zip(ends, chances, tokens, strict=True):
            so_far = 1.0 if parent < 0 else self.confidence[parent]
            for chance, token in zip(some, names, strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.confidence.append(so_far * chance)
        self.levels.append(len(self.tokens))

    def last_level(self) -> range:
        """Return the candidates of the last level."""
        return range(self.levels[-2] if len(self.levels) > 1 else 0, self.levels[-1])

    def row_of(self, node: int) -> int:
        """Return the place of a last level's parent among those that made this level."""
        return self._ends.index(self.parents[node])

    def way(self, node: int) -> list[int]:
        """Return a candidate and its ancestors, from it upward."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found

    def ranked(self) -> list[int]:
        """Return all candidates, the surest first; a parent comes before its children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.confidence[node])

    def draft(self, nodes: Sequence[int]) -> Draft:
        """Return a draft of some candidates, whose parents must be among them."""
        chosen = sorted(nodes)
        places = {node: place for place, node in enumerate(chosen)}
        parents = [places[self.parents[node]] if self.parents[node] >= 0 else -1 for node in chosen]
        return Draft(
            torch.tensor([self.tokens[node] for node in chosen], dtype=torch.int64),
            torch.tensor(parents, dtype=torch.int32),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a draft costs, in target forwards of one token, and so what is drafted.

    forward: pairs of rows and the cost of a forward of so many, from (1, 1) on; in between it's
    interpolated, and beyond the last pair nothing is drafted. branching: added to that for a draft
    that isn't a chain, whose forward makes a mask. worth: the expected tokens that one
    unit of cost must bring, the speed-up that is within reach. go_on: the least confidence of a
    candidate that is expanded. beam: the most candidates that are expanded in a level. ranks:
    children of each.
    Raises ValueError for pairs that don't start at (1, 1) or whose rows don't rise.
    """

    forward: tuple[tuple[int, float], ...] = (
        (1, 1.0), (2, 1.12), (3, 1.13), (5, 1.30), (8, 1.39), (16, 1.94)
    )  # fmt: skip
    branching: float = 0.1
    worth: float = 1.2
    go_on: float = 0.5
    beam: int = 1
    ranks: int = 3

    def __post_init__(self) -> None:
        positive_int("beam", self.beam)
        positive_int("ranks", self.ranks)
        rows = [pair[0] for pair in self.forward]
        if self.forward[:1] != ((1, 1.0),) or rows != sorted(set(rows)):
            raise ValueError(
                "forward must start with (1, 1.0), and its rows must rise, got "
                f"{list(self.forward)}"
            )

    def of_rows(self, rows: int) -> float:
        """Return the cost of a forward of `rows` rows; infinity beyond the last pair."""
        for (few, low), (many, high) in zip(self.forward, self.forward[1:], strict=False):
            if few <= rows <= many:
                return low + (high - low) * (rows - few) / (many - few)
        return 1.0 if rows == 1 else float("inf")

    def expanded(self, grown: Grown) -> list[int]:
        """Return the candidates of the last level that are to get children, in their order."""
        last = grown.last_level()
        sure = [node for node in last if grown.confidence[node] >= self.go_on]
        sure.sort(key=lambda node: -grown.confidence[node])
        return sorted(sure[: self.beam])

    def best(self, grown: Grown) -> list[int]:
        """Return the candidates worth a row: those with the most expected tokens less their cost.

        With `worth` w, that maximizes 1 + sum of confidences - w * cost, whose maximum is 0 at the
        best reachable ratio w of tokens to cost (Dinkelbach, 1967, "On nonlinear fractional
        programming").
        """
        best: list[int] = []
        most, limit = -self.worth * self.of_rows(1), self.forward[-1][0] - 1
        expected: list[float] = []  # tokens of the chain that ends at each candidate
        depths: list[int] = []
        for node, (parent, chance) in enumerate(zip(grown.parents, grown.confidence, strict=True)):
            expected.append(chance + (expected[parent] if parent >= 0 else 0.0))
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            value = expected[node] - self.worth * self.of_rows(depths[node] + 1)
            if value > most:
                most, best = value, grown.way(node)
        # A set that branches is best if it holds the surest candidates.
        ranked, total = grown.ranked()[:limit], 0.0
        for count, node in enumerate(ranked, 1):
            total += grown.confidence[node]
            value = total - self.worth * (self.of_rows(count + 1) + self.branching)
            if value > most:
                most, best = value, ranked[:count]
        return best
