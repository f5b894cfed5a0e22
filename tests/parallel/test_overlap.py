"""Chunks change no sum, the pipeline's form is its time, and waiting is where it should be."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labcore import processes
from labcore.parallel import overlap
from labcore.parallel.cost import Link, all_reduce_seconds
from labcore.parallel.overlap import (
    best_chunks,
    chunked_linear,
    measure_overlap,
    overlapped_seconds,
)

SHAPES = [(7,), (3, 5), (1, 2, 3), (), (1,), (0,), (2, 0)]
INNER, WIDTH = 12, 5


def whole(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    made = {"generator": dice, "dtype": torch.float64}
    return [torch.randn(*shape, INNER, **made) for shape in SHAPES], torch.randn(
        INNER, WIDTH, **made
    )


def every_shape(seed: int) -> list[tuple[str, Any]]:
    """What is not as it should be on this rank, of all shapes, chunks and both ways to wait."""
    rank, ranks = processes.rank_and_world()
    xs, weight = whole(seed)
    calls: list[torch.Size] = []
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, **settings: Any) -> Any:
        calls.append(tensor.shape)
        return plain(tensor, **settings)

    dist.all_reduce = counted
    own_weight = weight.tensor_split(ranks)[rank].requires_grad_()
    kept, wrong = own_weight.detach().clone(), []
    for x in xs:
        own = x.tensor_split(ranks, dim=-1)[rank]
        rows = own.numel() // own.shape[-1]
        for chunks in (1, 2, 3, 5, 40):
            for overlapped in (True, False):
                calls.clear()
                y = chunked_linear(own, own_weight, chunks, overlap=overlapped)
                case = (tuple(x.shape), chunks, overlapped)
                if y.shape != (*x.shape[:-1], WIDTH) or y.requires_grad:
                    wrong.append(("shape or gradient", case))
                elif not torch.allclose(y, x @ weight, rtol=1e-12, atol=1e-12):
                    wrong.append(("sum", case))
                summed = rows if ranks > 1 else 0
                if len(calls) != min(chunks, summed) or sum(n for n, _ in calls) != summed:
                    wrong.append(("chunks", case))
        if not torch.equal(own, x.tensor_split(ranks, dim=-1)[rank]):
            wrong.append(("x was changed", tuple(x.shape)))
    if not torch.equal(own_weight, kept):
        wrong.append(("weight was changed", ()))
    first = dist.new_group([0])
    try:
        y = chunked_linear(own, own_weight, 2, first)
    except ValueError as problem:
        if rank == 0 or "must contain this process" not in str(problem):
            wrong.append(("refused", problem))
    else:
        if rank or not torch.allclose(y, own @ own_weight):
            wrong.append(("a group of one", ()))
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_chunks_are_the_plain_product_summed(ranks: int, seed: int) -> None:
    assert processes.run(every_shape, ranks, seed) == [[]] * ranks


def test_a_process_alone_has_the_product(seed: int) -> None:
    xs, weight = whole(seed)
    for x in (*xs, torch.ones(3, 0, dtype=torch.float64)):
        own = weight[: x.shape[-1]]
        torch.testing.assert_close(chunked_linear(x, own, 3), x @ own)


class Told:
    """A link that writes down when it was given a chunk and when it was waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.sums: list[torch.Tensor] = []

    def reduce(self, part: torch.Tensor) -> SimpleNamespace:
        number = len(self.sums)
        self.sums.append(part.clone())
        self.events.append(("begin", number))
        return SimpleNamespace(wait=lambda: self.events.append(("wait", number)))


def test_overlap_waits_at_the_end_and_else_at_once(seed: int) -> None:
    (x, *_), weight = whole(seed)
    begins, waits = [[(what, n) for n in range(3)] for what in ("begin", "wait")]
    for overlapped, events in (
        (True, begins + waits),
        (False, [event for pair in zip(begins, waits, strict=True) for event in pair]),
    ):
        told = Told()
        overlap._chunked(x, weight, 3, told.reduce, overlap=overlapped)
        assert told.events == events
        # Each chunk was whole when it was given to the link.
        torch.testing.assert_close(torch.cat(told.sums), x @ weight)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"got \[3, 4\] and \[5, 4\]; pass weight.T"):
        chunked_linear(x, weight, 2)
    assert chunked_linear(x, weight.T, 2).shape == (3, 5)
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        chunked_linear(x, weight.T, 0)
    with pytest.raises(TypeError, match=r"x must be floating point, got torch.int64"):
        chunked_linear(torch.ones(3, 4, dtype=torch.int64), weight.T, 1)


def drawn(dice: random.Random) -> tuple[float, float, int, float, float]:
    compute, wire, launch, alpha = (10 ** dice.uniform(-6, -2) for _ in range(4))
    return compute, wire, dice.randrange(1, 20), launch / 10, alpha / 10


