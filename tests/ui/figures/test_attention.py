"""The chapter's figures show what the traffic model counts, and say it in words."""

import itertools
import math

import plotly.graph_objects as go
import pytest
import torch

from labcore.attention import online, traffic
from labcore.attention.pattern import Pattern, key_range, tile_mask
from labcore.ui import Choice, IntSlider, Toggle, explore, twin
from labcore.ui.figures import attention as figures

BLOCKS, LENGTHS = (32, 64, 128, 256), (512, 1024, 2048, 4096)
TILES = {
    "block": Choice(options=BLOCKS, default=128),
    "length": Choice(options=LENGTHS, default=1024),
    "is_causal": Toggle(default=True),
}
STEPS = {
    "after": IntSlider(low=0, high=4, default=2),
    "largest": Choice(options=(2.0, 5.0, 12.0, 100.0), default=5.0),
    "width": Choice(options=(2, 4), default=2),
    "conditional": Toggle(default=False),
}
MACHINE = {
    "moment": IntSlider(low=0, high=15, default=0),
    "form": Choice(options=figures.FORMS, default=figures.FORMS[0]),
    "head_dim": Choice(options=(64, 128), default=128),
}
DESIGNER = {
    "rows": Choice(options=(64, 128, 256), default=128),
    "columns": Choice(options=(32, 64, 128), default=128),
    "stages": Choice(options=(2, 3), default=2),
    "warps": Choice(options=(4, 8), default=8),
    "head_dim": Choice(options=(64, 128), default=128),
    "target": Choice(options=("sm_80", "sm_90"), default="sm_90"),
}


@pytest.fixture
def timelines() -> dict[str, dict]:
    """Two groups of warps in turns: A multiplies for 20 bins, then B; each has 10 of softmax."""

    def row(start: int, count: int) -> list[float]:
        return [float(start <= at % 32 < start + count) for at in range(64)]

    rows = {"matrix": [row(0, 12), row(12, 12)], "softmax": [row(20, 10), row(0, 10)]}
    own = {"clocks": 1234, "rows": rows}
    return {f"D {dim}, {name}": own for dim in (64, 128) for name in ("ahead", "turns")}


@pytest.fixture
def data(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(16, 4096, generator=generator)


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [32, 256])
def test_a_tile_is_drawn_as_what_the_pattern_makes_of_it(block: int, is_causal: bool, data) -> None:
    length, pattern = 512, Pattern(scale=1.0, is_causal=is_causal)
    drawn = figures.tiles(block, length, is_causal, data=data).data[0].z
    spans = [slice(first, first + block) for first in range(0, length, block)]
    for row, queries in zip(drawn, spans, strict=True):
        seen = key_range(pattern, queries.start, queries.stop, length, length)
        for state, keys in zip(row, spans, strict=True):
            if keys.start not in seen:
                assert state == 0
            else:
                mask = tile_mask(pattern, queries, keys, length, length)
                assert state == (2 if mask is None else 1)


def test_the_title_counts_what_the_traffic_model_counts(data) -> None:
    layout = figures.tiles(64, 1024, True, 128, data=data).layout
    shape = traffic.Shape(batch=1, heads=1, length=1024, head_dim=128, is_causal=True)
    flash, naive = (
        traffic.requested_bytes(shape, form, block_q=64, block_k=64) for form in ("flash", "naive")
    )
    assert f"{16 * 17 // 2} of 256 tiles" in layout.xaxis.title.text
    assert f"{flash / 1e6:.3g} MB requested, naive {naive / 1e6:.3g} MB" in layout.title.text


