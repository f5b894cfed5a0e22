"""Shards that webdataset reads alike, and damage found where it is."""

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader

from labcore.memory.shards.loading import (
    RecordFiles,
    read_shard,
    tar_bytes,
    token_row,
    write_rows,
)
from labcore.memory.shards.tfrecord import CorruptRecord, tfrecord_bytes
from labcore.shuffling import write_shards

BLOCK = 512
FORKS = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
FORMS = ["tfrecord", "webdataset"]


def texts(count: int):
    """Two fields a sample, of one block and of two."""
    for row in range(count):
        yield {"__key__": f"row{row:03d}", "bin": bytes([row]) * 700, "txt": f"text {row}"}


# Headers of the members and where they end: bin is a header and two blocks, txt one and one.
BIN, TXT, SAMPLE = 0, 3 * BLOCK, 5 * BLOCK


@pytest.fixture
def shard(tmp_path):
    (found,) = write_shards(texts(9), tmp_path / "shards", rows_per_shard=9)
    return found.path


def keys(samples) -> list[int]:
    return [int(sample["__key__"][3:]) for sample in samples]


def read_past(path) -> tuple[list[int], list[CorruptRecord]]:
    found: list[CorruptRecord] = []
    samples = list(read_shard(path, on_corrupt="skip", report=found.append))
    for sample in samples:
        row = int(sample["__key__"][3:])
        assert sample["bin"] == bytes([row]) * 700 and sample["txt"] == f"text {row}".encode()
    return keys(samples), found


