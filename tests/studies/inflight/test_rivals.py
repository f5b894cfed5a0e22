"""All rivals serve the same requests, within their pool, budget and chunk."""

from __future__ import annotations

import pytest

from labcore.serving.engine.scheduler import POLICIES
from labcore.studies.inflight import rivals as study


def test_every_setting_is_served_by_every_policy() -> None:
    runs = study.rivals()
    assert len(runs) == 3 * 3 * 3 * 6
    for (policy, _, pool, budget, chunk), run in runs.items():
        assert chunk <= budget and 0 < run.ttft <= run.seconds
        assert max(count for _, count in run.held) <= pool
        assert {bar.number for bar in run.bars} == set(range(24))
        assert (run.idle > 0) <= (policy == "static")
        assert (run.again > 0) <= (policy == "max_utilization")
        assert max(bar.slot for bar in run.bars) < study.ROWS
    for (policy, load, *rest), run in runs.items():
        if policy == "static":
            other = runs["guaranteed_no_evict", load, *rest]
            assert other.tokens_per_second > run.tokens_per_second
    # What two tokens wait for at most is a step, unless somebody is preempted.
    for policy in POLICIES:
        small, large = (runs[policy, 1.2, 84, 192, chunk].gap for chunk in (16, 192))
        assert small < large
    # What the chapter's text says that a reader sees.
    promised, greedy = (runs[policy, 1.2, 16, 64, 64] for policy in [*POLICIES][1:])
    assert greedy.gap > 24 * promised.gap and greedy.seconds < promised.seconds
    for load, budget, chunk in ((0.8, 64, 64), (1.2, 192, 16)):
        first, second = (runs[policy, load, 84, budget, chunk] for policy in [*POLICIES][1:])
        assert first == second
    by_budget = [runs["guaranteed_no_evict", 1.2, 84, size, size] for size in study.BUDGETS]
    assert sorted(by_budget, key=lambda run: -run.ttft) == by_budget
    assert sorted(by_budget, key=lambda run: run.gap) == by_budget
    with pytest.raises(ValueError, match="pool must be at least 14"):
        study.rival("static", 0.8, 13, 64, 64)
