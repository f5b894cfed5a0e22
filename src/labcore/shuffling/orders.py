"""Orders of rows as torch samplers, each a pure function of seed and epoch.

An order depends only on row numbers, and is known before any row is read. Its state is therefore
two numbers (epoch, rows yielded), whatever its buffer holds, and the same order works for indexed
data (`ResumableLoader`) and for data that is read from front to back (`StreamRows`).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

from labcore.checks import positive_int
from labcore.shuffling.state import Resumable

__all__ = [
    "BlockShuffle",
    "BufferShuffle",
    "FullShuffle",
    "Order",
    "Sequential",
    "ShardInterleave",
    "shards_of",
]


T = TypeVar("T")
_END: Any = object()


def shards_of(rows: int, size: int) -> tuple[int, ...]:
    """Return the lengths of the shards when `rows` rows are split into shards of `size`.

    The last shard may be shorter: shards_of(10, 4) is (4, 4, 2).
    """
    positive_int("rows", rows)
    positive_int("size", size)
    return tuple(min(size, rows - start) for start in range(0, rows, size))


def _permutation(count: int, dice: random.Random) -> np.ndarray:
    # numpy guarantees that RandomState's stream never changes, so orders survive upgrades.
    return np.random.RandomState([dice.getrandbits(32) for _ in range(4)]).permutation(count)


def _permuted(shards: Sequence[Iterable[T]], dice: random.Random) -> Iterator[T]:
    waiting: list[Any] = list(itertools.chain.from_iterable(shards))
    for place in _permutation(len(waiting), dice).tolist():
        item, waiting[place] = waiting[place], None  # free the yielded row's memory
        yield item


def _buffered(rows: Iterable[T], size: int, initial: int, dice: random.Random) -> Iterator[T]:
    """Yield random rows from a buffer of at most `size` rows, once it holds `initial` of them.

    Until the buffer is full, two rows enter for each one that leaves, as in webdataset.
    """
    source, waiting, uniform = iter(rows), list[T](), dice.random
    for row in source:
        waiting.append(row)
        if len(waiting) < size:
            waiting.extend(itertools.islice(source, 1))
        if len(waiting) >= initial:
            chosen = int(uniform() * len(waiting))
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            yield waiting.pop()
    while waiting:
        chosen = int(uniform() * len(waiting))
        waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
        yield waiting.pop()


class Order(Resumable[int], Sampler[int]):
    """Base class of all orders: a torch Sampler of row indices with an exact state.

    rows: the number of rows, or the length of each shard (rows are then numbered across shards).
    seed, epoch: the same two numbers give the same order on every machine.
    num_replicas, rank: those of a data-parallel job. Replica r gets every num_replicas-th index,
    starting with index r.
    even: drop the last (rows mod num_replicas) indices of an epoch, so that all replicas take the
    same number of steps. even=False yields every row.

    `state_dict` counts the indices that were yielded. A DataLoader takes indices ahead of its
    consumer; use `ResumableLoader` there, whose state counts what was received.
    Raises ValueError for no rows, an empty shard, or a rank outside 0..num_replicas - 1.
    """

    #: Whether the shards are in a new random order each epoch.
    shuffle_shards = False

    def __init__(
        self,
        rows: int | Sequence[int],
        *,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        even: bool = True,
    ) -> None:
        super().__init__()
        lengths = (rows,) if isinstance(rows, int) else tuple(rows)
        for length in lengths:
            positive_int("the length of a shard", length, "leave out empty shards")
        self.rows = positive_int("rows", sum(lengths))
        ends = itertools.accumulate(lengths)
        self.shards = tuple(
            range(end - length, end) for length, end in zip(lengths, ends, strict=True)
        )
        if not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {seed!r}; pass a whole number")
        positive_int("num_replicas", num_replicas)
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank must be in 0..{num_replicas - 1}, got {rank}; num_replicas is the total"
            )
        if num_replicas > self.rows:
            raise ValueError(
                f"every replica needs a row, got {self.rows} rows for {num_replicas} replicas"
            )
        self.seed, self.num_replicas, self.rank, self.even = seed, num_replicas, rank, even

    def _settings(self) -> dict[str, Any]:
        """Return the subclass's own arguments."""
        return {}

    def _ordered(self, shards: Sequence[Iterable[T]], dice: random.Random) -> Iterator[T]:
        """Yield the items of one reader's shards in order. It must not look at the items."""
        raise NotImplementedError

    def _dice(self, epoch: int, purpose: str) -> random.Random:
        # Seed with a string, so that seed 0 in epoch 1 is unrelated to seed 1 in epoch 0.
        return random.Random(f"{self.seed}/{epoch}/{purpose}")

    def part(self, epoch: int, part: int = 0, parts: int = 1) -> Iterator[int]:
        """Yield the rows of one of `parts` readers: every parts-th shard of the epoch's order.

        This splits a stream over workers and replicas: each row is in one part, and each part has
        its own buffer. The result depends only on the arguments, not on this object's position.
        """
        return self.arrange(self.shards, epoch, part, parts)

    def arrange(
        self, shards: Sequence[Iterable[T]], epoch: int, part: int = 0, parts: int = 1
    ) -> Iterator[T]:
        """Yield the items of `shards` in the order in which `part` yields their row numbers.

        shards: the same number and lengths as in this order. Each is read once, from front to
        back, and only as far as this order's buffer needs.
        """
        if len(shards) != len(self.shards):
            raise ValueError(
                f"the order must have a length for every shard, got {len(shards)} shards and "
                f"{len(self.shards)} lengths; build the order from the shards' lengths"
            )
        if self.shuffle_shards:
            places = _permutation(len(shards), self._dice(epoch, "shards")).tolist()
            shards = [shards[place] for place in places]
        return self._ordered(shards[part::parts], self._dice(epoch, f"part {part} of {parts}"))

    def indices(self, epoch: int) -> Iterator[int]:
        """Yield all of this replica's row indices in `epoch`. The object's position stays."""
        stop = len(self) * self.num_replicas if self.even else None
        return itertools.islice(self.part(epoch), self.rank, stop, self.num_replicas)

    def __len__(self) -> int:
        """Return the number of rows that this replica gets per epoch."""
        more = 0 if self.even else int(self.rank < self.rows % self.num_replicas)
        return self.rows // self.num_replicas + more

    def _rest(self, epoch: int, done: int) -> Iterator[tuple[int, bool]]:
        last = len(self) - 1
        for place, index in enumerate(itertools.islice(self.indices(epoch), done, None), done):
            yield index, place == last

    def _identity(self) -> dict[str, Any]:
        lengths = ",".join(str(len(shard)) for shard in self.shards)
        return {
            "order": type(self).__name__,
            "rows": self.rows,
            "shards": hashlib.sha256(lengths.encode()).hexdigest()[:16],
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "even": self.even,
            **self._settings(),
        }


