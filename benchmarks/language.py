"""Optimizers on a small language model, tuned with equally many trials, for several chapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.runner import Measurement, case, seen
from labcore.device import gpu_visible
from labcore.studies.language import bench
from labcore.studies.language.results import best
from labcore.studies.language.tuning import (
    REPORT_SEEDS,
    STAGE_2,
    TUNING_SEED,
    Setting,
    coarse,
    finer,
    train_setting,
)

# The optimizers at each batch size, in tokens. At small batches, Muon's orthogonalization would
# dominate the time on a CPU.
COMPARED = {
    2_048: ("AdamW", "Lion"),
    8_192: ("AdamW", "Lion", "Lion 0.95/0.98", "Lion 0.95/0.95", "Muon"),
    32_768: ("AdamW", "Lion"),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much text a run reads; 30 times as much on a GPU."""

    tokens: int = field(default_factory=lambda: bench.TOKENS * (30 if gpu_visible() else 1))
    max_files: int | None = None


FULL = Sizes()
SMALL = Sizes(tokens=3 * max(COMPARED), max_files=8)


def _declare(
    batch: int, optimizer: str, what: str, minutes: float, seed: int, choose: Callable[[], Setting]
) -> None:
    @case(f"{batch}/{optimizer}/{what}", minutes=minutes)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        setting = choose()
        run = train_setting(
            optimizer,
            setting,
            batch=batch,
            seed=seed,
            tokens=sizes.tokens,
            max_files=sizes.max_files,
        )
        details: dict[str, Any] = {"setting": asdict(setting), "seed": seed}
        if seed != TUNING_SEED:
            details["losses"] = [round(loss, 4) for loss in run.curve.losses]
            details["norms"] = [round(norm or 0.0, 4) for norm in run.curve.norms]
        seconds = round(run.seconds, 1)
        return [seen("held-out loss", "nats/token", [run.loss], seconds=seconds, **details)]


def _declare_all(batch: int, optimizer: str) -> None:
    """Declare the two stages of tuning, and the reported seeds with the best setting."""
    slow = 1.5 if optimizer == "Muon" else 0.0
    for name, setting in coarse(optimizer).items():
        _declare(batch, optimizer, name, 3.2 + slow, TUNING_SEED, lambda setting=setting: setting)  # type: ignore[misc]
    for name in STAGE_2:
        _declare(
            batch,
            optimizer,
            name,
            3.3 + slow,
            TUNING_SEED,
            lambda name=name: finer(best(batch, optimizer, stages=1))[name],  # type: ignore[misc]
        )
    for seed in REPORT_SEEDS:
        _declare(batch, optimizer, f"seed {seed}", 3.4 + slow, seed, lambda: best(batch, optimizer))


for _batch, _optimizers in COMPARED.items():
    for _optimizer in _optimizers:
        _declare_all(_batch, _optimizer)
