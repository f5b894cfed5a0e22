"""What was recorded of bad batches and of the language model, as the figures take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from labcore import records
from labcore.records import Record
from labcore.studies.clipping import damage
from labcore.studies.clipping.exploding import LOUD_LIMITS, UPDATES
from labcore.studies.language.results import run_record
from labcore.studies.language.tuning import REPORT_SEEDS

__all__ = [
    "AT_THE_END",
    "LOUD",
    "OPTIMIZERS",
    "Harm",
    "damage_harm",
    "damage_limits",
    "language_norms",
    "loud_layer",
    "loud_limits",
]

AT_THE_END = "at the end"
OPTIMIZERS = ("AdamW", "Lion", "Muon")  # of the language model's runs whose norms are shown
LOUD = {"convolutions": "conv", "recurrent network": "RNN"}  # networks with a loud layer
# Method -> kind of damage -> number of bad batches -> when it is read -> a number per seed.
Harm = Mapping[str, Mapping[str, Mapping[int, Mapping[str, Sequence[float | None]]]]]


def _by_time(record: Record) -> dict[str, Sequence[float | None]]:
    """Return the loss's excess by steps after the damage, and the record's number at the end."""
    return {**record.details["excess"], AT_THE_END: record.samples}


def damage_harm(optimizer: str) -> Harm:
    """Return what bad batches cost the recurrent network.

    optimizer: "AdamW" or "SGD". Training loss is in nats more, and at the end it is percentage
    points of held-out accuracy that were lost.
    """

    def find(kind: str, bad: int, method: str) -> Record:
        quantity = f"accuracy lost/{optimizer}, {kind}, {bad}, {method}"
        return records.find("clipping", f"damage/{optimizer}", quantity)

    return {
        method: {
            kind: {bad: _by_time(find(kind, bad, method)) for bad in damage.LENGTHS}
            for kind in damage.KINDS
        }
        for method in ("none", "global", *((UPDATES,) if optimizer == "AdamW" else ()))
    }


def damage_limits(optimizer: str) -> tuple[dict[str, dict[float, Sequence[float]]], float]:
    """Return what limits of the global norm cost the recurrent network, and its usual norm.

    Bad batches in a row -> limit -> points of accuracy lost, by seed, against no clipping and no
    bad batch. The usual norm is the median of the steps before, without clipping.
    """

    def find(bad: int, limit: float) -> Record:
        quantity = f"accuracy lost/{optimizer}, {bad}, {limit:g}"
        return records.find("clipping", "damage/limits", quantity)

    names = {"no bad batch": 0, "one bad batch": 1, "five in a row": 5}
    found: dict[str, dict[float, Sequence[float]]] = {
        name: {limit: find(bad, limit).samples for limit in damage.LIMITS}
        for name, bad in names.items()
    }
    return found, float(median(find(0, damage.LIMITS[0]).details["usual_norms"]))


def loud_layer(network: str, optimizer: str) -> Record:
    """Return the record of the network with a loud layer, under both norms; network: see LOUD."""
    quantity = f"local minus global/{optimizer}"
    return records.find("clipping", f"loud-layer/{LOUD[network]}", quantity)


def loud_limits(network: str, optimizer: str) -> dict[str, dict[float, list[float]]]:
    """Return the accuracies in percent, by norm and limit, on the seeds that chose the limits."""
    tried, limits = loud_layer(network, optimizer).details["tried"], LOUD_LIMITS[LOUD[network]]
    return {
        f"{norm} norm".replace("local, per layer", "local"): {
            limit: [100 * accuracy for accuracy in by_limit[f"{limit:g}"]] for limit in limits
        }
        for norm, by_limit in tried.items()
    }


def language_norms(
    batch: int = 8_192, *, optimizers: Iterable[str] = OPTIMIZERS, limits: Iterable[str] = ()
) -> dict[str, list[tuple[float, ...]]]:
    """Return the norms before clipping of the language model's runs: optimizer -> seeds.

    The bench clips each of them to a norm of 1. limits: keys of `language.LIMITS`, for runs of
    AdamW that were clipped in other ways, at 8,192 tokens per step.
    """
    runs = {
        name: [run_record(batch, name, f"seed {seed}") for seed in REPORT_SEEDS]
        for name in optimizers
    }
    for limit in limits:
        runs[f"AdamW, {limit}"] = [
            records.find("clipping", f"language/{limit}/seed {seed}", "held-out loss")
            for seed in REPORT_SEEDS
        ]
    return {name: [tuple(run.details["norms"]) for run in each] for name, each in runs.items()}
