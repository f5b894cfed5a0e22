"""The tile of an attention kernel for one compute unit of CDNA3."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.hip.occupancy import occupancy

__all__ = ["CHOOSE_TILE"]

STEP, MOST = 32, 256  # step and maximum of queries and of keys
OTHERS = (24, 28, 32, 36, 40)  # registers per lane for everything but scores and queries
PAD = 8  # bytes at the end of each row in LDS
HALF = 2  # bytes per fp16


def choose_tile(
    head_dim: int, *, waves: int, stages: int, wanted: int, other: int
) -> tuple[int, int, int]:
    """(queries, keys, waves per SIMD) of the best tile; (0, 0, 0) where none will do."""
    lanes, best = 64 * waves, (0, 0, 0)
    for queries in range(STEP, MOST + 1, STEP):
        for keys in range(STEP, MOST + 1, STEP):
            scores = queries * keys // lanes
            loaded = queries * head_dim // (2 * lanes)  # a register holds two fp16
            sums = queries * head_dim // lanes
            vgprs = other + scores + loaded
            if max(vgprs, sums) > 256:
                continue
            lds = stages * 2 * keys * (head_dim * HALF + PAD)
            found = occupancy("gfx942", vgprs=vgprs, agprs=sums, lds=lds, threads=lanes)
            if found.waves_per_simd >= wanted:
                tile = queries, keys, found.waves_per_simd
                best = max(best, tile)
    return best


def _cases(seed: int) -> list[dict[str, Any]]:
    """Every combination of three head widths, waves, stages, and occupancies, shuffled."""
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


_MISTAKES = [
    Mistake("LDS alone", ("other + scores + loaded", "sums = 0"),
            "Your tile fits into LDS, but the registers of a lane are not looked at."),
    Mistake("registers alone", ("lds=lds", "lds=0"),
            "Your tile fits into the registers, but the LDS that keys and values take is not "
            "looked at."),
    Mistake("no scores", (" + scores", ""),
            "The scores take no registers with you. There are queries times keys of them."),
    Mistake("no queries", (" + loaded", ""),
            "The queries take no registers with you: they are loaded once and stay."),
    Mistake("queries unpacked", (" + loaded", " + 2 * loaded"),
            "Your queries take a register each. Of fp16 two fit into one."),
    Mistake("nothing else", ("other + ", ""),
            "The `other` registers that the rest of the kernel needs are missing."),
    Mistake("no accumulators", ("sums = queries * head_dim // lanes", "sums = 0"),
            "You count no registers for the weighted sums, or take them from a separate file. On "
            "CDNA3 a lane's vector and accumulation registers come from the same 512."),
    Mistake("no padding", (" + PAD", ""), "The 8 bytes at the end of each row in LDS are missing."),
    Mistake("keys alone", ("stages * 2", "stages"),
            "Your LDS holds the keys. The values of a tile stand there too."),
    Mistake("one stage", ("stages * 2", "2"),
            "Your LDS holds one tile of keys and values. With two stages, two."),
    Mistake("not more than wanted", (">= wanted", "== wanted"),
            "You take only tiles with exactly the wanted number of waves. More waves are no "
            "fault."),
    Mistake("keys first", ("best, tile", "best, tile, key=lambda t: (t[1], t[0])"),
            "You take the tile with the most keys. The traffic of a kernel depends on the queries: "
            "each tile of them reads all keys and values once."),
    Mistake("largest square", ("best, tile", "best, tile, key=lambda t: (min(t[:2]), t)"),
            "You look for a tile that is as square as possible. The intensity depends on one of "
            "its sides alone."),
    Mistake("largest area", ("best, tile", "best, tile, key=lambda t: (t[0] * t[1], t[1])"),
            "You take the tile with the most pairs of queries and keys. The intensity depends on "
            "one of its sides alone."),
    Mistake("fewest keys", ("best, tile", "best, tile, key=lambda t: (t[0], -t[1])"),
            "Of the tiles with the most queries you take that with the fewest keys. The most are "
            "asked for."),
    Mistake("most waves", ("best, tile", "best, tile, key=lambda t: (t[2], t)"),
            "You take the tile with the highest occupancy. It is to be high enough, and no more: "
            "what counts then is the intensity."),
]  # fmt: skip

CHOOSE_TILE = Exercise(
    id="hip.choose_tile",
    points=3,
    reference=choose_tile,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_rest,
    returns=("queries", "keys", "waves per SIMD"),
    explanation="A tile of queries reads all keys and values once and multiplies each of them with "
    "all of its queries, so an element of 2 bytes is used for 2 operations a query: the intensity "
    "is the number of queries, in operations a byte. Queries cost registers, for their own values "
    "and for the weighted sums; keys cost LDS, and registers for the scores. So the two sides are "
    "bound by different things, and the best tile is taller than wide. That occupancy is asked for "
    "at all has its reason in latency: a wave that waits for memory needs others beside it.",
    hints=(
        "For one tile of queries that meets all keys, write down the operations and the bytes "
        "that are read. What cancels in their quotient, and what is left?",
        "The intensity depends on the number of queries alone, so of all tiles that are allowed "
        "take the most queries, and then the most keys. Divide what the block holds in registers "
        "by its 64 · `waves` lanes, and drop a tile with more than 256 registers of a kind before "
        "you call `occupancy`.",
        "`vgprs = other + queries * keys // lanes + queries * head_dim // (2 * lanes)` is what a "
        "lane needs in vector registers, with `lanes = 64 * waves`. The weighted sums go into "
        "`agprs`.",
    ),
)
