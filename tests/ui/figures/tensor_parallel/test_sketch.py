"""Messages and blocks are drawn as `labcore.parallel` sends and divides them."""

from __future__ import annotations

import itertools

import plotly.graph_objects as go
import pytest
import torch

from labcore import processes
from labcore.parallel.collectives import ALL_REDUCES, CollectiveTraffic, expected
from labcore.ui.figures.tensor_parallel import sketch as figures
from tests.ui.figures.drawn import packed


def alt(figure: go.Figure) -> str:
    return figure.layout.meta["alt"]


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


FITTING = [
    (name, ranks)
    for name in ALL_REDUCES
    for ranks in (1, 2, 3, 4, 5, 8, 16)
    if name != "halving_doubling" or not ranks & (ranks - 1)
]


@pytest.mark.parametrize(("algorithm", "ranks"), FITTING)
def test_played_messages_give_every_rank_every_sum_once(algorithm: str, ranks: int) -> None:
    # What each rank's parts are sums of; a step's messages are read before any arrives.
    known = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    sent = figures.messages(algorithm, ranks)
    does = expected(algorithm, ranks, 1.0)
    for step in range(does.steps):
        of_step = [one for one in sent if one.step == step]
        assert of_step
        before = [[set(part) for part in row] for row in known]
        for one in of_step:
            for part in one.parts:
                came = before[one.source][part]
                if one.summed:
                    assert came == set(range(ranks))
                    known[one.target][part] = set(came)
                else:
                    assert not came & known[one.target][part]
                    known[one.target][part] |= came
    assert all(part == set(range(ranks)) for row in known for part in row)
    for rank in range(ranks):
        own = [one for one in sent if one.source == rank]
        assert len(own) == does.messages
        assert sum(len(one.parts) for one in own) / ranks == pytest.approx(does.bytes)


def traffic(ranks: int, numel: int) -> dict[str, list[tuple[int, int, int]]]:
    found = {}
    for name, all_reduce in ALL_REDUCES.items():
        told = CollectiveTraffic()
        all_reduce(torch.ones(numel), traffic=told)
        found[name] = sorted(told.sent)
    return found


def test_messages_are_those_that_the_package_sends() -> None:
    ranks, numel = 4, 12
    told = processes.run(traffic, ranks, ranks, numel)
    for name in ALL_REDUCES:
        for rank in range(ranks):
            own = [one for one in figures.messages(name, ranks) if one.source == rank]
            found = sorted((one.step, one.target, len(one.parts) * numel) for one in own)
            first = min(step for step, _, _ in told[rank][name])
            assert [(step - first, *rest) for step, *rest in told[rank][name]] == found


@pytest.mark.parametrize(("algorithm", "ranks"), [one for one in FITTING if one[1] > 1])
def test_every_message_is_drawn_from_its_sender_to_its_receiver(algorithm: str, ranks: int) -> None:
    figure = figures.steps_view(algorithm, ranks)
    sent = figures.messages(algorithm, ranks)
    for name, summed in (("summands", False), ("whole sums", True)):
        item = trace(figure, name)
        lines = [
            (item.x[at], item.y[at], item.x[at + 1], item.y[at + 1])
            for at in range(0, len(item.x), 3)
            if item.x[at] is not None
        ]
        assert lines == [
            (one.step, one.source, one.step + 1, one.target) for one in sent if one.summed == summed
        ]
    does = expected(algorithm, ranks, 1.0)
    assert len(trace(figure, "rank").x) == ranks * (does.steps + 1)
    title = figure.layout.title.text
    assert f": each sends {does.bytes:.3g} tensor" in title and "<br>" not in title
    assert f"{ranks} ranks, {does.steps} step" in alt(figure)
    assert f"in {does.messages} message" in alt(figure)
    assert f"step {does.steps}, " in alt(figure)
    letters = next(item for item in figure.data if item.mode == "text")
    single = len(sent) == ranks * does.steps  # one message a rank and step
    assert len(letters.x) == (len(sent) if single and len(sent) <= 24 else 0)
    places = list(zip(letters.x, letters.y, strict=True))
    for one, other in itertools.combinations(places, 2):
        assert one[0] != other[0] or abs(one[1] - other[1]) > 0.2
    if letters.x:
        assert list(letters.text) == ["".join("abcdefgh"[p] for p in one.parts) for one in sent]


def test_pictures_of_steps_are_small() -> None:
    assert packed(figures.steps_view("one_shot", 4)) < 25_000
    assert packed(figures.steps_view("ring", 8)) < 25_000


def test_steps_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithm must be one of"):
        figures.steps_view("tree", 4)
    with pytest.raises(ValueError, match="ranks must be from 2 to 16, got 17"):
        figures.steps_view("ring", 17)
    with pytest.raises(ValueError, match="power of two"):
        figures.messages("halving_doubling", 6)


# Blocks.


def areas(figure: go.Figure) -> dict[str, float]:
    """Of the blocks of each rank, and of those that every rank has."""
    found = {}
    for item in figure.data:
        if item.fill == "toself":
            corners = [
                (item.x[at], item.y[at], item.x[at + 2], item.y[at + 2])
                for at in range(0, len(item.x), 6)
                if item.x[at] is not None
            ]
            found[item.name] = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in corners)
    return found


def found_box(figure: go.Figure, name: str, number: int) -> tuple[float, float]:
    """Width and height of one of a rank's blocks."""
    item, count = trace(figure, name), (len(trace(figure, name).x) + 1) // 6
    at = 6 * (number % count)
    return round(item.x[at + 2] - item.x[at], 9), round(item.y[at + 2] - item.y[at], 9)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("by", ["columns", "rows"])
def test_the_split_shows_equal_blocks_and_its_collective(by: str, ranks: int) -> None:
    figure = figures.split_picture(by, ranks)
    if by == "rows":  # a summand is as large as Y
        assert found_box(figure, "rank 0", -1) == found_box(figure, "every rank", -1)
    found = areas(figure)
    parts = [found[f"rank {rank}"] for rank in range(4)]
    assert parts[:ranks] == pytest.approx([parts[0]] * ranks) and parts[0] > 0
    assert parts[ranks:] == [0] * (4 - ranks)
    words = next(item for item in figure.data if item.mode == "text").text
    for rank in range(ranks):
        low = "₀₁₂₃"[rank]
        assert f"W{low}" in words
        assert (f"X{low}" in words) == (by == "rows")
        assert (f"X{low}W{low}" if by == "rows" else f"XW{low}") in words
    assert ("X" in words) == (by == "columns") and "Y" in words
    needed = "all-gather" if by == "columns" else "all-reduce"
    other = "all-reduce" if by == "columns" else "all-gather"
    assert needed in " ".join(words) and other not in " ".join(words)
    assert needed in alt(figure) and packed(figure) < 25_000
    assert alt(figure).startswith("Y = ") and "<br>" not in figure.layout.title.text


def test_a_split_without_colors_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be from 2 to 4"):
        figures.split_picture("rows", 5)
    with pytest.raises(ValueError, match="by must be one of 'columns', 'rows'"):
        figures.split_picture("cols")
