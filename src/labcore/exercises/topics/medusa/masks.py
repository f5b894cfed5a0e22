"""Build the mask of a draft tree and the positions of its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["TREE_MASK"]


def tree_mask(parents: Sequence[int], prefix: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the mask to add to the scores, [N + 1, prefix + N + 1], and the positions [N + 1]."""
    del window
    nodes = len(parents)
    mask = torch.full((nodes + 1, prefix + 1 + nodes), -torch.inf)
    mask[0, : prefix + 1] = 0
    positions = torch.full((nodes + 1,), prefix)
    for node, parent in enumerate(parents, 1):
        mask[node] = mask[parent + 1]
        mask[node, prefix + node] = 0
        positions[node] = positions[parent + 1] + 1
    return mask, positions


# Nodes by levels, by branches, in mixed order; a chain; one level; the root alone.
_SHAPES: tuple[list[int], ...] = (
    [-1, -1, 0, 0, 1, 2, 2, 4],
    [-1, 0, 1, 1, 0, -1, 5, 6, 5],
    [-1, 0, -1, 2, 0, 1, 3, 3],
    [-1, 0, 1, 2],
    [-1, -1, -1],
    [],
)


def _cases(seed: int) -> list[dict[str, Any]]:
    """Add two random trees to the shapes, and put each tree after a prefix."""
    chance = random.Random(seed)
    grown = [[chance.randint(-1, node - 1) for node in range(7)] for _ in range(2)]
    prefixes = [chance.randint(1, 3), chance.randint(2, 6), 0, 4, 1, 3, 0, chance.randint(1, 9)]
    trees = [*map(list, _SHAPES), *grown]
    return [
        {"parents": parents, "prefix": prefix, "window": None}
        for parents, prefix in zip(trees, prefixes, strict=True)
    ]


_MISTAKES = [
    Mistake("all before", ("mask[node] = mask[parent + 1]", "mask[node, : prefix + node] = 0"),
            "Each of your nodes sees all tokens written before it, as in plain text. Some of them "
            "are on other paths."),
    Mistake("siblings",
            ("    return", "    same = torch.tensor(parents)[:, None] == torch.tensor(parents)\n"
             "    mask[1:, prefix + 1 :][same.tril()] = 0\n    return"),
            "Your nodes see the siblings before them. At most one of two siblings becomes text, "
            "and it must not have seen the other."),
    Mistake("whole levels",
            ("    return",
             "    mask[1:, prefix:][positions < positions[1:, None]] = 0\n    return"),
            "Each of your nodes sees all nodes of the levels above it. Its past is a single path."),
    Mistake("other way round",
            ("    return",
             "    mask[:, prefix:] = mask[:, prefix:].T.clone()\n"
             "    mask[:, prefix] = 0\n    return"),
            "Your nodes see their descendants instead of their ancestors."),
    Mistake("parent alone",
            ("mask[node] = mask[parent + 1]",
             "mask[node, :prefix] = mask[node, prefix + parent + 1] = 0"),
            "Of the nodes above it, each of your nodes sees only its parent."),
    Mistake("root and parent alone",
            ("mask[node] = mask[parent + 1]",
             "mask[node, : prefix + 1] = mask[node, prefix + parent + 1] = 0"),
            "Your nodes see the prefix, the root, their parent, and themselves. The nodes between "
            "the root and the parent are part of their past too."),
    Mistake("not itself", ("    return", "    mask.diagonal(prefix)[1:] = -torch.inf\n    return"),
            "Your nodes do not see themselves."),
    Mistake("root unseen", ("    return", "    mask[1:, prefix] = -torch.inf\n    return"),
            "Your nodes do not see the root, the context's last token. `parents` has no entry for "
            "it."),
    Mistake("prefix unseen", ("mask[0, : prefix + 1]", "mask[0, prefix]"),
            "None of your tokens sees the prefix in the cache."),
    Mistake("prefix for the root alone",
            ("    return", "    mask[1:, :prefix] = -torch.inf\n    return"),
            "Your root sees the prefix in the cache, but your nodes do not."),
    Mistake("numbers without the root", ("= mask[parent + 1]", "= mask[max(parent, 0)]"),
            "Your nodes follow the node before the one that `parents` names: the root takes the "
            "first row and column of the tree, and the indices don't count it."),
    Mistake("positions by number", ("positions[parent + 1] + 1", "prefix + node"),
            "Your positions are those of plain text, one after another. Two siblings have the same "
            "position."),
    Mistake("positions without the root", ("    return", "    positions[1:] -= 1\n    return"),
            "Your nodes are one position too early: the first ones are at the root's position."),
    Mistake("positions from 0", ("(nodes + 1,), prefix)", "(nodes + 1,), 0)"),
            "Your positions start at the root. The prefix comes before it."),
    Mistake("root counted", ("(nodes + 1,), prefix)", "(nodes + 1,), prefix + 1)"),
            "All of your positions are one too large: after a prefix of n tokens, the next token "
            "has position n, because positions count from 0."),
    Mistake("ones and zeros", ("return mask", "return (mask == 0).float()"),
            "Your mask has ones and zeros. It is added to scores before a softmax, where a 0 hides "
            "nothing."),
    Mistake("upside down", ("return mask", "return torch.where(mask == 0, -torch.inf, 0.0)"),
            "Your mask hides what a token should see and shows what it should not."),
]  # fmt: skip

TREE_MASK = Exercise(
    id="medusa.tree_mask",
    points=6,
    beyond=2,
    reference=tree_mask,
    mistakes=_MISTAKES,
    cases=_cases,
    returns=("mask", "positions"),
    explanation="A node's past is the prefix, the root, and the path to it, so its row is its "
    "parent's row plus itself. Parents come before their children, so one pass is enough. A node's "
    "position is its parent's plus 1: with rotary embeddings, the keys of two siblings must turn "
    "by the same angle, whatever their slots are. With the right mask and positions, the logits at "
    "a node are those of a plain forward over its path, and that is how such a mask is tested. "
    "This reference ignores `window`.",
    hints=(
        "List the slots that node 2 of the example sees, and do the same for its parent. Which "
        "row of the mask belongs to each of the two?",
        "A node sees everything that its parent sees, and itself. Its position is its parent's "
        "position plus 1. The root sees the prefix and itself. A parent comes before its children, "
        "so you can fill in the rows from the root on. Rows and slots count the root, but the "
        "indices in `parents` do not.",
        "`mask[1 + node] = mask[1 + parent]` copies what the parent sees, and for the parent −1 "
        "it copies the root's row. Then `mask[1 + node, prefix + 1 + node] = 0` lets the node see "
        "itself.",
    ),
)