def test_the_naive_form_requests_more_at_every_position() -> None:
    """The page says so, and that its excess is smaller the larger the head dimension is."""
    blocks, lengths, masks = (control.positions() for control in TILES.values())
    dims = (32, 64, 128, 256)
    leads = {}
    for block, length, causal, dim in itertools.product(blocks, lengths, masks, dims):
        shape = traffic.Shape(batch=1, heads=1, length=length, head_dim=dim, is_causal=causal)
        naive, flash = (
            traffic.requested_bytes(shape, form, block_q=block, block_k=block)
            for form in ("naive", "flash")
        )
        leads[block, length, causal, dim] = naive / flash
    assert min(leads.values()) > 1
    for block, length, causal in itertools.product(blocks, lengths, masks):
        along = [leads[block, length, causal, dim] for dim in sorted(dims, reverse=True)]
        assert along == sorted(along)


def test_rescalings_are_counted_by_hand() -> None:
    rows = torch.tensor([[0.0, 1, 5, 2, 5, 5, 6, 0], [9.0, 1, 5, 2, 5, 5, 6, 0]])
    assert figures.rescalings(rows, 2, 8, is_causal=False) == (2 + 0) / 2
    # The first row now sees its first key only.
    assert figures.rescalings(rows.flip(0), 2, 8, is_causal=True) == (0 + 2) / 2
    assert figures.rescalings(rows, 8, 8, is_causal=False) == 0
    growing = torch.tensor([[0.0, 1], [0.0, 1]])
    assert figures.rescalings(growing, 1, 2, is_causal=True) == (0 + 1) / 2


def test_rescalings_follow_the_harmonic_law(generator: torch.Generator) -> None:
    rows = torch.rand(20_000, 32, generator=generator)
    law = sum(1 / i for i in range(2, 33))
    spread = math.sqrt(sum(1 / i * (1 - 1 / i) for i in range(2, 33)) / len(rows))
    # Six standard deviations: a false alarm in 500 million runs.
    assert abs(figures.rescalings(rows, 1, 32, is_causal=False) - law) < 6 * spread


def test_frames_share_traces_and_titles_fit_a_phone(data, timelines) -> None:
    for figure_fn, controls, given in (
        (figures.tiles, TILES, {"data": data}),
        (figures.steps, STEPS, {}),
        (figures.machine, MACHINE, {"data": timelines}),
        (figures.designer, DESIGNER, {}),
    ):
        kinds = set()
        (_, first), (_, second) = list(controls.items())[:2]
        for a in first.positions():
            for b in second.positions():
                figure = figure_fn(a, b, **given)
                kinds.add(tuple((item.type, item.name) for item in figure.data))
                lines = figure.layout.title.text.split("<br>")
                assert len(lines) == 1 and len(lines[0]) <= 44, lines
        assert len(kinds) == 1


def test_the_static_page_carries_every_frame(
    data: torch.Tensor, timelines: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    for controls in (TILES, STEPS, MACHINE):
        assert math.prod(len(one.positions()) for one in controls.values()) <= twin.MOST_FRAMES
    monkeypatch.setenv("LABCORE_BOOK", "1")
    explore(figures.tiles, alt="x", data=data, **TILES)
    explore(figures.steps, alt="x", **STEPS)
    explore(figures.machine, alt="x", data=timelines, **MACHINE)
    explore(figures.designer, alt="x", formula=figures.DESIGNER_FORMULA, **DESIGNER)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 5.5, 1e9])
