"""Each order is a permutation of the rows in every epoch, and moves rows as far as it says."""

import functools
import itertools
import json
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch.utils.data import BatchSampler, DataLoader
from webdataset.filters import _shuffle

from labcore.shuffling import (
    BlockShuffle,
    BufferShuffle,
    FullShuffle,
    Sequential,
    ShardInterleave,
    shards_of,
)
from tests.shuffling.orders import EXAMPLES, LENGTHS, MAKERS, one_of_each


@EXAMPLES
@given(make=MAKERS, lengths=LENGTHS, epoch=st.integers(0, 5), parts=st.integers(1, 9))
def test_every_row_is_in_one_part_of_every_epoch_once(make, lengths, epoch, parts) -> None:
    order = make(lengths)
    found = [list(order.part(epoch, part, parts)) for part in range(parts)]
    assert sorted(itertools.chain(*found)) == list(range(sum(lengths)))
    for part, rows in enumerate(found):
        assert rows == list(make(lengths).part(epoch, part, parts))


@EXAMPLES
@given(
    make=MAKERS,
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=7),
    replicas=st.integers(1, 4),
    even=st.booleans(),
)
def test_replicas_share_the_rows(make, lengths, replicas, even) -> None:
    orders = [make(lengths, num_replicas=replicas, rank=r, even=even) for r in range(replicas)]
    found = [list(order) for order in orders]
    assert [len(rows) for rows in found] == [len(order) for order in orders]
    missing = Counter(range(sum(lengths))) - Counter(itertools.chain(*found))
    assert sum(map(len, found)) + missing.total() == sum(lengths)
    if even:
        assert len({len(rows) for rows in found}) == 1 and missing.total() < replicas
    else:
        assert not missing
    # Together the replicas read the order of one: a global batch is as mixed as a single one's.
    whole = list(make(lengths).indices(0))
    for rank, rows in enumerate(found):
        assert rows == whole[rank::replicas][: len(rows)]


def test_every_epoch_has_another_order_without_set_epoch(seed: int) -> None:
    for order in one_of_each(shards_of(100, 7), seed)[1:]:
        epochs = [tuple(order) for _ in range(4)]
        assert order.epoch == 4 and len(set(epochs)) == 4, type(order).__name__
        assert all(sorted(rows) == list(range(100)) for rows in epochs)
        order.set_epoch(2)
        assert tuple(order) == epochs[2]
        assert tuple(order.indices(1)) == epochs[1]


def test_seed_and_epoch_do_not_add_up() -> None:
    # webdataset's detshuffle seeds with seed + epoch: its next epoch is the next seed's first one.
    for first, second in zip(one_of_each((9,) * 12, 0), one_of_each((9,) * 12, 1), strict=True):
        if not isinstance(first, Sequential):
            assert list(first.indices(1)) != list(second.indices(0))


BUFFER = [3, 1, 4, 5, 6, 0, 2, 8, 9, 7]
FULL = [1, 7, 3, 2, 9, 6, 0, 5, 8, 4]
BLOCK = [9, 7, 8, 6, 2, 3, 0, 1, 5, 4]
INTERLEAVE = [8, 6, 9, 7, 0, 2, 1, 3, 4, 5]


def test_an_order_is_the_same_in_every_version() -> None:
    # A run goes on after an upgrade only while these stay as they are.
    assert list(BufferShuffle(10, buffer_size=4, seed=7).indices(3)) == BUFFER
    assert list(FullShuffle(10, seed=7).indices(3)) == FULL
    assert list(BlockShuffle(shards_of(10, 2), blocks=2, seed=7).indices(3)) == BLOCK
    assert list(ShardInterleave(shards_of(10, 2), ways=2, seed=7).indices(3)) == INTERLEAVE


@pytest.mark.parametrize(
    "make",
    [
        FullShuffle,
        functools.partial(BufferShuffle, buffer_size=4),
        functools.partial(BufferShuffle, buffer_size=9),
        lambda n, seed: BlockShuffle((1,) * n, blocks=4, seed=seed),
        lambda n, seed: BlockShuffle((2, 2), blocks=2, seed=seed),
    ],
)
def test_all_orders_are_equally_likely_if_the_buffer_holds_all(make, seed: int) -> None:
    first = random.Random(seed).randrange(2**40)
    counts = Counter(tuple(make(4, seed=first + i)) for i in range(1200))
    statistic = sum((counts[p] - 50) ** 2 / 50 for p in itertools.permutations(range(4)))
    assert statistic < chi2.isf(1e-6, 23)  # one false alarm in a million runs of one case


@EXAMPLES
@given(
    rows=st.integers(1, 60), size=st.integers(1, 20), initial=st.integers(1, 25), seed=st.integers()
)
def test_the_buffer_follows_webdatasets_rule_draw_by_draw(rows, size, initial, seed) -> None:
    class Mirror(random.Random):
        def randint(self, low: int, high: int) -> int:
            return low + int(self.random() * (high - low + 1))

    dice = Mirror(f"{seed}/0/part 0 of 1")
    theirs = list(_shuffle(iter(range(rows)), size, initial, rng=dice))
    assert list(BufferShuffle(rows, buffer_size=size, initial=initial, seed=seed)) == theirs


