"""Tar shards: webdataset reads what is written, the orders read it too, and know where it was."""

import gc
import itertools
import json
import math

import pytest
import torch
import webdataset

from labcore.shuffling import (
    BlockShuffle,
    BufferShuffle,
    ResumableLoader,
    Sequential,
    StreamRows,
    label_entropy,
    read_shards,
    write_shards,
)
from tests.shuffling.orders import one_of_each


def samples(count: int):
    for row in range(count):
        yield {"__key__": f"row/{row:04d}", "cls": row // 10, "txt": f"text {row} — größe"}


# webdataset leaves the files that it opened to the garbage collector.
LEFT_OPEN = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def by_webdataset(paths: list[str], change=lambda data: data) -> list[dict]:
    found = list(change(webdataset.WebDataset(paths, shardshuffle=False)))
    gc.collect()
    return found


def keys_of(rows: list) -> list[str]:
    return [row["__key__"] for row in rows]


@pytest.fixture
def folder(tmp_path):
    write_shards(samples(97), tmp_path / "100% data", rows_per_shard=10)
    return tmp_path / "100% data"


@LEFT_OPEN
def test_webdataset_reads_what_was_written(folder) -> None:
    shards = read_shards(folder)
    assert [len(shard) for shard in shards] == [10] * 9 + [7]
    paths = [str(shard.path) for shard in shards]
    theirs = by_webdataset(paths, lambda data: data.decode())
    ours = list(itertools.chain(*shards))
    assert len(ours) == 97
    for row, (mine, sample) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine["__key__"], mine["__url__"]) == (sample["__key__"], sample["__url__"])
        assert mine["__key__"] == f"row/{row:04d}" and mine["__url__"] == paths[row // 10]
        assert int(mine["cls"]) == sample["cls"] == row // 10
        assert mine["txt"].decode() == sample["txt"] == f"text {row} — größe"


def test_the_same_rows_make_the_same_bytes(folder, tmp_path) -> None:
    again = write_shards(samples(97), tmp_path / "again", rows_per_shard=10)
    for first, second in zip(read_shards(folder), again, strict=True):
        assert first.path.read_bytes() == second.path.read_bytes()


def test_every_order_reads_every_row_once_with_its_provenance(folder, seed: int) -> None:
    shards = read_shards(folder)
    for order in one_of_each([len(shard) for shard in shards], seed):
        rows = list(StreamRows(shards, order))
        places = [(row["__url__"], row["__key__"]) for row in rows]
        assert sorted(places) == [
            (str(shards[row // 10].path), f"row/{row:04d}") for row in range(97)
        ]
        assert keys_of(rows) == [f"row/{row:04d}" for row in order.indices(0)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_run_over_shards_resumes_in_the_middle_of_an_epoch(folder, workers, seed: int) -> None:
    shards = read_shards(folder)

    def loader() -> ResumableLoader:
        order = BufferShuffle(
            [len(shard) for shard in shards], buffer_size=25, shuffle_shards=True, seed=seed
        )
        stream = StreamRows(shards, order)
        return ResumableLoader(stream, batch_size=8, num_workers=workers, collate_fn=keys_of)

    whole = loader()
    expected = [list(whole), list(whole)]
    assert sorted(itertools.chain(*expected[0])) == [f"row/{row:04d}" for row in range(97)]
    assert expected[0] != expected[1]
    begun = loader()
    found = list(itertools.islice(begun, 7))
    rows = [int(key[4:]) for key in found[-1]]
    assert begun.rows == tuple(rows)  # the trace of a batch, whatever the workers fetched ahead
    resumed = loader()
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert found + list(resumed) == expected[0] and list(resumed) == expected[1]


@LEFT_OPEN
def test_small_initial_lets_early_rows_leave_webdatasets_buffer(folder, seed: int) -> None:
    # webdataset's default is to begin at 100 of 1,000; our orders wait for a full buffer.
    def first(initial: int) -> list[int]:
        paths = [str(shard.path) for shard in read_shards(folder)]
        rows = by_webdataset(paths, lambda data: data.shuffle(60, initial=initial, seed=seed))
        return [int(row["__key__"][4:]) for row in rows]

    for initial in (1, 8):
        # Two rows come in for each that goes out, until 60 wait.
        assert all(row < initial + 2 * (place + 1) for place, row in enumerate(first(initial)))
        early = BufferShuffle(97, buffer_size=60, initial=initial, seed=seed)
        assert all(row < initial + 2 * (place + 1) for place, row in enumerate(early))
    late = [next(iter(BufferShuffle(97, buffer_size=60, seed=seed + i))) for i in range(200)]
    assert max(late) > 40 and min(late) < 20  # the first row comes from all 60


@LEFT_OPEN
def test_a_workers_buffer_holds_the_rows_of_its_own_shards_alone(
    tmp_path, monkeypatch, seed: int
) -> None:
    # 16 workers and 96 sorted shards of 5: each worker has 6 shards, 30 rows, whatever it asks for.
    shards = write_shards(samples(480), tmp_path, rows_per_shard=5)
    monkeypatch.setenv("WORKER", "3")
    monkeypatch.setenv("NUM_WORKERS", "16")
    paths = [str(shard.path) for shard in shards]
    rows = by_webdataset(paths, lambda data: data.shuffle(10_000, initial=10_000))
    theirs = [row["__url__"] for row in rows]
    order = BufferShuffle([5] * 96, buffer_size=10_000, seed=seed)
    stream = StreamRows(shards, order)
    rows = stream.read(0, worker=3, workers=16)
    first = next(rows)
    assert stream.held == 29
    ours = [row["__url__"] for _, row in (first, *rows)]
    assert sorted(ours) == sorted(theirs) and set(ours) == set(paths[3::16])


def test_shuffled_blocks_mix_better_than_sorted_shards(folder, seed: int) -> None:
    shards = read_shards(folder)
    lengths = [len(shard) for shard in shards]

    def within(order) -> float:
        labels = torch.tensor([int(row["cls"]) for row in StreamRows(shards, order)])
        return label_entropy(labels.split(8)).within

    sorted_, blocks = (
        within(Sequential(lengths)),
        within(BlockShuffle(lengths, blocks=5, seed=seed)),
    )
    assert sorted_ < math.log(2) < 1.0 < blocks


def test_a_loop_that_is_left_closes_its_file(folder) -> None:
    # An open file would be a ResourceWarning, which is an error here.
    for _ in StreamRows(read_shards(folder), Sequential([10] * 9 + [7])):
        break


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"__key__": "a.b", "txt": "x"}], "without a dot"),
        ([{"txt": "x"}], "without a dot"),
        ([{"__key__": "a", "txt": "x"}] * 2, "unique"),
        ([], "at least one sample"),
    ],
)
def test_bad_samples_say_what_to_do(tmp_path, rows, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        write_shards(rows, tmp_path, rows_per_shard=2)


def test_bad_folders_say_what_to_do(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"not hold shard-\*\.tar, got shard-"):
        write_shards(samples(3), folder, rows_per_shard=2)
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        read_shards(tmp_path)
    with pytest.raises(ValueError, match="rows_per_shard"):
        write_shards(samples(3), tmp_path / "new", rows_per_shard=0)


def test_a_directory_in_the_key_may_have_a_dot(tmp_path) -> None:
    (shard,) = write_shards([{"__key__": "v1.0/a", "txt": "x"}], tmp_path, rows_per_shard=2)
    (row,) = shard
    assert row["__key__"] == "v1.0/a" and row["txt"] == b"x"
