"""The experiments run small: every quantity that a claim asks for is there and is what it says."""

import dataclasses

import pytest

from benchmarks import shuffling as cases
from benchmarks.shuffling import SMALL
from labcore.studies.shuffling import characters, digit_orders, tracing
from tests.benchmarks.measurements import asked, by_quantity


def test_the_orders_are_compared_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    spikes = tracing.spikes_of

    def planted(losses: tuple[float, ...], provenance: object = ()):
        """The detector needs more steps than a test has: a spike at step 55 of the file order."""
        (first,) = spikes((*losses[:1] * 55, losses[0] * 9))
        return (dataclasses.replace(first, step=55),)

    monkeypatch.setattr(tracing, "spikes_of", planted)
    found = by_quantity(cases.text_orders(SMALL))
    assert asked("shuffling", "text/orders") <= set(found)
    order = found["spikes/sources, file order"]
    full = found["spikes/sources, full"]
    gap = found["held-out loss minus full/sources, file order"]
    pairs = zip(order.details["held out"], full.details["held out"], strict=True)
    assert gap.samples == [a - b for a, b in pairs]
    assert order.samples == [1000 / 12, 1000 / 12]
    assert found["spikes minus full/sources, file order"].samples == [0.0, 0.0]
    # The explorer needs the curves of these and of no other.
    drawn = {q for q, item in found.items() if "losses" in item.details}
    names = ("file order", *(f"buffer {size}" for size in characters.BUFFERS), "full")
    assert drawn == {f"spikes/sources, {name}" for name in names}
    assert order.details["design effect"][0] > 1.5


def test_the_other_rate_is_another() -> None:
    found = by_quantity(cases.text_learning_rate(SMALL))
    assert found["held-out loss minus full/full"].samples == [0.0, 0.0]
    at_first = characters.run("full", 0, steps=SMALL.steps).held_out
    assert found["spikes/full"].details["held out"][0] != at_first


def test_a_flag_is_judged_by_precision_and_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(held_out: float) -> characters.EpochRun:
        return characters.EpochRun(
            losses=(3.0,) * 12, rows=((0,) * 32,) * 12, checks=((12, held_out),)
        )

    runs = {
        ("sources", "full"): [run(2.0)] * 2,
        ("sources", "bad, flagged"): [run(2.2)] * 2,
        ("sources", "bad, missed"): [run(2.3)] * 2,
        ("sources", "good, flagged"): [run(2.01)] * 2,
    }
    effects = iter([1.0, 4.0, 1.0, 2.0] * 2)
    monkeypatch.setattr(cases, "_distances", lambda *_: [next(effects)])
    found = by_quantity(cases._flags(runs, SMALL.seeds))
    assert found["precision of the flag/design effect"].samples == [0.5, 0.5]
    assert found["recall of the flag/design effect"].samples == [0.5, 0.5]
    assert set(found) >= {"precision of the flag/spikes", "recall of the flag/spikes"}


def test_no_spike_leaves_nothing_to_trace() -> None:
    with pytest.raises(RuntimeError, match="nothing to trace"):
        cases._traced("sources", [[], []], SMALL.seeds)


def test_smooth_is_the_trailing_mean() -> None:
    values = [float(i) for i in range(40)]
    assert cases._smooth(values) == [12.0, 17.0, 22.0, 27.0]


def test_stability_is_a_ratio_of_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"file order": 1.0, "full": 2.0}
    monkeypatch.setattr(characters, "largest_stable_rate", lambda order, _: rates[order])
    (item,) = by_quantity(cases.text_stability(SMALL)).values()
    assert {item.quantity} == asked("shuffling", "text/stability")
    assert item.samples == [0.5, 0.5]
    rates["full"] = 0.0
    with pytest.raises(RuntimeError, match="lower the rates"):
        cases.text_stability(SMALL)


def test_the_digits_cases_cover_every_order() -> None:
    accuracy = by_quantity(cases.digits_collapse(SMALL))
    assert set(accuracy) == {f"accuracy/{order}" for order in digit_orders.ORDERS}
    effects = by_quantity(cases.digits_design_effect(SMALL))
    assert len(effects) == 3 * len(digit_orders.ORDERS)
    assert effects["measured minus predicted/sorted, batch 32"].details["at"] == 32
    scales = by_quantity(cases.digits_noise_scale(SMALL))
    item = scales["two batches over exact/full"]
    pairs = zip(item.details["two batches"], item.details["exact"], strict=True)
    assert item.samples == [a / b for a, b in pairs]
