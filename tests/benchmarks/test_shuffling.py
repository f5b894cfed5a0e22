"""The experiments run small: every quantity that a claim asks for is there and is what it says."""

import dataclasses

import pytest

from benchmarks import shuffling as cases
from benchmarks.runner import cases_of, seen
from benchmarks.shuffling import SMALL
from labcore.studies.language.tuning import REPORT_SEEDS, Setting
from labcore.studies.shuffling import (
    characters,
    digit_orders,
    language_orders,
    language_results,
    language_spikes,
    tracing,
)
from tests.benchmarks.measurements import asked, by_quantity

SETTING = Setting(lr=4e-3, decay=0.1)


def test_the_orders_are_compared_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    spikes = tracing.spikes_of

    def planted(losses: tuple[float, ...], provenance: object = ()):
        """The detector needs more steps than a test has: a spike at step 55 of the file order."""
        (first,) = spikes((*losses[:1] * 55, losses[0] * 9))
        return (dataclasses.replace(first, step=55),)

    monkeypatch.setattr(tracing, "spikes_of", planted)
    found = by_quantity(cases.text_orders(SMALL))
    assert asked("shuffling", "text/orders") <= set(found)
    order, full = (found[f"spikes/sources, {name}"] for name in ("file order", "full"))
    gap = found["held-out loss minus full/sources, file order"]
    pairs = zip(order.details["held out"], full.details["held out"], strict=True)
    assert gap.samples == [a - b for a, b in pairs]
    assert order.samples == [1000 / 16, 1000 / 16]
    assert found["spikes minus full/sources, file order"].samples == [0.0, 0.0]
    # The explorer needs the curves of these and of no other.
    drawn = {q for q, item in found.items() if "losses" in item.details}
    assert drawn == {f"spikes/sources, {name}" for name in characters.ORDERS if name != "blocks"}
    shuffled = found["spikes/sources, batches shuffled"]
    assert order.details["design effect"][0] > 1.5
    assert {*shuffled.details, *order.details} >= {"design effect of 16 batches"}


def test_a_flag_is_judged_by_precision_and_recall() -> None:
    effects = {"bad, flagged": 4.0, "bad, missed": 1.0, "good, flagged": 2.0}
    found = []
    for order, effect in effects.items():
        more = [9.0, 2.0] if order.startswith("bad") else [0.0, 1.9]
        details = {"design effect": [effect, effect]}
        found += [
            seen(f"spikes minus full/sources, {order}", "", more),
            seen(f"spikes/sources, {order}", "", more, **details),
        ]
    flags = by_quantity(cases._flags(found, SMALL.seeds))
    assert flags["precision of the flag"].samples == [0.5, 0.5]
    assert flags["recall of the flag"].samples == [0.5, 0.5]


def test_no_spike_leaves_nothing_to_trace() -> None:
    calm = characters.EpochRun(losses=(2.0,) * 60, held_out=2.0, rows=())
    with pytest.raises(RuntimeError, match="nothing to trace"):
        cases._traced("sources", [calm, calm], SMALL.seeds)


def test_smooth_is_the_trailing_mean() -> None:
    values = [float(i) for i in range(40)]
    assert cases._smooth(values) == [12.0, 17.0, 22.0, 27.0]


def test_a_schedule_is_compared_at_one_rate_and_at_the_best() -> None:
    found = by_quantity(cases.text_schedules(dataclasses.replace(SMALL, seeds=(0,))))
    for schedule, rates in characters.BEST.items():
        own, full = (
            found[f"held-out loss/{schedule}, rate {rates[order]:g}, {order}"].samples[0]
            for order in ("buffer 2048", "full")
        )
        best = found[f"held-out loss minus full/{schedule}, best rates, buffer 2048"]
        assert best.samples == [own - full]
    at_one = found["held-out loss minus full/decay, rate 0.003, file order"].samples
    one, full = (
        found[f"held-out loss/decay, rate 0.003, {order}"].samples
        for order in ("file order", "full")
    )
    assert at_one == [one[0] - full[0]]


def test_made_spikes_are_compared_with_the_clean_run() -> None:
    small = dataclasses.replace(SMALL, steps=104, bad=2)
    found = by_quantity(cases.text_made(small))
    assert asked("shuffling", "text/made") <= set(found)
    assert min(found["spikes/a shard of noise"].details["rise"]) > 1
    assert found["held-out loss minus clean/a shard of noise, SGD"].samples[0] != 0
    clean = {steps: characters.run("full", 0, steps=steps).held_out for steps in (104, 94, 103)}
    longer = found["held-out loss minus clean/one long step"].samples
    for what, steps in (("a tenth fewer steps", 94), ("the bad steps left out", 103)):
        shorter = found[f"held-out loss minus {what}/one long step"].samples
        cost = found[f"{what} minus clean/one long step"].samples
        assert cost[0] == clean[steps] - clean[104]
        assert longer[0] - shorter[0] == pytest.approx(cost[0])


