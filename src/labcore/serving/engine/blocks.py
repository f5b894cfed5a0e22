"""The blocks of a paged cache: who holds them, and which can be shared or evicted.

The pool tracks block numbers and never touches a tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from labcore.checks import positive_int

__all__ = ["BlockPool", "blocks_for", "chain_hashes"]


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks of `block_size` tokens hold `tokens` tokens."""
    return -(-tokens // block_size)


def chain_hashes(
    tokens: Sequence[int], block_size: int, *, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return a 16-byte digest for each full block of `tokens`.

    Each digest covers the one before it, because keys and values depend on all earlier tokens.
    Equal digests therefore mean equal prefixes (BLAKE2b, RFC 7693, makes a collision practically
    impossible). known: the first digests, if they are already computed.
    """
    full = len(tokens) // block_size
    digests = list(known[:full])
    for place in range(len(digests), full):
        block = array("q", tokens[place * block_size : (place + 1) * block_size]).tobytes()
        parent = digests[-1] if digests else b""
        digests.append(hashlib.blake2b(parent + block, digest_size=16).digest())
    return digests


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, with reference counts and a prefix cache.

    A block is free, held (it has at least one reference), or cached. A cached block has no
    reference, but `peek` still finds it by its digest until an allocation evicts it. The block
    released longest ago is evicted first; among blocks released together, the last one of the
    prefix.
    Raises TypeError or ValueError unless both sizes are whole numbers of at least 1.
    Source: Kwon et al., 2023, arXiv 2309.06180.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.block_size = positive_int("block_size", block_size)
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: low numbers first
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._digest: dict[int, bytes] = {}
        self._block: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """The number of blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """The number of blocks without a reference that still hold a known prefix."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """The number of blocks with at least one reference."""
        return self.num_blocks - self.available

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can return: free plus cached."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """Return the number of references to a block; ValueError if it isn't in the pool."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"a block must lie between 0 and {self.num_blocks - 1}, got {block}")
        return self._references[block]

    def digest(self, block: int) -> bytes | None:
        """Return the digest that a block is registered under, or None."""
        return self._digest.get(block)

    def allocate(self, n: int) -> list[int]:
        """Return `n` blocks with one reference each, evicting cached ones if too few are free.

        Raises ValueError, and takes none, if n is negative or fewer are available.
        """
        if not 0 <= n <= self.available:
            raise ValueError(
                f"n must be at least 0 and at most the {self.available} available blocks, got {n}; "
                "release some, or make the pool larger"
            )
        taken = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for block in taken:
            self._references[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block[self._digest.pop(block)]
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; a cached block becomes held again.

        Raises ValueError if a block is free: it holds nothing to share.
        """
        for block in blocks:
            if not self.references(block) and block not in self._cached:
                raise ValueError(
                    f"block {block} must be held or cached to be shared, got a free one"
                )
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block.

        A block whose count reaches 0 becomes cached if it has a digest, free otherwise.
        Raises ValueError, and releases none, if a block would lose more references than it has.
        """
        self._must_be_held(blocks, "released")
        for block in reversed(blocks):  # the end of a prefix is useless without its beginning
            self._references[block] -= 1
            if not self._references[block] and block in self._digest:
                self._cached[block] = None
            elif not self._references[block]:
                self._free.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Register a held block under a digest, unless another block has that digest.

        The block must be full and its keys and values written: requests that share it read them.
        Raises ValueError if the block isn't held, or has a different digest.
        """
        self._must_be_held([block], "registered")
        if self._digest.get(block, digest) != digest:
            raise ValueError(
                f"block {block} must keep its digest while it is held; register it once it is full"
            )
        if self._block.setdefault(digest, block) == block:
            self._digest[block] = digest

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the digests of held blocks whose contents can't be trusted.

        Raises ValueError, and forgets none, if nobody holds one of them.
        """
        self._must_be_held(blocks, "forgotten")
        for block in blocks:
            if block in self._digest:
                del self._block[self._digest.pop(block)]

    def peek(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix, without adding references."""
        return [self._block[digest] for digest in takewhile(self._block.__contains__, digests)]

    def clear(self) -> None:
        """Free all cached blocks, for example before a measurement."""
        while self._cached:
            self._free.append(self._evict())

    def _must_be_held(self, blocks: Sequence[int], what: str) -> None:
        for block, times in Counter(blocks).items():
            if times > self.references(block):
                raise ValueError(
                    f"block {block} must be held to be {what}, once per reference: it has "
                    f"{self.references(block)}, and {times} were named"
                )