class Sequential(Order):
    """The stored order of the data. Arguments: see Order."""

    def _ordered(self, shards: Sequence[Iterable[T]], _: random.Random) -> Iterator[T]:
        return itertools.chain.from_iterable(shards)


class FullShuffle(Order):
    """A new permutation of all rows each epoch. On a stream, it must hold all rows in memory."""

    def _ordered(self, shards: Sequence[Iterable[T]], dice: random.Random) -> Iterator[T]:
        return _permuted(shards, dice)


class BufferShuffle(Order):
    """Read rows in order into a buffer and draw from it. Only a large buffer moves rows far.

    buffer_size: the number of rows to draw from. initial: the number of rows in the buffer before
    the first draw (None: buffer_size). A small value yields the first rows sooner but mixes them
    less. shuffle_shards: read the shards in a new random order each epoch.
    Source: webdataset's `shuffle(bufsize, initial)`, whose default for initial is 100.
    """

    def __init__(
        self,
        rows: int | Sequence[int],
        *,
        buffer_size: int,
        initial: int | None = None,
        shuffle_shards: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(rows, **common)
        self.buffer_size = positive_int("buffer_size", buffer_size)
        initial = buffer_size if initial is None else positive_int("initial", initial)
        self.initial = min(initial, buffer_size)
        self.shuffle_shards = shuffle_shards

    def _settings(self) -> dict[str, Any]:
        return {
            "buffer_size": self.buffer_size,
            "initial": self.initial,
            "shuffle_shards": self.shuffle_shards,
        }

    def _ordered(self, shards: Sequence[Iterable[T]], dice: random.Random) -> Iterator[T]:
        rows = itertools.chain.from_iterable(shards)
        return _buffered(rows, self.buffer_size, self.initial, dice)


class BlockShuffle(Order):
    """Fill a buffer with `blocks` random shards, shuffle its rows, empty it, and repeat.

    Shards are the blocks: BlockShuffle(shards_of(1438, 45), blocks=8) buffers 360 of 1,438 rows.
    Source: CorgiPile (Xu et al., arXiv 2206.05830).
    """

    shuffle_shards = True

    def __init__(self, rows: int | Sequence[int], *, blocks: int, **common: Any) -> None:
        super().__init__(rows, **common)
        self.blocks = positive_int("blocks", blocks)

    def _settings(self) -> dict[str, Any]:
        return {"blocks": self.blocks}

    def _ordered(self, shards: Sequence[Iterable[T]], dice: random.Random) -> Iterator[T]:
        for start in range(0, len(shards), self.blocks):
            yield from _permuted(shards[start : start + self.blocks], dice)


class ShardInterleave(Order):
    """Take a row from each of `ways` open shards in turn. The next shard replaces one that ends.

    The shards are in a new random order each epoch. buffer_size: the size of a buffer after them,
    as in BufferShuffle (1: none), which also breaks up the fixed turns.
    Raises ValueError for one shard without a buffer, whose order would never change.
    """

    shuffle_shards = True

    def __init__(
        self, rows: int | Sequence[int], *, ways: int, buffer_size: int = 1, **common: Any
    ) -> None:
        super().__init__(rows, **common)
        self.ways = positive_int("ways", ways)
        self.buffer_size = positive_int("buffer_size", buffer_size)
        if self.buffer_size == len(self.shards) == 1:
            raise ValueError(
                "shards are interleaved, not shuffled inside, so one shard without a buffer keeps "
                f"its order, got one shard of {self.rows} rows; pass the length of each shard, or "
                "a buffer_size"
            )

    def _settings(self) -> dict[str, Any]:
        return {"ways": self.ways, "buffer_size": self.buffer_size}

    def _ordered(self, shards: Sequence[Iterable[T]], dice: random.Random) -> Iterator[T]:
        return _buffered(self._turns(shards), self.buffer_size, self.buffer_size, dice)

    def _turns(self, shards: Sequence[Iterable[T]]) -> Iterator[T]:
        waiting = iter(shards)
        turns = [iter(shard) for shard in itertools.islice(waiting, self.ways)]
        while turns:
            going = []
            for rows in turns:
                row = next(rows, _END)
                if row is _END:  # no shard is empty, so the next one has a row
                    rows = iter(next(waiting, ()))
                    row = next(rows, _END)
                if row is not _END:
                    going.append(rows)
                    yield row
            turns = going
