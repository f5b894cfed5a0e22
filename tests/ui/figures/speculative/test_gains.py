"""The chapter's figures show what the closed forms say and what was measured, and say it."""

import itertools

import plotly.graph_objects as go
import pytest
import torch

from labcore.decoding.theory import overlap
from labcore.ui import Choice, Slider, explore, twin
from labcore.ui.figures.speculative import gains as figures

CONTROLS = {
    "exactness": {
        "toward_p": Slider(low=0.0, high=1.0, step=0.05, default=0.0),
        "rule": Choice(options=overlap.RULES),
    },
}


@pytest.fixture
def rows(generator: torch.Generator) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    p, q = torch.randn(2, 6, generator=generator).mul(1.5).softmax(-1)
    return tuple("abcdef"), p, q


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


def frames(name: str, rows) -> list[go.Figure]:
    points = itertools.product(*(control.positions() for control in CONTROLS[name].values()))
    return [getattr(figures, name)(*point, data=rows) for point in points]


@pytest.mark.parametrize("name", CONTROLS)
def test_frames_share_traces_and_axes_and_titles_fit_a_phone(name, rows) -> None:
    kinds, bounds = set(), set()
    for figure in frames(name, rows):
        kinds.add(tuple((item.name, item.type) for item in figure.data))
        low, high = figure.layout.yaxis.range
        bounds.add((low, high))
        lines = figure.layout.title.text.split("<br>")
        assert len(lines) == 1 and max(map(len, lines)) <= 44, lines
        tops = [max(item.y) for item in figure.data]
        assert max(tops) < (10**high if figure.layout.yaxis.type == "log" else high)
    assert len(kinds) == 1 and len(bounds) == 1


@pytest.mark.parametrize("name", CONTROLS)
def test_the_static_page_moves_both_controls(name, rows, monkeypatch) -> None:
    controls, data = CONTROLS[name], rows
    count = 1
    for control in controls.values():
        count *= len(control.positions())
    assert count <= twin.MOST_FRAMES
    monkeypatch.setenv("LABCORE_BOOK", "1")
    explore(getattr(figures, name), alt="x", data=data, **controls)


@pytest.mark.parametrize("rule", overlap.RULES)
def test_exactness_stacks_what_leaves_and_says_how_far_it_is_off(rule: str, rows) -> None:
    names, p, q = rows
    for share in (0.0, 0.35, 1.0):
        figure = figures.exactness(share, rule, data=rows)
        found = overlap.one_token(p, overlap.toward(p, q, share), rule)
        stacked = torch.tensor(trace(figure, "accepted").y) + torch.tensor(
            trace(figure, "after a rejection").y
        )
        torch.testing.assert_close(stacked.double(), found.out, rtol=0, atol=1e-6)
        assert list(trace(figure, "target p").y) == pytest.approx(p.tolist())
        assert list(figure.data[0].x) == list(names) and figure.layout.barmode == "stack"
        title = figure.layout.title.text
        assert rule in alt(figure) and title.startswith(f"{found.acceptance:.0%} accepted, ")
        exact = rule == "residual" or share == 1
        assert ("exactly p" in title) == exact
        assert exact or f"{found.distance(p):.3f}" in title
        assert float(stacked.max()) < figure.layout.yaxis.range[1]


def test_lengths_show_measured_dots_over_the_law() -> None:
    measured = {"greedy": {1: [1.5, 1.6, 1.7], 4: [2.2, 2.3, 2.3]}, "T = 1": {4: [2.5]}}
    predicted = {"greedy": {1: 1.6, 4: 2.4}, "T = 1": {4: 2.6}}
    figure = figures.acceptance_by_length(measured, predicted, title="Bursts")
    dots = trace(figure, "greedy")
    law = next(item for item in figure.data if not item.showlegend and list(item.x) == [1, 4])
    assert list(dots.y) == [1.6, 2.3] and dots.mode == "markers"
    assert dots.error_y.array[0] == pytest.approx(0.06)
    assert law.line.dash == "dash" and law.line.color == dots.marker.color
    assert "greedy: 1.60 (formula 1.60) at 1, 2.30 (formula 2.40) at 4; T = 1: 2.50" in alt(figure)
    assert list(figure.layout.xaxis.tickvals) == [1, 4]


def test_costs_stand_between_free_and_linear() -> None:
    figure = figures.costs({1: [1.0], 5: [1.3, 1.35, 1.4], 9: [1.53]}, title="Not free")
    bars, free, linear = figure.data
    assert list(bars.y) == [1, 1.35, 1.53] and set(free.y) == {1} and list(linear.y) == [1, 5, 9]
    assert figure.layout.yaxis.range[1] > 1.53
    assert "1.35 at 5" in alt(figure)


def test_predictions_have_a_diagonal_and_a_band() -> None:
    rows = {"draft": (1.5, [1.3, 1.4, 1.5]), "n-gram": (0.8, [0.9])}
    figure = figures.predictions(rows, title="Within", band=0.2)
    band, diagonal, draft, ngram = figure.data
    assert list(diagonal.x) == list(diagonal.y)
    assert [y / x for x, y in zip(band.x, band.y, strict=True)] == pytest.approx(
        [0.8, 0.8, 1.2, 1.2]
    )
    assert (draft.x[0], draft.y[0]) == (1.5, 1.4) and ngram.y[0] == 0.9
    assert "draft: 1.40 measured, 1.50 predicted" in alt(figure)
    low, high = figure.layout.yaxis.range
    assert all(low <= y <= high for y in band.y)


def test_options_of_ngrams_have_a_symbol_a_kind_of_text() -> None:
    rows = {
        "longest, latest": {"code": [2.0, 2.2], "prose": [1.1]},
        "leftmost": {"code": [1.8]},
    }
    figure = figures.ngram_options(rows, title="Options")
    code, prose = figure.data
    assert list(code.y) == ["longest, latest", "leftmost"] and list(code.x) == [2.1, 1.8]
    assert list(prose.y) == ["longest, latest"] and code.marker.symbol != prose.marker.symbol
    assert figure.layout.shapes[0].x0 == 1
    assert "code: longest, latest 2.10, leftmost 1.80; prose: longest, latest 1.10" in alt(figure)


def test_the_gate_has_three_panels_over_one_axis() -> None:
    figure = figures.gate_tradeoff(
        (0, 1, "none"), [[0.9], [0.8, 0.8], [0.6]], [[1.2], [1.5], [2.0]], [[0.1], [0.4], [0.8]],
        title="Traded", cost_unit="forwards of the draft",
    )  # fmt: skip
    assert [item.yaxis for item in figure.data] == ["y", "y2", "y3"]
    assert [list(item.x) for item in figure.data] == [["0", "1", "none"]] * 3
    domains = [figure.layout[axis].domain for axis in ("yaxis", "yaxis2", "yaxis3")]
    for above, below in itertools.pairwise(domains):
        assert above[0] > below[1]
    assert "accepted of drafted: 0.90 at 0, 0.80 at 1, 0.60 at none" in alt(figure)
    assert "forwards of the draft: 0.10 at 0" in alt(figure)
