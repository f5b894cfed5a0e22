"""Timelines show the bars, the queue and the blocks of their scenes, in frames of one shape."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

import plotly.graph_objects as go
import pytest

from labcore.serving.engine.scheduler import POLICIES
from labcore.serving.simulation.router import ROUTERS
from labcore.serving.simulation.simulate import CACHED, FREE, SHARED
from labcore.studies.inflight import scenarios
from labcore.studies.inflight.scenes import PROMISED, scene
from labcore.ui import Choice, IntSlider, explore, twin
from labcore.ui.compact import dumps, plain
from labcore.ui.figures import inflight as figures
from labcore.ui.figures.inflight import batches
from tests.ui.figures.drawn import packed

LETTERS_OF_A_PHONE = 41
MOST_BYTES = {"timeline": 300_000}
MOST_BYTES_ELSE = 130_000
STEPS = 40


@lru_cache
def data(name: str):
    return {
        "timeline": lambda: scenarios.grid(mixes=("mixed", "long tail"), pools=(16, 24)),
        "latency_curves": lambda: scenarios.curves(requests=30),
        "chunk_gaps": scenarios.chunk_sizes,
        "replicas": scenarios.fleets,
        "anatomy": lambda: scenarios.short_trace(most=STEPS),
    }[name]()


CONTROLS = {
    "timeline": {
        "policy": Choice(options=tuple(POLICIES)),
        "rate": Choice(options=scenarios.RATES, default=0.9),
        "mix": Choice(options=("mixed", "long tail"), default="long tail"),
        "pool": Choice(options=(16, 24), default=24),
    },
    "latency_curves": {
        "measure": Choice(options=scenarios.MEASURES, default="normalised"),
        "mix": Choice(options=scenarios.MIXES, default="long tail"),
    },
    "chunk_gaps": {"chunk": Choice(options=scenarios.CHUNKS, default=64)},
    "replicas": {
        "policy": Choice(options=tuple(ROUTERS)),
        "share": Choice(options=scenarios.SHARES, default=0.5),
    },
    "anatomy": {"step": IntSlider(low=1, high=STEPS, default=3)},
}


def draw(name: str, **chosen: object) -> go.Figure:
    return getattr(figures, name)(**chosen, data=data(name))


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str, axis: str = "x"):
    return next(item for item in figure.data if item.name == name and (item.xaxis or "x") == axis)


def lines_of(item) -> list[tuple[float, float, float]]:
    """(from, to, height) of each of a trace's thick lines."""
    found = []
    for at in range(0, len(item.x), 3):
        if item.x[at] is not None:
            assert item.y[at] == item.y[at + 1]
            found.append((item.x[at], item.x[at + 1], item.y[at]))
    return found


# Explorers.


@pytest.mark.parametrize("name", CONTROLS)
def test_frames_share_traces_and_titles_fit_a_phone(name: str, seed: int) -> None:
    controls = CONTROLS[name]
    points = list(itertools.product(*(control.positions() for control in controls.values())))
    kinds = set()
    for point in random.Random(seed).sample(points, min(len(points), 40)):
        figure = draw(name, **dict(zip(controls, point, strict=True)))
        kinds.add((tuple((item.name, item.type, item.mode if item.type == "scatter" else "")
                         for item in figure.data), figure.layout.height))  # fmt: skip
        lines = figure.layout.title.text.split("<br>")
        assert len(lines) == 1 and len(lines[0]) <= LETTERS_OF_A_PHONE, lines
        assert alt(figure).endswith(".") and "nan" not in alt(figure)
    assert len(kinds) == 1


def drawn(figure: dict) -> str:
    """What a reader sees change: traces and title, in the page's digits."""
    return dumps(plain([figure["data"], figure["layout"]["title"]]))


@pytest.mark.parametrize("name", CONTROLS)
def test_every_step_of_a_control_changes_the_figure(name: str) -> None:
    controls = CONTROLS[name]
    start = {key: control.default for key, control in controls.items()}
    for key, control in controls.items():
        seen = [
            drawn(draw(name, **start | {key: value}).to_dict()) for value in control.positions()
        ]
        assert all(one != other for one, other in itertools.pairwise(seen)), key


