"""A DataLoader whose state counts the batches that it has delivered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from labcore.checks import positive_int
from labcore.shuffling.orders import Order
from labcore.shuffling.state import Resumable
from labcore.shuffling.streams import StreamRows

__all__ = ["ResumableLoader"]

# Options that would change the order or the position without this class knowing.
_OURS = ("shuffle", "sampler", "batch_sampler", "persistent_workers", "in_order", "generator")


def _batched(rows: Iterator[int], size: int, drop_last: bool) -> Iterator[list[int]]:
    while len(batch := list(itertools.islice(rows, size))) == size:
        yield batch
    if batch and not drop_last:
        yield batch


class _Worker(IterableDataset[Any]):
    """The rest of a stream's epoch: each worker's rows after those that were delivered."""

    def __init__(self, stream: StreamRows, epoch: int, first: int, skip: list[int]) -> None:
        self.stream, self.epoch, self.first, self.skip = stream, epoch, first, skip

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        # The DataLoader asks its worker 0 first, so that must be the one whose turn it is.
        worker = (self.first + (info.id if info else 0)) % len(self.skip)
        rows = self.stream.read(
            self.epoch, worker=worker, workers=len(self.skip), skip=self.skip[worker]
        )
        return (row for _, row in rows)


class ResumableLoader(Resumable[Any]):
    """A DataLoader with a given order, any number of workers, and an exact state.

    A `for` loop yields the rest of the current epoch. `state_dict` counts the batches that the loop
    has received, whatever the workers have prefetched. A run resumed from it gets the same batches
    as an uninterrupted run: no row is lost or repeated.

    dataset: a map-style dataset with `order`, an Order of its rows; or a StreamRows, which has its
    own order. batch_size, num_workers, drop_last, collate_fn, options: as in
    torch.utils.data.DataLoader. Options that would set the order raise TypeError.
    rows: row numbers of the latest batch; empty before the first.

    For a map-style dataset, the order does not depend on num_workers, which may change on resume.
    Workers of a stream share out its shards. Each has its own buffer and its own short last batch,
    so num_workers is part of the state.

    Resuming replays the order up to the position, which takes about 1 s for a million rows. A
    stream also rereads the shards that still had rows to give. Workers restart in each epoch. The
    state does not include random numbers that the dataset itself draws.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order | None = None,
        *,
        batch_size: int,
        num_workers: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if wrong := [name for name in _OURS if name in options]:
            raise TypeError(f"ResumableLoader sets the order itself, got {wrong}; leave it out")
        self.stream = dataset if isinstance(dataset, StreamRows) else None
        self.order = _checked(dataset, order)
        self.dataset, self.drop_last, self.num_workers = dataset, drop_last, num_workers
        self.batch_size = positive_int("batch_size", batch_size)
        self.options = {**options, "collate_fn": collate_fn, "num_workers": num_workers}
        self.rows: tuple[int, ...] = ()

    def _readers(self) -> int:
        return max(1, self.num_workers) if self.stream else 1

    def _plan(self, epoch: int) -> Iterator[tuple[int, list[int]]]:
        """Yield all batches of the epoch as (reader, row numbers), in the order of delivery.

        A DataLoader asks its workers in turn and skips those that have no more.
        """
        if self.stream:
            count = self._readers()
            readers = [self.stream.indices(epoch, worker, count) for worker in range(count)]
        else:
            readers = [self.order.indices(epoch)]
        turns = [
            (reader, _batched(rows, self.batch_size, self.drop_last))
            for reader, rows in enumerate(readers)
        ]
        while turns:
            going = []
            for reader, batches in turns:
                if (batch := next(batches, None)) is not None:
                    going.append((reader, batches))
                    yield reader, batch
            turns = going

    def _rest(self, epoch: int, done: int) -> Iterator[tuple[Any, bool]]:
        plan, skip = self._plan(epoch), [0] * self._readers()
        for reader, rows in itertools.islice(plan, done):
            skip[reader] += len(rows)
        coming = next(plan, None)
        if coming is None:
            return
        if self.stream:
            loader = self._loader(
                _Worker(self.stream, epoch, coming[0], skip),
                epoch,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
            )
        else:
            plan, ahead = itertools.tee(plan)  # the DataLoader reads ahead of the received batches
            rest = itertools.chain([coming[1]], (rows for _, rows in ahead))
            loader = self._loader(self.dataset, epoch, batch_sampler=rest)
        for batch in loader:
            if coming is None:
                raise self._disagreement(epoch)
            self.rows = tuple(coming[1])
            coming = next(plan, None)
            yield batch, coming is None
        if coming is not None:
            raise self._disagreement(epoch)

    def _disagreement(self, epoch: int) -> RuntimeError:
        return RuntimeError(
            f"the dataset must give as many batches as the order counts, got another number in "
            f"epoch {epoch}; workers and collate_fn must not drop or add rows"
        )

    def _loader(self, dataset: Dataset[Any], epoch: int, **arguments: Any) -> DataLoader[Any]:
        # The DataLoader draws a seed for its workers. Keep it off the generator training uses.
        dice = random.Random(f"{self.order.seed}/{epoch}/workers")
        generator = torch.Generator().manual_seed(dice.getrandbits(63))
        return DataLoader(dataset, generator=generator, **arguments, **self.options)

    def __len__(self) -> int:
        """Return the batches per epoch of a map-style dataset; a stream's number varies."""
        if self.stream:
            raise TypeError(
                "a stream has no len(): its number of batches varies by epoch; use "
                "sum(1 for _ in loader)"
            )
        whole, more = divmod(len(self.order), self.batch_size)
        return whole + (more > 0 and not self.drop_last)

    def _identity(self) -> dict[str, Any]:
        readers = {"num_workers": self._readers()} if self.stream else {}
        batches = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**self.order._identity(), **batches, **readers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; see Resumable. `rows` is empty until the next batch."""
        super().load_state_dict(state)
        self.rows = ()


def _checked(dataset: Any, order: Order | None) -> Order:
    if isinstance(dataset, StreamRows):
        if order is not None:
            raise TypeError("a StreamRows has its own order, got a second one; leave it out")
        return dataset.order
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"an iterable dataset must be a StreamRows, got {type(dataset).__name__}; wrap its "
            "shards: StreamRows(shards, order)"
        )
    if order is None:
        raise TypeError("a map-style dataset needs an order, got None; pass order=")
    if len(dataset) != order.rows:
        raise ValueError(
            f"the order must have as many rows as the dataset, got {order.rows} for "
            f"{len(dataset)}; build it with len(dataset)"
        )
    return order
