"""Which keys a query sees and how its scores are scaled, described once for all implementations.

Letters: B batch, H heads, Hkv key and value heads, T queries, S keys, D head dimension, N nodes of
a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Pattern", "allowed", "ancestors", "key_range", "masked_keys", "tile_mask", "tree_bits"]

WORD = 32  # bits of one int32 of `tree_bits`
FAR = 1 << 30  # longer than any sequence; a position plus a smaller bound still fits in int32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pattern:
    """The keys that each query sees and the scaling of their scores.

    scale: multiplies q·k. softcap: c turns a score s into c * tanh(s / c).
    is_causal: query i sees the keys up to i + shift.
    window: (left, right); query i sees the keys i + shift - left … i + shift + right. None means
    no bound on that side.
    bottom_right: shift is S - T, which aligns the last query with the last key; otherwise it's 0.
    tree: parents, int32 [B, N] with N = T. The last N keys belong to the queries, and all keys
    before them are the prefix. A node sees the prefix, its ancestors and itself. parents[n] is an
    earlier node, -1 for a child of the prefix or -2 for padding, which sees nothing and isn't seen.
    A tree can't be combined with `is_causal` or `window`.
    """

    scale: float
    softcap: float | None = None
    is_causal: bool = False
    bottom_right: bool = False
    window: tuple[int | None, int | None] | None = None
    tree: Tensor | None = None

    @property
    def left(self) -> int | None:
        """How far before i + shift query i sees; None means no limit."""
        return None if self.window is None else _near(self.window[0])

    @property
    def right(self) -> int | None:
        """How far past i + shift query i sees, at most 0 if causal; None means no limit."""
        right = None if self.window is None else _near(self.window[1])
        if not self.is_causal:
            return right
        return 0 if right is None else min(right, 0)

    def shift(self, q_len: int, k_len: int) -> int:
        """Return the key on query 0's diagonal."""
        return k_len - q_len if self.bottom_right or self.tree is not None else 0


def _near(bound: int | None) -> int | None:
    """Return a window's bound, or None if no sequence reaches it (such as sys.maxsize)."""
    return None if bound is None or bound >= FAR else bound


def ancestors(parents: Tensor) -> Tensor:
    """Return which nodes each node of a tree sees, itself and its ancestors: bool [B, N, N].

    parents: integers [B, N], as in `Pattern`. Computed on their device without synchronizing.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    seen = (nodes[:, None] == nodes) | (parents[:, :, None] == nodes)
    # Each squaring doubles the generations that a node sees; a chain of N needs N - 1.
    for _ in range(max(parents.shape[1] - 1, 0).bit_length()):
        seen = (seen.float() @ seen.float()) > 0
    return seen & (parents != -2)[:, :, None]


def tree_bits(parents: Tensor) -> Tensor:
    """Pack `ancestors` into bits for a kernel: int32 [B, N, ceil(N / 32)].

    Bit j % 32 of word j // 32 of node n is set if n sees node j.
    """
    seen = ancestors(parents)
    words = -(-parents.shape[1] // WORD)
    padded = torch.nn.functional.pad(seen, (0, words * WORD - parents.shape[1]))
    places = torch.arange(WORD, device=parents.device)
    packed = (padded.unflatten(2, (words, WORD)).long() << places).sum(-1)
    # Bit 31 is the sign of an int32.
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def allowed(
    pattern: Pattern, q_len: int, k_len: int, *, device: torch.device | None = None
) -> Tensor:
    """Return the dense mask, whether query t sees key s: bool [B or 1, 1, T, S].

    device: where to put the result; a tree's device takes precedence. Uses O(T * S) memory.
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
    """Return one tile of `allowed`; its last dimension is 1 if a tree's prefix has all `keys`."""
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
    """Return the keys that at least one of the queries first … stop - 1 may see, maybe none.

    A tree's nodes come after their parents, so its range ends like a causal one.
    """
    shift = pattern.shift(q_len, k_len)
    right = 0 if pattern.tree is not None else pattern.right
    begin = 0 if pattern.left is None else max(0, first + shift - pattern.left)
    end = k_len if right is None else min(k_len, stop + shift + right)
    return range(begin, max(begin, end)) if stop > first else range(0)


def masked_keys(pattern: Pattern, queries: slice, keys: slice, q_len: int, k_len: int) -> slice:
    """Return the part of `keys` that needs a mask; every query sees every key outside it.

    Inside a band, most tiles need no mask. A tree's tiles always need one, because only the device
    knows whether the tree holds padding.
    """
    if pattern.tree is not None:
        return keys
    shift = pattern.shift(q_len, k_len)
    first, last = queries.start + shift, queries.stop - 1 + shift  # the outer rows' diagonals
    begin = keys.stop if pattern.right is None else max(keys.start, first + pattern.right + 1)
    end = keys.start if pattern.left is None else min(keys.stop, last - pattern.left)
    if begin < keys.stop and end > keys.start:
        return keys  # both ends of the band cross this tile
    return slice(begin, keys.stop) if begin < keys.stop else slice(keys.start, max(keys.start, end))


def tile_mask(
    pattern: Pattern,
    queries: slice,
    keys: slice,
    q_len: int,
    k_len: int,
    *,
    device: torch.device | None = None,
) -> Tensor | None:
    """Return `allowed` for one tile, broadcastable, or None if `masked_keys` is empty."""
    hidden = masked_keys(pattern, queries, keys, q_len, k_len)
    if hidden.start == hidden.stop:
        return None
    return _seen(pattern, queries, keys, q_len, k_len, device)
