"""What a tree would do to a known text: counts the steps without a forward.

Under a lossless verifier the output doesn't depend on the drafts. So given an output, and the rank
that each head gave to each of its tokens, the steps of any tree follow from a table.
Letters: T positions, K heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labcore.decoding.medusa.trees import Tree

__all__ = ["replay_text"]


def replay_text(tree: Tree, ranks: Tensor | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the accepted nodes of each step that decodes a text with a tree.

    ranks: integers [T, K], like a row of `label_ranks`: at position t, the rank that head i gave to
    token t + 2 + i. A step at position t accepts the longest path that matches the ranks there,
    adds one token from the target, and continues after them until the positions end.
    This is greedy verification. At a temperature it has the distribution of `sample_and_compare`
    and of rejection sampling, because drafts aren't drawn. Tokens per step: 1 + the mean path
    length.
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
