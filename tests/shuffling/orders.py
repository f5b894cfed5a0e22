"""Random orders of random shards, as hypothesis strategies and as a list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from labcore.shuffling import (
    BlockShuffle,
    BufferShuffle,
    FullShuffle,
    Order,
    Sequential,
    ShardInterleave,
)

# No test here measures time: a slow machine is no failure.
EXAMPLES = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For tests that start processes; to shrink a failure would take minutes.
FEW_EXAMPLES = settings(
    EXAMPLES, max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)

Make = Callable[..., Order]
SMALL = st.integers(1, 12)


def interleave(lengths: Sequence[int], *, buffer_size: int, **settings: int) -> ShardInterleave:
    """Interleaved shards; a lone one has at least a buffer of 2, without which it is refused."""
    lone = len(lengths) == 1
    return ShardInterleave(lengths, buffer_size=max(buffer_size, 1 + lone), **settings)


KINDS: list[st.SearchStrategy[Make]] = [
    st.just(Sequential),
    st.just(FullShuffle),
    st.builds(
        lambda size, initial, shards: functools.partial(
            BufferShuffle, buffer_size=size, initial=initial, shuffle_shards=shards
        ),
        SMALL,
        st.none() | SMALL,
        st.booleans(),
    ),
    st.builds(lambda blocks: functools.partial(BlockShuffle, blocks=blocks), SMALL),
    st.builds(
        lambda ways, size: functools.partial(interleave, ways=ways, buffer_size=size),
        SMALL,
        SMALL,
    ),
]
# make(lengths) is an order with a seed of its own.
MAKERS = st.builds(
    lambda make, seed: functools.partial(make, seed=seed), st.one_of(KINDS), st.integers(0, 2**40)
)
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def one_of_each(rows: tuple[int, ...], seed: int = 0) -> list[Order]:
    return [
        Sequential(rows, seed=seed),
        FullShuffle(rows, seed=seed),
        BufferShuffle(rows, buffer_size=16, seed=seed),
        BufferShuffle(rows, buffer_size=16, initial=3, shuffle_shards=True, seed=seed),
        BlockShuffle(rows, blocks=3, seed=seed),
        ShardInterleave(rows, ways=3, seed=seed),
        ShardInterleave(rows, ways=2, buffer_size=8, seed=seed),
    ]


def rows_of(lengths: list[int]) -> list[list[int]]:
    """Shards whose rows are their own row numbers."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