@pytest.mark.parametrize("width", [1, 3, 4, 11])
def test_a_walk_by_hand_ends_at_softmax_whatever_the_threshold(
    width: int, threshold: float, generator: torch.Generator
) -> None:
    scores, values = torch.randn(2, 11, generator=generator, dtype=torch.float64) * 5
    states = figures.walk(scores.tolist(), values.tolist(), width, threshold=threshold)
    assert len(states) == -(-11 // width)
    last = states[-1]
    assert last.acc / last.total == pytest.approx(float(scores.softmax(0) @ values), rel=1e-12)
    lse = last.top + math.log(last.total)
    assert lse == pytest.approx(float(scores.logsumexp(0)), rel=1e-12)
    tops = [one.top for one in states]
    if threshold == 0:
        state = None
        for first, one in zip(range(0, 11, width), states, strict=True):
            tile = slice(first, first + width)
            base_2 = scores[None, tile] * online.LOG2E
            state = online.absorb(state, base_2, values[tile, None])
            assert one.top * online.LOG2E == pytest.approx(state.top.item(), rel=1e-12)
            assert one.total == pytest.approx(state.total.item(), rel=1e-12)
            assert one.acc == pytest.approx(state.acc.item(), rel=1e-12)
            assert one.grown == (one.factor < 1)
    elif threshold == 1e9:
        assert len(set(tops)) == 1 and all(one.factor == 1 for one in states)
    else:  # m follows only a score that exceeds it by more
        assert all(b == a or b > a + threshold for a, b in itertools.pairwise(tops))


def test_the_row_by_hand_shows_its_factors_and_ends_at_softmax() -> None:
    figure = figures.steps(4, 5.0, 2)
    bars, line, cells, words = figure.data
    assert list(bars.y) == [1, 3, 2, 0, 4, 2, 5, 1] and set(line.y) == {5.0}
    assert [list(row) for row in cells.z][1] == [0, 0, 1, 1]
    assert words.text[6] == words.text[7] == f"{math.exp(-1):.3g}"
    scores = torch.tensor(bars.y, dtype=torch.float64)
    exact = float(scores.softmax(0) @ torch.arange(1.0, 9, dtype=torch.float64))
    assert f"Softmax: {exact:.4g}. m grew 2×, rescaled 2×" == figure.layout.title.text
    assert words.text[-1] == f"{exact:.3g}"
    lazy = figures.steps(4, 12.0, 2, True).layout.title.text
    assert lazy.endswith("m grew 2×, rescaled 1×")
    assert figures.steps(0).layout.title.text == "After 0 of 4 tiles"
    assert figures.steps(4, 5.0, 4).data[3].text[2] == "·"
    # The chapter starts at the first, and moving each control once leads to the second.
    for start in ({}, {"after": 4, "largest": 8.0, "width": 4}):
        usual, rare = (figures.steps(**start, conditional=rule).data for rule in (False, True))
        assert usual[1].y != rare[1].y and usual[2].z != rare[2].z


def test_the_machine_shows_the_recorded_work_at_each_moment(timelines: dict) -> None:
    figure = figures.machine(0, figures.FORMS[1], 128, data=timelines)
    first, second, third = (one for one in figure.data if one.type == "heatmap")
    names = list(figure.layout.yaxis2.ticktext)
    rows = timelines["D 128, ahead"]["rows"]
    assert [*first.z[names.index("copies")]] == [0.5] * 64
    for trace_, letter, which in ((second, "A", 0), (third, "B", 1)):
        assert [*trace_.z[names.index(f"products {letter}")]] == rows["matrix"][which]
        assert [*trace_.z[names.index(f"softmax {letter}")]] == rows["softmax"][which]
    assert figure.layout.title.text == "Tensor cores at work: 75%, by a model"
    assert "1,234 clocks" in figure.layout.xaxis2.title.text
    (words,) = (one for one in figure.data if getattr(one, "mode", "") == "text")
    assert list(words.text)[2:] == [
        "<b>tensor cores</b><br>for A", "<b>warps A</b>: wait<br>m, ℓ, a",
        "<b>warps B</b>: softmax<br>m, ℓ, a",
    ]  # fmt: skip


def test_ping_pong_puts_each_softmax_under_the_others_products(timelines: dict) -> None:
    figure = figures.machine(0, figures.FORMS[3], 64, data=timelines)
    assert figure.layout.title.text == "Tensor cores: ideal 100%, published 50%"
    _, a, b = (one for one in figure.data if one.type == "heatmap")
    names = list(figure.layout.yaxis2.ticktext)
    for mine, other in ((a, b), (b, a)):
        letter, their = ("A", "B") if mine is a else ("B", "A")
        softmax = mine.z[names.index(f"softmax {letter}")]
        products = other.z[names.index(f"products {their}")]
        assert sum(softmax) > 0 and all(x <= y for x, y in zip(softmax, products, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_three_lines_take_as_long_as_their_bytes(head_dim: int, timelines: dict) -> None:
    figure = figures.machine(0, figures.FORMS[0], head_dim, data=timelines)
    copies, a, _ = (one for one in figure.data if one.type == "heatmap")
    names = list(figure.layout.yaxis2.ticktext)
    assert set(copies.z[names.index("copies")]) == {1.0}  # HBM is the slowest part throughout
    gpu = traffic.GPUS["H100"]
    share = sum(a.z[names.index("products A")]) / 64
    assert share == pytest.approx((4 * head_dim / gpu.matmul) / (8 / gpu.bandwidth), rel=0.05)


def test_the_designer_shows_what_was_compiled_and_what_does_not_fit() -> None:
    table = figures.grid()
    positions = [control.positions() for control in DESIGNER.values()]
    assert len(table["tiles"]) == math.prod(map(len, positions))
    said = set()
    for point in itertools.product(*positions):
        chosen = dict(zip(DESIGNER, point, strict=True))
        figure = figures.designer(**chosen)
        key = " ".join(
            str(chosen[name])
            for name in ("target", "head_dim", "rows", "columns", "stages", "warps")
        )
        need, limit = table["tiles"][key], table["limits"][chosen["target"]]
        title = figure.layout.title.text
        said.add(title.split()[0])
        fits = need["shared"] <= limit and not need["spills"]
        assert title.startswith("Fits:") == fits
        assert title.startswith("Too large:") == (need["shared"] > limit)
        formula, shared, registers = figure.data[0].x
        assert shared == pytest.approx(100 * need["shared"] / limit)
        assert (registers > 100) == bool(need["spills"])
        assert formula == pytest.approx(100 * need["formula"] / limit)
    assert said == {"Fits:", "Too", "Registers"}


def test_memory_shows_models_as_lines_and_measurements_as_dots() -> None:
    curve = {256: 1e6, 512: 4e6}
    figure = figures.memory({"naive": curve}, {"naive": curve, "mine": {256: 2500}}, title="Kept")
    model, dots, mine = figure.data
    assert model.mode == "lines" and dots.mode == mine.mode == "markers"
    assert model.line.color == dots.marker.color != mine.marker.color
    assert list(figure.layout.xaxis.tickvals) == [256, 512]
    assert "naive: 1 MB at 256 tokens, 4 MB at 512; mine: 2.5 kB at 256" in alt(figure)


def test_rates_show_medians_with_their_spread_and_limits() -> None:
    curves = {"labcore": {1024: [1, 2, 9], 2048: [4, 4, 4]}, "peer": {1024: [3]}}
    figure = figures.rates(curves, unit="GFLOP/s", title="Speed", limits={"peak": 20})
    ours, peer, limit = figure.data
    assert list(ours.y) == [2, 4] and ours.error_y.array[0] > 0 == ours.error_y.array[1]
    assert list(peer.x) == [1024] and set(limit.y) == {20} and limit.line.dash == "dash"
    assert "labcore: 2 at 1024, 4 at 2048; peer: 3 at 1024; peak 20" in alt(figure)


def test_no_curve_has_the_color_of_another_or_of_a_limit() -> None:
    names = ("naive", "FlashAttention-2", "tutorial", "cuDNN", "FlashAttention-3", "labcore, H100")
    curves = {name: {1024: [n]} for n, name in enumerate(names)}
    figure = figures.rates(curves, unit="TFLOP/s", title="Speed", limits={"in turns": 20})
    colors = [one.line.color for one in figure.data]
    assert len(set(colors)) == len(colors) == len(names) + 1
