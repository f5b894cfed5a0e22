"""The emulator: threads and waves as the hardware has them, errors with a place, counts by rule."""

import functools
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from labcore.hip import EmulationError, LaunchCounters, Program, emulate, forward, load

KERNELS = Path(__file__).parent / "kernels.hip"
LANES = torch.arange(64)


@functools.cache
def kernels(wave: int = 64) -> Program:
    return load(KERNELS, wave=wave)


def launch(name: str, *, grid=1, block=64, wave: int = 64, count=False, **arguments):
    return kernels(wave).launch(
        f"{name}_", grid=grid, block=block, arguments=arguments, count=count
    )


def counted(name: str, *, block: int = 64, **arguments) -> LaunchCounters:
    counters = kernels().launch(name, grid=1, block=block, arguments=arguments, count=True)
    assert counters is not None
    return counters


# ---- threads, waves, blocks ----


@pytest.mark.parametrize(
    ("grid", "block"), [((3,), (5,)), ((2, 3), (4, 2)), ((2, 1, 3), (3, 2, 5)), (1, 1024)]
)
def test_each_thread_has_its_own_place(grid, block) -> None:
    many = [(*n, 1, 1)[:3] if isinstance(n, tuple) else (n, 1, 1) for n in (grid, block)]
    wanted = [
        [x + 10 * y + 100 * z for z in range(n[2]) for y in range(n[1]) for x in range(n[0])]
        for n in many
    ]
    out = torch.full((len(wanted[0]), len(wanted[1])), -1, dtype=torch.int32)
    launch("places", grid=grid, block=block, out=out, threads=out.shape[1])
    assert (out == 1000 * torch.tensor(wanted[0])[:, None] + torch.tensor(wanted[1])).all()


@pytest.mark.parametrize("width", [64, 32, 16, 2])
@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
def test_shuffles_follow_hips_rule_in_every_group(width: int, by: int, generator) -> None:
    x, y = torch.randn(64, generator=generator), torch.empty(64)
    group, place = LANES // width * width, LANES % width
    down = torch.where(place + by < width, LANES + by, LANES)
    xor = torch.where((LANES ^ by) < group + width, LANES ^ by, LANES)
    for op, source in enumerate((group + by % width, xor, down)):
        launch("shuffle", x=x, y=y, op=op, by=by, width=width)
        assert torch.equal(y, x[source])


def test_sum_starting_at_16_is_a_warps_and_half_a_wavefronts(generator) -> None:
    x = torch.randint(-9, 9, (64,), generator=generator).float()  # exact sums
    y = torch.empty(64)
    launch("wave_sum", x=x, y=y, start=32)
    assert (y == x.sum()).all()
    launch("wave_sum", x=x, y=y, start=16)
    assert (y == x.view(2, 32).sum(1).repeat_interleave(32)).all()
    launch("wave_sum", wave=32, x=x, y=y, start=16)
    assert (y == x.view(2, 32).sum(1).repeat_interleave(32)).all()


def test_a_vote_inside_a_branch_is_of_the_lanes_that_are_there() -> None:
    low, high = (torch.empty(64, dtype=torch.int32) for _ in range(2))
    launch("votes", low=low, high=high)
    masks = (high.long() << 32) | (low.long() & 0xFFFFFFFF)
    signed = torch.tensor(1, dtype=torch.int64)
    thirds = sum((signed << i for i in range(1, 64, 2) if i % 3 == 0), torch.tensor(0))
    evens = sum((signed << i for i in range(0, 64, 2)), torch.tensor(0))
    assert (masks[1::2] == thirds).all() and (masks[::2] == evens).all()


