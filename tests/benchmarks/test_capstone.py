"""The cases run small: what the page draws and compares is there."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks import capstone as cases
from benchmarks.capstone import SMALL
from labcore import records
from labcore.capstone import ScalingLaw
from labcore.capstone.live import recorded_curves
from tests.benchmarks.measurements import by_quantity


def test_runs_of_a_width_are_told_with_their_sizes() -> None:
    found = cases.losses_of(64, SMALL.counts, SMALL.bytes)
    assert [one.details["tokens"] for one in found] == list(SMALL.counts)
    assert all(one.details["weights"] > 200_000 for one in found)
    assert 9 > found[0].samples[0] > found[1].samples[0] > 0  # more text, less loss


def test_a_whole_run_is_told_with_its_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    law = ScalingLaw(floor=1.0, by_weights=50.0, by_tokens=50.0, worst=0.1)
    monkeypatch.setattr(cases, "scaling_law", lambda: law)
    found = by_quantity(cases.whole_run(SMALL))
    told = found["held-out text"].details
    assert len(told["losses"]) == len(told["norms"]) == len(told["seconds"]) > 1
    assert found["held-out text"].peers["predicted"] == [law(told["weights"], told["tokens"])]
    predicted = found["memory of a step"].peers["predicted"][0]
    assert found["memory of a step"].samples[0] == pytest.approx(predicted, rel=0.1)
    assert found["same tokens as transformers"].samples[0] > 0.5
    assert {"decoding/plain", "decoding/n-grams", "decoding/EAGLE", "time"} < set(found)


def test_the_recorded_curves_are_whole() -> None:
    curves = recorded_curves("dial/10 minutes")
    assert curves.steps == len(curves.bits) == len(curves.norms) == len(curves.seconds) > 1_000
    held_out = records.find("capstone", "dial/10 minutes", "held-out text").p50
    last = fmean(curves.bits[-100:])  # one batch may be far off
    assert 0.6 * held_out < last < 1.05 * held_out  # lower: of the text that it trains on
