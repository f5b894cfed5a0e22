"""Tiles that nobody launches are compiled like those that are."""

from __future__ import annotations

import pytest

from labcore.attention.configs import DESCRIBED, FORWARD
from labcore.compile_only import read, tiles
from tests.compile_only.test_table import TABLE

pytestmark = pytest.mark.long


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_our_own_tile_needs_what_the_table_says(target: str) -> None:
    own, name = FORWARD[64]["ampere"], "forward"
    if target == "sm_90":
        own, name = DESCRIBED[64], "described"
    grid = {
        "target": (target,),
        "head_dim": (64,),
        "rows": (own.m,),
        "columns": (own.n,),
        "stages": (own.stages, own.stages - 1),
        "warps": (own.warps,),
    }
    found = tiles.measure_tiles(grid)
    of_table = read(TABLE)["kernels"][f"{name}_kernel/bfloat16-d64"][target]
    same, smaller = found.values()
    assert same == {key: of_table[key] for key in tiles.KEPT}
    assert smaller["shared"] < same["shared"]


def test_a_timeline_has_the_products_that_the_table_counts() -> None:
    loop = read(TABLE)["kernels"]["described_kernel/bfloat16-d64"]["sm_90"]["loop"]
    found = tiles.measure_timeline(64)
    for scheduler, clocks in zip(("ahead", "turns"), loop["clocks"], strict=True):
        assert found["clocks"][scheduler] == 2 * clocks
        rows = found[scheduler]["matrix"]
        assert len(rows) == 2 and all(0 <= share <= 1 for row in rows for share in row)
        work = sum(map(sum, rows)) / tiles.BINS * found["clocks"][scheduler]
        assert work == pytest.approx(2 * loop["busy"]["matrix"], rel=0.1)
