"""A simulated run agrees with itself, and a slower one is told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labcore.serving.simulation.agreement import agreement
from labcore.serving.simulation.costs import CostModel
from labcore.serving.simulation.scenarios import COST, scenario
from labcore.serving.simulation.simulate import Run


def served(cost: CostModel = COST, **options: object) -> Run:
    return scenario("guaranteed_no_evict", 0.9, "mixed", 24, cost=cost, **options)  # type: ignore[arg-type]


def test_a_run_agrees_with_itself(seed: int) -> None:
    run = served(seed=seed)
    told = agreement(run, run, seed=seed)
    assert set(told) == {"requests/s", "tokens/s"} | {
        f"{time} {part}" for time in ("queue", "ttft", "tpot", "e2e") for part in ("p50", "p99")
    }
    for one in told.values():
        assert one.agrees and (not one.measured or one.error == 0)
    p99 = told["e2e p99"]
    assert p99.low < p99.measured <= p99.high == max(one.e2e for one in run.metrics)


def test_machine_slower_than_the_tolerance_disagrees(seed: int) -> None:
    run = served(seed=seed)
    for slower, agrees in ((1.1, True), (1.3, False)):
        late = replace(
            run,
            metrics=tuple(
                replace(
                    one,
                    **{
                        name: slower * getattr(one, name)
                        for name in ("queue", "ttft", "tpot", "e2e")
                    },
                )
                for one in run.metrics
            ),
            end=run.begin + slower * run.seconds,
        )
        told = agreement(late, run)
        assert told["tokens/s"].agrees == agrees and told["e2e p50"].agrees == agrees
        assert told["e2e p50"].error == pytest.approx(slower - 1)
        assert agreement(late, run, tolerance=0.4)["tpot p50"].agrees


def test_runs_of_other_requests_are_refused(seed: int) -> None:
    run = served(seed=seed)
    with pytest.raises(ValueError, match="simulate the requests that were measured"):
        agreement(run, replace(run, metrics=run.metrics[1:]))
    with pytest.raises(ValueError, match="simulate the requests that were measured"):
        agreement(replace(run, metrics=()), replace(run, metrics=()))
    with pytest.raises(ValueError, match="tolerance"):
        agreement(run, run, tolerance=0)
