"""Four ranks that decode together, as they should and with a fault each, and what is said of it."""

from __future__ import annotations

import math

import pytest

from labcore.exercises.topics.tensor_parallel import CLINIC, engine, recorder
from labcore.exercises.topics.tensor_parallel.engine import (
    EAGER,
    REPLAY,
    SIZES,
    STEPS,
    Engine,
    Log,
    run,
)
from tests.exercises.notebook import source

SLUG = "tensor_parallel"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_healthy_ranks_write_what_one_process_writes(ranks: int) -> None:
    log = run(Engine(), ranks)
    assert log.right == [1.0] * STEPS and not any(log.waiting)
    assert log.fewest == log.most and set(log.fewest) <= {REPLAY, 0}
    assert log.total == sum(log.finished) and log.finished[0] == engine.LAYERS + 1
    rows = [int((engine._one_process()[:, step] >= 0).sum()) for step in range(STEPS)]
    used = {min(size for size in SIZES if size >= count) for count in rows if count}
    assert {16, 8, 4} <= used and rows[0] == engine.REQUESTS


def last_step(log: Log) -> int:
    return sum(not math.isnan(one) for one in log.finished) - 1


def test_the_patients_show_what_their_symptoms_say() -> None:
    healthy = run(Engine())
    rows = [int((engine._one_process()[:, step] >= 0).sum()) for step in range(STEPS)]
    first = next(step for step, count in enumerate(rows) if count <= engine.FAULTY)
    assert 3 < first < STEPS - 3
    for flag in ("shorter", "ungraphed", "wider"):
        log = run(Engine(**{flag: True}))
        assert last_step(log) == first and log.right[:first] == [1.0] * first
        assert log.finished[:first] == healthy.finished[:first]
        assert log.finished[first] == (engine.LAYERS - 1 if flag == "shorter" else 0)
        assert log.most[first] == (EAGER if flag == "ungraphed" else REPLAY)
        assert log.fewest[first] == REPLAY and len({one is None for one in log.waiting}) == 1
        shapes = [one.numbers.shape for one in log.waiting if one is not None]
        kinds = [one.kind for one in log.waiting if one is not None]
        assert (len(set(shapes)) == 1) == (flag == "ungraphed")
        assert (len(set(kinds)) == 1) == (flag != "shorter")

    unfilled, unreduced = run(Engine(unfilled=True)), run(Engine(unreduced=True))
    for log in (unfilled, unreduced):
        assert not any(log.waiting) and last_step(log) == STEPS - 1 and log.right[3] < 0.9
    assert unfilled.fewest[0] == REPLAY - 1 and unfilled.most[0] == REPLAY
    assert unfilled.finished[0] == healthy.finished[0] and unreduced.finished[0] == 1
    assert unreduced.fewest[0] == REPLAY

    draws = run(Engine(own_draws=True))
    last = last_step(draws)
    assert 3 < last < STEPS - 1 and any(draws.waiting) and draws.right[3] < 0.9
    assert draws.finished[:last] == healthy.finished[:last] and set(draws.most[: last + 1]) == {3}
    assert len({one and one.numbers.shape for one in draws.waiting}) > 1


def test_the_recorder_says_where_ranks_stand(seed: int) -> None:
    words, names = recorder(seed), CLINIC.diagnoses(seed)
    assert words.keys() == names.keys()
    for label, name in names.items():
        hangs = "filled" not in name and "not in the graphs" not in name
        assert words[label].startswith("stands still" if hangs else "came to its end")
        if "lacks" in name:
            assert "ranks 0, 1 and 3 wait in an all-reduce of 8 x 24" in words[label]
            assert "rank 2 waits in an all-gather of 8 x 8 numbers" in words[label]
        if "op by op" in name:
            assert "ranks 0, 1, 2 and 3 wait in an all-reduce of 8 x 24" in words[label]
        if "pads" in name:
            assert "rank 3 waits in an all-reduce of 16 x 24 numbers" in words[label]


def test_the_text_has_the_clinic_s_numbers() -> None:
    text = source(SLUG).read_text("utf-8")
    assert f"decode {engine.REQUESTS} requests together" in text
    assert f"for each of {STEPS} steps" in text and engine.RANKS == 4 and engine.LAYERS == 2
    assert "for 1, 2, 4, 8 and 16 rows" in text and SIZES == (1, 2, 4, 8, 16)
    assert "A step is three launches" in text and REPLAY == 3 and engine.FAULTY == 8
