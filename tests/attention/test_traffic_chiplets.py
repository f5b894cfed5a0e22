"""What the dies' caches read: by hand, between two bounds, and by a cache that is simulated."""

import random
from collections import OrderedDict
from dataclasses import replace

import pytest

from labcore.attention.traffic import GPUS, Shape, requested_bytes
from labcore.attention.traffic.chiplets import fabric_bytes

TILE = {"block_q": 128, "block_k": 64}
SMALL = replace(GPUS["MI300X"], units=4)


def simulated(shape: Shape, order: str, *, dies: int, l2: int, block_q: int, block_k: int) -> int:
    """Bytes that dies' least-recently-used caches read, with programs that run in step."""
    row = shape.head_dim * shape.dtype_bytes
    tiles = -(-shape.length // block_q)
    programs = shape.batch * shape.heads * tiles
    each = -(-programs // dies)
    read = 0
    for die in range(dies):
        mine = list(range(programs))[die::dies]
        if order == "by head":
            mine = list(range(programs))[die * each : (die + 1) * each]
        held: OrderedDict[tuple[object, ...], int] = OrderedDict()

        def touch(piece: tuple[object, ...], size: int, *, cache=held) -> int:
            hit = piece in cache
            cache[piece] = size
            cache.move_to_end(piece)
            while sum(cache.values()) > l2:
                cache.popitem(last=False)
            return 0 if hit else size

        at_once = SMALL.units // dies
        for first in range(0, len(mine), at_once):
            wave = mine[first : first + at_once]
            read += sum(touch(("q", p), block_q * row) for p in wave)
            for tile in range(shape.keys // block_k):
                read += sum(touch((p // tiles, tile), 2 * block_k * row) for p in wave)
    return read


@pytest.mark.parametrize("order", ["in turn", "by head"])
@pytest.mark.parametrize("l2", [40_000, 10_000_000])
def test_the_model_is_what_simulated_caches_read(order: str, l2: int, seed: int) -> None:
    draw = random.Random(seed)
    shape = Shape(
        batch=draw.choice((1, 2)), heads=draw.choice((2, 3, 6)), length=64 * draw.choice((2, 5)),
        head_dim=64, key_length=32 * draw.choice((8, 12)),
    )  # fmt: skip
    sizes = {"dies": 2, "l2": l2, "block_q": 64, "block_k": 32}
    assert fabric_bytes(shape, SMALL, order, **sizes) == simulated(shape, order, **sizes)


def test_neighbors_on_one_die_read_less_and_both_orders_read_what_they_must() -> None:
    shape = Shape(batch=1, heads=32, length=4096, head_dim=128)
    gpu = GPUS["MI300X"]
    apart, together = (fabric_bytes(shape, gpu, o, **TILE) for o in ("in turn", "by head"))
    # By hand: a die's waves of 38 programs span programs 0-303, 304-607, 608-911 and 912-1023, in
    # heads 0-9, 9-18, 19-28 and 28-31.
    query, pair = 4096 * 256 * 32, 2 * 4096 * 256
    assert apart == query + 8 * pair * (10 + 10 + 10 + 4)
    assert query + 32 * pair <= together < apart
    assert apart <= requested_bytes(shape, "flash", **TILE)
    causal = replace(shape, is_causal=True)
    assert fabric_bytes(causal, gpu, "by head", **TILE) <= together


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"order": "random"}, "order must be one of"),
        ({"dies": 7}, "dies must divide the GPU's 304 units, got 7"),
        ({"block_q": 0}, "block_q must be at least 1"),
    ],
)
def test_impossible_arguments_are_refused(more: dict, sentence: str) -> None:
    shape = Shape(batch=1, heads=1, length=64, head_dim=64)
    given = {"order": "in turn", **TILE, **more}
    with pytest.raises(ValueError, match=sentence):
        fabric_bytes(shape, GPUS["MI300X"], given.pop("order"), **given)