@pytest.mark.parametrize("block", [64, 40, 100])
def test_lanes_that_left_a_loop_wait_behind_it(block: int) -> None:
    last, after = (torch.empty(block, dtype=torch.int32) for _ in range(2))
    launch("turns", block=block, last=last, after=after)
    # Lane i's last turn is the i-th: the lanes after it in its wave are still there.
    first = torch.tensor([t // 64 * 64 for t in range(block)])
    end = (first + 64).clamp(max=block)
    assert torch.equal(last, (end - torch.arange(block)).int())
    assert torch.equal(after, (end - first).int())


def test_what_a_lane_that_left_would_say_is_an_error() -> None:
    with pytest.raises(EmulationError, match=r"\(0, 0, 0\): __shfl of line \d+ reads lane 7"):
        launch("from_nobody", y=torch.empty(64, dtype=torch.int32))


@pytest.mark.parametrize("n", [1, 63, 64, 129, 1024])
def test_a_barrier_makes_one_waves_writes_anothers_to_read(n: int, generator) -> None:
    x = torch.randn(3, n, generator=generator)
    y = torch.empty_like(x)
    counters = launch("reverse", grid=3, block=n, count=True, x=x, y=y, n=n)
    assert torch.equal(y, x.flip(1))
    assert counters.barriers == 3


# ---- what goes wrong ----


def fails(name: str, sentence: str, **arguments) -> None:
    with pytest.raises(EmulationError, match=sentence) as caught:
        launch(name, **arguments)
    assert str(caught.value).startswith("kernels.hip: block (")
    # The process and the library live on.
    y = torch.empty(1, 9)
    launch("reverse", block=9, x=torch.arange(9.0)[None], y=y, n=9)
    assert torch.equal(y[0], torch.arange(8.0, -1.0, -1.0))


def line_of(text: str) -> int:
    """The line of kernels.hip that holds `text`, which only one does."""
    lines = KERNELS.read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line)
    return number


@pytest.mark.parametrize("stay", [1, 63, 64, 127])
def test_a_barrier_that_some_never_reach(stay: int) -> None:
    line = line_of("// Not all of them come here.")
    fails(
        "some_return",
        rf"block \(0, 0, 0\), thread \({stay}, 0, 0\): returned, and thread \(0, 0, 0\) waits at "
        rf"the barrier of line {line}$",
        block=128,
        grid=2,
        y=torch.empty(1),
        stay=stay,
    )


def test_barriers_on_two_lines_are_two_barriers() -> None:
    fails(
        "two_barriers",
        r"thread \(64, 0, 0\): waits at the barrier of line (\d+), thread \(0, 0, 0\) at that of "
        r"line (?!\1)\d+",
        block=128,
        y=torch.empty(1),
    )


@pytest.mark.parametrize("what", [0, 1, 2, 3])
@pytest.mark.parametrize("beyond", [-1, 0, 7])
def test_stray_access_names_thread_line_array_and_place(what, beyond) -> None:
    name, count = (("x", 20), ("y", 30), ("tile", 48), ("tile", 48))[what]
    at = beyond if beyond < 0 else count + beyond
    line = line_of(f"if (what == {what})")
    fails(
        "stray",
        rf"block \(1, 0, 0\), thread \(5, 0, 0\): line {line}: {name}\[{at}\] is outside its "
        rf"{count} elements" + (" of LDS" if what > 1 else ""),
        grid=2,
        x=torch.zeros(20),
        y=torch.zeros(30),
        what=what,
        at=at,
    )
    y = torch.zeros(30)
    launch("stray", grid=2, x=torch.zeros(20), y=y, what=what, at=count - 1)  # the last one is in


def test_a_window_has_bounds_of_its_own() -> None:
    x, y = torch.arange(10.0), torch.empty(1)
    launch("window", block=1, x=x, y=y, start=4, length=3, at=2)
    assert y.item() == 6.0
    fails("window", r"x\[3\] is outside its 3", block=1, x=x, y=y, start=4, length=3, at=3)
    fails("window", r"part 8 \.\.\. 10 of x is outside", block=1, x=x, y=y, start=8, length=3, at=0)


def test_vectors_are_inside_and_aligned() -> None:
    x, y = torch.arange(12.0), torch.zeros(12)
    launch("vectors", block=1, x=x, y=y, source=8, target=4)
    assert y.tolist() == [0] * 4 + [8, 9, 10, 11] + [0] * 4
    fails("vectors", r"x\[12\] is outside", block=1, x=x, y=y, source=9, target=0)
    fails("vectors", r"x\[2\] is not aligned to 16", block=1, x=x, y=y, source=2, target=0)
    fails("vectors", r"y\[6\] is not aligned to 16", block=1, x=x, y=y, source=0, target=6)


def test_lds_that_nobody_wrote_is_nan_in_every_block() -> None:
    y, h = torch.zeros(3, 64), torch.zeros(3, 64, dtype=torch.float16)
    launch("unwritten", grid=3, y=y, h=h)
    assert y.isnan().all() and h.isnan().all()


def test_a_block_has_64_kib_of_lds() -> None:
    fails("much", "second needs the block's LDS up to byte 65552", block=1, y=torch.zeros(1))


def test_arguments_that_the_kernel_cannot_take() -> None:
    y = torch.zeros(1)
    with pytest.raises(ValueError, match="takes 2 arguments, got 1"):
        launch("some_return", y=y)
    for other in (y.double(), y.int()):
        with pytest.raises(ValueError, match=r"y must be a tensor of torch.float32, .* got torch"):
            launch("some_return", y=other, stay=64)
    with pytest.raises(ValueError, match="stay must be an int, .* got float"):
        launch("some_return", y=y, stay=64.0)
    with pytest.raises(ValueError, match="stay must be an int, .* got torch.float32"):
        launch("some_return", y=y, stay=y)
    with pytest.raises(ValueError, match="stay must be a tensor of torch.float32, .* got int"):
        launch("some_return", stay=64, y=y)  # the kernel knows order, not names
    with pytest.raises(ValueError, match="stay must fit .*, got 4294967360"):
        launch("some_return", y=y, stay=2**32 + 64)
    with pytest.raises(ValueError, match="c must be a number that .* got int"):
        launch("scaled", y=y, a=2.0, b=0, c=1)
    for grid in (0, (1, 0), 2**32 + 1, -1):
        with pytest.raises(ValueError, match=r"grid must be .*got (0|-1|4294967297|\(1, 0\))"):
            launch("some_return", grid=grid, y=y, stay=64)
    with pytest.raises(EmulationError, match="1 to 1024 threads, got 2048"):
        launch("some_return", block=(1024, 2), y=y, stay=1)
    with pytest.raises(ValueError, match=r"ENTRY\(nothing_"):
        launch("nothing")
    with pytest.raises(ValueError, match=r"grid must be .*got \(1, 2, 3, 4\)"):
        launch("some_return", grid=(1, 2, 3, 4), y=y, stay=64)
    with pytest.raises(ValueError, match="contiguous"):
        launch("some_return", y=torch.zeros(4, 2).T, stay=64)
    with pytest.raises(TypeError, match="stay must be a tensor, an int or a float, got bool"):
        launch("some_return", y=y, stay=True)


def test_an_int_is_a_float_where_the_kernel_takes_one() -> None:
    y = torch.tensor([1.0, 2, 3, 4, 5, 6])
    launch("changed", block=1, y=y, n=torch.tensor([1], dtype=torch.int32), by=2)
    assert y.tolist() == [3, 0, 6, 2, 0, 0]


@pytest.mark.parametrize(
    ("way", "where", "does"),
    [
        (0, "Reads too early.", "reads .* tile .* written"),
        (1, "Writes too early.", "writes .* tile .* read"),
        (2, "Both write.", "writes .* tile .* written"),
    ],
)
def test_missing_barrier_is_an_error_even_if_numbers_are_right(
    way: int, where: str, does: str
) -> None:
    fails(
        "meeting",
        rf"thread \(64, 0, 0\): line {line_of(where)} {does} on line \d+, .*no barrier",
        block=128,
        y=torch.empty(128),
        way=way,
    )


@pytest.mark.parametrize("way", [3, 4, 5])
def test_what_no_order_of_the_waves_can_change_is_no_race(way: int) -> None:
    y = torch.empty(128)
    launch("meeting", grid=2, block=128, y=y[:128], way=way)
    if way == 5:
        assert torch.equal(y, torch.arange(127.0, -1.0, -1.0))


def test_two_libraries_have_a_machine_each() -> None:
    y = torch.empty(64)
    for _ in range(2):
        launch("wave_sum", x=torch.ones(64), y=y, start=32)
        assert (y == 64).all()
        launch("wave_sum", wave=32, x=torch.ones(64), y=y, start=16)
        assert (y == 32).all()


def test_a_launch_waits_for_that_of_another_thread_of_python() -> None:
    x, y = torch.arange(64.0)[None], torch.zeros(1, 64)
    other = threading.Thread(target=lambda: launch("reverse", x=x, y=y, n=64))
    with emulate._ONE_LAUNCH:
        other.start()
        other.join(0.3)
        assert other.is_alive() and (y == 0).all()
    other.join()
    assert torch.equal(y, x.flip(1))


# ---- what is counted ----

# Lanes that are served together, as AMD's pages put it (their source: cpu_check.h).
HALVES = [range(i, i + 32) for i in (0, 32)]
QUARTERS = [range(i, i + 16) for i in range(0, 64, 16)]
EIGHTHS = [range(i, i + 8) for i in range(0, 64, 8)]
CROSSED = [
    [*range(a + base, a + base + 4), *range(b + base, b + base + 4)]
    for base in (0, 32)
    for a, b in ((0, 20), (4, 16), (8, 28), (12, 24))
]


def conflicts(addresses: list[int], size: int, together) -> int:
    """Cycles beyond one for each group of lanes, a 4-byte word of each of 32 banks a cycle."""
    extra = 0
    for group in together:
        words = {
            w
            for lane in group
            for w in range(addresses[lane] // 4, (addresses[lane] + size - 1) // 4 + 1)
        }
        extra += max(Counter(w % 32 for w in words).values()) - 1
    return extra


@pytest.mark.parametrize("stride", [0, 1, 2, 3, 4, 17, 32, 33, 64, 65])
def test_lds_conflicts_of_narrow_accesses(stride: int) -> None:
    for size, bytes_ in ((2, 2), (4, 4)):
        wanted = conflicts([lane * stride * bytes_ for lane in range(64)], size, HALVES)
        read = counted(f"lds_read_{size}", y=torch.empty(64), stride=stride, rows=64)
        write = counted(f"lds_write_{size}", stride=stride, rows=64)
        assert read.lds_conflicts == write.lds_conflicts == wanted
        assert read.lds_accesses == write.lds_accesses == 1


def test_the_known_cases_of_a_tile_with_32_columns() -> None:
    y = torch.empty(64)
    assert counted("lds_read_4", y=y, stride=32, rows=64).lds_conflicts == 2 * 31
    assert counted("lds_read_4", y=y, stride=33, rows=64).lds_conflicts == 0
    assert (
        counted("lds_read_4", y=y, stride=0, rows=64).lds_conflicts == 0
    )  # one word for all of them


@pytest.mark.parametrize("stride", [8, 16, 24, 40, 64, 72, 128, 136])
@pytest.mark.parametrize("rows", [64, 32, 16])
def test_lds_conflicts_of_wide_accesses(stride: int, rows: int) -> None:
    for size, reads, writes in ((8, QUARTERS, QUARTERS), (16, CROSSED, EIGHTHS)):
        addresses = [lane % rows * stride * 2 + lane // rows * size for lane in range(64)]
        read = counted(f"lds_read_{size}", y=torch.empty(64), stride=stride, rows=rows)
        write = counted(f"lds_write_{size}", stride=stride, rows=rows)
        assert read.lds_conflicts == conflicts(addresses, size, reads)
        assert write.lds_conflicts == conflicts(addresses, size, writes)


def test_rows_8_halves_apart_from_a_power_of_two_do_not_collide() -> None:
    y = torch.empty(64)
    assert counted("lds_read_16", y=y, stride=64, rows=64).lds_conflicts == 8 * 7
    assert counted("lds_read_16", y=y, stride=72, rows=64).lds_conflicts == 0


@pytest.mark.parametrize(("turns", "quiet"), [(1, 0), (5, 0), (5, 40), (3, 64)])
def test_loop_costs_as_many_instructions_as_its_longest_lane(turns: int, quiet: int) -> None:
    counters = counted("diverging_", turns=turns, quiet=quiet)
    assert counters.lds_accesses == (turns if quiet < 64 else 0)


@pytest.mark.parametrize(("stride", "segments"), [(0, 1), (1, 4), (2, 8), (4, 16), (16, 64)])
def test_global_transactions_are_segments_of_64_bytes(stride: int, segments: int) -> None:
    x = torch.zeros(64 * 16)
    counters = counted("global_read_", x=x, y=torch.empty(1), stride=stride)
    assert (counters.transactions, counters.bytes) == (segments, 64 * 4)


def test_a_vector_is_one_instruction() -> None:
    counters = counted("global_read_vectors_", x=torch.zeros(256), y=torch.empty(1))
    assert (counters.transactions, counters.bytes) == (16, 64 * 16)


@pytest.mark.parametrize(
    ("start", "gap", "instructions"),
    [(0, 1, 8), (4, 1, 8), (2, 1, 9), (1, 1, 10), (0, 2, 32), (0, 0, 32)],
)
def test_neighbors_in_every_lane_are_merged_up_to_16_aligned_bytes(
    start: int, gap: int, instructions: int
) -> None:
    x, y = torch.zeros(128), torch.empty(64)
    counters = counted("run_", x=x, y=y, start=start, gap=gap)
    assert counters.transactions == 32 + 4
    assert counters.merged_transactions == instructions + 4
    assert counters.merged_lines == instructions + 2


def test_lds_accesses_at_one_distance_are_pairs_until_a_barrier() -> None:
    y = torch.empty(64)
    for far, barrier, expected in ((5, 0, 1), (5, 1, 2), (64, 0, 1)):
        counters = counted("pair_", y=y, far=far, spread=0, barrier=barrier)
        assert (counters.lds_accesses, counters.merged_lds) == (2, expected), (far, barrier)
    assert counted("pair_", y=y, far=5, spread=1, barrier=0).merged_lds == 2


def test_an_update_reads_and_writes() -> None:
    y = torch.arange(64.0)
    counters = counted("update_", y=y)
    assert torch.equal(y, 2 * (torch.arange(64.0) + 1))
    assert (counters.transactions, counters.bytes) == (4 * 4, 4 * 64 * 4)


def test_counts_do_not_outlive_their_launch() -> None:
    with pytest.raises(EmulationError, match="outside"):
        counted("global_read_", x=torch.zeros(1024), y=torch.empty(1), stride=17)
    assert counted("update_", y=torch.zeros(64)).transactions == 16


def test_only_a_checked_program_counts() -> None:
    plain = Program(kernels().path, name="kernels.hip", checked=False)
    with pytest.raises(ValueError, match="counting needs a checked program"):
        plain.launch("update_", grid=1, block=64, arguments={"y": torch.zeros(64)}, count=True)


# ---- what forward takes and refuses ----


@pytest.mark.parametrize("step", [1, 4])
def test_forward_takes_any_address_strides_gradients_and_nothing(step: int, generator) -> None:
    plain = torch.randn(1, 1, 8, 64, generator=generator)
    odd = torch.cat([torch.zeros(1), plain.flatten()])[1:].view_as(plain).requires_grad_()
    assert odd.data_ptr() % 16
    wanted = forward(plain, plain, plain, step=step).out
    found = forward(odd, odd.mT.contiguous().mT, odd, step=step)
    assert torch.equal(found.out, wanted) and not found.out.requires_grad
    for empty in (plain[:, :, :0], plain[:0], plain[:, :0]):
        keys = plain.expand(*empty.shape[:2], 8, 64)
        nothing = forward(empty, keys, keys, step=step, count=True)
        assert nothing.out.shape == empty.shape and nothing.lse.shape == empty.shape[:3]
        assert nothing.counters is not None and nothing.counters.bytes == 0


def test_forward_says_what_it_takes() -> None:
    good = torch.zeros(1, 2, 3, 64)
    refused = [
        (ValueError, "query must be", (good[0], good, good)),
        (ValueError, "head dimension must be one of 64, 128", (good[..., :32],) * 3),
        (TypeError, "query must be float32, float16 or bf", (good.double(),) * 3),
        (TypeError, "float32 or float16 for step 1, got torch.bf", (good.bfloat16(),) * 3),
        (TypeError, "value must have query's dtype", (good, good, good.half())),
        (ValueError, "where Hkv divides 2", (good, good[:, [0, 0, 0]], good[:, [0, 0, 0]])),
        (ValueError, "where Hkv divides 2", (good, good[:, :0], good[:, :0])),
        (ValueError, "key and value must be", (good, good, good[:, :, :2])),
        (ValueError, "at least one position", (good, good[:, :, :0], good[:, :, :0])),
        (ValueError, "must be on the CPU", (good.to("meta"), good, good)),
    ]
    for kind, sentence, tensors in refused:
        with pytest.raises(kind, match=sentence):
            forward(*tensors, step=1)
    with pytest.raises(ValueError, match="step must be one of 1, 2, 3, 4, got 5"):
        forward(good, good, good, step=5)
    with pytest.raises(ValueError, match="scale must be a finite number above 0"):
        forward(good, good, good, step=1, scale=0.0)
