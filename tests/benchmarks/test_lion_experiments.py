"""The digits cases run small: every quantity that a claim or the chapter asks for is there."""

import pytest
import torch

from benchmarks import lion as cases
from labcore.studies import digits_runs
from labcore.studies.lion import tuning
from tests.benchmarks.measurements import by_quantity


def test_the_sweep_keeps_the_whole_grid_and_what_it_chose() -> None:
    found = by_quantity(cases.digits_sweep(cases.SMALL))
    assert set(found) == {"learning-rate ratio/batch 16", "learning-rate ratio/batch 64"}
    details = found["learning-rate ratio/batch 16"].details
    assert torch.tensor(details["accuracy"]["Lion"]).shape == (2, 2, 2)
    assert details["chosen"]["AdamW"]["lr"] in details["plateau"]["AdamW"]


@pytest.mark.parametrize(
    ("case", "quantity", "between"),
    [
        ("digits_accuracy", "accuracy/batch 64", "accuracy difference/batch 64"),
        ("digits_convergence", "steps/batch 64", "steps ratio/batch 64"),
    ],
)
def test_what_lies_between_is_taken_seed_by_seed(case: str, quantity: str, between: str) -> None:
    found = by_quantity(getattr(cases, case)(cases.SMALL))
    lion, adamw = found[quantity].samples, found[quantity].peers["AdamW"]
    assert len(lion) == len(adamw) == 3
    if "difference" in between:
        expected = [100 * (a - b) for a, b in zip(lion, adamw, strict=True)]
    else:
        expected = [a / b for a, b in zip(lion, adamw, strict=True)]
    assert found[between].samples == expected
    # The settings in the details give the samples again.
    setting = digits_runs.Setting(**found[quantity].details["chosen"]["Lion"])
    sizes = cases.SMALL
    again = tuning.report("Lion", setting, 64, sizes.report_seeds, steps=sizes.steps[64])
    if "acc" in quantity:
        repeated = [run.accuracy for run in again]
    else:
        repeated = tuning.steps_to_target(again, sizes.target)
    assert list(lion) == repeated


def test_the_precision_case_has_every_remedy_beside_plain_bf16() -> None:
    found = by_quantity(cases.digits_bf16(cases.SMALL))
    assert set(found) == {f"accuracy/lr {lr}" for lr in ("0.0001", "0.0003", "0.001")}
    for item in found.values():
        assert set(item.peers) == set(cases.PRECISIONS) - {"bf16"}
        assert all(len(samples) == 2 for samples in (item.samples, *item.peers.values()))


def test_a_plateau_is_the_mean_of_all_its_settings() -> None:
    sizes = cases.SMALL
    found = by_quantity(cases.digits_accuracy(sizes))
    told = found["plateau accuracy/batch 64"]
    settings = [digits_runs.Setting(**one) for one in told.details["settings"]["Lion"]]
    best = digits_runs.Setting(**found["accuracy/batch 64"].details["chosen"]["Lion"])
    assert best in settings
    runs = [
        tuning.report("Lion", one, 64, sizes.report_seeds, steps=sizes.steps[64])
        for one in settings
    ]
    means = [sum(run.accuracy for run in each) / len(settings) for each in zip(*runs, strict=True)]
    assert list(told.samples) == pytest.approx(means)
    peers = told.peers["AdamW"]
    gaps = found["plateau accuracy difference/batch 64"].samples
    assert gaps == [100 * (a - b) for a, b in zip(told.samples, peers, strict=True)]
