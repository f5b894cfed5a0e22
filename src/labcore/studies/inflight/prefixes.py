"""Which beginnings prompts share: as a radix tree of tokens, and in blocks with chained hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from labcore.models import shipped_tokenizer
from labcore.serving.engine.blocks import chain_hashes

__all__ = ["PROMPTS", "Edge", "found_in_blocks", "radix_tree", "tokenized"]

_SYSTEM = (
    "You are a careful programmer. Answer with one Python function and nothing else.\n"
    "Use only the standard library. Keep lines short.\n"
)
_EXAMPLE = (
    "Task: return the larger of two numbers.\ndef larger(a, b):\n    return a if a > b else b\n"
)
PROMPTS = (
    _SYSTEM + "Task: read a file and count its lines.\n",
    _SYSTEM + "Task: read a file and count its words.\n",
    _SYSTEM + _EXAMPLE + "Task: return the smallest of a list.\n",
    _SYSTEM + _EXAMPLE + "Task: sort a list of names by length.\n",
    _SYSTEM + _EXAMPLE + "Task: sort a list of names by their last letter.\n",
    "Translate to French: where is the station?\n",
)
"""Prompts with a common system prompt, some with an example, and one that has neither."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A run of tokens that all `prompts` have at places `begin` to `end`, and nobody else has.

    parent: the index of the edge before it, -1 for one that begins a prompt.
    """

    begin: int
    end: int
    parent: int
    prompts: tuple[int, ...]


def tokenized() -> list[list[int]]:
    """Return the tokens of PROMPTS, by the course's tokenizer."""
    tokenizer = shipped_tokenizer()
    return [tokenizer.encode(one) for one in PROMPTS]


def radix_tree(prompts: Sequence[Sequence[int]]) -> list[Edge]:
    """Return the edges of the radix tree of `prompts`, each after its parent.

    Every edge that isn't a leaf branches after its end, or a prompt ends there.
    """
    edges: list[Edge] = []

    def grow(group: Sequence[int], begin: int, parent: int) -> None:
        heads: dict[int, list[int]] = {}
        for one in group:
            if len(prompts[one]) > begin:
                heads.setdefault(prompts[one][begin], []).append(one)
        for same in heads.values():
            columns = zip(*(prompts[one] for one in same), strict=False)
            end = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
            edges.append(Edge(begin, end, parent, tuple(same)))
            grow(same, end, len(edges) - 1)

    grow(range(len(prompts)), 0, -1)
    return edges


def found_in_blocks(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Return how many tokens of each prompt are in full blocks that an earlier prompt left.

    As in the engine's scheduler, a prompt's last token is always read.
    """
    known: set[bytes] = set()
    found = []
    for tokens in prompts:
        digests = chain_hashes(tokens, block_size)
        most = (len(tokens) - 1) // block_size
        shared = next((n for n, one in enumerate(digests[:most]) if one not in known), most)
        found.append(shared * block_size)
        known.update(digests)
    return found
