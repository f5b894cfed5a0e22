"""The figures show what maps, banks and occupancy say, and say it in words."""

import plotly.graph_objects as go
import pytest
import torch

from labcore.attention import traffic
from labcore.hip import load, mfma
from labcore.hip.occupancy import occupancy
from labcore.ui import Choice, IntSlider, explore, twin
from labcore.ui.figures import hip as figures

LANES = {
    "matrix": Choice(options=("A", "B", "D"), default="D"),
    "instruction": Choice(options=tuple(mfma.INSTRUCTIONS), default="32x32x8_f16"),
    "lane": IntSlider(low=0, high=63, default=37),
}
BANKS = {
    "padding": Choice(options=(0, 1, 2, 4, 8, 16), default=0),
    "width": Choice(options=(4, 8, 16), default=4),
    "chip": Choice(options=("CDNA2, CDNA3", "CDNA4"), default="CDNA2, CDNA3"),
}
DECODE = {
    "batch": Choice(options=(1, 4, 16, 64), default=1),
    "context": Choice(options=(2048, 8192, 32768, 131072), default=8192),
}
RESIDENTS = {
    "registers": Choice(options=(64, 168, 256, 384, 512), default=168),
    "lds_kib": Choice(options=(8, 18, 35, 64), default=18),
    "waves": Choice(options=(1, 4, 16), default=4),
}
REPORTED = {"step4": {"registers": 160, "occupancy": 3, "lds": 17_920, "threads": 256}}


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


@pytest.mark.parametrize("matrix", ["A", "B", "D"])
@pytest.mark.parametrize("instruction", mfma.INSTRUCTIONS)
def test_each_element_is_drawn_with_the_lane_that_holds_it(instruction: str, matrix: str) -> None:
    chosen = mfma.INSTRUCTIONS[instruction]
    grid, ring = figures.lanes(instruction, matrix, 37).data
    for row, places in enumerate(mfma.layout(chosen, matrix)):
        for column, (lane, item) in enumerate(places):
            assert (grid.customdata[row][column], grid.z[row][column]) == (lane, item)
    rung = set(zip(ring.y, ring.x, strict=True))
    held = chosen.results if matrix == "D" else chosen.operands
    assert rung == {mfma.element(chosen, matrix, 37, item) for item in range(held)}


def test_two_halves_share_a_register_and_results_do_not() -> None:
    half, single = mfma.INSTRUCTIONS["32x32x8_f16"], mfma.INSTRUCTIONS["32x32x2_f32"]
    assert figures.place(half, "A", 3) == "register 1, high half"
    assert figures.place(half, "D", 3) == figures.place(single, "D", 3) == "register 3"
    halves, singles = (figures.lanes(name, "A", 0) for name in ("32x32x8_f16", "32x32x2_f32"))
    assert "in register 1, high half." in halves.layout.meta["alt"]
    assert halves.layout.title.text == "4 elements per lane, in 2 registers"
    assert singles.layout.title.text == "1 element per lane, in 1 register"


COLUMN = """
#include "portable.h"
template <int N>
__global__ void column(Global<float> y, int stride) {
  SHARED(float, tile, 64 * 80);
  for (int i = threadIdx.x; i < 64 * 80; i += 64) tile[i] = float(i);
  __syncthreads();
  y[threadIdx.x] = load<N>(tile, threadIdx.x * stride)[0];
}
ENTRY(bytes4, column<1>)
ENTRY(bytes8, column<2>)
ENTRY(bytes16, column<4>)
"""


@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_rule_for_banks_is_what_the_emulator_counts(width: int) -> None:
    program = load(COLUMN)
    for padding in (0, 1, 2, 4, 8, 16):
        title = figures.banks(padding, width).layout.title.text
        if 4 * padding % width:
            assert title == f"rows aren't aligned to {width} bytes"
            continue
        lost = program.launch(
            f"bytes{width}", grid=1, block=64, count=True,
            arguments={"y": torch.zeros(64), "stride": 64 + padding},
        ).lds_conflicts  # fmt: skip
        groups = width // 2
        assert title == f"{groups + lost} bank cycles, {groups} at best"
        data = {(width, padding): lost}
        emulated = figures.banks(padding, width, data=data).layout.title.text
        assert emulated == f"{title}, {groups + lost} emulated"


