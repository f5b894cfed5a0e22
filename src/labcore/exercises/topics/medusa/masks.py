"""What each token of a draft tree sees, and where it stands."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["TREE_MASK"]


def tree_mask(parents: Sequence[int], prefix: int, window: int | None) -> tuple[Tensor, Tensor]:
    """What is added to the scores [N + 1, prefix + N + 1], and the places [N + 1]."""
    del window
    nodes = len(parents)
    mask = torch.full((nodes + 1, prefix + 1 + nodes), -torch.inf)
    mask[:, : prefix + 1] = 0
    places = torch.full((nodes + 1,), prefix)
    for node, parent in enumerate(parents, 1):
        mask[node, prefix + 1 :] = mask[parent + 1, prefix + 1 :]
        mask[node, prefix + node] = 0
        places[node] = places[parent + 1] + 1
    return mask, places


def _depths(parents: Sequence[int]) -> list[int]:
    """Of root and nodes, the root's being 0."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def _lines(fault: str, parents: Sequence[int]) -> Tensor:
    """Which of root and nodes each of them sees, by the ways of different mistakes: bool."""
    size = len(parents) + 1
    above = [0, *(parent + 1 for parent in parents)]
    if fault == "numbers without the root":
        above = [0, *(max(parent, 0) for parent in parents)]
    sees = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        if fault == "parent alone":
            sees[node, above[node]] = True
        else:
            sees[node] |= sees[above[node]]
    if fault == "all before":
        sees = torch.ones(size, size, dtype=torch.bool).tril()
    if fault == "whole levels":
        depths = torch.tensor(_depths(parents))
        sees = (depths < depths[:, None]) | torch.eye(size, dtype=torch.bool)
    if fault == "siblings":
        same = torch.tensor([-1, *above[1:]])
        sees |= (same == same[:, None]).tril()
    if fault == "other way round":
        sees = sees.T.clone()
        sees[:, 0] = True
    if fault == "not itself":
        sees[1:] &= ~torch.eye(size, dtype=torch.bool)[1:]
    if fault == "root unseen":
        sees[1:, 0] = False
    return sees


def _places(fault: str, parents: Sequence[int], prefix: int) -> list[int]:
    numbers = list(range(len(parents) + 1))
    depths = _depths(parents)
    return {
        "places by number": [prefix + number for number in numbers],
        "places without the root": [prefix, *(prefix + depth - 1 for depth in depths[1:])],
        "places from 0": depths,
        "root counted": [prefix + 1 + depth for depth in depths],
    }.get(fault, [prefix + depth for depth in depths])


def _wrongly(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def inputs(parents: Sequence[int], prefix: int, window: int | None) -> tuple[Tensor, Tensor]:
        del window
        sees = _lines(fault, parents)
        before = torch.full((len(sees), prefix), fault != "prefix unseen")
        if fault == "prefix for the root alone":
            before[1:] = False
        sees = torch.cat((before, sees), 1)
        places = torch.tensor(_places(fault, parents, prefix))
        if fault == "ones and zeros":
            return sees.float(), places
        if fault == "upside down":
            sees = ~sees
        return torch.zeros(sees.shape).masked_fill(~sees, -torch.inf), places

    return inputs


# By levels, by branches, in mixed order; a chain; one level; nothing but the root.
_SHAPES: tuple[list[int], ...] = (
    [-1, -1, 0, 0, 1, 2, 2, 4],
    [-1, 0, 1, 1, 0, -1, 5, 6, 5],
    [-1, 0, -1, 2, 0, 1, 3, 3],
    [-1, 0, 1, 2],
    [-1, -1, -1],
    [],
)


def _cases(seed: int) -> list[dict[str, Any]]:
    """The shapes and two random trees, behind prefixes of several lengths."""
    chance = random.Random(seed)
    grown = [[chance.randint(-1, node - 1) for node in range(7)] for _ in range(2)]
    prefixes = [chance.randint(1, 3), chance.randint(2, 6), 0, 4, 1, 3, 0, chance.randint(1, 9)]
    trees = [*map(list, _SHAPES), *grown]
    return [
        {"parents": parents, "prefix": prefix, "window": None}
        for parents, prefix in zip(trees, prefixes, strict=True)
    ]


_HINTS = {
    "all before": "Each of your nodes sees all tokens that were written before it, as in plain "
    "text. Some of them stand on other paths.",
    "siblings": "Your nodes see the siblings before them. Of two siblings at most one will be "
    "text, and the other must not have been in its past.",
    "whole levels": "Each of your nodes sees all nodes of the levels above it. Its past is one "
    "path.",
    "other way round": "Your nodes see what follows them in the tree, and not what they follow.",
    "parent alone": "Of the nodes above it each of yours sees its parent and no other.",
    "not itself": "Your nodes do not see themselves.",
    "root unseen": "Your nodes do not see the root, the context's last token, which stands in no "
    "list of parents.",
    "prefix unseen": "No token of yours sees the prefix in the cache.",
    "prefix for the root alone": "Your root sees the prefix in the cache, and your nodes do not.",
    "numbers without the root": "Your nodes follow the node before the one that `parents` names: "
    "the root takes the first row and column of the tree, and the numbers do not count it.",
    "places by number": "Your places are those of plain text, each token one behind the other. Two "
    "siblings would stand at the same place of a text.",
    "places without the root": "Your nodes stand one place too early: the first ones at the place "
    "of the root.",
    "places from 0": "Your places begin at the root. The prefix comes before it.",
    "root counted": "All of your places are one too far: behind a prefix of n tokens the next one "
    "stands at place n, as places count from 0.",
    "ones and zeros": "Your mask has ones and zeros. It is added to scores before a softmax, where "
    "a 0 hides nothing.",
    "upside down": "Your mask hides what is to be seen and shows what is to be hidden.",
}

TREE_MASK = Exercise(
    id="medusa.tree_mask",
    reference=tree_mask,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("mask", "places"),
    explanation="A node's past is the prefix, the root, and the path to it, so its row is its "
    "parent's row and itself. As a parent stands before its children one pass is enough. Its place "
    "is its parent's and one more: with rotary positions two siblings must turn their keys by the "
    "same angle, wherever their slots are. With both, the logits at a node are those of a plain "
    "forward over its path, which is how such a mask is tested. This reference knows no window.",
)
