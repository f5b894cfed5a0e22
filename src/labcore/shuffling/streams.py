"""Rows of shards that can only be read from front to back, in a given Order."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from labcore.shuffling.orders import Order
from labcore.shuffling.state import Resumable

__all__ = ["StreamRows"]

_END = object()


class StreamRows(Resumable[Any], IterableDataset[Any]):
    """Rows from shards that are read from front to back, in the order of `order`.

    shards: each can be iterated from the start any number of times (a list, a TarShard) and has as
    many rows as `order` says. order: made from the shards' lengths. Replicas share out whole
    shards: replica r of R reads every R-th shard of the epoch, and `even` has no effect.
    held: the number of rows that were read but not yet yielded, at most the order's buffer (with
    FullShuffle, all rows).

    A state is two numbers. Resuming replays the order up to that position. Shards whose rows were
    all yielded are not opened; the others are read again from the start.

    In one process, this is an iterator with its own state. With DataLoader workers, read it through
    `ResumableLoader`, because each worker has a copy whose epoch and state are lost with it.
    """

    def __init__(self, shards: Sequence[Iterable[Any]], order: Order) -> None:
        super().__init__()
        order.arrange(shards, 0)  # raises unless there is a length per shard
        if len(shards) < order.num_replicas:
            raise ValueError(
                f"every replica needs a shard, got {len(shards)} shards for {order.num_replicas} "
                "replicas; write smaller shards"
            )
        self.shards, self.order, self.held = shards, order, 0

    def indices(self, epoch: int, worker: int = 0, workers: int = 1) -> Iterator[int]:
        """Yield the row numbers of one of this replica's `workers` readers, in order."""
        return self.order.part(epoch, *self._part(worker, workers))

    def _part(self, worker: int, workers: int) -> tuple[int, int]:
        return self.order.rank * workers + worker, self.order.num_replicas * workers

    def read(
        self, epoch: int, *, worker: int = 0, workers: int = 1, skip: int = 0
    ) -> Iterator[tuple[int, Any]]:
        """Yield one reader's (row number, row) pairs in `epoch`, after its first `skip` rows."""
        given: dict[int, bytearray] = {}
        starts = [place.start for place in self.order.shards]
        for index in itertools.islice(self.indices(epoch, worker, workers), skip):
            shard = bisect.bisect_right(starts, index) - 1
            rows = given.setdefault(shard, bytearray(len(self.order.shards[shard])))
            rows[index - starts[shard]] = 1
        self.held = 0
        shards = [self._shard(shard, given.get(shard)) for shard in range(len(self.shards))]
        items = self.order.arrange(shards, epoch, *self._part(worker, workers))
        for item in itertools.islice(items, skip, None):
            self.held -= 1
            yield item

    def _shard(self, shard: int, given: bytearray | None) -> Iterator[tuple[int, Any]]:
        """Read one shard from the start, with None for rows that were yielded before."""
        places = self.order.shards[shard]
        if given is not None and 0 not in given:
            yield from ((place, None) for place in places)
            return
        rows = iter(self.shards[shard])
        try:
            for place in places:
                row = next(rows, _END)
                if row is _END:
                    raise self._other_length(shard, f"only {place - places.start}")
                if given is not None and given[place - places.start]:
                    yield place, None
                    continue
                if place == places[-1] and next(rows, _END) is not _END:
                    raise self._other_length(shard, "more")
                self.held += 1
                yield place, row
        finally:
            if close := getattr(rows, "close", None):
                close()

    def _other_length(self, shard: int, came: str) -> RuntimeError:
        return RuntimeError(
            f"shard {shard} must hold the {len(self.order.shards[shard])} rows that the order "
            f"expects, got {came}; count the rows again and build the order from them"
        )

    def _rest(self, epoch: int, done: int) -> Iterator[tuple[Any, bool]]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "with DataLoader workers, StreamRows must be read by a ResumableLoader, got a "
                "plain DataLoader, whose next epoch would repeat this one's order; use "
                "ResumableLoader(stream, batch_size=..., num_workers=...)"
            )
        parts = self.order.num_replicas
        total = sum(1 for _ in self.indices(epoch)) if parts > 1 else self.order.rows
        for place, (_, row) in enumerate(self.read(epoch, skip=done), done + 1):
            yield row, place == total

    def _identity(self) -> dict[str, Any]:
        # Replicas of an order share out rows, but those of a stream share out shards.
        return {**self.order._identity(), "reader": "stream"}
