"""The drawn times and budgets are those of the study."""

from __future__ import annotations

from labcore.decoding.theory.speedup import Roofline
from labcore.studies.inflight.budget import budget, step_seconds
from labcore.ui.figures import inflight as figures

ROOF = Roofline(flops=1e15, bandwidth=3e12, weights=8e9, cache=1e5, attention=5e5)


def test_lines_and_markers_are_read_off_the_study() -> None:
    loads, limit = ((0, 0), (64, 4096), (512, 16384)), 0.02
    figure = figures.step_times(ROOF, loads, limit)
    for (rows, context), line, mark in zip(
        loads, figure.data[0:6:2], figure.data[1:6:2], strict=True
    ):
        assert line.x[0] == max(rows, 1) and list(line.x) == sorted(line.x)
        assert list(line.y) == [
            1e3 * step_seconds(ROOF, n, rows=rows, context=context) for n in line.x
        ]
        most = budget(ROOF, limit, rows=rows, context=context)
        assert mark.x[0] == (most if most >= rows and most else None)
    assert figure.data[5].x == (None,) and "tokens: none" in figure.layout.meta["alt"]
