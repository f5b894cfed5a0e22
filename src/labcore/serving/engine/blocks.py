"""The blocks of a paged cache: who holds them, and which can be shared or evicted.

The pool tracks block numbers and never touches a tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from labcore.checks import positive_int

__all__ = ["BlockPool", "NoBlocks", "blocks_for", "chain_hashes"]


class NoBlocks(RuntimeError):
    """A pool has fewer blocks available than requested."""


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
    positive_int("block_size", block_size)
    digests = list(known[: len(tokens) // block_size])
    parent = digests[-1] if digests else b""
    for start in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
        block = array("q", tokens[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        digests.append(parent)
    return digests


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, with reference counts and a prefix cache.

    A block is free, held (it has at least one reference), or cached. A cached block has no
    reference, but `peek` still finds it by its digest until an allocation evicts it. The block
    released longest ago is evicted first; among blocks released together, the last one of the
    prefix.
    evicted: the number of blocks evicted so far.
    Raises TypeError or ValueError unless both sizes are whole numbers of at least 1.
    Source: Kwon et al., 2023, arXiv 2309.06180.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.block_size = positive_int("block_size", block_size)
        self.evicted = 0
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
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can return: free plus cached."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """Return the number of references to a block; ValueError if it isn't in the pool."""
        return self._references[self._own(block)]

    def digest(self, block: int) -> bytes | None:
        """Return the digest that a block is registered under, or None."""
        return self._digest.get(self._own(block))

    def allocate(self, n: int) -> list[int]:
        """Return `n` blocks with one reference each, evicting cached ones if too few are free.

        Raises NoBlocks, and takes none, if fewer are available; ValueError if n is negative.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if n > self.available:
            raise NoBlocks(
                f"{n} blocks were requested, but only {self.available} of {self.num_blocks} are "
                "available; release some, or make the pool larger"
            )
        taken = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for block in taken:
            self._references[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block[self._digest.pop(block)]
        self.evicted += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a cached block becomes held again.

        Raises ValueError if a block is free: it holds nothing to share.
        """
        asked = list(blocks)
        for block in asked:
            if not self._references[self._own(block)] and block not in self._cached:
                raise ValueError(
                    f"block {block} must be held or cached to be shared, but it is free"
                )
        for block in asked:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block.

        A block whose count reaches 0 becomes cached if it has a digest, free otherwise.
        Raises ValueError, and releases none, if a block would lose more references than it has.
        """
        given = list(blocks)
        for block, times in Counter(given).items():
            if times > self._references[self._own(block)]:
                raise ValueError(
                    f"block {block} must be held to be released, but it has "
                    f"{self._references[block]} references; release it once per reference"
                )
        for block in reversed(given):  # the end of a prefix is useless without its beginning
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._digest:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, digest: bytes) -> bool:
        """Register a held block under a digest; return False if another block has that digest.

        The block must be full and its keys and values written: requests that share it read them.
        Raises ValueError if the block isn't held, or has a different digest.
        """
        self._must_be_held([block], "registered")
        if self._digest.get(block, digest) != digest:
            raise ValueError(
                f"block {block} must keep its digest while it is held; register it once it is full"
            )
        if self._block.setdefault(digest, block) != block:
            return False
        self._digest[block] = digest
        return True

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the digests of held blocks whose contents can't be trusted.

        Raises ValueError, and forgets none, if nobody holds one of them.
        """
        self._must_be_held(blocks, "forgotten")
        for block in blocks:
            digest = self._digest.pop(block, None)
            if digest is not None:
                del self._block[digest]

    def peek(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix, without adding references."""
        found = []
        for digest in digests:
            block = self._block.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def clear(self) -> int:
        """Free all cached blocks, for example before a measurement; return how many."""
        count = self.cached
        while self._cached:
            self._free.append(self._evict())
        self.evicted -= count
        return count

    def _must_be_held(self, blocks: Iterable[int], what: str) -> None:
        for block in blocks:
            if not self._references[self._own(block)]:
                raise ValueError(f"block {block} must be held to be {what}, but nobody holds it")

    def _own(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"a block must lie between 0 and {self.num_blocks - 1}, got {block}")
        return block
