"""The blocks of a paged cache: who holds which, what may be shared, what may be evicted.

A block is a page of the cache, `page` tokens long; the pool deals in numbers and touches no tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from labcore.checks import positive_int

__all__ = ["BlockPool", "NoBlocks", "blocks_for", "chain_hashes"]


class NoBlocks(RuntimeError):
    """A pool has fewer blocks to give than were asked for."""


def blocks_for(tokens: int, page: int) -> int:
    """Blocks of `page` tokens that hold `tokens`."""
    return -(-tokens // page)


def chain_hashes(
    tokens: Sequence[int], page: int, salt: bytes = b"", *, known: Sequence[bytes] = ()
) -> list[bytes]:
    """A digest for each full block of `tokens`, 16 bytes long.

    Each includes the digest before it, since keys and values depend on all tokens before them:
    equal digests mean equal prefixes (BLAKE2b, RFC 7693, so a collision is not to be expected).
    page: tokens of a block. salt: tells models apart that must not share. known: the first digests,
    where they were computed before.
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
    """`count` blocks of `page` tokens each, with reference counts and a cache of known prefixes.

    A block is free, held (one reference or more), or cached: without a reference, but with a digest
    by which `peek` finds it again, until an allocation evicts it. The block that was released
    longest ago is evicted first, and of blocks released together the last ones of the prefix.
    evicted: how many were, so far.
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
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that still carry a known prefix."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks with at least one reference."""
        return self.count - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: the free and the cached."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """How many hold it. Raises ValueError for a block that is not the pool's."""
        return self._references[self._own(block)]

    def digest(self, block: int) -> bytes | None:
        """The digest that it is known by, or None."""
        return self._digest.get(self._own(block))

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each; cached ones are evicted where the free do not do.

        Raises NoBlocks, and takes none, where there are fewer; ValueError for n below 0.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if n > self.available:
            raise NoBlocks(
                f"{n} blocks were asked for and {self.available} of {self.count} can be given; "
                "release some, or make the pool larger"
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
        """One reference more for each; a cached block is held again.

        Raises ValueError for a block that is free: it holds nothing to share.
        """
        asked = list(blocks)
        for block in asked:
            if not self._references[self._own(block)] and block not in self._cached:
                raise ValueError(f"block {block} must be held or cached to be shared, it is free")
        for block in asked:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each; at 0 a block with a digest is cached, another one free.

        Raises ValueError, and releases none, where a block has fewer references than are given.
        """
        given = list(blocks)
        for block, times in Counter(given).items():
            if times > self._references[self._own(block)]:
                raise ValueError(
                    f"block {block} must be held to be released, it has "
                    f"{self._references[block]} references; release a block once for each"
                )
        for block in reversed(given):  # the end of a prefix is of no use without its beginning
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._digest:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, digest: bytes) -> bool:
        """Make a held block known by its digest; False where another block has that digest.

        Only for a full block whose keys and values are written: whoever shares it reads them.
        Raises ValueError for a block that nobody holds, or that has another digest.
        """
        if not self._references[self._own(block)]:
            raise ValueError(f"block {block} must be held to be registered, nobody holds it")
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
        """Have nobody find these held blocks any more: what is written there is not to be trusted.

        Raises ValueError, and forgets none, where nobody holds one.
        """
        given = list(blocks)
        for block in given:
            if not self._references[self._own(block)]:
                raise ValueError(f"block {block} must be held to be forgotten, nobody holds it")
        for block in given:
            digest = self._digest.pop(block, None)
            if digest is not None:
                del self._block[digest]

    def peek(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix, without a reference."""
        found = []
        for digest in digests:
            block = self._block.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def clear(self) -> int:
        """Forget all prefixes that nobody holds, as before a measurement; how many blocks."""
        count = self.cached
        while self._cached:
            self._free.append(self._evict())
        self.evicted -= count
        return count

    def check(self) -> None:
        """Raise RuntimeError that names the first invariant that does not hold."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        blocks = set(range(self.count))
        broken = {
            "a block is free once": len(free) == len(self._free),
            "no block has fewer than 0 references": min(self._references) >= 0,
            "no block is both free and cached": not free & cached,
            "a held block is neither free nor cached": not held & (free | cached),
            "free + held + cached is the pool": free | held | cached == blocks,
            "a cached block has a digest": cached <= set(self._digest),
            "a free block has none": not free & set(self._digest),
            "a digest and its block name each other": (
                {digest: block for block, digest in self._digest.items()} == self._block
                and len(self._digest) == len(self._block)
            ),
        }
        for rule, holds in broken.items():
            if not holds:
                raise RuntimeError(
                    f"the pool's invariant must hold: {rule}, got {len(free)} free, {len(held)} "
                    f"held and {len(cached)} cached of {self.count}"
                )

    def _own(self, block: int) -> int:
        if not 0 <= block < self.count:
            raise ValueError(f"a block must lie between 0 and {self.count - 1}, got {block}")
        return block
