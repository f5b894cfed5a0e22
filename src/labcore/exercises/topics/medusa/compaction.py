"""The accepted path of a tree, moved together in the cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["COMPACT", "filled"]

_Paths = Sequence[Sequence[int]]
_Answer = tuple[Tensor, Tensor]


def compact(
    cache: Tensor, lengths: Tensor, nodes: Tensor, paths: _Paths, table: Tensor | None
) -> _Answer:
    """The cache with what still stands in the text, side by side, and the new lengths [B]."""
    del nodes, table
    after = torch.zeros_like(cache)
    for b, path in enumerate(paths):
        root = int(lengths[b])
        slots = [*range(root + 1), *(root + 1 + node for node in path)]
        after[:, b, : len(slots)] = cache[:, b, slots]
    return after, lengths + 1 + torch.tensor([len(path) for path in paths])


def _row(
    fault: str, row: Tensor, length: int, nodes: int, path: Sequence[int]
) -> tuple[Tensor, int]:
    """One request by the ways of different mistakes; row: [L, S, D]."""
    row, root = row.clone(), length
    start = root + 1  # the slot of node 0, and of the first accepted one afterwards
    after = start + len(path)
    moves = [(start + place, start + node) for place, node in enumerate(path)]
    if fault == "root overwritten":
        moves, after = [(to - 1, at) for to, at in moves], after - 1
    if fault == "off by the root":
        moves = [(to, at - 1) for to, at in moves]
    if fault == "not moved":
        moves = []
    if fault == "whole tree kept":
        moves, after = [], start + nodes
    if fault == "last one dropped" and path:
        moves, after = moves[:-1], after - 1
    if fault == "path's end alone" and path:
        moves = [(start, moves[-1][1])]
        after = start + 1
    if fault == "from the last one on":
        moves = moves[::-1]
    layers = row[:1] if fault == "one layer" else row
    for to, at in moves:
        layers[:, to] = layers[:, at].clone()
    if fault != "rejected ones left":
        row[:, after:] = 0
    length = after + (fault == "next token counted")
    return row, length - (fault == "root not counted")


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(
        cache: Tensor, lengths: Tensor, nodes: Tensor, paths: _Paths, table: Tensor | None
    ) -> _Answer:
        del table
        found = []
        for b, path in enumerate(paths):
            length, mine = int(lengths[b]), path
            if fault == "first row's path":
                mine = [node for node in paths[0] if node < nodes[b]]
            if fault == "shortest path for all":
                mine = path[: min(map(len, paths))]
            found.append(_row(fault, cache[:, b], length, int(nodes[b]), mine))
            if fault == "longest row's start" and length < int(lengths.max()):
                found[-1] = _row("not moved", cache[:, b], length, int(nodes[b]), mine)
        rows, counts = zip(*found, strict=True)
        return torch.stack(rows, 1), torch.tensor(counts)

    return answer


def filled(
    chance: Any, plan: Sequence[tuple[int, Sequence[int]]], *, layers: int, width: int
) -> dict[str, Any]:
    """A cache after a forward. plan: for each row the number of nodes and the accepted path.

    chance: Python's `random.Random`.
    """
    draw = torch.Generator().manual_seed(chance.randrange(2**31))
    lengths = [chance.randint(1, 6) for _ in plan]
    written = [length + 1 + nodes for length, (nodes, _) in zip(lengths, plan, strict=True)]
    slots = -(-(max(written) + 2) // 4) * 4
    size = (layers, len(plan), slots, width)
    cache = torch.randint(1, 100, size, generator=draw).float()
    for b, count in enumerate(written):
        cache[:, b, count:] = 0
    return {
        "cache": cache,
        "lengths": torch.tensor(lengths),
        "nodes": torch.tensor([nodes for nodes, _ in plan]),
        "paths": [[*path] for _, path in plan],
        "table": None,
    }


# Rows alone, then batches: nothing accepted, the first nodes, scattered ones, nothing drafted.
_PLANS: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = (
    ((6, (1, 3, 5)),),
    ((5, ()),),
    ((4, (0, 1, 2, 3)),),
    ((7, (2, 3, 4)), (7, (0, 4)), (7, (6,))),
    ((8, (1, 2, 6)), (0, ()), (5, (2, 4)), (3, ())),
    ((4, (3,)), (9, (0, 1, 4, 8)), (6, (1, 4, 5))),
)


def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    cases = [filled(chance, plan, layers=2, width=2) for plan in _PLANS]
    # Rows of the batches differ in length, so that one row's slots are not another's.
    for case in cases[3:]:
        if len(case["lengths"].unique()) < len(case["lengths"]):
            return _cases(chance.randrange(2**31))
    return cases


_HINTS = {
    "off by the root": "Of each accepted node you keep the slot before it. The forward has written "
    "the root first, and the numbers of the nodes do not count it.",
    "root overwritten": "Your first accepted node takes the root's slot. The root was the "
    "context's last token and is text as well.",
    "root not counted": "Your slots are right, and each length is one too small: the forward has "
    "also read the context's last token.",
    "next token counted": "You count the token that was chosen behind the path. Nobody has read "
    "it, and its slot is empty.",
    "not moved": "You set the lengths and move nothing. That keeps the tree's first nodes, "
    "whichever were accepted.",
    "whole tree kept": "Your cache keeps the whole tree, as if all of it had become text.",
    "last one dropped": "Your cache lacks the last accepted node of each path. The target has read "
    "it, and would have to read it again.",
    "path's end alone": "You keep the last node of a path, and not those that lead to it.",
    "from the last one on": "You move in place and begin with the last node. It may land on the "
    "slot of one that has not been moved yet.",
    "rejected ones left": "Behind your new lengths rejected tokens are left over.",
    "one layer": "You move the slots of the first layer only. A token has keys in each of them.",
    "first row's path": "You use the first row's path for all rows.",
    "shortest path for all": "All of your rows keep as many nodes as the one with the shortest "
    "path.",
    "longest row's start": "Your slots are right in the longest row. In the others the forward has "
    "begun at a slot of their own.",
}

COMPACT = Exercise(
    id="medusa.compact",
    reference=compact,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("cache", "lengths"),
    explanation="What a row keeps is the prefix, the root, and the slots root + 1 + node of its "
    "path, in this order. The next token has not been read and gets its slot in the next forward. "
    "A gather into new memory has no order to get wrong. In place, as an engine does it, the "
    "slots must be moved from the first to the last: a path's numbers rise, so a node only ever "
    "moves to the left, onto a slot whose own node has been moved or rejected. Keys that carry "
    "rotary positions may be moved, as the position was that of the depth and not that of the "
    "slot. This reference knows no pages.",
)
