"""A run that goes on from a state gets the uninterrupted run's batches: none lost, none twice."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from labcore.shuffling import (
    BlockShuffle,
    BufferShuffle,
    FullShuffle,
    ResumableLoader,
    Sequential,
    ShardInterleave,
    StreamRows,
)
from tests.shuffling.orders import EXAMPLES, FEW_EXAMPLES, LENGTHS, MAKERS, interleave, rows_of

pytestmark = [
    # More workers than cores are asked for on purpose; Python 3.12 warns of every fork of a
    # process that has threads.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
EPOCHS = 2


def as_list(rows: list) -> list:
    return rows


def first(loader: ResumableLoader, count: int | None = None) -> list[list[int]]:
    """`count` batches (None: all up to the end of EPOCHS), through as many loops as it takes."""
    found: list[list[int]] = []
    while (count is None or len(found) < count) and loader.epoch < EPOCHS:
        for batch in loader:
            assert loader.rows == tuple(batch)  # the data are row numbers
            found.append(batch)
            if len(found) == count:
                break
    return found


def check_any_interruption(make, cuts: list[int], *, whole_rows: list[int]) -> None:
    """make() -> a new loader: compare a run that is cut again and again with one that is not."""
    whole, found, loader = first(make()), [], make()
    for cut in cuts:
        found += first(loader, cut)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
    found += first(loader)
    assert found == whole
    rows = list(itertools.chain(*whole))
    assert sorted(rows) == sorted(whole_rows * EPOCHS)


CUTS = st.lists(st.integers(0, 20), min_size=1, max_size=3)


@EXAMPLES
@given(make=MAKERS, lengths=LENGTHS, size=st.integers(1, 8), cuts=CUTS, stream=st.booleans())
def test_one_process(make, lengths, size, cuts, stream) -> None:
    def loader() -> ResumableLoader:
        order = make(lengths)
        if stream:
            data = StreamRows(rows_of(lengths), order)
            return ResumableLoader(data, batch_size=size, collate_fn=as_list)
        return ResumableLoader(range(sum(lengths)), order, batch_size=size, collate_fn=as_list)

    check_any_interruption(loader, cuts, whole_rows=list(range(sum(lengths))))


@FEW_EXAMPLES
@given(
    make=MAKERS,
    lengths=LENGTHS,
    size=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=1),
    workers=st.integers(1, 3),
    prefetch=st.integers(1, 3),
)
def test_a_stream_over_workers(make, lengths, size, cuts, workers, prefetch) -> None:
    def loader() -> ResumableLoader:
        data = StreamRows(rows_of(lengths), make(lengths))
        return ResumableLoader(
            data,
            batch_size=size,
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=as_list,
        )

    check_any_interruption(loader, cuts, whole_rows=list(range(sum(lengths))))


@FEW_EXAMPLES
@given(
    make=MAKERS,
    lengths=LENGTHS,
    size=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=1),
    workers=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_an_indexed_dataset_over_workers_that_change(make, lengths, size, cuts, workers) -> None:
    counts = itertools.cycle(workers)

    def loader() -> ResumableLoader:
        return ResumableLoader(
            range(sum(lengths)),
            make(lengths),
            batch_size=size,
            num_workers=next(counts),
            collate_fn=as_list,
        )

    check_any_interruption(loader, cuts, whole_rows=list(range(sum(lengths))))


@EXAMPLES
@given(
    make=MAKERS,
    lengths=st.lists(st.integers(1, 9), min_size=3, max_size=7),
    replicas=st.integers(2, 3),
    size=st.integers(1, 5),
    cuts=CUTS,
    stream=st.booleans(),
)
def test_replicas_resume_each_for_itself(make, lengths, replicas, size, cuts, stream) -> None:
    everything = []
    for rank in range(replicas):

        def loader(rank: int = rank) -> ResumableLoader:
            order = make(lengths, num_replicas=replicas, rank=rank, even=False)
            data = StreamRows(rows_of(lengths), order) if stream else range(sum(lengths))
            arguments = {} if stream else {"order": order}
            return ResumableLoader(data, batch_size=size, collate_fn=as_list, **arguments)

        mine = first(loader())
        found, again = [], loader()
        for cut in cuts:
            found += first(again, cut)
            state = again.state_dict()
            again = loader()
            again.load_state_dict(state)
        assert found + first(again) == mine
        everything += itertools.chain(*mine)
    assert sorted(everything) == sorted(list(range(sum(lengths))) * EPOCHS)


@EXAMPLES
@given(make=MAKERS, lengths=LENGTHS, size=st.integers(1, 8), cut=st.integers(0, 20))
def test_stream_alone_resumes_without_rereading_finished_shards(make, lengths, size, cut) -> None:
    opened: list[int] = []

    class Shard(list):
        def __iter__(self):
            opened.append(self[0])
            return super().__iter__()

    shards = [Shard(rows) for rows in rows_of(lengths)]
    cut = min(cut, sum(lengths))
    whole = list(StreamRows(shards, make(lengths)))
    stream = StreamRows(shards, make(lengths))
    found = list(itertools.islice(stream, cut))
    again = StreamRows(shards, make(lengths))
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    opened.clear()
    found += list(again) if again.epoch == 0 else []
    assert found == whole and again.epoch == 1
    pending = [shard[0] for shard in rows_of(lengths) if not set(shard) <= set(whole[:cut])]
    assert sorted(opened) == pending


def test_short_batches_are_dropped_as_the_data_loader_drops_them() -> None:
    for workers in (0, 2):
        data = StreamRows(rows_of([5, 4]), Sequential([5, 4]))
        loader = ResumableLoader(
            data, batch_size=3, num_workers=workers, drop_last=True, collate_fn=as_list
        )
        batches = list(loader)
        expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]] if not workers else [[0, 1, 2], [5, 6, 7]]
        assert batches == expected and loader.epoch == 1
    loader = ResumableLoader(range(10), FullShuffle(10), batch_size=4, drop_last=True)
    assert len(loader) == len(list(loader)) == 2 and loader.epoch == 1
    # An epoch without a batch still ends, or a loop over epochs would not.
    empty = ResumableLoader(range(3), FullShuffle(3), batch_size=4, drop_last=True)
    assert list(empty) == [] and empty.epoch == 1


def test_loader_counts_rows_received_and_sampler_rows_fetched() -> None:
    order = Sequential(40)
    batches = iter(DataLoader(range(40), batch_size=4, sampler=order, num_workers=1))
    next(batches)
    # The classic fault: two batches more are on their way, and a resume from here loses them.
    assert order.state_dict()["done"] > 4
    loader = ResumableLoader(range(40), Sequential(40), batch_size=4, num_workers=1)
    next(iter(loader))
    assert loader.state_dict()["done"] == 1


def test_training_keeps_its_random_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(3)
    torch.manual_seed(seed)
    for workers in (0, 1):
        list(ResumableLoader(range(9), FullShuffle(9), batch_size=4, num_workers=workers))
    assert torch.equal(torch.rand(3), expected)


def test_another_number_of_workers_is_refused_for_a_stream_alone() -> None:
    def stream(workers: int) -> ResumableLoader:
        data = StreamRows(rows_of([3, 3]), FullShuffle([3, 3]))
        return ResumableLoader(data, batch_size=2, num_workers=workers)

    state = stream(2).state_dict()
    with pytest.raises(ValueError, match=r"num_workers \(2 there, 3 here\)"):
        stream(3).load_state_dict(state)
    stream(2).load_state_dict(state)
    state = ResumableLoader(range(9), FullShuffle(9), batch_size=2).state_dict()
    ResumableLoader(range(9), FullShuffle(9), batch_size=2, num_workers=3).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size"):
        ResumableLoader(range(9), FullShuffle(9), batch_size=3).load_state_dict(state)


class Dropping(Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index


def half(rows: list) -> list:
    return rows[::2]


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: ResumableLoader(Dropping(), batch_size=2), TypeError, "needs an order"),
        (
            lambda: ResumableLoader(Dropping(), FullShuffle(8), batch_size=2),
            ValueError,
            "got 8 for 9",
        ),
        (
            lambda: ResumableLoader(Dropping(), FullShuffle(9), batch_size=2, shuffle=True),
            TypeError,
            r"sets the order itself, got \['shuffle'\]",
        ),
        (lambda: ResumableLoader(Dropping(), FullShuffle(9), batch_size=0), ValueError, "at least"),
        (
            lambda: ResumableLoader(
                StreamRows([[1]], FullShuffle(1)), FullShuffle(1), batch_size=1
            ),
            TypeError,
            "has its own order",
        ),
        (
            lambda: ResumableLoader(torch.utils.data.ChainDataset([]), batch_size=1),
            TypeError,
            "StreamRows",
        ),
        (lambda: StreamRows([[1], [2]], FullShuffle(2)), ValueError, "2 shards and 1 lengths"),
        (
            lambda: StreamRows([[1, 2]], FullShuffle(2, num_replicas=2)),
            ValueError,
            "every replica needs a shard",
        ),
        (
            lambda: len(ResumableLoader(StreamRows([[1]], FullShuffle(1)), batch_size=1)),
            TypeError,
            r"no len\(\)",
        ),
    ],
)
def test_bad_arguments_say_what_to_do(make, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 2, 3]])
def test_shard_of_another_length_is_an_error_not_a_silent_loss(rows) -> None:
    for order in (Sequential([3, 2]), BufferShuffle([3, 2], buffer_size=4)):
        with pytest.raises(RuntimeError, match="shard 0 must hold the 3 rows"):
            list(StreamRows([rows, [8, 9]], order))


@EXAMPLES
@given(lengths=LENGTHS, size=st.integers(1, 30), seed=st.integers(0, 2**31), cut=st.integers(0, 40))
def test_a_stream_holds_no_more_rows_than_the_buffer(lengths, size, seed, cut) -> None:
    for order, most in [
        (BufferShuffle(lengths, buffer_size=size, shuffle_shards=True, seed=seed), size - 1),
        (BlockShuffle(lengths, blocks=2, seed=seed), sum(sorted(lengths)[-2:]) - 1),
        (
            interleave(lengths, ways=3, buffer_size=size, seed=seed),
            max(size - 1, len(lengths) == 1),
        ),
    ]:
        stream = StreamRows(rows_of(lengths), order)
        assert all(stream.held <= most for _ in stream) and stream.held == 0
        resumed = stream.read(0, skip=cut)
        assert all(stream.held <= most for _ in resumed)


def test_shards_are_closed_when_a_loop_is_left() -> None:
    closed = []

    class Shard:
        def __iter__(self):
            try:
                yield from range(4)
            finally:
                closed.append(1)

    stream = StreamRows([Shard(), Shard()], Sequential([4, 4]))
    for row in stream:
        if row == 2:
            break
    assert len(closed) == 1
    assert list(stream) == [3, 0, 1, 2, 3] and len(closed) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_refuses_the_workers_of_a_plain_data_loader(workers: int) -> None:
    stream = StreamRows(rows_of([3, 4]), Sequential([3, 4]))
    with pytest.raises(RuntimeError, match="ResumableLoader"):
        list(DataLoader(stream, batch_size=2, num_workers=workers))
    assert list(itertools.chain(*DataLoader(stream, batch_size=2, collate_fn=as_list))) == list(
        range(7)
    )


def test_a_place_among_rows_is_no_place_in_a_stream() -> None:
    shards = [list(range(7)), list(range(7, 12)), list(range(12, 21))]
    order = ShardInterleave([7, 5, 9], ways=2, num_replicas=3, rank=1)
    next(iter(order))
    stream = StreamRows(shards, ShardInterleave([7, 5, 9], ways=2, num_replicas=3, rank=1))
    with pytest.raises(ValueError, match="reader"):
        stream.load_state_dict(order.state_dict())