@pytest.mark.parametrize("name", CONTROLS)
def test_the_static_page_carries_the_explorer(name: str, monkeypatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    shown = explore(getattr(figures, name), alt="x", data=data(name), **CONTROLS[name])
    found = shown._repr_mimebundle_()[twin.MIME]
    moved = [control["name"] for control in found["controls"]]
    assert moved == list(CONTROLS[name])
    assert sum(len(one["frames"]) for one in found["slices"]) <= twin.MOST_FRAMES
    for control in found["controls"]:
        assert len(control["values"]) == len(CONTROLS[name][control["name"]].positions())
    assert len(dumps(twin.first_slice(found))) < MOST_BYTES.get(name, MOST_BYTES_ELSE)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_not_in_the_data_is_refused(name: str) -> None:
    start = {key: control.default for key, control in CONTROLS[name].items()}
    for key, value in start.items():
        wrong = "none" if isinstance(value, str) else 10**6
        with pytest.raises(ValueError):
            draw(name, **start | {key: wrong})


# The timeline.


@pytest.mark.parametrize("policy", POLICIES)
def test_the_timeline_is_its_scene(policy: str) -> None:
    point = (policy, 2.0, "mixed", 16)
    shown = data("timeline")[point]
    figure = figures.timeline(*point, data=data("timeline"))
    for kind, (name, _) in batches._KINDS.items():
        bars = [(b.begin, b.end, b.slot + 1) for b in shown.bars if b.kind == kind]
        assert lines_of(trace(figure, name)) == bars
    numbers = trace(figure, "request")
    assert len(numbers.text) == len(shown.bars) == len(numbers.hovertext)
    assert {word for word in numbers.text if word} <= {str(n) for n in range(1, 25)}
    assert sum(bool(word) for word in numbers.text) >= 8
    waiting = trace(figure, "waiting", "x2")
    assert tuple(zip(waiting.x, waiting.y, strict=True))[:-1] == shown.waiting
    low, high = figure.layout.yaxis2.range
    assert low == 0 and max(waiting.y) < high
    title = figure.layout.title.text
    assert title.startswith(f"{shown.tokens_per_second:.0f} tokens/s")
    assert f"hold {shown.shares.get('idle', 0):.0%}" in title
    for item in figure.data:  # the legend explains nothing that does not occur
        if item.type == "scatter" and item.legendgroup and item.showlegend:
            assert lines_of(item)
    assert trace(figure, "promised block", "x3").showlegend == any(
        PROMISED in row for row in shown.blocks
    )
    assert f"{shown.preemptions} preemptions" in alt(figure) and packed(figure) < 60_000


@pytest.mark.parametrize("policy", POLICIES)
def test_the_block_map_has_a_tone_for_each_holder(policy: str) -> None:
    shown = data("timeline")[policy, 2.0, "long tail", 24]
    figure = figures.timeline(policy, 2.0, "long tail", 24, data=data("timeline"))
    heat = trace(figure, "blocks", "x3")
    assert heat.zmin == -0.5 and heat.zmax + 0.5 == len(heat.colorscale) / 2
    for told, row in zip(heat.z, shown.blocks, strict=True):
        for code, block in zip(told, row, strict=True):
            assert (code is None) == (block == FREE)
            assert (code == 0) == (block == PROMISED) and block not in (CACHED, SHARED)
            assert block < 0 or code == 3 + block % len(batches._TONES)
    tones = [color for _, color in heat.colorscale[::2]]
    assert len(set(tones)) == len(tones) and not set(tones) & {c for _, c in
                                                               batches._KINDS.values()}  # fmt: skip


def test_policies_share_their_axes_at_one_rate() -> None:
    for rate in (0.3, 1.2):
        layouts = [
            figures.timeline(policy, rate, "mixed", 16, data=data("timeline")).layout
            for policy in POLICIES
        ]
        assert len({(one.xaxis.range, one.yaxis2.range, one.yaxis3.range) for one in layouts}) == 1
        assert {one.xaxis.range for one in layouts} == {one.xaxis3.range for one in layouts}


def test_cached_and_shared_blocks_are_in_the_legend_if_any_exist() -> None:
    point = ("static", 0.3, "mixed", 16)
    shown = data("timeline")[point]
    kept = {point: type(shown)(**{
        **{name: getattr(shown, name) for name in shown.__slots__},
        "blocks": ((CACHED, SHARED, 0),) * 16,
    })}  # fmt: skip
    names = {item.name for item in figures.timeline(*point, data=kept).data}
    assert {"cached block", "shared block"} <= names
    plain_names = {item.name for item in figures.timeline(*point, data=data("timeline")).data}
    assert not {"cached block", "shared block"} & plain_names


# Two batches.


def test_two_batches_show_the_same_requests_and_the_longest_wait(seed: int) -> None:
    static, inflight = map(scene, scenarios.opening(seed=seed))
    figure = figures.two_batches(static, inflight)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    for panel, now in (("x", static), ("x2", inflight)):
        for kind, (name, _) in batches._KINDS.items():
            bars = [(b.begin, b.end, b.slot + 1) for b in now.bars if b.kind == kind]
            assert lines_of(trace(figure, name, panel)) == bars
        waits = [
            one for name in ("waiting", "waiting, named below")
            for one in lines_of(trace(figure, name, panel))
        ]  # fmt: skip
        assert sorted(one[:2] for one in waits) == sorted((b.begin, b.end) for b in now.queue)
        foot = getattr(figure.layout, f"yaxis{panel[1:]}").range[0]
        assert all(now.slots + 0.5 < y < foot for *_, y in waits)
        for one, two in itertools.combinations(waits, 2):  # no two lie on each other
            assert one[2] != two[2] or one[1] <= two[0] or two[1] <= one[0]
    longest = max(static.queue, key=lambda bar: bar.end - bar.begin)
    marked = [one[:2] for one in lines_of(trace(figure, "waiting, named below"))]
    assert marked == [(longest.begin, longest.end)]  # nobody is preempted and waits again
    words = [item.text[0] for item in figure.data if item.name == "words"]
    assert sum(word.startswith(f"request {longest.number + 1} waits") for word in words) == 2
    assert f"request {longest.number + 1} waits" in alt(figure) and packed(figure) < 40_000
    for text in figure.layout.title.text.split("<br>"):
        assert len(text) <= LETTERS_OF_A_PHONE


def test_two_batches_need_the_same_requests_and_may_have_no_wait() -> None:
    static = scene(scenarios.opening()[0])
    with pytest.raises(ValueError, match="of the same requests"):
        figures.two_batches(static, scene(scenarios.opening(requests=5)[1]))
    lone = scene(scenarios.opening(requests=1)[0])
    told = figures.two_batches(lone, lone)
    assert "waits" not in alt(told) and packed(told) > 0
