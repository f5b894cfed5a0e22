"""Records of the language-model runs: trials by setting, and reported runs by seed."""

from __future__ import annotations

from labcore import records
from labcore.records import Record
from labcore.studies.language.tuning import STAGE_2, Setting, coarse

__all__ = ["best", "run_record", "tried"]


def run_record(batch: int, optimizer: str, what: str) -> Record:
    """Return the record of one run; what: the name of a trial, or "seed 0" and so on."""
    return records.find("language", f"{batch}/{optimizer}/{what}", "held-out loss")


def tried(batch: int, optimizer: str, stages: int = 2) -> dict[Setting, float]:
    """Return the held-out losses of the first `stages` tuning stages by setting, best first."""
    names = [*coarse(optimizer), *(STAGE_2 if stages == 2 else ())]
    every = (run_record(batch, optimizer, name) for name in names)
    losses = {Setting(**record.details["setting"]): record.p50 for record in every}
    return {setting: losses[setting] for setting in sorted(losses, key=losses.__getitem__)}


def best(batch: int, optimizer: str, stages: int = 2) -> Setting:
    """Return the best setting that the first stages of tuning found."""
    return next(iter(tried(batch, optimizer, stages)))
