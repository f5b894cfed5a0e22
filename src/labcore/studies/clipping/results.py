"""What was recorded of bad batches and of the language model, as the figures take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from labcore import records
from labcore.records import Record
from labcore.studies.clipping import damage, language
from labcore.studies.clipping.exploding import UPDATES
from labcore.studies.language.results import run_record
from labcore.studies.language.tuning import REPORT_SEEDS

__all__ = ["AT_THE_END", "Harm", "damage_harm", "language_harm", "language_norms"]

AT_THE_END = "at the end"
OPTIMIZERS = ("AdamW", "Lion", "Muon")  # of the language model's runs whose norms are shown
# Method -> kind of damage -> number of bad batches -> when it is read -> a number per seed.
Harm = Mapping[str, Mapping[str, Mapping[int, Mapping[str, Sequence[float | None]]]]]


def _harm(methods: Sequence[str], kinds: Sequence[str], find: Callable[..., Record]) -> Harm:
    return {
        method: {
            kind: {bad: _by_time(find(kind, bad, method)) for bad in damage.LENGTHS}
            for kind in kinds
        }
        for method in methods
    }


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

    methods = ("none", "global", *((UPDATES,) if optimizer == "AdamW" else ()))
    return _harm(methods, damage.KINDS, find)


def language_harm() -> Harm:
    """Return what bad batches cost the language model, in nats per token of loss."""

    def find(kind: str, bad: int, method: str) -> Record:
        return records.find(
            "clipping", "language-damage/harm", f"higher loss/{kind}, {bad}, {method}"
        )

    return _harm([*language.METHODS], language.KINDS, find)


def language_norms(
    batch: int = 8_192, *, limits: Iterable[str] = ()
) -> dict[str, list[tuple[float, ...]]]:
    """Return the norms before clipping of the language model's runs: optimizer -> seeds.

    The bench clips each of them to a norm of 1. limits: keys of `language.LIMITS`, for runs of
    AdamW that were clipped in other ways, at 8,192 tokens per step.
    """
    runs = {
        name: [run_record(batch, name, f"seed {seed}") for seed in REPORT_SEEDS]
        for name in OPTIMIZERS
    }
    for limit in limits:
        runs[f"AdamW, {limit}"] = [
            records.find("clipping", f"language/{limit}/seed {seed}", "held-out loss")
            for seed in REPORT_SEEDS
        ]
    return {name: [tuple(run.details["norms"]) for run in each] for name, each in runs.items()}
