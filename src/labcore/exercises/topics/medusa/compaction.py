"""Compact the cache to the accepted path of a tree."""

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
    """Return the cache with only the text's tokens, without gaps, and the new lengths [B]."""
    del nodes, table
    after, kept = torch.zeros_like(cache), []
    for b, path in enumerate(paths):
        start = int(lengths[b]) + 1  # the root is text too
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
             "        for depth, node in enumerate(path):\n"
             "            slots[start + depth] = slots[start + node - 1]\n"
             "        del slots[start + len(path) :]"),
            "For each accepted node, you keep the slot before it. The forward wrote the root "
            "first, and the indices of the nodes don't count it."),
    Mistake("root overwritten", ("*range(start)", "*range(start - 1)"),
            "Your first accepted node overwrites the root's slot. The root was the context's last "
            "token and is text too."),
    Mistake("root not counted", ("append(len(slots))", "append(len(slots) - 1)"),
            "Your slots are right, but each length is one too small: the forward also read the "
            "context's last token."),
    Mistake("next token counted", ("append(len(slots))", "append(len(slots) + 1)"),
            "You count the token that was chosen after the path. It has not been read, and its "
            "slot is empty."),
    Mistake("not moved", ("start), *(start + node for node in path)", "start + len(path))"),
            "You set the lengths but move nothing. That keeps the tree's first nodes, whichever "
            "were accepted."),
    Mistake("whole tree kept",
            [("del nodes, table", "del table"),
             ("start), *(start + node for node in path)", "start + int(nodes[b]))")],
            "Your cache keeps the whole tree, as if all of it had become text."),
    Mistake("last one dropped", ("in path)", "in path[:-1])"),
            "Your cache lacks the last accepted node of each path. The target has read it and "
            "would have to read it again."),
    Mistake("path's end alone", ("in path)", "in path[-1:])"),
            "You keep only the last node of a path, without the nodes that lead to it."),
    Mistake("from the last one on",
            ("[*range(start), *(start + node for node in path)]", "[*range(cache.shape[2])]\n"
             "        for depth, node in reversed([*enumerate(path)]):\n"
             "            slots[start + depth] = slots[start + node]\n"
             "        del slots[start + len(path) :]"),
            "You move in place and start with the last node. It may overwrite a node that has not "
            "been moved yet."),
    Mistake("rejected ones left", ("torch.zeros_like(cache)", "cache.clone()"),
            "Rejected tokens remain after your new lengths."),
    Mistake("one layer",
            ("        kept",
             "        after[1:, b, : len(slots)] = cache[1:, b, : len(slots)]\n        kept"),
            "You move the slots of the first layer only. A token has keys in every layer."),
    Mistake("first row's path",
            [("del nodes, table", "del table"), ("in path)", "in paths[0] if node < nodes[b])")],
            "You use the first row's path for all rows."),
    Mistake("shortest path for all", ("in path)", "in path[: min(map(len, paths))])"),
            "All of your rows keep only as many nodes as the row with the shortest path."),
    Mistake("longest row's start",
            ("        after[", "        if lengths[b] < lengths.max():\n"
             "            slots = [*range(len(slots))]\n        after["),
            "Your slots are right only in the longest row. In each row, the forward started at "
            "that row's own length."),
]  # fmt: skip

COMPACT = Exercise(
    id="medusa.compact",
    points=6,
    beyond=2,
    reference=compact,
    mistakes=_MISTAKES,
    cases=_cases,
    returns=("cache", "lengths"),
    explanation="A row keeps the prefix, the root, and the slots root + 1 + node of its path, in "
    "this order. The next token has not been read and gets its slot in the next forward. If you "
    "gather into new memory, the order of the moves can't go wrong. In place, as an engine does "
    "it, move the slots from first to last: indices rise along a path, so a node only moves left, "
    "to a slot whose own node has been moved or rejected. Keys with rotary embeddings may be moved "
    "because the node's position came from its depth, not from its slot. This reference has no "
    "pages.",
    hints=(
        "For the example, write down the slots of the root and of node 0. Then list the slots of "
        "all tokens that stay.",
        "Each request keeps its old tokens, the root, and the accepted nodes, in this order. Copy "
        "their slots, in every layer, to the first slots of a cache that is full of zeros. The "
        "new length is the number of copied slots, so it counts the root but not the next token.",
        "`slots = [*range(start), *(start + node for node in paths[b])]`, with `start = "
        "int(lengths[b]) + 1`, lists what request b keeps. `cache[:, b, slots]` reads these slots "
        "in all layers.",
    ),
)