def changed(path, at: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves it open
def test_a_whole_shard_gives_what_webdataset_gives(shard) -> None:
    theirs = list(webdataset.WebDataset([str(shard)], shardshuffle=False))
    ours = list(read_shard(shard))
    assert len(ours) == 9
    for mine, sample in zip(ours, theirs, strict=True):
        assert {name: mine[name] for name in ("__key__", "__url__", "bin", "txt")} == {
            name: sample[name] for name in ("__key__", "__url__", "bin", "txt")
        }


@pytest.mark.parametrize("row", [0, 4, 8])
@pytest.mark.parametrize(("field", "before"), [(BIN, True), (TXT, False)])
@pytest.mark.parametrize("damage", [b"\xff" * 8, bytes(BLOCK)], ids=["changed", "zeros"])
def test_a_damaged_header_costs_its_sample(row, field, before, damage, shard) -> None:
    at = row * SAMPLE + field
    changed(shard, at, damage)
    with pytest.raises(
        CorruptRecord, match=f"000000.tar, record at byte {at}: no header"
    ) as caught:
        next(read_shard(shard))
    assert (caught.value.path, caught.value.offset) == (shard, at)
    rest, found = read_past(shard)
    assert rest == [number for number in range(9) if number != row]
    assert found[0].offset == at
    assert f"'row{row:03d}' beside the damage lacks {['bin' if before else 'txt']}" in str(found[1])
    assert len(found) == 2


def test_webdataset_alone_ends_there_in_silence(shard) -> None:
    """Why the headers are read first: if this fails, the library has learned to say so."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    changed(shard, 4 * SAMPLE, b"\xff" * 8)
    with shard.open("rb") as stream:
        source = {"url": str(shard), "stream": stream}
        assert keys(group_by_keys(tar_file_expander([source]))) == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [0, 1, BLOCK, BLOCK + 1, TXT - 1, TXT, TXT + 7, SAMPLE - 1])
def test_a_shard_that_was_cut_off_says_so(cut, shard) -> None:
    size = 5 * SAMPLE + cut
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(CorruptRecord) as caught:
        list(read_shard(shard))
    whole = 5 * SAMPLE + (TXT if cut >= TXT else 0)
    assert caught.value.offset == whole
    rest, found = read_past(shard)
    assert rest == [0, 1, 2, 3, 4]
    assert found[0].offset == whole


def test_an_empty_file_and_a_header_that_is_all_wrong(shard) -> None:
    size = shard.stat().st_size
    shard.write_bytes(b"no tar " * 1000)
    assert [problem.offset for problem in read_past(shard)[1]] == [0]
    shard.write_bytes(b"")
    with pytest.raises(CorruptRecord, match="byte 0: the file ends there without a tar file's"):
        list(read_shard(shard))
    shard.write_bytes(bytes(size))
    assert list(read_shard(shard)) == []


def test_two_damages_in_one_shard(shard) -> None:
    changed(shard, 2 * SAMPLE + BIN, b"\xff")
    changed(shard, 6 * SAMPLE + TXT, b"\xff")
    rest, found = read_past(shard)
    assert rest == [0, 1, 3, 4, 5, 7, 8]
    assert [problem.offset for problem in found[:2]] == [2 * SAMPLE, 6 * SAMPLE + TXT]


@pytest.fixture
def rows(generator) -> torch.Tensor:
    return torch.randint(256, (23, 257), generator=generator)


@pytest.mark.parametrize("form", FORMS)
def test_rows_come_back_in_order_and_in_the_predicted_bytes(form, rows, tmp_path) -> None:
    paths = write_rows(rows, tmp_path / form, form=form, rows_per_file=5)
    assert len(paths) == 5
    assert torch.equal(torch.stack(list(RecordFiles(paths))), rows)
    predict = tfrecord_bytes if form == "tfrecord" else tar_bytes
    sizes = [path.stat().st_size for path in paths]
    assert sizes == [predict([257] * count) for count in (5, 5, 5, 5, 3)]


@pytest.mark.parametrize("length", [1, 512, 513, 4000])
def test_a_tars_bytes(length, tmp_path) -> None:
    # Ten rows of a block or less fill a tar file's record, so that its end takes one more.
    samples = [{"__key__": f"{n}", "bin": bytes(length)} for n in range(10)]
    (shard,) = write_shards(samples, tmp_path / "bytes", rows_per_shard=10)
    assert shard.path.stat().st_size == tar_bytes([length] * 10)


@FORKS
@pytest.mark.parametrize("form", FORMS)
def test_workers_share_the_files(form, rows, tmp_path) -> None:
    paths = write_rows(rows, tmp_path / form, form=form, rows_per_file=5)
    loader = DataLoader(RecordFiles(paths), batch_size=4, num_workers=2)
    read = torch.cat(list(loader))
    assert sorted(read.tolist()) == sorted(rows.tolist())


@FORKS
def test_a_workers_error_names_file_and_offset(rows, tmp_path) -> None:
    paths = write_rows(rows, tmp_path / "rows", form="tfrecord", rows_per_file=23)
    changed(paths[0], 3 * 273 + 12, bytes([int(rows[3, 0]) ^ 1]))
    loader = DataLoader(RecordFiles(paths), batch_size=2, num_workers=1)
    with pytest.raises(CorruptRecord, match=r"shard-000000.tfrecord, record at byte 819: its 257"):
        list(loader)


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_passed_over_where_asked(form, rows, tmp_path) -> None:
    paths = write_rows(rows, tmp_path / form, form=form, rows_per_file=23)
    if form == "tfrecord":
        changed(paths[0], 3 * 273 + 12, bytes([int(rows[3, 0]) ^ 1]))
    else:
        changed(paths[0], 3 * 2 * BLOCK, b"\xff")
    found: list[CorruptRecord] = []
    files = RecordFiles(paths, on_corrupt="skip", report=found.append)
    assert torch.equal(torch.stack(list(files)), torch.cat((rows[:3], rows[4:])))
    assert [problem.offset for problem in found] == [819 if form == "tfrecord" else 3 * 2 * BLOCK]
    with pytest.raises(CorruptRecord):
        list(RecordFiles(paths))


def test_what_is_no_row_is_refused(rows, tmp_path) -> None:
    for wrong in (rows + 1000, rows - 256, rows.float(), rows[0], rows[:0]):
        with pytest.raises(ValueError, match="rows must be byte tokens .N, T."):
            write_rows(wrong, tmp_path / "never", rows_per_file=5)
    with pytest.raises(ValueError, match="form must be one of .* got 'tar'"):
        write_rows(rows, tmp_path / "never", form="tar", rows_per_file=5)
    assert not (tmp_path / "never").exists()
    with pytest.raises(FileExistsError):
        write_rows(rows, tmp_path, rows_per_file=5)
    with pytest.raises(ValueError, match="a file's ending must be one of '.tar', '.tfrecord'"):
        RecordFiles([tmp_path / "rows.txt"])
    with pytest.raises(ValueError, match="on_corrupt must be one of"):
        RecordFiles([], on_corrupt="ignore")
    with pytest.raises(ValueError, match="on_corrupt must be one of"):
        read_shard(tmp_path, on_corrupt="ignore")


def test_a_row_is_its_bytes() -> None:
    for record in (b"\x00\xff\x07", {"__key__": "0", "bin": b"\x00\xff\x07"}):
        assert torch.equal(token_row(record), torch.tensor([0, 255, 7]))
