"""TFRecord: checksums as in the RFC, a round trip, and each kind of damage found where it is."""

import pickle
import random
import struct

import pytest

from labcore.memory.shards.tfrecord import (
    CorruptRecord,
    crc32c,
    masked_crc32c,
    read_tfrecord,
    tfrecord_bytes,
    write_tfrecord,
)

# RFC 3720, appendix B.4, whose bytes stand in the order of transmission.
READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400"
    "00000014 00000018 28000000 00000000 02000000 00000000"
)
VECTORS = {
    bytes(32): "aa36918a",
    b"\xff" * 32: "43aba862",
    bytes(range(32)): "4e79dd46",
    bytes(reversed(range(32))): "5cdb3f11",
    READ_COMMAND: "563a96d9",
}


@pytest.mark.parametrize("data", VECTORS, ids=VECTORS.get)
def test_the_checksums_of_the_rfc(data) -> None:
    assert crc32c(data) == int.from_bytes(bytes.fromhex(VECTORS[data]), "little")


def bit_by_bit(data: bytes) -> int:
    """The definition: a division of polynomials, one bit at a time."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("length", [*range(9), 1021, 1023, 1024, 1025, 1027, 1028, 2999])
def test_any_length_takes_the_same_division(length, seed) -> None:
    data = random.Random(seed).randbytes(length)
    assert crc32c(data) == bit_by_bit(data)


def test_a_masked_checksum_is_turned_and_shifted() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value in catalogues of checksums
    turned = (0xE3069283 >> 15) | (0xE3069283 << 17) & 0xFFFFFFFF
    assert masked_crc32c(b"123456789") == (turned + 0xA282EAD8) % 2**32
    assert masked_crc32c(b"") == 0xA282EAD8


LENGTHS = (5, 0, 1, 1024, 2500, 33)


@pytest.fixture
def records(seed) -> list[bytes]:
    return [random.Random(seed + n).randbytes(length) for n, length in enumerate(LENGTHS)]


@pytest.fixture
def file(tmp_path, records):
    path = tmp_path / "rows.tfrecord"
    assert write_tfrecord(path, iter(records)) == len(records)
    return path


def places() -> list[int]:
    """The offset of each record, and of the end."""
    return [tfrecord_bytes(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]


def test_what_is_written_is_read_in_the_documented_form(file, records) -> None:
    assert list(read_tfrecord(file)) == records
    raw = file.read_bytes()
    assert len(raw) == tfrecord_bytes(LENGTHS) == places()[-1]
    assert struct.unpack("<Q", raw[:8]) == (5,)
    assert struct.unpack("<I", raw[8:12]) == (masked_crc32c(raw[:8]),)
    assert raw[12:17] == records[0]
    assert struct.unpack("<I", raw[17:21]) == (masked_crc32c(records[0]),)


def test_a_file_is_not_written_over(file, records) -> None:
    with pytest.raises(FileExistsError):
        write_tfrecord(file, records)
    assert list(read_tfrecord(file)) == records


def test_what_is_no_bytes_leaves_a_whole_file(tmp_path) -> None:
    path = tmp_path / "rows.tfrecord"
    with pytest.raises(TypeError, match="bytes-like"):
        write_tfrecord(path, [b"one", "two"])
    assert list(read_tfrecord(path)) == [b"one"]


def damaged(file, at: int, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << bit
    file.write_bytes(raw)


def read_past(file) -> tuple[list[bytes], list[CorruptRecord]]:
    found: list[CorruptRecord] = []
    return list(read_tfrecord(file, on_corrupt="skip", report=found.append)), found


@pytest.mark.parametrize("number", [0, 2, 4, 5])
@pytest.mark.parametrize("part", ["bytes", "checksum"])
def test_a_changed_bit_costs_one_record(number, part, file, records, seed) -> None:
    dice = random.Random(seed)
    start = places()[number]
    inside = LENGTHS[number] if part == "bytes" else 4
    first = start + 12 + (0 if part == "bytes" else LENGTHS[number])
    damaged(file, first + dice.randrange(inside), dice.randrange(8))

    reading = read_tfrecord(file)
    assert [next(reading) for _ in range(number)] == records[:number]
    said = f"rows.tfrecord, .*byte {start}: its {LENGTHS[number]} bytes .*checksum"
    with pytest.raises(CorruptRecord, match=said) as caught:
        next(reading)
    assert (caught.value.path, caught.value.offset) == (file, start)

    rest, found = read_past(file)
    assert rest == records[:number] + records[number + 1 :]
    assert [(problem.path, problem.offset) for problem in found] == [(file, start)]


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_changed_length_costs_the_rest(number, file, records, seed) -> None:
    dice = random.Random(seed)
    start = places()[number]
    damaged(file, start + dice.randrange(12), dice.randrange(8))
    lost = places()[-1] - start
    with pytest.raises(
        CorruptRecord, match=f"byte {start}: its length .*checksum, .* {lost} bytes"
    ):
        list(read_tfrecord(file))
    rest, found = read_past(file)
    assert rest == records[:number]
    assert [problem.offset for problem in found] == [start]


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_file_that_was_cut_off_says_so(number, file, records, seed) -> None:
    start, end = places()[number : number + 2]
    raw = file.read_bytes()
    dice = random.Random(seed)
    for size in {start + 1, start + 11, start + 12, end - 1, dice.randrange(start + 1, end)}:
        file.write_bytes(raw[:size])
        with pytest.raises(CorruptRecord, match=f"byte {start}: the file ends in i"):
            list(read_tfrecord(file))
        rest, found = read_past(file)
        assert rest == records[:number]
        assert [problem.offset for problem in found] == [start]
    file.write_bytes(raw[:start])  # between two records nothing is missing that it could know of
    assert list(read_tfrecord(file)) == records[:number]


def test_a_skipped_record_warns_unless_told_otherwise(file, records) -> None:
    damaged(file, 12, 3)
    with pytest.warns(RuntimeWarning, match="skipped .*record at byte 0: its 5 bytes fail"):
        assert list(read_tfrecord(file, on_corrupt="skip")) == records[1:]
    with pytest.raises(ValueError, match="on_corrupt must be one of .* got 'ignore'"):
        read_tfrecord(file, on_corrupt="ignore")


def test_the_error_travels_between_processes(file) -> None:
    damaged(file, 12, 3)
    with pytest.raises(CorruptRecord) as caught:
        list(read_tfrecord(file))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.offset) == (str(caught.value), file, 0)
    assert "byte 0" in str(CorruptRecord(str(again)))  # what a DataLoader's worker hands on
