"""The forked capture sums what it should, and a rehearsal catches each way to break it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from labcore import processes
from labcore.parallel.forked import Rehearsal, capture, capture_overlapped

ROWS, INNER, WIDTH = 7, 12, 5


def edited(old: str, new: str) -> Callable[..., Any]:
    """Return capture_overlapped with one mistake."""
    source = textwrap.dedent(inspect.getsource(capture_overlapped))
    assert source.count(old) == 1
    scope = dict(vars(capture))
    exec(source.replace(old, new), scope)  # our own source, changed
    return scope["capture_overlapped"]


def captured(old: str, new: str, seed: int, chunks: int) -> tuple[list[str], bool, list[int]]:
    """Rehearse on this rank; return the log, whether a replay sums new numbers, and priorities."""
    rank, ranks = processes.rank_and_world()
    dice = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=dice, dtype=torch.float64)
                 for shape in ((ROWS, INNER), (INNER, WIDTH)))  # fmt: skip
    own = [one.tensor_split(ranks, dim)[rank].contiguous() for one, dim in ((x, 1), (weight, 0))]
    made = edited(old, new) if old else capture_overlapped
    with Rehearsal() as stage:
        graph, out = made(*own, chunks, warmup=2)
        own[0].mul_(3)
        out.fill_(torch.nan)
        graph.replay()
    return stage.log, torch.allclose(out, 3 * x @ weight), [one.priority for one in stage.streams]


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 3), (3, 2), (2, 40)])
def test_the_wire_forks_and_joins(ranks: int, chunks: int, seed: int) -> None:
    for log, right, priorities in processes.run(captured, ranks, "", "", seed, chunks):
        assert right and priorities == [0, 0, -1]  # default, main, wire
        chunks = min(chunks, ROWS)
        begin, end = log.index("capture begins"), log.index("capture ends")
        inside = log[begin + 1 : end]
        first = 2 * 2 * chunks + 1  # after two warm-up steps
        wanted = []
        for at in range(first, first + 2 * chunks, 2):
            wanted += [
                f"operation {at} on main: mm",
                f"wire waits for operation {at} on main",
                f"operation {at + 1} on wire: allreduce_",
            ]
        assert inside == [*wanted, f"main waits for operation {first + 2 * chunks - 1} on wire"]
        assert log[0] == "main waits for default" and log[begin - 1] == "default waits for main"
        assert log[-1] == "replay"


END = "        step()\n    return"
SYNC = "must not wait for the device"
MISTAKES = [
    ("wire.wait_event(ready)", "pass", "must wait for operation 1"),
    ("main.wait_event(done)", "pass", "must wait for operation 2"),
    ("done.record(wire)", "done.record(main)", "must wait for operation 2"),
    (END, "        step(); torch.cuda.synchronize()\n    return", SYNC),
    (END, "        step(); main.synchronize()\n    return", SYNC),
    (END, "        step(); out.sum().item()\n    return", SYNC),
    (END, "        torch.empty(3); step()\n    return", "must not allocate"),
    ("main.wait_event(done)", "warm = main.stage._began < 0; warm and main.wait_event(done)",
     "joined before its end, but operation 6 isn't"),
]  # fmt: skip


def complaints(seed: int) -> list[str]:
    """Make each mistake on this rank; return what the rehearsal says."""
    said = []
    for old, new, _ in MISTAKES:
        try:
            captured(old, new, seed, 1)
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_each_mistake_is_caught(seed: int) -> None:
    for told in processes.run(complaints, 2, seed):
        for said, (_, new, wanted) in zip(told, MISTAKES, strict=True):
            assert wanted in said, new


def test_a_cpu_is_told_so_and_torch_is_left_as_it_was() -> None:
    x, stream = torch.ones(2, 3), torch.cuda.Stream
    with Rehearsal():
        assert torch.cuda.Stream is not stream
    assert torch.cuda.Stream is stream
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="must have a GPU"):
            capture_overlapped(x, x.T, 1)
    with pytest.raises(ValueError, match="chunks must"):
        capture_overlapped(x, x.T, 0)