def test_the_digits_cases_cover_every_order() -> None:
    accuracy = by_quantity(cases.digits_collapse(SMALL))
    assert set(accuracy) == {f"accuracy/{order}" for order in digit_orders.ORDERS}
    effects = by_quantity(cases.digits_design_effect(SMALL))
    item = effects["measured over predicted, largest batch/sorted"]
    pairs = zip(item.details["measured"], item.details["predicted"], strict=True)
    assert item.samples == [measured[-1] / predicted[-1] for measured, predicted in pairs]


def test_every_run_of_the_language_model_has_a_case() -> None:
    minutes = {case.name: case.minutes for case in cases_of("shuffling")}
    runs = {name: each for name, each in minutes.items() if name.startswith("language/")}
    arms = (*language_orders.ORDERS, language_orders.SHORTER)
    wanted = (*arms, "damaged", "mended", "damaged, z-loss", "damaged, QK-norm")
    for what in (*wanted, language_results.HOT):
        assert all(runs.pop(f"language/{what}/seed {seed}") < 4.8 for seed in REPORT_SEEDS)
    assert set(runs) == {"language/orders", "language/spikes"}


def test_the_language_model_runs_small_and_is_compared(
    few_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "_tuned", lambda _: SETTING)
    by_name = {case.name: case.function for case in cases_of("shuffling")}
    found = {}
    shorter = language_orders.SHORTER
    for what in ("sorted", shorter, "damaged", "mended", language_results.HOT):
        (seed, *_) = REPORT_SEEDS
        for item in by_name[f"language/{what}/seed {seed}"](SMALL):
            found[what, item.quantity] = item
    details = found["sorted", "held-out loss"].details
    assert len(details["losses"]) == len(details["norms"]) == 3
    assert details["design effect"] > 0 and details["design effect of 16 batches"] >= 0
    assert len(found[shorter, "held-out loss"].details["losses"]) == 2
    branches = {name.removeprefix("held-out loss/") for what, name in found if what == "damaged"}
    assert branches == {"clean", *language_spikes.DAMAGES, language_spikes.FEWER}
    assert len(found[language_results.HOT, "held-out loss/z-loss"].details["fixed"]) == 4
    losses = [
        found["damaged", f"held-out loss/{name}"].details["losses"]
        for name in ("clean", "random tokens")
    ]
    assert losses[0][:2] == losses[1][:2] and losses[1][2] > losses[0][2]


def test_recorded_runs_give_the_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, end: float, high: float) -> None:
            trunk, after = language_spikes.Plan().trunk, language_spikes.Plan().after
            losses = [5.0 - 0.05 * step for step in range(trunk + 100)]
            losses[trunk + 60] += high
            fixed = [4.0 - 0.05 * step for step in range(after + 1)]
            fixed[4] += high
            self.p50, self.details = end, {"losses": losses, "norms": losses, "fixed": fixed}

    def find(_slug: str, case: str, quantity: str) -> Fake:
        calm = any(word in quantity for word in ("clean", "none", language_spikes.FEWER))
        worse = 0.0 if calm or language_orders.SHORTER in case else 0.25
        return Fake(2.0 + worse, 8 * worse)

    monkeypatch.setattr(language_results.records, "find", find)
    monkeypatch.setattr(language_results, "run_record", lambda *_: Fake(1.5, 0.5))
    orders = by_quantity(cases.language_order_records())
    assert asked("shuffling", "language/orders") <= set(orders)
    assert orders["held-out loss minus random/sorted"].samples == [0.75] * len(REPORT_SEEDS)
    assert orders["held-out loss minus a tenth fewer steps/sorted"].samples == [0.25] * 4
    assert orders["highest rise minus random/sorted"].samples == pytest.approx([1.5] * 4)
    spiking = orders["spikes minus random/sorted"]
    assert spiking.samples == [0.0] * 4 and spiking.unit == "in 1,000 steps"
    spikes = by_quantity(cases.language_spike_records())
    assert asked("shuffling", "language/spikes") <= set(spikes)
    for name in ("random tokens", "random tokens, z-loss", *language_spikes.MENDED):
        assert spikes[f"held-out loss minus clean/{name}"].samples == [0.25] * 4
        for rise in ("rise", "rise on fixed windows"):
            assert spikes[f"{rise} minus clean/{name}"].samples == pytest.approx([2.0] * 4)
    steps = spikes["steps to recover/random tokens"]
    assert steps.samples == [5.0] * 4 and steps.unit == "steps"
    left_out = language_spikes.FEWER
    assert spikes[f"held-out loss minus {left_out}/random tokens"].samples == [0.25] * 4
    hot = f"{language_results.HOT}, QK-norm"
    assert spikes[f"held-out loss minus no cure/{hot}"].samples == [0.25] * 4
    assert spikes["held-out loss minus no cure/clean, QK-norm"].samples == [0.0] * 4
    rises = spikes[f"rise on fixed windows minus no cure/{hot}"].samples
    assert rises == pytest.approx([1.95] * 4)
    curves = language_results.damage_curves()
    assert {cure: len(runs) for cure, runs in curves.items()} == {
        "no cure": 1 + len(language_spikes.DAMAGES), "z-loss": 3, "QK-norm": 3,
    }  # fmt: skip
    assert curves["z-loss"]["random tokens"]["loss on fixed windows"][3][4] == 3.8 + 2.0
