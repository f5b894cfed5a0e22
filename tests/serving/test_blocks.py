"""Blocks are free, held or cached, each exactly one of them; a prefix is found by its digests."""

import random
from collections import Counter

import pytest

from labcore.serving.engine.blocks import BlockPool, blocks_for, chain_hashes
from tests.serving.invariants import check_pool


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_digest_names_the_whole_prefix(block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(2**31) for _ in range(5 * block_size + rng.randrange(block_size))]
    whole = chain_hashes(tokens, block_size)
    assert len(whole) == len(tokens) // block_size == 5 and len(set(whole)) == 5
    for place in range(len(tokens)):
        other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
        digests = chain_hashes(other, block_size)
        same = [a == b for a, b in zip(whole, digests, strict=True)]
        assert same == [block < place // block_size for block in range(5)]
    for known in range(6):
        assert chain_hashes(tokens, block_size, known=whole[:known]) == whole
        assert chain_hashes(tokens[: known * block_size], block_size) == whole[:known]
    # What is known beyond the tokens is no digest of theirs.
    assert chain_hashes(tokens[:block_size], block_size, known=whole) == whole[:1]


def test_equal_blocks_behind_unequal_ones_differ() -> None:
    first, second = chain_hashes([1, 2, 9, 9, 9, 9], 2), chain_hashes([3, 4, 9, 9, 9, 9], 2)
    assert len({*first, *second}) == 6


def test_tokens_that_fill_a_block_need_no_other() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_random_calls_keep_every_invariant(seed: int) -> None:
    """Against a plain model of the pool: counters and a list of who was released when."""
    rng = random.Random(seed)
    for _ in range(20):
        pool = BlockPool(rng.randrange(1, 12), rng.randrange(1, 5))
        holders: list[list[int]] = []
        names = 0
        for _ in range(150):
            held = Counter(block for blocks in holders for block in blocks)
            move = rng.random()
            if move < 0.35:
                n = rng.randrange(pool.num_blocks + 2)
                available = pool.available
                assert available == pool.num_blocks - len(held)
                if n > available:
                    before = (pool.free, pool.held, pool.cached)
                    with pytest.raises(ValueError, match=f"{available} available blocks, got {n};"):
                        pool.allocate(n)
                    assert before == (pool.free, pool.held, pool.cached)
                else:
                    blocks = pool.allocate(n)
                    assert len(set(blocks)) == n and not set(blocks) & set(held)
                    assert all(pool.digest(block) is None for block in blocks)
                    holders.append(blocks)
            elif move < 0.65 and holders:
                pool.release(holders.pop(rng.randrange(len(holders))))
            elif move < 0.8 and held:
                block = rng.choice(list(held))
                if pool.digest(block) is None:
                    names += 1
                    pool.register(block, str(names).encode())
                    assert pool.digest(block) == str(names).encode()
            elif names:
                digest = str(rng.randrange(1, names + 1)).encode()
                found = pool.peek([digest])
                assert pool.peek([digest, b"never known"]) == found
                pool.share(found)
                holders.append(found)
            check_pool(pool)
            held = Counter(block for blocks in holders for block in blocks)
            assert [pool.references(b) for b in range(pool.num_blocks)] == [
                held[block] for block in range(pool.num_blocks)
            ]
            assert pool.held == len(held)
        for blocks in holders:
            pool.release(blocks)
        check_pool(pool)
        assert pool.held == 0 and pool.free + pool.cached == pool.num_blocks
        pool.clear()
        check_pool(pool)
        assert pool.free == pool.num_blocks
        assert not any(pool.peek([str(name + 1).encode()]) for name in range(names))


def test_free_blocks_go_first_then_stale_prefixes_from_their_end() -> None:
    pool = BlockPool(7, 2)
    old, new = pool.allocate(3), pool.allocate(2)
    for name, blocks in (("old", old), ("new", new)):
        for place, block in enumerate(blocks):
            pool.register(block, f"{name}{place}".encode())
    pool.release(old)
    pool.release(new)
    again = pool.peek([b"old0"])
    pool.share(again)
    pool.release(again)  # used again: now the newest
    assert (pool.free, pool.held, pool.cached) == (2, 0, 5)
    assert pool.allocate(2) == [5, 6] and pool.cached == 5
    gone = []
    for _ in range(5):
        pool.allocate(1)
        check_pool(pool)
        left = {n for n in ("old0", "old1", "old2", "new0", "new1") if pool.peek([n.encode()])}
        gone.append(({"old0", "old1", "old2", "new0", "new1"} - left - set(gone)).pop())
    assert gone == ["old2", "old1", "new1", "new0", "old0"] and pool.cached == 0


def test_a_prefix_is_found_up_to_its_first_gap() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(3)
    for place in (0, 2):
        pool.register(blocks[place], bytes([place]))
    assert pool.peek([b"\0", b"\1", b"\2"]) == blocks[:1]
    assert [pool.references(block) for block in blocks] == [1, 1, 1]


def test_the_first_of_two_equal_blocks_is_the_known_one() -> None:
    pool = BlockPool(3, 1)
    first, second = pool.allocate(2)
    for block in (first, first, second):
        pool.register(block, b"same")
    assert pool.digest(first) == b"same" and pool.digest(second) is None
    pool.release([first, second])
    check_pool(pool)
    assert (pool.free, pool.cached) == (2, 1) and pool.peek([b"same"]) == [first]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: p.release([1]), "block 1 must be held to be released"),
        (lambda p: p.release([0, 0]), "block 0 must be held to be released"),
        (lambda p: p.share([0, 1]), "block 1 must be held or cached to be shared"),
        (lambda p: p.register(1, b"d"), "block 1 must be held to be registered"),
        (lambda p: p.register(0, b"other"), "block 0 must keep its digest"),
        (lambda p: p.references(3), "between 0 and 2, got 3"),
        (lambda p: p.release([-1]), "between 0 and 2, got -1"),
        (lambda p: p.allocate(-1), "n must be at least 0"),
        (lambda p: BlockPool(0, 4), "num_blocks must be at least 1"),
        (lambda p: BlockPool(4, 0), "block_size must be at least 1"),
    ],
)
def test_a_mistake_is_told_and_changes_nothing(call, said: str) -> None:
    pool = BlockPool(3, 4)
    pool.register(pool.allocate(1)[0], b"digest")
    with pytest.raises(ValueError, match=said):
        call(pool)
    check_pool(pool)
    assert (pool.free, pool.held, pool.cached, pool.references(0)) == (2, 1, 0, 1)


