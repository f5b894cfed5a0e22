"""Tiles of a causal mask: those that need none, those that need it, those to be skipped."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["COUNT_TILES"]

BLOCKS = (32, 48, 64, 80, 96, 128)  # even, so that no odd length is a multiple


def count_tiles(
    queries: int, keys: int, *, block_q: int, block_k: int, alignment: str
) -> tuple[int, int, int]:
    """Tiles in which all pairs see each other, only some do, and none does."""
    shift = keys - queries if alignment == "bottom_right" else 0
    across = -(-keys // block_k)
    whole = live = 0
    for first in range(0, queries, block_q):
        stop = min(first + block_q, queries)
        for_all = min(max(first + shift + 1, 0), keys)  # keys that the first query sees
        for_some = min(max(stop + shift, 0), keys)  # keys that the last one sees
        whole += across if for_all == keys else for_all // block_k
        live += -(-for_some // block_k)
    tiles = across * -(-queries // block_q)
    return whole, live - whole, tiles - live


def _faulty_shift(queries: int, keys: int, alignment: str, fault: str) -> int:
    """The key of query 0, relative to key 0."""
    aligned = {"always top left": False, "always bottom right": True}
    if aligned.get(fault, alignment == "bottom_right"):
        return queries - keys if fault == "shifted the wrong way" else keys - queries
    return 0


def _rounded(seen: int, keys: int, block: int, fault: str) -> tuple[int, int]:
    """Whole tiles among `seen` keys, and tiles that hold one of them at least."""
    if fault == "short tiles dropped":
        return seen // block, min(-(-seen // block), keys // block)
    last = -(-keys // block)
    if fault == "keys past the end":
        return min(seen // block, last), min(-(-seen // block), last)
    complete = seen == keys and fault != "short tiles masked"
    return last if complete else seen // block, -(-seen // block)


def _wrongly(fault: str) -> Callable[..., tuple[int, int, int]]:
    def count(
        queries: int, keys: int, *, block_q: int, block_k: int, alignment: str
    ) -> tuple[int, int, int]:
        if fault == "blocks exchanged":
            block_q, block_k = block_k, block_q
        shift = _faulty_shift(queries, keys, alignment, fault)
        across, down = -(-keys // block_k), -(-queries // block_q)
        if fault == "short tiles dropped":
            across, down = keys // block_k, queries // block_q
        whole = live = 0
        for first in range(0, down * block_q, block_q):
            stop = min(first + block_q, queries)
            low = 0 if fault != "rows before the keys" else -queries
            high = keys if fault != "keys past the end" else keys + block_k
            own = int(fault != "own key hidden")
            late = int(fault == "stop taken for the last")
            for_all = min(max(first + shift + own, low), high)
            for_some = min(max(stop + shift - 1 + own + late, low), high)
            if fault == "judged by the last query":
                for_all = for_some
            whole_here, _ = _rounded(for_all, keys, block_k, fault)
            _, live_here = _rounded(for_some, keys, block_k, fault)
            if fault == "judged by the first query":
                _, live_here = _rounded(for_all, keys, block_k, fault)
            if fault == "one masked tile a row":
                whole_here = max(live_here - 1, 0)
            whole, live = whole + whole_here, live + live_here
        if fault == "masked counted as whole":
            return live, live - whole, across * down - live
        return whole, live - whole, across * down - live

    return count


def _cases(seed: int) -> list[dict[str, Any]]:
    """As many queries as keys, fewer, and more, for both alignments; then one query, and many.

    Nearly all lengths are odd and have a short tile at their end.
    """
    chance = random.Random(seed)

    def odd(low: int, high: int) -> int:
        return 2 * chance.randint(low // 2, high // 2) + 1

    cases = []
    for alignment in ("top_left", "bottom_right"):
        length, more = odd(400, 700), 2 * odd(150, 300)
        for queries, keys in ((length, length), (length, length + more), (length + more, length)):
            cases.append({"queries": queries, "keys": keys, "alignment": alignment})
    # One key less than queries, so that tiles end at the diagonal.
    length = odd(700, 1000)
    cases.append({"queries": length, "keys": length - 1, "alignment": "bottom_right"})
    cases.append({"queries": 1, "keys": odd(1500, 2500), "alignment": "bottom_right"})
    length = odd(65_536, 70_000)
    cases.append({"queries": length, "keys": length, "alignment": "bottom_right"})
    return cases


def _own_blocks(student: int) -> Mapping[str, Any]:
    block_q, block_k = random.Random(f"attention.count_tiles:{student}").sample(BLOCKS, 2)
    return {"block_q": block_q, "block_k": block_k}


_HINTS = {
    "always top left": "Both alignments are counted as top_left. With bottom_right the last query "
    "stands at the last key, and query 0 at the key keys - queries.",
    "always bottom right": "Both alignments are counted as bottom_right. With top_left query 0 "
    "sees key 0 and no other.",
    "shifted the wrong way": "With bottom_right your diagonal moves the wrong way. Where there are "
    "more keys than queries, query 0 sees more than key 0.",
    "blocks exchanged": "`block_q` and `block_k` have changed places: the first is a number of "
    "queries, the second one of keys.",
    "one masked tile a row": "You count one masked tile for each row of tiles. A tall tile's "
    "diagonal crosses several tiles of keys, and with a flat one, too, the number depends on where "
    "the diagonal stands.",
    "judged by the last query": "A tile is called whole when its last query sees all of it. All "
    "the queries above see less.",
    "judged by the first query": "A tile is skipped when its first query sees nothing of it. The "
    "queries below see more.",
    "own key hidden": "Your queries do not see their own key: query i sees the keys up to "
    "i + shift, that one included.",
    "stop taken for the last": "Your tiles reach one query too far down: where the next tile "
    "begins is not where this one's last query stands.",
    "keys past the end": "A tile that is cut short at the last key is called masked unless its "
    "queries could see a full tile's keys. Keys past the end are not there to be seen.",
    "short tiles masked": "A tile that is cut short at the last key is always counted as masked. "
    "Where all of its pairs see each other it needs no causal mask: it is whole.",
    "short tiles dropped": "What is left over at the end of queries or keys is not counted. A "
    "short tile is a tile.",
    "rows before the keys": "Queries that see nothing have a negative number of keys with you. "
    "Where there are fewer keys than queries, bottom_right leaves the first queries with none.",
    "masked counted as whole": "Your whole tiles include the masked ones. Each tile is to be "
    "counted once: the three numbers add up to all tiles.",
}

COUNT_TILES = Exercise(
    id="attention.count_tiles",
    reference=count_tiles,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_blocks,
    returns=("whole", "masked", "skipped"),
    timeout_s=30.0,  # a loop over all tiles of the long case is slow and right
    explanation="Along a row of tiles the first query sees least and the last one most. The tiles "
    "that the first sees completely are whole, those of which the last sees nothing are skipped, "
    "and the diagonal runs through the others. So two numbers of keys decide a row, and no mask is "
    "made: a kernel finds in the same way where its loop ends and from where on it must mask. With "
    "long sequences nearly half of all tiles are skipped and the masked ones become few, since "
    "they grow with the length and the others with its square.",
)
