"""What the recorded runs of the language model show: differences by seed, by name of a quantity."""

from __future__ import annotations

from collections.abc import Sequence

from labcore import records
from labcore.studies.language.results import run_record
from labcore.studies.language.tuning import REPORT_SEEDS
from labcore.studies.shuffling.language_orders import BATCH, ORDERS, WINDOW, heights
from labcore.studies.shuffling.language_spikes import CURES, LATER, MENDED, Branch, Plan, kinds_with

__all__ = ["HOT", "branch_records", "order_differences", "order_losses", "spike_differences"]

HOT = "rate 8 times too high"


def order_losses(order: str) -> list[list[float]]:
    """Return the losses of each step in nats per token, by seed; order: of ORDERS, or "random"."""
    return [list(one.details["losses"]) for one in _runs(order)]


def _runs(order: str) -> list[records.Record]:
    if order == "random":
        return [run_record(BATCH, "AdamW", f"seed {seed}") for seed in REPORT_SEEDS]
    return [
        records.find("shuffling", f"language/{order}/seed {seed}", "held-out loss")
        for seed in REPORT_SEEDS
    ]


def branch_records(what: str, name: str) -> list[Branch]:
    """Return the recorded branches of a case by seed; what: the case without its seed."""
    found = [
        records.find("shuffling", f"language/{what}/seed {seed}", f"held-out loss/{name}")
        for seed in REPORT_SEEDS
    ]
    return [Branch(losses=tuple(one.details["losses"]), held_out=one.p50) for one in found]


def order_differences() -> dict[str, list[float]]:
    """Compare the orders with random windows, in nats per token.

    The quantities are the held-out loss at the end, and the highest rise of a step's loss above the
    median of the steps before it.
    """
    found = {}
    base = [max(heights(losses)) for losses in order_losses("random")]
    for order in ORDERS:
        ends = [one.p50 for one in _runs(order)], [one.p50 for one in _runs("random")]
        found[f"held-out loss minus random/{order}"] = _minus(*ends)
        rises = [max(heights(losses)) for losses in order_losses(order)]
        found[f"highest rise minus random/{order}"] = _minus(rises, base)
    return found


def spike_differences() -> dict[str, list[float]]:
    """Compare spikes that were made on purpose with the clean branch of the same model.

    The quantities are the rise of the loss and the held-out loss at the end, in nats per token, and
    the steps to recover. At a learning rate that is too high, cures are compared with no cure.
    """
    found: dict[str, list[float]] = {}
    trunk = Plan().trunk
    for cure in CURES:
        what = "damaged" if cure == "none" else f"damaged, {cure}"
        clean = branch_records(what, "clean")
        for kind in kinds_with(cure):
            name = kind if cure == "none" else f"{kind}, {cure}"
            found |= _spiked(name, branch_records(what, kind), clean, trunk)
    clean = branch_records("damaged", "clean")
    for name in MENDED:
        at = trunk + (LATER if name.endswith("later") else 0)
        found |= _spiked(name, branch_records("mended", name), clean, at)
    plain = branch_records(HOT, "none")
    for cure in list(CURES)[1:]:
        runs = branch_records(HOT, cure)
        rises = ([one.height(WINDOW) for one in each] for each in (runs, plain))
        ends = ([one.held_out for one in each] for each in (runs, plain))
        found[f"rise minus no cure/{HOT}, {cure}"] = _minus(*rises)
        found[f"held-out loss minus no cure/{HOT}, {cure}"] = _minus(*ends)
    return found


def _spiked(
    name: str, runs: Sequence[Branch], clean: Sequence[Branch], at: int
) -> dict[str, list[float]]:
    rises = ([one.height(at) for one in each] for each in (runs, clean))
    ends = ([one.held_out for one in each] for each in (runs, clean))
    return {
        f"rise minus clean/{name}": _minus(*rises),
        f"held-out loss minus clean/{name}": _minus(*ends),
        f"steps to recover/{name}": [float(one.recovery(at)) for one in runs],
    }


def _minus(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]
