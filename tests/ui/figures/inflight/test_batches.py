"""Two batches show the bars and the queues of their scenes on one time axis."""

from __future__ import annotations

import itertools

import plotly.graph_objects as go
import pytest

from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.scheduler import Scheduler
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.simulate import simulate
from labcore.serving.simulation.workload import Workload, lognormal, long_tail, poisson
from labcore.studies.inflight.scenes import Scene, scene
from labcore.ui.figures import inflight as figures
from labcore.ui.figures.inflight import batches
from tests.ui.figures.drawn import packed

LETTERS_OF_A_PHONE = 41
COST = CostModel(base=4e-3, per_prefill_token=1e-4, per_decode_row=4e-4)


def both(seed: int = 10, n: int = 12) -> list[Scene]:
    """The same long-tailed requests in static batches and in flight."""
    prompts, outputs = lognormal(24, n, seed, most=48), long_tail(8, n, seed + 1, most=64)
    work = Workload(poisson(40.0, n, seed + 2), prompts, outputs, max_tokens=64)
    return [
        scene(simulate(work, lambda p=policy: Scheduler(BlockPool(40, 16), policy=p,
                       max_num_seqs=4, enable_prefix_caching=False), COST))
        for policy in ("static", "guaranteed_no_evict")
    ]  # fmt: skip


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


def test_two_batches_show_the_same_requests_and_the_longest_wait(seed: int) -> None:
    static, inflight = both(seed)
    figure = figures.two_batches(static, inflight)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    for panel, now in (("x", static), ("x2", inflight)):
        for kind, (name, _) in batches.KINDS.items():
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
    static = both()[0]
    with pytest.raises(ValueError, match="of the same requests"):
        figures.two_batches(static, both(n=5)[1])
    lone = both(n=1)[0]
    told = figures.two_batches(lone, lone)
    assert "waits" not in alt(told) and packed(told) > 0
