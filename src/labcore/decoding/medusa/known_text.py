"""What a tree would have done to a text that is known: steps counted without a forward.

Under a lossless verifier the output does not depend on the drafts. So once it is there, with the
rank that each head gave to each of its tokens, the steps of any tree follow from a table.
Letters: T places, K heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labcore.decoding.medusa.trees import Tree

__all__ = ["replay"]


def replay(tree: Tree, ranks: Tensor | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The accepted nodes of each step that decodes a text with a tree.

    ranks: integers [T, K], as a row of `label_ranks`: at place t the rank of head i for token
    t + 2 + i. A step at place t accepts the longest path whose ranks are those found there, adds
    a token of the target's, and goes on behind them; the steps end with the places.
    That is greedy verification, and at a temperature the law of `sample_and_compare` and of
    rejection sampling, since drafts are not drawn. Tokens a step: 1 + the mean length.
    Raises ValueError for fewer heads than the tree has levels.
    """
    table = ranks.tolist() if isinstance(ranks, Tensor) else [list(row) for row in ranks]
    if table and tree.depth > len(table[0]):
        raise ValueError(
            f"ranks must have the tree's {tree.depth} heads, got {len(table[0])}; make them with "
            "more heads or cut the tree"
        )
    numbers = {choice: node for node, choice in enumerate(tree.choices)}
    steps: list[tuple[int, ...]] = []
    place = 0
    while place < len(table):
        row = table[place]
        path: list[int] = []
        while len(path) < len(row) and tuple(row[: len(path) + 1]) in numbers:
            path.append(numbers[tuple(row[: len(path) + 1])])
        steps.append(tuple(path))
        place += len(path) + 1
    return steps
