"""Give blocks back to a pool after requests were canceled in the middle of a step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

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
    """Return tables, references, digests, free and cached blocks once `ids` are canceled."""
    del limit
    left = {name: list(blocks) for name, blocks in tables.items()}
    references, digests = list(references), list(digests)
    free, cached = list(free), list(cached)
    for name in ids:
        blocks = left.pop(name, [])
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            references[block] -= 1
            if references[block] > 0:
                continue
            if digests[block] and (index + 1) * page <= computed[name]:
                cached.append(block)
            else:
                digests[block] = ""
                free.append(block)
    return left, references, digests, sorted(free), cached


def _digest(chance: random.Random) -> str:
    return f"{chance.getrandbits(24):06x}"


def some_pool(chance: random.Random, *, limited: bool = False) -> dict[str, Any]:
    """Draw requests in the middle of a step, some with a common prefix, and the ids to cancel."""
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
        planned = tokens + chance.choice((1, 1, chance.randint(1, 2 * page)))
        own = [numbers.pop() for _ in range(-(-planned // page) - len(shared))]
        tables[name], computed[name] = [*shared, *own], tokens
        for index, block in enumerate(tables[name]):
            references[block] += 1
            filled = (index + 1) * page <= planned
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
        ids.insert(0, "z")  # This request has already ended.
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
    wrong = (function for function, _ in CANCEL.wrong.values())
    return separating(lambda: some_pool(chance), [cancel, *wrong])


CANCEL = Exercise(
    id="inflight.cancel",
    points=5,
    beyond=2,
    reference=cancel,
    mistakes=[
        Mistake(
            "shared ones freed",
            ("references[block] -= 1", "references[block] = 0"),
            "You free blocks that other requests still read. Somebody else's tokens will "
            "overwrite them.",
        ),
        Mistake(
            "shared ones kept",
            (
                "                continue",
                "                references[block] += 1\n                continue",
            ),
            "You leave shared blocks unchanged. One of their holders is gone, but the count "
            "still includes it, so they never become free.",
        ),
        Mistake(
            "given back twice",
            ("left.pop(name, [])", "left.pop(name, tables.get(name, []))"),
            "A request that is canceled twice gives its blocks back twice. By then, they may "
            "belong to others or already be in the free list.",
        ),
        Mistake(
            "full ones alone",
            ("left.pop(name, [])", "left.pop(name, [])[: computed.get(name, 0) // page]"),
            "You give back only full blocks. Every request then keeps its last, partly filled "
            "block.",
        ),
        Mistake(
            "written ones alone",
            ("left.pop(name, [])", "left.pop(name, [])[: -(-computed.get(name, 0) // page)]"),
            "You give back only blocks with tokens in them. For some requests, the current step "
            "has taken one more block, which is then lost.",
        ),
        Mistake(
            "unwritten ones cached",
            (" and (index + 1) * page <= computed[name]", ""),
            "You cache every block that has a digest. Some digests stand for tokens that were "
            "never written: whoever finds such a block reads its old contents.",
        ),
        Mistake(
            "begun ones cached",
            ("(index + 1) * page <= computed[name]", "index * page < computed[name]"),
            "You cache partly filled blocks that have a digest. A digest stands for a full block.",
        ),
        Mistake(
            "nothing cached",
            ("(index + 1) * page <= computed[name]", "False"),
            "You free every block that nobody holds. A full block with a digest is useful to the "
            "next request with the same beginning.",
        ),
        Mistake(
            "beginning first",
            ("reversed(range(len(blocks)))", "range(len(blocks))"),
            "You give back a table from its beginning, so the beginning of a prefix is evicted "
            "first. The rest of it can't be found without the beginning.",
        ),
        Mistake(
            "first to be evicted",
            ("cached.append(block)", "cached.insert(0, block)"),
            "You put returned blocks at the wrong end of the cached list, where the blocks that "
            "have waited longest are.",
        ),
        Mistake(
            "digest of an empty one",
            ('                digests[block] = ""\n', ""),
            "Some of your free blocks still have a digest.",
        ),
    ],
    cases=_cases,
    returns=("tables", "references", "digests", "free blocks", "cached blocks"),
    explanation="Every entry of a table is one reference, whether the block is full, partly "
    "filled, or taken for the current step. Give each of them back once and drop the table; a "
    "second cancellation then finds no table. Only the last reference decides what becomes of a "
    "block. If it is full and has a digest, a later request may read it, so it goes to the cache. "
    "The end of a prefix goes in first, because it is useless without the beginning. A digest "
    "assigned for tokens to come must not outlive the step that was to write them: the block would "
    "look like any other cached one but hold somebody else's tokens. This reference has no limit "
    "for the cache.",
    hints=(
        "In the example, why does block 2 become free although it has a digest? And why does "
        "block 5 stay where it is when a is canceled?",
        "A request that still has a table gives it up and lowers the count of each of its blocks "
        "by 1, from the end to the beginning. Only a block whose count reaches 0 moves. It goes "
        "to the end of the cached list if it has a digest and all of its slots are written. "
        "Otherwise it becomes free and loses its digest.",
        "`digests[block] and (index + 1) * page <= computed[name]` says whether the block at "
        "`index` of a table is cached once nobody holds it. On a copy `left` of the tables, "
        "`left.pop(name, [])` makes a second cancellation do nothing.",
    ),
)