def test_groups_of_lanes_cover_the_wavefront_and_more_banks_serve_more_at_a_time() -> None:
    for width in (4, 8, 16):
        for count in (32, 64):
            groups = figures.turns(width, count)
            assert sorted(lane for group in groups for lane in group) == list(range(64))
            assert {len(group) for group in groups} == {4 * count // width}
    # AMD, Composable Kernel's page on bank conflicts: 16-byte reads, the first two groups.
    assert figures.turns(16, 32)[:2] == [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19]]
    # Triton's pull request 11365: MI350's first group.
    fours = [0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27]
    assert figures.turns(16, 64)[0] == fours
    wide = figures.banks(0, 4, "CDNA4", data={(4, 0): 62})
    assert wide.layout.title.text == "64 bank cycles, 1 at best" and len(wide.data[0].x) == 64
    assert sum(figures.banks(1, 4).data[0].y) == 32 and max(figures.banks(1, 4).data[0].y) == 1


def test_a_decode_step_is_bound_by_latency_until_its_pieces_fill_the_gpu() -> None:
    few = figures.decode(1, 32768, 4, 1.0)
    for curve in few.data:
        assert curve.text[0] == "latency" and curve.text[-1] == "bandwidth"
        assert curve.y[0] > 4 * min(curve.y)
    assert "MI300X: " in few.layout.meta["alt"] and "H100: " in few.layout.meta["alt"]
    shape = traffic.Shape(batch=1, heads=32, length=1, head_dim=128, kv_heads=8, key_length=32768)
    moved = traffic.decode_bytes(shape, 64)
    assert few.data[0].y[-1] == pytest.approx(1e6 * moved / traffic.GPUS["MI300X"].bandwidth)
    assert few.data[0].y[0] == pytest.approx(traffic.decode_bytes(shape) / (8 * figures.IN_FLIGHT))
    short = figures.decode(1, 2048, 4, 9.0)  # 32 passes of 64 keys: 64 pieces are 32 with work
    assert all(curve.y[-1] == curve.y[-2] for curve in short.data)
    assert figures.decode(256, 8192, 512, 0.1).data[0].text[0] == "products"


def test_residents_curve_is_the_model_and_the_ring_is_on_it() -> None:
    figure = figures.residents(168, 18, 4, data=REPORTED)
    curve = trace(figure, "waves on a SIMD")
    for count, waves in zip(curve.x, curve.y, strict=True):
        model = occupancy(
            "gfx942",
            vgprs=min(count, 256),
            agprs=max(0, count - 256),
            lds=18 * 1024,
            threads=256,
        )
        assert waves == model.waves_per_simd
    ring = dict(zip(curve.x, curve.y, strict=True))
    assert trace(figure, "chosen").y[0] == ring[168] == 3
    assert list(trace(figure, "by the compiler").x) == [160]
    title = figure.layout.title.text
    assert title == "3 waves per SIMD, bound by registers and LDS"
    groups = occupancy("gfx942", vgprs=168, agprs=0, lds=18 * 1024, threads=256).groups
    assert f"a compute unit holds {groups} workgroups" in figure.layout.meta["alt"]
    roomy = figures.residents(64, 8).layout.title.text
    assert roomy == "8 waves per SIMD, all that it has room for"
    assert "no workgroup fits" in figures.residents(512, 64, 16).layout.title.text


def test_frames_share_traces_and_titles_fit_a_phone() -> None:
    for figure_fn, controls, given in (
        (figures.lanes, LANES, {}),
        (figures.banks, BANKS, {"data": {(16, 4): 30}}),
        (figures.residents, RESIDENTS, {"data": REPORTED}),
        (figures.decode, DECODE, {}),
    ):
        kinds = set()
        names, found = list(controls)[:2], list(controls.values())[:2]
        positions = [item.positions() for item in found]
        frames = [(a, b) for a in positions[0] for b in (positions[1:] or [(None,)])[0]]
        assert len(frames) <= twin.MOST_FRAMES
        for values in frames:
            chosen = dict(zip(names, values, strict=False))
            figure = figure_fn(**chosen, **given)
            kinds.add(tuple((item.type, item.name) for item in figure.data))
            lines = figure.layout.title.text.split("<br>")
            assert len(lines) == 1 and max(map(len, lines)) <= 44, lines
        assert len(kinds) == 1


def test_the_static_page_carries_every_explorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    explore(figures.lanes, alt="x", **LANES)
    explore(figures.banks, alt="x", data={}, **BANKS)
    explore(figures.residents, alt="x", data=REPORTED, **RESIDENTS)
    explore(figures.decode, alt="x", **DECODE)


def test_work_leaves_out_what_was_not_done_and_says_it_in_words() -> None:
    counts = {
        "step 1": {"LDS accesses": 0, "bytes": 1200},
        "step 2": {"LDS accesses": 7, "bytes": 3},
    }
    figure = figures.work(counts, title="Counted")
    assert list(figure.data[0].y) == [None, 1200] and list(figure.data[1].y) == [7, 3]
    assert figure.layout.yaxis.type == "log"
    assert "step 1: LDS accesses 0, bytes 1,200; step 2" in figure.layout.meta["alt"]
