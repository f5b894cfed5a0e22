"""The figures show what maps, banks and occupancy say, and say it in words."""

import plotly.graph_objects as go
import pytest

from labcore.hip import mfma
from labcore.hip.occupancy import occupancy
from labcore.ui import Choice, IntSlider, explore, twin
from labcore.ui.figures import hip as figures

LANES = {
    "matrix": Choice(options=("A", "B", "D"), default="D"),
    "instruction": Choice(options=tuple(mfma.INSTRUCTIONS), default="32x32x8_f16"),
    "lane": IntSlider(low=0, high=63, default=37),
}
BANKS = {"stride": IntSlider(low=32, high=80, default=64)}
RESIDENTS = {
    "registers": Choice(options=(64, 168, 256, 384, 512), default=168),
    "lds_kib": Choice(options=(8, 18, 35, 64), default=18),
    "waves": Choice(options=(1, 4, 16), default=4),
}
REPORTED = {"step4": {"registers": 160, "occupancy": 3}}


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


def test_the_fullest_bank_sets_the_cycles() -> None:
    for stride, cycles in ((64, 32), (33, 1), (48, 16), (36, 4), (34, 2)):
        figure = figures.banks(stride)
        assert sum(figure.data[0].y) == 32 and max(figure.data[0].y) == cycles
        title = figure.layout.title.text
        assert title == f"{cycles} cycle{'' if cycles == 1 else 's'} by the rule"
        used = 32 - figure.data[0].y.count(0)
        assert f"{stride} words apart use {used} of 32 banks: {title}" in figure.layout.meta["alt"]
    assert "32 in the emulator" in figures.banks(64, data={64: 31}).layout.title.text
    assert "emulator" not in figures.banks(65, data={64: 31}).layout.title.text


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
        (figures.banks, BANKS, {"data": {64: 31}}),
        (figures.residents, RESIDENTS, {"data": REPORTED}),
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


def test_work_leaves_out_what_was_not_done_and_says_it_in_words() -> None:
    counts = {
        "step 1": {"LDS accesses": 0, "bytes": 1200},
        "step 2": {"LDS accesses": 7, "bytes": 3},
    }
    figure = figures.work(counts, title="Counted")
    assert list(figure.data[0].y) == [None, 1200] and list(figure.data[1].y) == [7, 3]
    assert figure.layout.yaxis.type == "log"
    assert "step 1: LDS accesses 0, bytes 1,200; step 2" in figure.layout.meta["alt"]
