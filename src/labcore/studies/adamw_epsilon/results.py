"""What was recorded of the runs on the language model: by eps and format, and by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labcore import records
from labcore.records import Record
from labcore.studies.adamw_epsilon.gradient_scale import fit_power
from labcore.studies.adamw_epsilon.language import BATCH, EPSILONS, SHAPES
from labcore.studies.language.results import run_record
from labcore.studies.language.tuning import REPORT_SEEDS

__all__ = [
    "BASE",
    "BF16_SEEDS",
    "MEASURED_EPS",
    "Run",
    "differences",
    "exponents",
    "final_losses",
    "rms_by_batch",
    "rms_by_shape",
    "run_of",
    "second_moments",
]

Run = tuple[float, str]
"""An eps, and the format of weights and state."""

BASE: Run = (1e-8, "fp32")
"""`benchmarks.language` records these runs."""
MEASURED_EPS = min(EPSILONS)
"""The eps of the runs whose gradients are measured; it's too small to have a say in them."""
BF16_SEEDS = REPORT_SEEDS[:3]  # so that all runs together stay below an hour and a half


def run_of(run: Run, seed: int, quantity: str = "held-out loss") -> Record:
    """Return a quantity of one recorded run. Raises KeyError if it has no record."""
    if run == BASE:
        return run_record(BATCH, "AdamW", f"seed {seed}")
    eps, form = run
    return records.find("adamw_epsilon", f"language/eps {eps:g}, {form}/seed {seed}", quantity)


def final_losses(run: Run, seeds: Sequence[int] = REPORT_SEEDS) -> list[float]:
    """Return the loss on held-out files at the end, in nats per token, by seed."""
    return [run_of(run, seed).p50 for seed in seeds]


def differences(one: Run, other: Run, seeds: Sequence[int] = REPORT_SEEDS) -> list[float]:
    """Return the final loss of one run minus that of the other, seed by seed."""
    pairs = zip(final_losses(one, seeds), final_losses(other, seeds), strict=True)
    return [a - b for a, b in pairs]


def rms_by_batch(batches: Sequence[int]) -> dict[int, list[float]]:
    """Return the RMS of the gradients after training, by the tokens of a batch and by seed."""
    run = (MEASURED_EPS, "fp32")
    return {
        batch: [run_of(run, seed, f"gradient rms/{batch} tokens").p50 for seed in REPORT_SEEDS]
        for batch in batches
    }


def second_moments() -> list[Mapping[str, Any]]:
    """Return what `gradient_batches.sizes_of` says of Adam's √v̂ after training, by seed."""
    run = (MEASURED_EPS, "fp32")
    return [run_of(run, seed).details["second moments"] for seed in REPORT_SEEDS]


def rms_by_shape(batch: int) -> dict[str, dict[int, list[float]]]:
    """Return the RMS by seed for the models of "width" and of "depth", by their number of weights.

    batch: tokens of the batches over which the gradients were measured.
    """
    _, (width, depth), *_ = SHAPES
    found: dict[str, dict[int, list[float]]] = {"width": {}, "depth": {}}
    for shape in SHAPES:
        case = f"language/width {shape[0]}, depth {shape[1]}/seed "
        quantity = f"gradient rms/{batch} tokens"
        runs = [records.find("adamw_epsilon", f"{case}{n}", quantity) for n in REPORT_SEEDS]
        weights = runs[0].details["parameters"]
        for name, alike in (("width", shape[1] == depth), ("depth", shape[0] == width)):
            if alike:
                found[name][weights] = [run.p50 for run in runs]
    return found


def exponents(sizes: Mapping[int, Sequence[float]]) -> list[float]:
    """Return one exponent per seed of a power law in x; sizes: x -> RMS by seed."""
    xs = sorted(sizes)
    return [fit_power(xs, ys)[0] for ys in zip(*(sizes[x] for x in xs), strict=True)]
