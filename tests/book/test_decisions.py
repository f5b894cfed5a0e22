"""The labs' decisions: the numbers that their answers name are what the exercises compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from labcore.attention.traffic import GPUS
from labcore.book.teaching.units import read_course
from labcore.exercises.topics import (
    adamw_epsilon,
    attention,
    capstone,
    clipping,
    ghost_norm,
    hip,
    inflight,
    lion,
    medusa,
    memory,
)
from labcore.grading.intake.submissions import mend
from labcore.labs.source import cell_text
from tests.book_fixtures import ROOT
from tests.labs import mini

Numbers = dict[str, float]


def of_lion() -> Numbers:
    _, decay = lion.TRANSFER.reference(lr=3e-4, decay=0.1, factor=10.0, decay_times_lr=True)
    _, whole = lion.TRANSFER.reference(lr=3e-4, decay=0.1, factor=10.0, decay_times_lr=False)
    return {
        "to be {:.0f},": decay,
        "decay is {:.0e} whatever": whole,
        "would be {:.0f} in": 1 / 0.1,
    }


def of_adamw_epsilon() -> Numbers:
    rms = torch.tensor([3e-3, 2e-4, 5e-6, 8e-7], dtype=torch.float64)
    largest, _ = adamw_epsilon.LARGEST_EPS.reference(rms, lost=0.05)
    lost = 1e-6 / (rms + 1e-6)
    assert lost[:2].max() < 0.01
    return {
        "up to {:.1e} at": largest,
        "lose {:.0%} of": float(lost[3]),
        "the next one {:.0%},": float(lost[2]),
    }


def of_ghost_norm() -> Numbers:
    rows, before, large = 1_200_000, 256, 4096
    old, new = 90 * -(-rows // before), 120 * -(-rows // large)
    case = {"lr": 0.1, "momentum": 0.1, "epochs": 90, "rows": rows, "batch": before}
    *_, epochs = ghost_norm.LARGE_BATCH.reference(**case, factor=large // before, power=1.0)
    assert round(old / new) == 12
    return {"make {:,} updates": new, "the {:,} before": old, "take {:,} epochs": epochs}


def of_clipping() -> Numbers:
    norms = torch.ones(700, dtype=torch.float64)
    norms[200:] = 3
    clipped = {
        factor: int((clipping.HISTORY.reference(norms, window=100, factor=factor) < 1).sum())
        for factor in (1.2, 2.0, 3.0)
    }
    assert clipped[3.0] == 0
    return {"next {} steps": clipped[1.2], "2 clips {},": clipped[2.0]}


def peak(inputs: Sequence[int], kept: Sequence[int], lengths: Sequence[int]) -> int:
    waiting, highest, at = 0, 0, 0
    for length in lengths:
        inside = slice(at, at + length)
        highest = max(highest, waiting + sum(inputs[inside]) + sum(kept[inside]))
        waiting, at = waiting + inputs[at], at + length
    return highest


def of_memory() -> Numbers:
    found: Numbers = {}
    for kept, alone, best in (
        (8, "peak of {} GB", "division {} GB"),
        (1, "it does: {} GB", "and {} GB for 3, 3, 2, 2, 1, 1"),
    ):
        layers = [1] * 12, [kept] * 12
        found[alone] = peak(*layers, [1] * 12)
        lengths = memory.STRETCHES.reference(*layers, most=None)
        found[best] = peak(*layers, lengths)
    assert peak([1] * 12, [1] * 12, [3, 3, 2, 2, 1, 1]) == found["and {} GB for 3, 3, 2, 2, 1, 1"]
    return found


def of_attention() -> Numbers:
    keys = {
        (sram, stages): attention.LARGEST_TILE.reference(
            sram, 128, itemsize=2, ratio=2, stages=stages
        )[0]
        for sram in (101_376, 232_448)
        for stages in (2, 3)
    }
    assert keys[232_448, 2] == keys[232_448, 3]
    return {
        "where {} keys": keys[101_376, 2],
        "only {} with": keys[101_376, 3],
        "where {} fit": keys[232_448, 3],
    }


def of_hip() -> Numbers:
    two, three = (
        hip.CHOOSE_TILE.reference(128, waves=4, stages=1, wanted=wanted, other=32)[0]
        for wanted in (2, 3)
    )
    card = GPUS["MI300X"]
    return {
        "tile of {} queries": three,
        "place of {},": two,
        "{} operations per byte": two,
        "some {:.0f} for an MI300X": round(card.matmul / card.bandwidth, -1),
    }


def of_speculative() -> Numbers:
    def time(tokens: int) -> float:
        return 20 + 0.3 * max(tokens - 64, 0)

    def gain(rows: int, length: int) -> float:
        chances = torch.tensor([0.8, 0.75, 0.7, 0.65])[:length]
        tokens = 1 + float(chances.cumprod(0).sum())
        return tokens * time(rows) / (time(rows * (length + 1)) + 2 * length)

    best = {rows: max(range(5), key=lambda n: gain(rows, n)) for rows in (1, 32, 64)}
    assert best[64] == 0
    return {
        "load: {} for one": best[1],
        "request, {:.1f} times": gain(1, best[1]),
        "{} for 32": best[32],
        "32 requests, {:.1f} times": gain(32, best[32]),
        "slower, {:.2f} times": gain(64, 1),
    }


def of_medusa() -> Numbers:
    def rows(*rates: float) -> Tensor:
        return torch.tensor(rates, dtype=torch.float64).expand(3, 3)

    first = rows(0.6, 0.15, 0.08)[:1]
    later = torch.stack((rows(0.5, 0.12, 0.06), rows(0.41, 0.1, 0.05)))[None]
    tokens = {n: medusa.SPARSE_TREE.reference(first, later, budget=n)[1] for n in range(1, 30)}
    gpu = {n: 20 * one / (20 + 0.25 * max(n + 1 - 16, 0)) for n, one in tokens.items()}
    cpu = {n: 20 * one / (20 + n) for n, one in tokens.items()}
    assert round(tokens[24] - tokens[4], 1) == 0.5
    return {
        "About {} nodes": max(gpu, key=gpu.__getitem__),
        "GPU, {:.1f} times": max(gpu.values()),
        "about {} on": max(cpu, key=cpu.__getitem__),
        "CPU, {:.1f} times": max(cpu.values()),
        "nodes bring {:.1f} and": gpu[24],
        "and {:.1f}.": cpu[24],
        "bring {:.2f} tokens": tokens[4],
    }


def of_tensor_parallel() -> Numbers:
    def ring(ranks: int, latency: float, speed: float) -> float:
        return 160 * 2 * (ranks - 1) * (latency + 131_072 / ranks / speed)

    return {
        "spend {:.0f} ms": 1e3 * ring(16, 12e-6, 40e9),
        "and {:.1f} ms over 8": 1e3 * ring(8, 2e-6, 300e9),
        "is {:.0f} ms a step": 6 + 1e3 * ring(16, 12e-6, 40e9),
        "instead of {:.0f} ms": 12 + 1e3 * ring(8, 2e-6, 300e9),
        "latency: {} messages follow": 2 * (16 - 1),
        "bytes {:.1f} µs": 1e6 * 131_072 / 16 / 40e9,
    }


def of_inflight() -> Numbers:
    def step(tokens: int) -> float:
        return 15 + 0.1 * tokens

    budget = next(n for n in range(1000, 0, -1) if step(n) <= 50)
    requests = [(0, 1, 40)] * 30 + [(1, 2000, 4)]
    case = {"requests": requests, "budget": budget, "chunk": 2000, "least": 1, "steps": 12}
    reads, firsts = inflight.CHUNK.reference(**case, equal=False)
    steps = reads[1 : firsts[-1] + 1]
    return {
        "{} tokens a step": budget,
        "step of {:.0f} ms": step(2030),
        "takes {} steps": len(steps),
        "after {:.0f} ms": sum(step(sum(one)) for one in steps),
    }


def of_capstone() -> Numbers:
    speed, hour, letters = 5e11, 3600, 2_000_000
    weights = (speed * hour / 120) ** 0.5
    shapes = [(64, 2, 400_000), (128, 4, round(weights))]
    case = {"speed": speed, "seconds": hour, "batch": 1000, "length": 0, "shapes": shapes}
    width, steps = capstone.CHOOSE.reference(**case, corpus=letters, epochs=4)
    assert width == 64 and steps * 1000 == 20 * 400_000
    return {
        "read them {:.0f} times": 20 * weights / letters,
        "readings are {:.0f} million": steps / 1000,
        "enough for {:,} weights": steps * 1000 // 20,
        "trained in {:.0f} s": 6 * 400_000 * steps * 1000 / speed,
        "more text: {:.0f} million": 20 * weights / 4 / 1e6,
    }


COMPUTED: dict[str, Callable[[], Numbers]] = {
    "lion": of_lion,
    "adamw_epsilon": of_adamw_epsilon,
    "ghost_norm": of_ghost_norm,
    "clipping": of_clipping,
    "memory": of_memory,
    "attention": of_attention,
    "hip": of_hip,
    "speculative": of_speculative,
    "medusa": of_medusa,
    "tensor_parallel": of_tensor_parallel,
    "inflight": of_inflight,
    "capstone": of_capstone,
}


@pytest.mark.parametrize("slug", COMPUTED)
def test_the_numbers_of_an_answer_are_computed(slug: str) -> None:
    answer = " ".join(read_course(ROOT)[slug].decision.expects)
    for words, value in COMPUTED[slug]().items():
        told = words.format(value).replace("e-0", "e-")
        assert told in answer, told


def test_every_lab_asks_for_a_decision_and_its_text_reaches_the_grader() -> None:
    course = read_course(ROOT)
    assert course.keys() - COMPUTED.keys() == {"shuffling"}  # whose number is in the question
    for slug, unit in course.items():
        release = mini.read(ROOT / "labs" / "release" / slug / f"{slug}.ipynb")
        assert unit.decision.question.endswith("?") or "Try some" in unit.decision.question
        notebook = mini.read(ROOT / "labs" / "release" / slug / f"{slug}.ipynb")
        mini.cell(notebook, "decision")["source"] += "\nI would take 7, because of 49."
        kept = [cell_text(cell) for cell in mend(notebook, release).notebook["cells"]]
        assert any("I would take 7, because of 49." in text for text in kept)