@EXAMPLES
@given(rows=st.integers(1, 80), size=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_a_buffer_gives_no_row_before_it_came_in(rows, size, seed) -> None:
    for place, row in enumerate(BufferShuffle(rows, buffer_size=size, seed=seed)):
        assert row <= place + size - 1
    if size == 1:
        assert list(BufferShuffle(rows, buffer_size=1, seed=seed)) == list(range(rows))


def test_block_shuffle_empties_buffers_of_whole_blocks_in_turn(seed: int) -> None:
    rows = list(BlockShuffle(shards_of(96, 8), blocks=3, seed=seed))
    for start in range(0, 96, 24):
        buffer = rows[start : start + 24]
        blocks = {row // 8 for row in buffer}
        assert len(blocks) == 3 and set(buffer) == {8 * b + i for b in blocks for i in range(8)}


def test_interleaving_takes_one_row_of_each_open_shard_in_turn(seed: int) -> None:
    rows = list(ShardInterleave((5,) * 6, ways=3, seed=seed))
    for start in range(0, 30, 3):
        turn = rows[start : start + 3]
        assert len({row // 5 for row in turn}) == 3
        assert len({row % 5 for row in turn}) == 1
    # Within a shard, rows keep their order.
    for shard in range(6):
        own = [row for row in rows if row // 5 == shard]
        assert own == sorted(own)


@EXAMPLES
@given(
    make=MAKERS, lengths=LENGTHS, even=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=3)
)
def test_a_resumed_order_goes_on_bit_for_bit(make, lengths, even, cuts) -> None:
    arguments = {"num_replicas": min(2, sum(lengths)), "even": even}
    whole = _first(make(lengths, **arguments), 70)
    order, found = make(lengths, **arguments), []
    for cut in cuts:
        found += _first(order, cut)
        state = json.loads(json.dumps(order.state_dict()))
        order = make(lengths, **arguments)
        order.load_state_dict(state)
    found += _first(order, 70)
    assert found[:70] == whole


def _first(order, count: int) -> list[int]:
    """`count` rows through as many loops as it takes, each left as soon as it has enough."""
    found: list[int] = []
    while len(found) < count:
        for row in order:
            found.append(row)
            if len(found) == count:
                break
    return found


def test_an_order_is_a_sampler_for_a_data_loader(seed: int) -> None:
    for order in one_of_each(shards_of(50, 7), seed):
        batches = list(DataLoader(range(50), batch_size=8, sampler=order))
        assert sorted(torch.cat(batches).tolist()) == list(range(50))
        assert sum(map(len, BatchSampler(order, 8, drop_last=True))) == 48 and order.epoch == 2


def test_two_loops_at_once_are_refused() -> None:
    order = FullShuffle(9)
    with pytest.raises(RuntimeError, match="one loop at a time"):
        list(zip(order, order, strict=True))
    older = iter(order)
    next(older)
    order.set_epoch(0)
    with pytest.raises(RuntimeError, match="one loop at a time"):
        next(older)


def test_state_of_another_order_is_refused_with_its_differences() -> None:
    state = BufferShuffle((4, 5), buffer_size=3, seed=1).state_dict()
    for other, name in [
        (BufferShuffle((4, 5), buffer_size=4, seed=1), "buffer_size"),
        (BufferShuffle((5, 4), buffer_size=3, seed=1), "shards"),
        (BufferShuffle((4, 5), buffer_size=3, seed=2), "seed"),
        (BufferShuffle((4, 5), buffer_size=3, seed=1, num_replicas=2, rank=1), "rank"),
        (FullShuffle((4, 5), seed=1), "order"),
    ]:
        with pytest.raises(ValueError, match=f"same arguments.*{name}"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: FullShuffle(0), ValueError, "at least 1, got 0"),
        (lambda: FullShuffle(True), TypeError, "whole number"),
        (lambda: FullShuffle(10, seed=None), TypeError, "seed must be an int, got None"),
        (lambda: FullShuffle([]), ValueError, "rows must be at least 1"),
        (lambda: FullShuffle([3, 0, 2]), ValueError, "leave out empty shards"),
        (lambda: FullShuffle(3, num_replicas=4), ValueError, "every replica needs a row"),
        (lambda: FullShuffle(3, num_replicas=2, rank=2), ValueError, r"rank must .*0\.\.1, got 2"),
        (lambda: BufferShuffle(3, buffer_size=0), ValueError, "buffer_size"),
        (lambda: BufferShuffle(3, buffer_size=2, initial=0), ValueError, "initial"),
        (lambda: BlockShuffle(3, blocks=0), ValueError, "blocks"),
        (lambda: ShardInterleave(3, ways=0), ValueError, "ways"),
        (lambda: ShardInterleave(8, ways=3), ValueError, "one shard of 8 rows"),
        (lambda: ShardInterleave([8], ways=3), ValueError, "length of each shard"),
        (lambda: shards_of(3, 0), ValueError, "size"),
        (lambda: FullShuffle(3).set_epoch(-1), ValueError, "epoch"),
    ],
)
def test_bad_arguments_say_what_to_do(make, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()
