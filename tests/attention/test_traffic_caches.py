"""Both forms' bytes against programs that walk over tiles, element by element, through a cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcore.attention import traffic
from labcore.attention.configs import DESCRIBED, FORWARD
from labcore.attention.traffic import GPUS, Gpu, Shape
from tests.attention.test_traffic import tiles, visible

Piece = tuple[Any, ...]  # an element of a tensor, and its bytes at the end


@dataclass
class Program:
    """Reads a list of pieces per step, then writes."""

    steps: list[list[Piece]]
    writes: list[Piece]


class Cache:
    """Least recently used out, write-back; `moved` counts the bytes to and from memory."""

    def __init__(self, size: int) -> None:
        self.size, self.held, self.moved, self.requested = size, 0, 0, 0
        self.lines: OrderedDict[Piece, bool] = OrderedDict()  # whether it was written

    def touch(self, piece: Piece, write: bool = False) -> None:
        self.requested += piece[-1]
        if piece in self.lines:
            write |= self.lines.pop(piece)
        else:
            self.held += piece[-1]
            self.moved += 0 if write else piece[-1]
        self.lines[piece] = write
        while self.held > self.size:
            old, dirty = self.lines.popitem(last=False)
            self.held -= old[-1]
            self.moved += old[-1] if dirty else 0

    def run(self, kernels: Iterable[list[Program]], units: int, results: set[str]) -> None:
        """Run waves of `units` programs in step; results still held are written at the end."""
        for programs in kernels:
            for first in range(0, len(programs), units):
                wave = programs[first : first + units]
                for step in range(max(len(p.steps) for p in wave)):
                    for program in wave:
                        for piece in program.steps[step] if step < len(program.steps) else ():
                            self.touch(piece)
                for program in wave:
                    for piece in program.writes:
                        self.touch(piece, write=True)
        self.moved += sum(p[-1] for p, dirty in self.lines.items() if dirty and p[0] in results)


def part(name: str, head: int, rows: Iterable[int], columns: Iterable[int], size: int) -> list:
    columns = list(columns)
    return [(name, head, i, j, size) for i in rows for j in columns]


def naive(shape: Shape, direction: str, block_q: int, block_k: int) -> Iterator[list[Program]]:
    """The kernels of the naive form. Transposed operands are named with a star."""
    lengths = {"q": shape.length, "k": shape.keys, "d": shape.head_dim}
    size = shape.dtype_bytes

    def read(name: str, *place: Any) -> list[Piece]:
        head, rows, columns = place
        if name.endswith("*"):
            return part(name[:-1], head, columns, rows, size)
        return part(name, head, rows, columns, size)

    def product(a: str, b: str, out: str, form: str) -> list[Program]:
        m, n, k = (lengths[letter] for letter in form)
        return [
            Program(
                [read(a, head, rows, [i]) + read(b, head, [i], columns) for i in range(k)],
                part(out, head, rows, columns, size),
            )
            for head in range(shape.batch * shape.heads)
            for rows in tiles(m, block_q)
            for columns in tiles(n, block_k)
        ]

    def softmax(inputs: list[str], out: str) -> list[Program]:
        return [
            Program(
                [part(name, head, [row], range(shape.keys), size) for name in inputs],
                part(out, head, [row], range(shape.keys), size),
            )
            for head in range(shape.batch * shape.heads)
            for row in range(shape.length)
        ]

    if direction == "forward":
        yield product("q", "k*", "s", "qkd")
        yield softmax(["s"], "p")
        yield product("p", "v", "out", "qdk")
    else:
        yield product("p*", "do", "dv", "kdq")
        yield product("do", "v*", "dp", "qkd")
        yield softmax(["p", "dp"], "ds")
        yield product("ds", "k", "dq", "qdk")
        yield product("ds*", "q", "dk", "kdq")


def flash(shape: Shape, direction: str, block_q: int, block_k: int) -> Iterator[list[Program]]:
    size, seen, dims = shape.dtype_bytes, visible(shape), range(shape.head_dim)
    group, heads = shape.heads // shape.shared_heads, range(shape.batch * shape.heads)

    def rows(names: str, head: int, where: Iterable[int]) -> list[Piece]:
        return [p for name in names.split() for p in part(name, head, where, dims, size)]

    def numbers(names: str, head: int, where: Iterable[int]) -> list[Piece]:
        return [p for name in names.split() for p in part(name, head, where, [0], 4)]

    def live(queries: range, keys: range) -> bool:
        return bool(seen[queries.start : queries.stop, keys.start : keys.stop].any())

    def walk_keys(own: list[Piece], head: int, queries: range, writes: list[Piece]) -> Program:
        steps = [
            rows("k v", head // group, keys)
            for keys in tiles(shape.keys, block_k)
            if live(queries, keys)
        ]
        return Program([own, *steps], writes)

    each = [(head, queries) for head in heads for queries in tiles(shape.length, block_q)]
    if direction == "forward":
        yield [
            walk_keys(rows("q", h, t), h, t, rows("out", h, t) + numbers("lse", h, t))
            for h, t in each
        ]
        return
    yield [Program([rows("out do", h, t)], numbers("delta", h, t)) for h, t in each]
    yield [
        Program(
            [
                rows("k v", head, keys),
                *(
                    rows("q do", h, queries) + numbers("lse delta", h, queries)
                    for h in range(head * group, (head + 1) * group)
                    for queries in tiles(shape.length, block_q)
                    if live(queries, keys)
                ),
            ],
            rows("dk dv", head, keys),
        )
        for head in range(shape.batch * shape.shared_heads)
        for keys in tiles(shape.keys, block_k)
    ]
    yield [
        walk_keys(rows("q do", h, t) + numbers("lse delta", h, t), h, t, rows("dq", h, t))
        for h, t in each
    ]


FORMS = {"naive": naive, "flash": flash}
RESULTS = {"out", "lse", "dq", "dk", "dv"}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    length, group = draw(st.integers(1, 14)), draw(st.integers(1, 2))
    causal = draw(st.booleans())
    return Shape(
        batch=1,
        heads=2 * group,
        kv_heads=2,
        length=length,
        key_length=length + draw(st.integers(0, 9)) if causal else draw(st.integers(1, 20)),
        head_dim=draw(st.integers(1, 5)),
        is_causal=causal,
    )


CASES = {
    "shape": shapes(),
    "form": st.sampled_from(["naive", "flash"]),
    "direction": st.sampled_from(["forward", "backward"]),
    "block_q": st.integers(1, 5),
    "block_k": st.integers(1, 5),
}


def machine(units: int, cache: int) -> Gpu:
    return replace(GPUS["T4"], units=units, cache=cache)


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_requests_are_those_of_programs(shape, form, direction, block_q, block_k) -> None:
    cache = Cache(0)
    cache.run(FORMS[form](shape, direction, block_q, block_k), 3, set())
    found = traffic.requested_bytes(shape, form, direction, block_q=block_q, block_k=block_k)
    assert found == cache.requested


@settings(max_examples=120, deadline=None)
@given(**CASES, units=st.integers(1, 5), share=st.floats(0.02, 1.5))
def test_hbm_bytes_are_near_those_of_a_cache(
    shape, form, direction, block_q, block_k, units, share
) -> None:
    """A cache that holds a part of an operand answers a part; the model knows all or nothing.

    So a cache lies between the model at half its size and the model at twice its size. Besides,
    the end of a result may still be there when the next kernel starts.
    """
    tile = {"block_q": block_q, "block_k": block_k}
    a_step = 2 * (block_q + block_k) * (shape.head_dim * shape.dtype_bytes + 4)
    size = max(int(traffic.naive_bytes(shape, direction) * share), units * a_step)
    cache = Cache(size)
    cache.run(FORMS[form](shape, direction, block_q, block_k), units, RESULTS)
    half, double = (
        traffic.hbm_bytes(shape, form, machine(units, int(size * f)), direction, **tile)
        for f in (0.5, 2)
    )
    low, high = (0.4, 1.5) if form == "naive" else (0.8, 1.1)
    assert low * double <= cache.moved <= high * half


@settings(max_examples=40, deadline=None)
@given(**CASES, units=st.integers(1, 5))
def test_a_cache_for_everything_leaves_inputs_and_results(
    shape, form, direction, block_q, block_k, units
) -> None:
    cache = Cache(10**9)
    cache.run(FORMS[form](shape, direction, block_q, block_k), units, RESULTS)
    tile = {"block_q": block_q, "block_k": block_k}
    found = traffic.hbm_bytes(shape, form, machine(units, 10**9), direction, **tile)
    assert found == cache.moved
    if form == "flash":
        assert found == traffic.compulsory_bytes(shape, direction)


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_one_program_per_wave_without_a_cache_gets_all_that_it_requests(
    shape, form, direction, block_q, block_k
) -> None:
    causal = shape.is_causal and form == "flash"
    length = shape.length if causal else shape.length * block_q * block_k
    keys = shape.keys if causal else shape.keys * block_q * block_k
    whole = replace(
        shape, length=length, key_length=keys, head_dim=shape.head_dim * block_k, is_causal=causal
    )  # tiles without a ragged edge
    tile = {"block_q": block_q, "block_k": block_k}
    found = traffic.hbm_bytes(whole, form, machine(1, 0), direction, **tile)
    assert found == traffic.requested_bytes(whole, form, direction, **tile)


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_one_tile_makes_the_requests_those_of_whole_operations(
    shape, form, direction, block_q, block_k
) -> None:
    size = max(shape.length, shape.keys, shape.head_dim)
    found = traffic.requested_bytes(shape, "naive", direction, block_q=size, block_k=size)
    assert found == traffic.naive_bytes(shape, direction)


# At 4,096 tokens: the naive form in tiles of 128 x 128 over flash in the tiles that are launched.
LAUNCHED = [
    ("A100", 64, FORWARD[64]["ampere"], 5.35),
    ("A100", 128, FORWARD[128]["ampere"], 3.41),
    ("A100", 256, FORWARD[256]["ampere"], 1.36),
    ("H100", 64, DESCRIBED[64], 5.35),
    ("H100", 128, DESCRIBED[128], 3.41),
    ("H100", 256, FORWARD[256]["hopper"], 2.68),
]


@pytest.mark.parametrize(("gpu", "head_dim", "config", "ratio"), LAUNCHED, ids=str)
def test_flash_asks_for_less_at_every_head_dimension(gpu, head_dim, config, ratio) -> None:
    shape = Shape(batch=1, heads=16, length=4096, head_dim=head_dim)
    product, walk = {"block_q": 128, "block_k": 128}, {"block_q": config.m, "block_k": config.n}
    naive = traffic.requested_bytes(shape, "naive", **product)
    assert naive / traffic.requested_bytes(shape, "flash", **walk) == pytest.approx(ratio, abs=5e-3)
    # Of HBM, the naive form reads and writes its scores, and flash what it must.
    naive = traffic.hbm_bytes(shape, "naive", GPUS[gpu], **product)
    assert naive == pytest.approx(traffic.naive_bytes(shape), rel=0.02)
    found = traffic.hbm_bytes(shape, "flash", GPUS[gpu], **walk)
    assert found == traffic.compulsory_bytes(shape)


def test_long_keys_in_a_small_cache_are_read_once_per_wave() -> None:
    gpu, shape = GPUS["T4"], Shape(batch=1, heads=1, length=8192, key_length=65536, head_dim=128)
    keys = 2 * shape.key_bytes
    assert keys > gpu.cache
    found = traffic.hbm_bytes(shape, "flash", gpu, block_q=64, block_k=64)
    waves = -(-8192 // 64 // gpu.units)
    assert found - traffic.compulsory_bytes(shape) == (waves - 1) * keys


def test_unknown_words_and_sizes_are_refused() -> None:
    shape, tile = Shape(batch=1, heads=1, length=8, head_dim=16), {"block_q": 4, "block_k": 4}

    def on_t4(shape: Shape, form: str, *direction: str, **tile: int) -> int:
        return traffic.hbm_bytes(shape, form, GPUS["T4"], *direction, **tile)

    for count in (traffic.requested_bytes, on_t4):
        with pytest.raises(ValueError, match="form must be one of 'naive', 'flash', got 'tiled'"):
            count(shape, "tiled", **tile)
        for form in FORMS:
            with pytest.raises(ValueError, match="direction must be one of"):
                count(shape, form, "sideways", **tile)
            with pytest.raises(ValueError, match="block_q must be at least 1, got 0"):
                count(shape, form, **{**tile, "block_q": 0})
