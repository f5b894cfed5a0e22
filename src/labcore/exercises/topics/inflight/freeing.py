"""The blocks of a pool after requests were cancelled in the middle of a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.drawing import kept, separating

__all__ = ["CANCEL", "some_pool"]

_Tables = Mapping[str, Sequence[int]]
_Answer = tuple[dict[str, list[int]], list[int], list[str], list[int], list[int]]


def cancel(
    ids: Sequence[str],
    tables: _Tables,
    computed: Mapping[str, int],
    references: Sequence[int],
    digests: Sequence[str],
    free: Sequence[int],
    cached: Sequence[int],
    page: int,
    limit: int | None,
) -> _Answer:
    """Tables, references, digests, free and cached blocks, after the requests `ids` have gone."""
    del limit
    left = {name: list(blocks) for name, blocks in tables.items()}
    references, digests = list(references), list(digests)
    free, cached = list(free), list(cached)
    for name in ids:
        blocks = left.pop(name, [])
        for place in reversed(range(len(blocks))):
            block = blocks[place]
            references[block] -= 1
            if references[block]:
                continue
            if digests[block] and (place + 1) * page <= computed[name]:
                cached.append(block)
            else:
                digests[block] = ""
                free.append(block)
    return left, references, digests, sorted(free), cached


def _visited(fault: str, length: int, tokens: int, page: int) -> list[int]:
    """Places of a table, in the order in which they are given back."""
    if fault == "full ones alone":
        length = min(length, tokens // page)
    if fault == "written ones alone":
        length = min(length, -(-tokens // page))
    places = list(range(length))
    return places if fault == "beginning first" else places[::-1]


def _kept(fault: str, digest: str, place: int, tokens: int, page: int) -> bool:
    """Whether a block that nobody holds any more stays in the cache."""
    if fault == "nothing cached" or not digest:
        return False
    if fault == "unwritten ones cached":
        return True
    if fault == "begun ones cached":
        return place * page < tokens
    return (place + 1) * page <= tokens


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(
        ids: Sequence[str],
        tables: _Tables,
        computed: Mapping[str, int],
        references: Sequence[int],
        digests: Sequence[str],
        free: Sequence[int],
        cached: Sequence[int],
        page: int,
        limit: int | None,
    ) -> _Answer:
        del limit
        left = {name: list(blocks) for name, blocks in tables.items()}
        counts, known = list(references), list(digests)
        empty, idle = list(free), list(cached)
        for name in ids:
            if name not in tables:
                continue
            blocks = tables[name] if fault == "given back twice" else left.get(name, [])
            left.pop(name, None)
            for place in _visited(fault, len(blocks), computed[name], page):
                block = blocks[place]
                if fault == "shared ones kept" and counts[block] > 1:
                    continue
                counts[block] = 0 if fault == "shared ones freed" else counts[block] - 1
                if counts[block] > 0:
                    continue
                if _kept(fault, known[block], place, computed[name], page):
                    idle.insert(0 if fault == "first to be evicted" else len(idle), block)
                    continue
                if fault != "digest of an empty one":
                    known[block] = ""
                empty.append(block)
        return left, counts, known, sorted(empty), idle

    return answer


_HINTS = {
    "shared ones freed": "You free blocks that others still read. Somebody else's tokens will be "
    "written over them.",
    "shared ones kept": "You leave shared blocks as they are. One who held them has gone, and "
    "their count does not know it: they are never free again.",
    "given back twice": "A request that is cancelled twice gives its blocks back twice. The second "
    "time they may belong to others, or stand in the free list already.",
    "full ones alone": "You give back full blocks. The last one, which is filled in part, stays "
    "behind with every request.",
    "written ones alone": "You give back blocks with tokens in them. The step under way has taken "
    "one more for some requests, and it stays behind.",
    "unwritten ones cached": "You keep every block that has a digest. Some have one for tokens "
    "that are not there: whoever finds them reads what stood there before.",
    "begun ones cached": "You keep blocks with a digest that are filled in part. Their digest is "
    "that of a full one.",
    "nothing cached": "You free all blocks that nobody holds. Full ones with a digest are worth "
    "something to the next request with this beginning.",
    "beginning first": "You give back a table from its beginning, so that the beginning of a "
    "prefix is evicted first. What is left of it can then not be found.",
    "first to be evicted": "What you give back stands at that end of the cached list where the "
    "blocks stand that nobody has wanted for longest.",
    "digest of an empty one": "Some of your free blocks still have a digest.",
}
_WRONG = {name: _wrongly(name) for name in _HINTS}


def _digest(chance: random.Random) -> str:
    return f"{chance.getrandbits(24):06x}"


def some_pool(chance: random.Random, *, limited: bool = False) -> dict[str, Any]:
    """Requests in the middle of a step, some with a beginning in common; who is cancelled."""
    page = chance.choice((4, 8, 16))
    count = chance.randint(26, 34)
    numbers = chance.sample(range(count), count)
    references, digests = [0] * count, [""] * count
    tables: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    for name in chance.sample("abcdefgh", chance.randint(3, 5)):
        shared: list[int] = []
        if tables and chance.random() < 0.7:
            other = chance.choice(list(tables))
            full = computed[other] // page
            shared = tables[other][: chance.randint(0, full)]
        tokens = len(shared) * page + chance.randint(0, 3 * page)
        under_way = tokens + chance.choice((1, 1, chance.randint(1, 2 * page)))
        own = [numbers.pop() for _ in range(-(-under_way // page) - len(shared))]
        tables[name], computed[name] = [*shared, *own], tokens
        for place, block in enumerate(tables[name]):
            references[block] += 1
            filled = (place + 1) * page <= under_way
            if block in own and filled and chance.random() < 0.8:
                digests[block] = _digest(chance)
    cached = [numbers.pop() for _ in range(chance.randint(1, 3))]
    for block in cached:
        digests[block] = _digest(chance)
    names = list(tables)
    ids = chance.sample(names, chance.randint(1, len(names)))
    if chance.random() < 0.4:
        ids.append(chance.choice(ids))
    if chance.random() < 0.3:
        ids.insert(0, "z")  # it has ended before
    return {
        "ids": ids,
        "tables": tables,
        "computed": computed,
        "references": references,
        "digests": digests,
        "free": sorted(numbers),
        "cached": cached,
        "page": page,
        "limit": chance.randint(1, 4) if limited else None,
    }


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return separating(lambda: some_pool(chance), [cancel, *_WRONG.values()])


CANCEL = Exercise(
    id="inflight.cancel",
    reference=cancel,
    mistakes=[Mistake(name, _WRONG[name], hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("tables", "references", "digests", "free blocks", "cached blocks"),
    explanation="Every entry of a table is one reference, whatever is in the block: full, filled "
    "in part, or taken for the step under way. Giving all of them back once, and the table with "
    "them, is the whole rule, and a second cancellation finds no table. Only who gives back the "
    "last reference decides what becomes of a block. One that is full and known by a digest may "
    "be read by a later request, so it waits in the cache; the end of a prefix goes in first, as "
    "it is of no use without the beginning. A digest that was given for tokens to come must not "
    "outlive the step that was to write them: the block looks like any other cached one and holds "
    "somebody else's past. This reference has no limit for the cache.",
)