def test_the_form_is_that_of_a_pipeline_played_through(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        compute, wire, chunks, launch, alpha = drawn(dice)
        core = link = 0.0
        for _ in range(chunks):
            core += compute / chunks + launch
            link = max(core, link) + wire / chunks + alpha
        found = overlapped_seconds(compute, wire, chunks, launch=launch, alpha=alpha)
        assert found == pytest.approx(link, rel=1e-9)
        one_core = overlapped_seconds(
            compute, wire, chunks, launch=launch, alpha=alpha, shared=True
        )
        assert one_core == pytest.approx(compute + wire + chunks * (launch + alpha))
        assert max(compute, wire) <= found <= one_core * (1 + 1e-12)


def test_without_costs_more_chunks_never_lose(seed: int) -> None:
    dice = random.Random(seed)
    compute, wire, *_ = drawn(dice)
    times = [overlapped_seconds(compute, wire, chunks) for chunks in (1, 2, 3, 8, 64, 10**6)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(compute + wire)
    assert times[-1] == pytest.approx(max(compute, wire), rel=1e-5)


def test_the_best_number_of_chunks(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        compute, wire, _, launch, alpha = drawn(dice)
        costs = {"launch": launch, "alpha": alpha}
        found = best_chunks(compute, wire, **costs, most=30)
        times = [overlapped_seconds(compute, wire, chunks, **costs) for chunks in range(1, 31)]
        good = [time <= min(times) * (1 + 1e-9) for time in times]
        assert found == good.index(True) + 1
    # Of 8 and 2: 10 in one, 8/k + 2/k + (k - 1) 8/k + costs; the wire hides, launches do not.
    assert best_chunks(8.0, 2.0, launch=0.02) == 10
    assert best_chunks(8.0, 2.0, launch=3.0) == 1
    assert best_chunks(8.0, 0.0) == 1


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        overlapped_seconds(1.0, 1.0, 0)
    for name in ("compute", "wire", "launch", "alpha"):
        times = {"compute": 1.0, "wire": 1.0, name: -1.0}
        with pytest.raises(ValueError, match=f"{name} must be a finite number, at least 0"):
            overlapped_seconds(chunks=1, **times)


def test_a_pretended_link_carries_one_message_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only a sleep and a look move."""
    clock = SimpleNamespace(now=100.0)

    def look() -> float:
        clock.now += 1e-6
        return clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(overlap, "time", SimpleNamespace(perf_counter=look, sleep=sleep))
    link = Link(name="", alpha=0.25, beta=1e-3, source="")
    pretended = overlap._Pretended(link, 4, "two_shot")
    part = torch.zeros(125)
    each = all_reduce_seconds("two_shot", 4, 500, link)
    assert each == 1.25
    first, second = pretended.reduce(part), pretended.reduce(part)
    second.wait()
    assert clock.now == pytest.approx(100 + 2 * each, abs=1e-4)
    first.wait()  # it came long ago
    assert clock.now == pytest.approx(100 + 2 * each, abs=1e-4)
    clock.now += 10  # the link is free again
    pretended.reduce(part).wait()
    assert clock.now == pytest.approx(110 + 3 * each, abs=1e-4)


def test_five_forms_are_measured() -> None:
    sizes = {"rows": 6, "inner": 8, "width": 10, "chunks": 3, "repeats": 4}
    link = Link(name="slow", alpha=5e-4, beta=0.0, source="")
    for asked, name in (({"ranks": 2}, "gloo"), ({"ranks": 4, "link": link}, "slow")):
        run = measure_overlap(**sizes, **asked)
        assert (run.chunks, run.nbytes, run.link) == (3, 240, name)
        forms = (run.compute, run.wire, run.plain, run.chunked, run.overlapped)
        assert all(form.n == 4 and min(form.samples) > 0 for form in forms)
        assert run.gain == run.plain.p50 / run.overlapped.p50
    # On the pretended link no message can be waited for in less than its time: ring, 6 steps.
    each = 6 * 5e-4 * (1 - 1e-6)
    assert min(*run.wire.samples, *run.plain.samples) >= each
    assert min(*run.chunked.samples, *run.overlapped.samples) >= 3 * each


def test_what_cannot_be_measured_is_refused() -> None:
    for name in ("ranks", "rows", "inner", "width", "chunks", "repeats"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            measure_overlap(**{name: 0})
    with pytest.raises(ValueError, match="algorithm|name must be one of"):
        link = Link(name="", alpha=0.0, beta=0.0, source="")
        measure_overlap(rows=1, inner=1, width=1, repeats=1, link=link, algorithm="tree")
