"""The work of a simulated token is that of the model, and the GPUs are the published ones."""

from __future__ import annotations

import dataclasses
import math

import pytest

from labcore.memory.accounting.shapes import parameter_shapes
from labcore.models import LlamaConfig
from labcore.parallel import cost, step, timeline
from labcore.parallel.collectives import ALL_REDUCES
from labcore.parallel.timeline import (
    GPUS,
    MODELS,
    Collective,
    Kernel,
    decode_step,
    held_bytes,
    simulate_timeline,
)

SMALL = LlamaConfig(
    vocab_size=240,
    hidden_size=48,
    intermediate_size=120,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    qkv_bias=True,
    output_bias=True,
)


def named(ops, name: str) -> list:
    return [op for op in ops if op.name == name]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_step_has_the_operations_of_its_layers(ranks: int) -> None:
    ops = decode_step(SMALL, ranks=ranks, batch=3, context=7)
    layers = SMALL.num_hidden_layers
    half = ("all-reduce",) if ranks > 1 else ()
    layer = ("norm", "qkv", "attention", "o", *half, "norm", "gate, up", "silu", "down", *half)
    tail = ("all-gather",) if ranks > 1 else ()
    expected = ("embedding", *half, *(layer * layers), "norm", "head", *tail)
    assert tuple(op.name for op in ops) == expected
    sums = [op for op in ops if isinstance(op, Collective) and op.kind == "all_reduce"]
    assert len(sums) == (2 * layers + 1 if ranks > 1 else 0)
    assert {op.nbytes for op in sums} <= {2 * 3 * 48}
    if ranks > 1:
        assert ops[-1].nbytes == 2 * 3 * 240 and {op.ranks for op in sums} == {ranks}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype_bytes", [1, 2, 4])
