"""Which keys a query sees, and how its scores are scaled: one description for every form.

Letters: B batch, H heads, Hkv key and value heads, T queries, S keys, D head dimension, N nodes of
a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Pattern", "allowed", "ancestors", "key_range", "tile_mask", "tree_bits"]

WORD = 32  # bits of one int32 of `tree_bits`
FAR = 1 << 30  # keys: past any sequence, and a place plus less than this fits an int32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pattern:
    """Scores are scale * q·k, softly capped if asked for, of the keys that a query sees.

    scale: multiplies q·k. softcap: c turns a score s into c * tanh(s / c).
    is_causal: query i sees the keys up to i + shift. window: (left, right), query i sees the keys
    i + shift - left … i + shift + right; None is no bound on that side.
    bottom_right: shift is S - T, which aligns the last query with the last key; else it is 0.
    tree: parents, int32 [B, N] with N = T: the last N keys are the queries themselves, all keys
    before them are the prefix. A node sees the prefix, its ancestors and itself; parents[n] is an
    earlier node, -1 for a child of the prefix, -2 for padding, which sees nothing and is not seen.
    A tree has neither `is_causal` nor `window`.
    """

    scale: float
    softcap: float | None = None
    is_causal: bool = False
    bottom_right: bool = False
    window: tuple[int | None, int | None] | None = None
    tree: Tensor | None = None

    @property
    def left(self) -> int | None:
        """How far before i + shift query i sees; None is all the way."""
        return None if self.window is None else _near(self.window[0])

    @property
    def right(self) -> int | None:
        """How far past i + shift query i sees, 0 at most if causal; None is all the way."""
        right = None if self.window is None else _near(self.window[1])
        if not self.is_causal:
            return right
        return 0 if right is None else min(right, 0)

    def shift(self, q_len: int, k_len: int) -> int:
        """The key that stands on query 0's diagonal."""
        return k_len - q_len if self.bottom_right or self.tree is not None else 0


def _near(bound: int | None) -> int | None:
    """A bound of a window; None for one that no sequence reaches, such as sys.maxsize."""
    return None if bound is None or bound >= FAR else bound


def ancestors(parents: Tensor) -> Tensor:
    """Which nodes each node of a tree sees: itself and its ancestors. bool [B, N, N].

    parents: integers [B, N], as in `Pattern`. Computed on their device without waiting for it.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    seen = (nodes[:, None] == nodes) | (parents[:, :, None] == nodes)
    # Each squaring doubles the generations that a node sees; a chain of N needs N - 1.
    for _ in range(max(parents.shape[1] - 1, 0).bit_length()):
        seen = (seen.float() @ seen.float()) > 0
    return seen & (parents != -2)[:, :, None]


def tree_bits(parents: Tensor) -> Tensor:
    """`ancestors` packed for a kernel: int32 [B, N, ceil(N / 32)].

    Bit j % 32 of word j // 32 of node n is set where n sees node j.
    """
    seen = ancestors(parents)
    words = -(-parents.shape[1] // WORD)
    padded = torch.nn.functional.pad(seen, (0, words * WORD - parents.shape[1]))
    places = torch.arange(WORD, device=parents.device)
    packed = (padded.unflatten(2, (words, WORD)).long() << places).sum(-1)
    # The last bit is an int32's sign.
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def allowed(
    pattern: Pattern, q_len: int, k_len: int, *, device: torch.device | None = None
) -> Tensor:
    """The dense truth: whether query t sees key s. bool [B or 1, 1, T, S].

    device: of the result, a tree's own where there is one. O(T * S) memory.
    """
    whole = slice(0, q_len), slice(0, k_len)
    return _seen(pattern, *whole, q_len, k_len, device).expand(-1, -1, q_len, k_len)


def _seen(
    pattern: Pattern,
    queries: slice,
    keys: slice,
    q_len: int,
    k_len: int,
    device: torch.device | None,
) -> Tensor:
    """One tile of `allowed`, its last dimension 1 where all of `keys` belong to a tree's prefix."""
    if pattern.tree is not None:
        prefix = k_len - q_len
        alive = (pattern.tree[:, queries] != -2)[:, None, :, None]
        if keys.stop <= prefix:
            return alive
        nodes = slice(max(0, keys.start - prefix), keys.stop - prefix)
        related = ancestors(pattern.tree)[:, None, queries, nodes]
        return torch.cat((alive.expand(-1, -1, -1, max(0, prefix - keys.start)), related), dim=3)
    diagonal = torch.arange(queries.start, queries.stop, device=device)[:, None]
    diagonal = diagonal + pattern.shift(q_len, k_len)
    places = torch.arange(keys.start, keys.stop, device=device)
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if pattern.left is not None:
        seen = seen & (places >= diagonal - pattern.left)
    if pattern.right is not None:
        seen = seen & (places <= diagonal + pattern.right)
    return seen


def key_range(pattern: Pattern, first: int, stop: int, q_len: int, k_len: int) -> range:
    """The keys that at least one of the queries first … stop - 1 may see; empty where none is.

    A tree's nodes follow their parents, so its range ends like a causal one.
    """
    shift = pattern.shift(q_len, k_len)
    right = 0 if pattern.tree is not None else pattern.right
    begin = 0 if pattern.left is None else max(0, first + shift - pattern.left)
    end = k_len if right is None else min(k_len, stop + shift + right)
    return range(begin, max(begin, end)) if stop > first else range(0)


def tile_mask(
    pattern: Pattern,
    queries: slice,
    keys: slice,
    q_len: int,
    k_len: int,
    *,
    device: torch.device | None = None,
) -> Tensor | None:
    """`allowed` of one tile, to be broadcast; None where each query is known to see each key.

    Inside a band most tiles need no mask at all. A tree's tiles always have one: whether it holds
    padding is known to its device only.
    """
    if pattern.tree is None:
        shift = pattern.shift(q_len, k_len)
        first, last = queries.start + shift, queries.stop - 1 + shift  # the outer rows' diagonals
        starts_inside = pattern.left is None or keys.start >= last - pattern.left
        ends_inside = pattern.right is None or keys.stop - 1 <= first + pattern.right
        if starts_inside and ends_inside:
            return None
    return _seen(pattern, queries, keys, q_len, k_len, device)