def _twice_free(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _lost(pool: BlockPool) -> None:
    pool._free.pop()


def _below_zero(pool: BlockPool) -> None:
    pool._references[pool._free[0]] = -1


def _free_and_held(pool: BlockPool) -> None:
    pool._references[pool._free[0]] = 1


def _free_and_cached(pool: BlockPool) -> None:
    pool._cached[pool._free[0]] = None


def _nameless(pool: BlockPool) -> None:
    block = next(iter(pool._cached))
    del pool._block[pool._digest.pop(block)]


def _named_and_free(pool: BlockPool) -> None:
    pool._digest[pool._free[0]] = b"x"
    pool._block[b"x"] = pool._free[0]


def _two_names(pool: BlockPool) -> None:
    pool._block[b"x"] = next(iter(pool._cached))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_twice_free, "twice in the free list"),
        (_lost, "free \\+ held \\+ cached is the pool"),
        (_below_zero, "negative reference count"),
        (_free_and_held, "a held block is neither"),
        (_free_and_cached, "both free and cached"),
        (_nameless, "a cached block has a digest"),
        (_named_and_free, "a free block has no digest"),
        (_two_names, "refer to each other"),
    ],
)
def test_each_broken_invariant_is_named(harm, said: str) -> None:
    pool = BlockPool(6, 2)
    blocks = pool.allocate(3)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"b")
    pool.release(blocks[1:])
    check_pool(pool)
    harm(pool)
    with pytest.raises(RuntimeError, match=said):
        check_pool(pool)


def test_forgotten_blocks_are_found_by_nobody(seed: int) -> None:
    pool, chance = BlockPool(9, 4), random.Random(seed)
    held = pool.allocate(5)
    digests = chain_hashes([chance.randrange(99) for _ in range(16)], 4)
    for block, digest in zip(held, digests, strict=False):
        pool.register(block, digest)
    pool.share(held[:1])
    pool.forget(held[2:])
    assert pool.peek(digests) == held[:2]
    with pytest.raises(ValueError, match="must be held to be forgotten"):
        pool.forget([held[0], *set(range(9)) - set(held)])
    assert pool.peek(digests) == held[:2]
    pool.release(held)
    assert (pool.free, pool.cached, pool.held) == (7, 1, 1)
    check_pool(pool)
