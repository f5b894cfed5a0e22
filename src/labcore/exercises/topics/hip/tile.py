"""The tile of an attention kernel for one compute unit of CDNA3."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.hip.occupancy import occupancy

__all__ = ["CHOOSE_TILE"]

STEP, MOST = 32, 256  # of queries and of keys
OTHERS = (24, 28, 32, 36, 40)  # registers of a lane for all that is neither scores nor queries
PAD = 8  # bytes at the end of each row in LDS
HALF = 2  # bytes of an fp16


def choose_tile(
    head_dim: int, *, waves: int, stages: int, wanted: int, other: int
) -> tuple[int, int, int]:
    """(queries, keys, waves per SIMD) of the best tile; (0, 0, 0) where none will do."""
    best = (0, 0, 0)
    for queries in range(STEP, MOST + 1, STEP):
        for keys in range(STEP, MOST + 1, STEP):
            lanes = 64 * waves
            sums = queries * head_dim // lanes
            vgprs = other + queries * keys // lanes + queries * head_dim // (2 * lanes)
            if vgprs > 256 or sums > 256:
                continue
            lds = stages * 2 * keys * (head_dim * HALF + PAD)
            found = occupancy("gfx942", vgprs=vgprs, agprs=sums, lds=lds, threads=lanes)
            if found.waves_per_simd >= wanted:
                best = max(best, (queries, keys, found.waves_per_simd))
    return best


def _held(
    fault: str, queries: int, keys: int, head_dim: int, lanes: int, other: int
) -> tuple[int, int]:
    """Vector and accumulation registers of a lane."""
    scores, query = queries * keys // lanes, queries * head_dim // (2 * lanes)
    vgprs = other + scores + query
    sums = queries * head_dim // lanes
    if fault == "no scores":
        vgprs -= scores
    if fault == "no queries":
        vgprs -= query
    if fault == "queries unpacked":
        vgprs += query
    if fault == "nothing else":
        vgprs -= other
    return vgprs, 0 if fault == "no accumulators" else sums


def _wrongly(fault: str) -> Callable[..., tuple[int, int, int]]:
    def tiles(
        head_dim: int, waves: int, stages: int, wanted: int, other: int
    ) -> Iterator[tuple[int, ...]]:
        for queries in range(STEP, MOST + 1, STEP):
            for keys in range(STEP, MOST + 1, STEP):
                vgprs, sums = _held(fault, queries, keys, head_dim, 64 * waves, other)
                row = head_dim * HALF + (0 if fault == "no padding" else PAD)
                held = {"keys alone": stages, "one stage": 2}.get(fault, 2 * stages)
                if fault == "LDS alone":
                    vgprs = sums = 0
                if fault == "registers alone":
                    held = 0
                if max(vgprs, sums) > 256:
                    continue
                lds = held * keys * row
                found = occupancy(
                    "gfx942", vgprs=vgprs, agprs=sums, lds=lds, threads=64 * waves
                ).waves_per_simd
                if found == wanted or (found > wanted and fault != "not more than wanted"):
                    yield queries, keys, found

    def choose(
        head_dim: int, *, waves: int, stages: int, wanted: int, other: int
    ) -> tuple[int, int, int]:
        def merit(one: tuple[int, ...]) -> tuple[int, ...]:
            queries, keys, found = one
            return {
                "keys first": (keys, queries),
                "largest square": (min(queries, keys), queries, keys),
                "largest area": (queries * keys, keys),
                "fewest keys": (queries, -keys),
                "most waves": (found, queries, keys),
            }.get(fault, one)

        able = tiles(head_dim, waves, stages, wanted, other)
        queries, keys, found = max(able, key=merit, default=(0, 0, 0))
        return queries, keys, found

    return choose


def _cases(seed: int) -> list[dict[str, Any]]:
    """Three widths of a head, every number of waves and stages, three occupancies."""
    chance = random.Random(seed)
    cases = [
        {"head_dim": head_dim, "waves": waves, "stages": stages, "wanted": wanted}
        for head_dim in (64, *chance.sample((80, 96, 112, 128), 2))
        for waves in (1, 2, 4)
        for stages in (1, 2)
        for wanted in (1, 2, 3)
    ]
    return chance.sample(cases, len(cases))


def _own_rest(student: int) -> Mapping[str, Any]:
    return {"other": random.Random(f"hip.choose_tile:{student}").choice(OTHERS)}


_HINTS = {
    "LDS alone": "Your tile fits into LDS, but the registers of a lane are not looked at.",
    "registers alone": "Your tile fits into the registers, but the LDS that keys and values take "
    "is not looked at.",
    "no scores": "The scores take no registers with you. There are queries times keys of them.",
    "no queries": "The queries take no registers with you: they are loaded once and stay.",
    "queries unpacked": "Your queries take a register each. Of fp16 two fit into one.",
    "nothing else": "The `other` registers that the rest of the kernel needs are missing.",
    "no accumulators": "The weighted sums take no registers with you. Accumulation registers come "
    "out of the same 512 as the others.",
    "no padding": "The 8 bytes at the end of each row in LDS are missing.",
    "keys alone": "Your LDS holds the keys. The values of a tile stand there too.",
    "one stage": "Your LDS holds one tile of keys and values. With two stages, two.",
    "not more than wanted": "You take only tiles with exactly the wanted number of waves. More "
    "waves are no fault.",
    "keys first": "You take the tile with the most keys. The traffic of a kernel depends on the "
    "queries: each tile of them reads all keys and values once.",
    "largest square": "You look for a tile that is as square as possible. The intensity depends on "
    "one of its sides alone.",
    "largest area": "You take the tile with the most pairs of queries and keys. The intensity "
    "depends on one of its sides alone.",
    "fewest keys": "Of the tiles with the most queries you take that with the fewest keys. The "
    "most are asked for.",
    "most waves": "You take the tile with the highest occupancy. It is to be high enough, and no "
    "more: what counts then is the intensity.",
}

CHOOSE_TILE = Exercise(
    id="hip.choose_tile",
    reference=choose_tile,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_rest,
    returns=("queries", "keys", "waves per SIMD"),
    explanation="A tile of queries reads all keys and values once and multiplies each of them with "
    "all of its queries, so an element of 2 bytes is used for 2 operations a query: the intensity "
    "is the number of queries, in operations a byte. Queries cost registers, for their own values "
    "and for the weighted sums; keys cost LDS, and registers for the scores. So the two sides are "
    "bound by different things, and the best tile is taller than wide. That occupancy is asked for "
    "at all has its reason in latency: a wave that waits for memory needs others beside it.",
)
