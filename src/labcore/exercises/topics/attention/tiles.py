"""Count the tiles of causal attention that need no mask, need one, or can be skipped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["COUNT_TILES"]

# Even: no odd length is a multiple. None is a multiple of another: the last tile of queries, taken
# as a full one, would reach no further tile of keys if their blocks were.
BLOCKS = (48, 80, 112, 128, 176)


def count_tiles(
    queries: int, keys: int, *, block_q: int, block_k: int, alignment: str
) -> tuple[int, int, int]:
    """Count the tiles whose pairs are all visible, partly visible, or all hidden."""
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


def _one_tile_further(queries: int) -> set[tuple[int, int]]:
    """The pairs of BLOCKS with which a full last tile of queries would see another tile of keys."""
    return {
        (block_q, block_k)
        for block_q, block_k in itertools.permutations(BLOCKS, 2)
        if -(-queries // block_k) < -(-queries // block_q) * block_q / block_k
    }


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw as many queries as keys, fewer, and more for both alignments; then one query, and many.

    Nearly all lengths are odd and end with a short tile. With each pair of BLOCKS, at least one of
    the cases with fewer queries tells a short last tile from a full one.
    """
    chance = random.Random(seed)

    def odd(low: int, high: int) -> int:
        return 2 * chance.randint(low // 2, high // 2) + 1

    cases = []
    for alignment in ("top_left", "bottom_right"):
        length, more = odd(400, 700), 2 * odd(150, 300)
        for queries, keys in ((length, length), (length, length + more), (length + more, length)):
            cases.append({"queries": queries, "keys": keys, "alignment": alignment})
    pairs = set(itertools.permutations(BLOCKS, 2))
    while pairs:
        tried = [odd(400, 700) for _ in range(30)]
        queries = max(tried, key=lambda length: len(pairs & _one_tile_further(length)))
        pairs -= _one_tile_further(queries)
        keys = queries + 2 * odd(150, 300)
        cases.append({"queries": queries, "keys": keys, "alignment": "top_left"})
    # With one key less than queries, tiles end at the diagonal. Those of 128 by 176 do so at 1408.
    length = odd(1450, 1750)
    cases.append({"queries": length, "keys": length - 1, "alignment": "bottom_right"})
    cases.append({"queries": 1, "keys": odd(1500, 2500), "alignment": "bottom_right"})
    length = odd(65_536, 70_000)
    cases.append({"queries": length, "keys": length, "alignment": "bottom_right"})
    return cases


def _own_blocks(student: int) -> Mapping[str, Any]:
    block_q, block_k = random.Random(f"attention.count_tiles:{student}").sample(BLOCKS, 2)
    return {"block_q": block_q, "block_k": block_k}


_MISTAKES = [
    Mistake("always top left", ('keys - queries if alignment == "bottom_right" else 0', "0"),
            "Both alignments are counted as top_left. With bottom_right the last query stands at "
            "the last key, and query 0 at the key keys - queries."),
    Mistake("always bottom right", (' if alignment == "bottom_right" else 0', ""),
            "Both alignments are counted as bottom_right. With top_left query 0 sees key 0 and no "
            "other."),
    Mistake("shifted the wrong way", ("keys - queries if", "queries - keys if"),
            "With bottom_right your diagonal moves the wrong way. Where there are more keys than "
            "queries, query 0 sees more than key 0."),
    Mistake("blocks exchanged",
            ("    shift =", "    block_q, block_k = block_k, block_q\n    shift ="),
            "`block_q` and `block_k` have changed places: the first is a number of queries, the "
            "second one of keys."),
    Mistake("one masked tile a row",
            ("across if for_all == keys else for_all // block_k",
             "max(-(-for_some // block_k) - 1, 0)"),
            "You count one masked tile for each row of tiles. A tall tile's diagonal crosses "
            "several tiles of keys, and with a flat one, too, the number depends on where the "
            "diagonal stands."),
    Mistake("judged by the last query", ("first + shift + 1", "stop + shift"),
            "A tile is called whole when its last query sees all of it. All the queries above see "
            "less."),
    Mistake("judged by the first query", ("-for_some // block_k", "-for_all // block_k"),
            "A tile is skipped when its first query sees nothing of it. The queries below see "
            "more."),
    Mistake("own key hidden",
            [("first + shift + 1", "first + shift"), ("stop + shift", "stop + shift - 1")],
            "Your queries do not see their own key: query i sees the keys up to i + shift, that "
            "one included."),
    Mistake("stop taken for the last", ("stop + shift", "stop + shift + 1"),
            "Your tiles reach one query too far down: where the next tile begins is not where "
            "this one's last query stands."),
    Mistake("last tile as full", ("min(first + block_q, queries)", "first + block_q"),
            "You count the last tile of queries as if it were full. Where it is cut short, its "
            "last query stands earlier and sees fewer keys."),
    Mistake("keys past the end",
            [("min(max(first + shift + 1, 0), keys)", "max(first + shift + 1, 0)"),
             ("for_all == keys", "for_all >= across * block_k")],
            "A tile that is cut short at the last key is called masked unless its queries could "
            "see a full tile's keys. Keys past the end are not there to be seen."),
    Mistake("short tiles masked", ("across if for_all == keys else ", ""),
            "A tile that is cut short at the last key is always counted as masked. Where all of "
            "its pairs see each other it needs no causal mask: it is whole."),
    Mistake("short tiles dropped",
            ("    across =", "    queries -= queries % block_q\n"
             "    keys -= keys % block_k\n    across ="),
            "What is left over at the end of queries or keys is not counted. A short tile is a "
            "tile."),
    Mistake("rows before the keys",
            [("max(first + shift + 1, 0)", "first + shift + 1"),
             ("max(stop + shift, 0)", "stop + shift")],
            "Queries that see nothing have a negative number of keys with you. Where there are "
            "fewer keys than queries, bottom_right leaves the first queries with none."),
    Mistake("masked counted as whole", ("return whole", "return live"),
            "Your whole tiles include the masked ones. Each tile is to be counted once: the three "
            "numbers add up to all tiles."),
]  # fmt: skip

COUNT_TILES = Exercise(
    id="attention.count_tiles",
    points=4,
    reference=count_tiles,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_blocks,
    returns=("whole", "masked", "skipped"),
    timeout_s=30.0,  # a loop over all tiles of the long case is slow but right
    explanation="Along a row of tiles the first query sees least and the last one most. The tiles "
    "that the first sees completely are whole, those of which the last sees nothing are skipped, "
    "and the diagonal runs through the others. So two numbers of keys decide a row, and no mask is "
    "made: a kernel finds in the same way where its loop ends and from where on it must mask. With "
    "long sequences nearly half of all tiles are skipped and the masked ones become few, since "
    "they grow with the length and the others with its square.",
    hints=(
        "Look at one row of tiles, which has up to `block_q` queries. Which of these queries sees "
        "the fewest keys, and which sees the most?",
        "The number of keys that the first query of a row sees decides how many tiles are whole, "
        "and the number that the last query sees decides how many are not skipped. Query i sees "
        "`i + shift + 1` keys, but never fewer than 0 or more than `keys`.",
        "`whole += across if for_all == keys else for_all // block_k` counts the whole tiles of a "
        "row, a short last one too. Here `for_all` is the number of keys that the first query "
        "sees, and `across` is the number of tiles in a row.",
    ),
)
