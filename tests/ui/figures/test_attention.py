"""The chapter's figures show what the traffic model counts, and say it in words."""

import itertools
import math

import plotly.graph_objects as go
import pytest
import torch

from labcore.attention import traffic
from labcore.attention.pattern import Pattern, key_range, tile_mask
from labcore.ui import Choice, Toggle, explore, twin
from labcore.ui.figures import attention as figures

BLOCKS, LENGTHS = (32, 64, 128, 256), (512, 1024, 2048, 4096)
TILES = {
    "block": Choice(options=BLOCKS, default=128),
    "length": Choice(options=LENGTHS, default=1024),
    "is_causal": Toggle(default=True),
}
INTENSITY = {
    "gpu": Choice(options=tuple(traffic.GPUS), default="H100"),
    "head_dim": Choice(options=(64, 128, 256), default=128),
}


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


def test_frames_share_traces_and_titles_fit_a_phone(data) -> None:
    for figure_fn, controls, given in (
        (figures.tiles, TILES, {"data": data}),
        (figures.intensity, INTENSITY, {}),
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


def test_the_static_pages_carry_both_explorers(
    data: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for controls in (TILES, INTENSITY):
        first, second = list(controls.values())[:2]
        assert len(first.positions()) * len(second.positions()) <= twin.MOST_FRAMES
    monkeypatch.setenv("LABCORE_BOOK", "1")
    explore(figures.tiles, alt="x", data=data, **TILES)
    explore(figures.intensity, alt="x", **INTENSITY)


@pytest.mark.parametrize("gpu", traffic.GPUS)
def test_the_ring_stands_on_the_curve_at_the_largest_tile(gpu: str) -> None:
    for head_dim in (64, 128, 256):
        figure = figures.intensity(gpu, head_dim)
        curve = dict(zip(trace(figure, "tiles").x, trace(figure, "tiles").y, strict=True))
        fits = traffic.largest_block(traffic.GPUS[gpu].sram, head_dim=head_dim, block_k=32)
        for name in ("largest that fits", "our kernel's tile"):
            (x,), (y,) = trace(figure, name).x, trace(figure, name).y
            assert (x is None and y is None) or y == curve[x]
            if name == "largest that fits":
                assert x == (min(fits, 1024) or None)
        assert (trace(figure, "our kernel's tile").x[0] is None) == (gpu == "T4")
    needed = traffic.GPUS[gpu].matmul / traffic.GPUS[gpu].bandwidth
    assert set(trace(figure, "needed").y) == {needed}


def test_the_intensity_of_a_tile_is_its_queries() -> None:
    curve = trace(figures.intensity("H100", 128), "tiles")
    for block, reached in list(zip(curve.x, curve.y, strict=True))[:4]:
        assert 0.9 * block < reached <= block


def test_memory_shows_models_as_lines_and_measurements_as_dots() -> None:
    curve = {256: 1e6, 512: 4e6}
    figure = figures.memory({"naive": curve}, {"naive": curve, "mine": {256: 2500}}, title="Kept")
    model, dots, mine = figure.data
    assert model.mode == "lines" and dots.mode == mine.mode == "markers"
    assert model.line.color == dots.marker.color != mine.marker.color
    assert list(figure.layout.xaxis.tickvals) == [256, 512]
    assert "naive: 1 MB at 256 tokens, 4 MB at 512; mine: 2.5 kB at 256" in alt(figure)


def test_running_rings_the_tiles_that_bring_a_larger_score() -> None:
    figure = figures.running([1.0, 3.0, 3.0, 4.0], [2.0, 1.5, 1.6, 1.2], exact=4.2, title="Row")
    so_far, top, ring, exact = figure.data
    assert list(ring.x) == [2, 4] and list(ring.y) == [3, 4]
    assert so_far.y[0] == pytest.approx(1 + math.log(2))
    assert list(top.y) == [1, 3, 3, 4] and set(exact.y) == {4.2}
    assert "rescaled at tile 2, 4" in alt(figure)
    assert "rescaled at tile none" in alt(figures.running([1.0], [1.0], exact=1.0, title="Row"))


def test_rates_show_medians_with_their_spread_and_limits() -> None:
    curves = {"labcore": {1024: [1, 2, 9], 2048: [4, 4, 4]}, "peer": {1024: [3]}}
    figure = figures.rates(curves, unit="GFLOP/s", title="Speed", limits={"peak": 20})
    ours, peer, limit = figure.data
    assert list(ours.y) == [2, 4] and ours.error_y.array[0] > 0 == ours.error_y.array[1]
    assert list(peer.x) == [1024] and set(limit.y) == {20} and limit.line.dash == "dash"
    assert "labcore: 2 at 1024, 4 at 2048; peer: 3 at 1024; peak 20" in alt(figure)


def test_resources_name_what_was_spilled() -> None:
    need = {"registers": 255, "spills": 0, "shared": 65_536}
    row = {"sm_80": need, "sm_90": {**need, "spills": 8}}
    kernels = {"forward": row, "dq": row}
    figure = figures.resources(kernels, ("sm_90", "sm_80"), title="Compiled")
    (table,) = figure.data
    assert list(table.x) == ["sm_90", "sm_80"] and list(table.y) == ["forward", "dq"]
    assert list(table.text[0]) == ["<b>255</b><br>64<br>8 spilled", "<b>255</b><br>64"]
    assert "forward: sm_90 255, 8 spilled, 64 KiB, sm_80 255, 0 spilled" in alt(figure)