def test_one_rank_holds_and_reads_every_parameter(tied: bool, dtype_bytes: int) -> None:
    config = dataclasses.replace(SMALL, tie_word_embeddings=tied)
    numbers = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    table = config.vocab_size * config.hidden_size
    ops = decode_step(config, batch=5, context=11, dtype_bytes=dtype_bytes)
    read = sum(op.weights for op in ops if isinstance(op, Kernel))
    assert read == dtype_bytes * (numbers - (0 if tied else table))  # of the table, only rows
    cache = 2 * 3 * 5 * 11 * 4 * 6  # keys and values, layers, rows, tokens, heads, numbers a head
    held = held_bytes(config, batch=5, context=11, dtype_bytes=dtype_bytes)
    assert held == dtype_bytes * (numbers + cache)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_divide_the_weights_the_cache_and_the_arithmetic(ranks: int) -> None:
    config = dataclasses.replace(SMALL, output_bias=False)
    whole, part = (decode_step(config, ranks=n, batch=3, context=50) for n in (1, ranks))
    for name in ("qkv", "o", "gate, up", "down", "head"):
        for one, other in zip(named(whole, name), named(part, name), strict=True):
            assert one.weights == ranks * other.weights and one.flops == ranks * other.flops
    for one, other in zip(named(whole, "attention"), named(part, "attention"), strict=True):
        assert one.nbytes == ranks * other.nbytes and one.flops == ranks * other.flops
    assert named(whole, "norm") == named(part, "norm")  # whole on every rank
    held = [held_bytes(MODELS["70B"], ranks=n, context=999) for n in (1, 2, 4, 8)]
    norms = 2 * (2 * 80 + 1) * 8192
    for n, one in zip((1, 2, 4, 8), held, strict=True):
        assert n * (one - norms) == held[0] - norms


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_products_multiply_and_add_every_weight_for_every_row(ranks: int) -> None:
    config = dataclasses.replace(SMALL, qkv_bias=False, output_bias=False)
    ops = decode_step(config, ranks=ranks, batch=5, context=9, dtype_bytes=4)
    shapes = {  # numbers in and out of a row, of Hkv = 4 and H = 8 heads of 6
        "qkv": (48, (48 + 2 * 24) // ranks),
        "o": (48 // ranks, 48),
        "gate, up": (48, 2 * 120 // ranks),
        "down": (120 // ranks, 48),
        "head": (48, 240 // ranks),
    }
    for name, (wide_in, wide_out) in shapes.items():
        for op in named(ops, name):
            assert op.flops == 2 * 5 * wide_in * wide_out
            assert op.weights == 4 * wide_in * wide_out
            assert (op.inputs, op.outputs) == (4 * 5 * wide_in, 4 * 5 * wide_out)
    for op in named(ops, "attention"):  # scores and their sum of values, for all query heads
        assert op.flops == 2 * 2 * 5 * 9 * 48 // ranks


def test_attention_reads_the_cache_of_every_row() -> None:
    few, many = (decode_step(SMALL, batch=2, context=n) for n in (10, 110))
    grown = named(many, "attention")[0].inputs - named(few, "attention")[0].inputs
    assert grown == 2 * 2 * 2 * 4 * 6 * 100  # bytes, keys and values, rows, heads, numbers, tokens
    assert [op for op in few if op.name != "attention"] == [
        op for op in many if op.name != "attention"
    ]


@pytest.mark.parametrize("parallel_block", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_rows_read_the_weights_again(
    parallel_block: bool, ranks: int, parts: int
) -> None:
    how = {"ranks": ranks, "batch": 6, "context": 7, "parallel_block": parallel_block}
    whole, cut = (decode_step(SMALL, **how, micro_batches=n) for n in (1, parts))
    assert len(cut) == parts * len(whole)
    for name in {op.name for op in whole}:
        one, many = named(whole, name), named(cut, name)
        if isinstance(one[0], Kernel):
            assert sum(op.weights for op in many) == parts * sum(op.weights for op in one)
            for what in ("flops", "inputs", "outputs"):
                each = (sum(getattr(op, what) for op in ops) for ops in (one, many))
                assert math.isclose(*each)
        else:
            assert sum(op.nbytes for op in many) == sum(op.nbytes for op in one)
    # Every part reads its own rows and nothing else: it is the step of a smaller batch.
    of: list[int] = []
    for at, op in enumerate(cut):
        reads = {of[at - back] for back in op.after if back <= at}
        assert len(reads) <= 1
        of.append(reads.pop() if reads else len(set(of)))
    assert set(of) == set(range(parts))
    small = decode_step(SMALL, **how | {"batch": 6 // parts})
    for part in range(parts):
        own = [op for op, mine in zip(cut, of, strict=True) if mine == part]
        assert [dataclasses.replace(op, after=()) for op in own] == [
            dataclasses.replace(op, after=()) for op in small
        ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parallel_block", [False, True])
def test_operations_read_what_a_layer_gives_them(ranks: int, parallel_block: bool) -> None:
    ops = decode_step(SMALL, ranks=ranks, parallel_block=parallel_block)
    read = [[ops[at - back].name for back in op.after if back <= at] for at, op in enumerate(ops)]
    summed = {name: "all-reduce" if ranks > 1 else name for name in ("embedding", "o", "down")}
    norms = [names for names, op in zip(read, ops, strict=True) if op.name == "norm"]
    layers = SMALL.num_hidden_layers
    if parallel_block:
        assert norms == [[summed["embedding"]], *([[summed["down"], summed["o"]]] * layers)]
    else:
        assert norms == [[summed["embedding"]], *([[summed["o"]], [summed["down"]]] * layers)]
    chain = {"qkv": "norm", "attention": "qkv", "o": "attention", "gate, up": "norm",
             "silu": "gate, up", "down": "silu", "head": "norm"}  # fmt: skip
    for names, op in zip(read, ops, strict=True):
        assert op.name not in chain or names == [chain[op.name]]


def test_one_sum_adds_both_outputs_of_a_parallel_block_before_the_wire() -> None:
    two, one = (
        decode_step(SMALL, ranks=4, batch=3, parallel_block=True, one_sum=way)
        for way in (False, True)
    )
    assert [len(named(ops, "all-reduce")) for ops in (two, one)] == [7, 4]  # of 3 layers
    read = [[one[at - back].name for back in op.after if back <= at] for at, op in enumerate(one)]
    reads = {op.name: names for op, names in zip(one, read, strict=True)}  # of the last layer
    assert reads["down"] == ["silu", "o"] and reads["all-reduce"] == ["down"]
    assert reads["gate, up"] == reads["qkv"] == ["norm"] and reads["norm"] == ["all-reduce"]
    for name in ("qkv", "attention", "o", "silu", "down"):
        for ours, theirs in zip(named(one, name), named(two, name), strict=True):
            assert dataclasses.replace(ours, after=theirs.after) == theirs
    with pytest.raises(ValueError, match="one_sum needs parallel_block"):
        decode_step(SMALL, ranks=2, one_sum=True)


def test_kv_heads_fewer_than_ranks_are_copied() -> None:
    four, eight = (named(decode_step(SMALL, ranks=n), "qkv")[0] for n in (4, 8))
    # 2 of 8 query heads and one key and value head each, then one of each.
    assert four.outputs == 2 * (2 + 2) * 6 and eight.outputs == 2 * (1 + 2) * 6


@pytest.mark.parametrize(
    ("ranks", "changed", "told"),
    [
        (3, {}, "num_attention_heads .* got 8 and 3; .* 1, 2, 4, 8"),
        (8, {"intermediate_size": 100}, "intermediate_size .* got 100 and 8"),
        (8, {"vocab_size": 244}, "vocab_size .* got 244 and 8"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4},
            "num_key_value_heads .* got 6 and 4; .* 1, 2, 3, 6",
        ),
        (0, {}, "ranks must be at least 1"),
    ],
)
def test_what_does_not_divide_is_named(ranks: int, changed: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        decode_step(dataclasses.replace(SMALL, **changed), ranks=ranks)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="batch must be a multiple of micro_batches, got 5 and 2"):
        decode_step(SMALL, batch=5, micro_batches=2)
    with pytest.raises(ValueError, match="micro_batches must be at least 1"):
        decode_step(SMALL, micro_batches=0)


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_an_all_gather_is_the_second_half_of_an_all_reduce(algorithm: str) -> None:
    link = cost.Link(name="x", alpha=3e-6, beta=2e-9, source="")
    gather = Collective(name="x", kind="all_gather", ranks=8, nbytes=8000)
    steps = {"ring": 7, "halving_doubling": 3, "one_shot": 1, "two_shot": 1}[algorithm]
    # A rank sends its eighth to the seven others, or as much of others on.
    assert gather.seconds(link, algorithm) == pytest.approx(steps * 3e-6 + 7 * 1000 * 2e-9)


# Published numbers.


def test_models_have_their_published_sizes() -> None:
    published = {"7B": 6_738_415_616, "8B": 8_030_261_248, "13B": 13_015_864_320,
                 "70B": 68_976_648_192}  # fmt: skip
    for name, size in published.items():
        held = held_bytes(MODELS[name], context=1) - held_bytes(MODELS[name], context=2)
        assert held_bytes(MODELS[name], context=1) + held == 2 * size


def test_one_gpu_is_faster_on_paper_than_measured() -> None:
    """gpt-fast, Llama 2 7B in bf16 on an A100, one row: 104.9 tokens/s (its README, 2023)."""
    run = simulate_timeline(
        decode_step(MODELS["7B"], context=128), GPUS["A100 SXM"], cost.LINKS["NVLink 3"], graph=True
    )
    assert 0.6 < 104.9 * run.seconds < 1


def test_every_gpu_says_where_its_numbers_are_from() -> None:
    assert list(GPUS) == [gpu.name for gpu in GPUS.values()]
    assert all(gpu.source for gpu in GPUS.values())
    assert set(timeline.__all__) >= set(step.__all__)
