"""The blocks of a paged cache: who holds them, and which can be shared or evicted.

A block is a page of the cache, `page` tokens long. The pool tracks block numbers and never touches
a tensor.
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


def blocks_for(tokens: int, page: int) -> int:
    """Return how many blocks of `page` tokens hold `tokens` tokens."""
    return -(-tokens // page)


def chain_hashes(
    tokens: Sequence[int], page: int, salt: bytes = b"", *, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return a 16-byte digest for each full block of `tokens`.

    Each digest covers the one before it, because keys and values depend on all earlier tokens.
    Equal digests therefore mean equal prefixes (BLAKE2b, RFC 7693, makes a collision practically
    impossible).
    page: tokens per block. salt: distinguishes models that must not share blocks. known: the first
    digests, if they are already computed.
    """
    positive_int("page", page)
    digests = list(known[: len(tokens) // page])
    parent = digests[-1] if digests else hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(len(digests) * page, len(tokens) - page + 1, page):
        block = array("q", tokens[start : start + page]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        digests.append(parent)
    return digests


class BlockPool:
    """`count` blocks of `page` tokens each, with reference counts and a prefix cache.

    A block is free, held (it has at least one reference), or cached. A cached block has no
    reference, but `peek` still finds it by its digest until an allocation evicts it. The block
    released longest ago is evicted first; among blocks released together, the last one of the
    prefix.
    evicted: the number of blocks evicted so far.
    Raises TypeError or ValueError unless count and page are whole numbers of at least 1.
    Source: Kwon et al., 2023, arXiv 2309.06180.
    """

    def __init__(self, count: int, page: int) -> None:
        self.count = positive_int("count", count)
        self.page = positive_int("page", page)
        self.evicted = 0
        self._free = list(range(count - 1, -1, -1))  # taken from the end: low numbers first
        self._references = [0] * count
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
        return self.count - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can return: free plus cached."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """Return the number of references to a block.

        Raises ValueError if the block isn't in the pool.
        """
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
                f"{n} blocks were requested, but only {self.available} of {self.count} are "
                "available; release some, or make the pool larger"
            )
        taken = []
        for _ in range(n):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            taken.append(block)
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
        if not self._references[self._own(block)]:
            raise ValueError(f"block {block} must be held to be registered, but nobody holds it")
        before = self._digest.get(block)
        if before is not None and before != digest:
            raise ValueError(
                f"block {block} must keep its digest while it is held; register it once it is full"
            )
        if self._block.setdefault(digest, block) != block:
            return False
        self._digest[block] = digest
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove the digests of held blocks whose contents can't be trusted.

        `peek` no longer finds these blocks.
        Raises ValueError, and forgets none, if nobody holds one of them.
        """
        given = list(blocks)
        for block in given:
            if not self._references[self._own(block)]:
                raise ValueError(f"block {block} must be held to be forgotten, but nobody holds it")
        for block in given:
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

    def check(self) -> None:
        """Raise RuntimeError with the first invariant that doesn't hold."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        blocks = set(range(self.count))
        broken = {
            "no block is twice in the free list": len(free) == len(self._free),
            "no block has a negative reference count": min(self._references) >= 0,
            "no block is both free and cached": not free & cached,
            "a held block is neither free nor cached": not held & (free | cached),
            "free + held + cached is the pool": free | held | cached == blocks,
            "a cached block has a digest": cached <= set(self._digest),
            "a free block has no digest": not free & set(self._digest),
            "a digest and its block refer to each other": (
                {digest: block for block, digest in self._digest.items()} == self._block
                and len(self._digest) == len(self._block)
            ),
        }
        for rule, holds in broken.items():
            if not holds:
                raise RuntimeError(
                    f"a pool invariant is broken: {rule}; got {len(free)} free, {len(held)} "
                    f"held and {len(cached)} cached of {self.count} blocks"
                )

    def _own(self, block: int) -> int:
        if not 0 <= block < self.count:
            raise ValueError(f"a block must lie between 0 and {self.count - 1}, got {block}")
        return block
