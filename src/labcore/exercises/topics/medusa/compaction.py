"""Move the accepted path of a tree together in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    """Return the cache with only the text's tokens, side by side, and the new lengths [B]."""
    del nodes, table
    after, kept = torch.zeros_like(cache), []
    for b, path in enumerate(paths):
        start = int(lengths[b]) + 1  # the root is text as well
        slots = [*range(start), *(start + node for node in path)]
        after[:, b, : len(slots)] = cache[:, b, slots]
        kept.append(len(slots))
    return after, torch.tensor(kept)


def filled(
    chance: Any, plan: Sequence[tuple[int, Sequence[int]]], *, layers: int, width: int
) -> dict[str, Any]:
    """Draw a cache after a forward, with the other arguments of `compact`.

    chance: a `random.Random`. plan: for each row, its number of nodes and its accepted path.
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


# Single rows come first, then batches. Some rows accept no node, and some have no draft.
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
    # Rows of a batch must differ in length, so that one row's slots are wrong for another.
    for case in cases[3:]:
        if len(case["lengths"].unique()) < len(case["lengths"]):
            return _cases(chance.randrange(2**31))
    return cases


_MISTAKES = [
    Mistake("off by the root",
            ("[*range(start), *(start + node for node in path)]", "[*range(cache.shape[2])]\n"
             "        for place, node in enumerate(path):\n"
             "            slots[start + place] = slots[start + node - 1]\n"
             "        del slots[start + len(path) :]"),
            "Of each accepted node you keep the slot before it. The forward has written the root "
            "first, and the numbers of the nodes do not count it."),
    Mistake("root overwritten", ("*range(start)", "*range(start - 1)"),
            "Your first accepted node takes the root's slot. The root was the context's last token "
            "and is text as well."),
    Mistake("root not counted", ("append(len(slots))", "append(len(slots) - 1)"),
            "Your slots are right, and each length is one too small: the forward has also read the "
            "context's last token."),
    Mistake("next token counted", ("append(len(slots))", "append(len(slots) + 1)"),
            "You count the token that was chosen behind the path. Nobody has read it, and its slot "
            "is empty."),
    Mistake("not moved", ("start), *(start + node for node in path)", "start + len(path))"),
            "You set the lengths and move nothing. That keeps the tree's first nodes, whichever "
            "were accepted."),
    Mistake("whole tree kept",
            [("del nodes, table", "del table"),
             ("start), *(start + node for node in path)", "start + int(nodes[b]))")],
            "Your cache keeps the whole tree, as if all of it had become text."),
    Mistake("last one dropped", ("in path)", "in path[:-1])"),
            "Your cache lacks the last accepted node of each path. The target has read it, and "
            "would have to read it again."),
    Mistake("path's end alone", ("in path)", "in path[-1:])"),
            "You keep the last node of a path, and not those that lead to it."),
    Mistake("from the last one on",
            ("[*range(start), *(start + node for node in path)]", "[*range(cache.shape[2])]\n"
             "        for place, node in reversed([*enumerate(path)]):\n"
             "            slots[start + place] = slots[start + node]\n"
             "        del slots[start + len(path) :]"),
            "You move in place and begin with the last node. It may land on the slot of one that "
            "has not been moved yet."),
    Mistake("rejected ones left", ("torch.zeros_like(cache)", "cache.clone()"),
            "Behind your new lengths rejected tokens are left over."),
    Mistake("one layer",
            ("        kept",
             "        after[1:, b, : len(slots)] = cache[1:, b, : len(slots)]\n        kept"),
            "You move the slots of the first layer only. A token has keys in each of them."),
    Mistake("first row's path",
            [("del nodes, table", "del table"), ("in path)", "in paths[0] if node < nodes[b])")],
            "You use the first row's path for all rows."),
    Mistake("shortest path for all", ("in path)", "in path[: min(map(len, paths))])"),
            "All of your rows keep as many nodes as the one with the shortest path."),
    Mistake("longest row's start",
            ("        after[", "        if lengths[b] < lengths.max():\n"
             "            slots = [*range(len(slots))]\n        after["),
            "Your slots are right in the longest row. In the others the forward has begun at a "
            "slot of their own."),
]  # fmt: skip

COMPACT = Exercise(
    id="medusa.compact",
    points=6,
    beyond=2,
    reference=compact,
    mistakes=_MISTAKES,
    cases=_cases,
    returns=("cache", "lengths"),
    explanation="What a row keeps is the prefix, the root, and the slots root + 1 + node of its "
    "path, in this order. The next token has not been read and gets its slot in the next forward. "
    "A gather into new memory has no order to get wrong. In place, as an engine does it, the "
    "slots must be moved from the first to the last: a path's numbers rise, so a node only ever "
    "moves to the left, onto a slot whose own node has been moved or rejected. Keys that carry "
    "rotary positions may be moved, as the position was that of the depth and not that of the "
    "slot. This reference knows no pages.",
    hints=(
        "For the example, write down the slots of the root and of node 0. Then list the slots of "
        "all tokens that stay.",
        "Each request keeps its old tokens, the root, and the accepted nodes, in this order. Copy "
        "their slots, in every layer, to the first slots of a cache that is full of zeros. The "
        "new length is the number of copied slots, so it counts the root and does not count the "
        "next token.",
        "`slots = [*range(start), *(start + node for node in paths[b])]`, with `start = "
        "int(lengths[b]) + 1`, lists what request b keeps. `cache[:, b, slots]` reads these slots "
        "in all layers.",
    ),
)
