"""What the recorded runs of the language model show: differences by seed, by name of a quantity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from labcore import records
from labcore.studies.language.results import run_record
from labcore.studies.language.tuning import REPORT_SEEDS
from labcore.studies.shuffling.language_orders import BATCH, ORDERS, SHORTER
from labcore.studies.shuffling.language_spikes import (
    CURES,
    FEWER,
    MENDED,
    Branch,
    Plan,
    kinds_with,
)
from labcore.studies.shuffling.tracing import spike_rate

__all__ = [
    "HOT",
    "branch_records",
    "damage_curves",
    "heights",
    "order_differences",
    "order_records",
    "recovery",
    "spike_differences",
    "unit_of",
]

HOT = "rate 8 times too high"
_WINDOW = 16  # steps of the trailing median


def unit_of(quantity: str) -> str:
    """Return the unit of a quantity that this module names."""
    if quantity.startswith("spikes"):
        return "in 1,000 steps"
    return "steps" if quantity.startswith("steps") else "nats/token"


def heights(losses: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Return how far each loss lies above the median of the `window` losses before it, in nats.

    There are as many as losses after the first window.
    """
    return [
        losses[step] - median(losses[step - window : step]) for step in range(window, len(losses))
    ]


# Orders -----------------------------------------------------------------------------------------
def order_records(order: str) -> list[records.Record]:
    """Return the runs by seed; order: of ORDERS, SHORTER, or "random"."""
    if order == "random":
        return [run_record(BATCH, "AdamW", f"seed {seed}") for seed in REPORT_SEEDS]
    return [
        records.find("shuffling", f"language/{order}/seed {seed}", "held-out loss")
        for seed in REPORT_SEEDS
    ]


def order_differences() -> dict[str, list[float]]:
    """Compare the orders with random windows.

    The quantities are the held-out loss at the end, over random windows and over SHORTER, the
    spikes that the detector finds in 1,000 steps, and the highest rise of a step's loss above the
    median of the steps before it.
    """
    runs = {order: order_records(order) for order in ("random", *ORDERS, SHORTER)}
    ends = {order: [one.p50 for one in each] for order, each in runs.items()}
    curves = {order: [one.details["losses"] for one in each] for order, each in runs.items()}
    rates = {order: [spike_rate(one) for one in each] for order, each in curves.items()}
    rises = {order: [max(heights(one)) for one in each] for order, each in curves.items()}
    found = {f"held-out loss minus random/{SHORTER}": _minus(ends[SHORTER], ends["random"])}
    for order in ORDERS:
        found |= {
            f"held-out loss minus random/{order}": _minus(ends[order], ends["random"]),
            f"held-out loss minus {SHORTER}/{order}": _minus(ends[order], ends[SHORTER]),
            f"spikes minus random/{order}": _minus(rates[order], rates["random"]),
            f"highest rise minus random/{order}": _minus(rises[order], rises["random"]),
        }
    return found


# Spikes made on purpose -------------------------------------------------------------------------
def branch_records(what: str, name: str) -> list[Branch]:
    """Return the recorded branches of a case by seed; what: the case without its seed."""
    found = [
        records.find("shuffling", f"language/{what}/seed {seed}", f"held-out loss/{name}")
        for seed in REPORT_SEEDS
    ]
    return [
        Branch(
            losses=tuple(one.details["losses"]),
            norms=tuple(one.details["norms"]),
            fixed=tuple(one.details["fixed"]),
            held_out=one.p50,
        )
        for one in found
    ]


def damage_curves() -> dict[str, dict[str, dict[str, list[tuple[float, ...]]]]]:
    """Return cure -> damage or "clean" -> curve -> values by seed, of the damaged branches.

    The curves are "loss of the step" and "gradient's norm", from the first step on, and "loss on
    fixed windows", from the last step before the damage on.
    """
    found = {}
    for cure in CURES:
        what, name = ("damaged", "no cure") if cure == "none" else (f"damaged, {cure}", cure)
        runs = {kind: branch_records(what, kind) for kind in ("clean", *kinds_with(cure))}
        found[name] = {
            kind: {
                "loss of the step": [one.losses for one in each],
                "loss on fixed windows": [one.fixed for one in each],
                "gradient's norm": [one.norms for one in each],
            }
            for kind, each in runs.items()
        }
    return found


def recovery(fixed: Sequence[float]) -> int:
    """Return after how many steps the loss on fixed windows stays at or below the first one.

    If it never does, that's all of the steps.
    """
    above = [step for step, loss in enumerate(fixed) if loss > fixed[0]]
    return min(above[-1] + 1, len(fixed) - 1) if above else 0


def spike_differences() -> dict[str, list[float]]:
    """Compare spikes that were made on purpose with the clean branch of the same model.

    The quantities are how far the loss of a step, and the loss on fixed windows, lie above the
    clean branch's at the same step, at most; the held-out loss at the end, over the clean branch
    and over FEWER; and the steps until the loss on fixed windows is back where it was. On clean
    data, and at a learning rate that is too high, cures are compared with no cure: the held-out
    loss, and at that rate the largest rise of the loss on fixed windows above its lowest value.
    """
    found: dict[str, list[float]] = {}
    left_out = branch_records("damaged", FEWER)
    for cure in CURES:
        what = "damaged" if cure == "none" else f"damaged, {cure}"
        clean = branch_records(what, "clean")
        for kind in kinds_with(cure):
            name = kind if cure == "none" else f"{kind}, {cure}"
            found |= _spiked(name, branch_records(what, kind), clean)
    clean = branch_records("damaged", "clean")
    ends = [one.held_out for one in left_out]
    found[f"held-out loss minus clean/{FEWER}"] = _minus(ends, [one.held_out for one in clean])
    for name in MENDED:
        found |= _spiked(name, branch_records("mended", name), clean)
    for name in (*kinds_with("none"), *MENDED):
        runs = branch_records("mended" if name in MENDED else "damaged", name)
        found[f"held-out loss minus {FEWER}/{name}"] = _minus([o.held_out for o in runs], ends)
    plain = branch_records(HOT, "none")
    for cure in list(CURES)[1:]:
        cured = [one.held_out for one in branch_records(f"damaged, {cure}", "clean")]
        without = [one.held_out for one in clean]
        found[f"held-out loss minus no cure/clean, {cure}"] = _minus(cured, without)
        runs = branch_records(HOT, cure)
        rises = ([_relapse(one.fixed) for one in each] for each in (runs, plain))
        last = ([one.held_out for one in each] for each in (runs, plain))
        found[f"rise on fixed windows minus no cure/{HOT}, {cure}"] = _minus(*rises)
        found[f"held-out loss minus no cure/{HOT}, {cure}"] = _minus(*last)
    return found


def _spiked(name: str, runs: Sequence[Branch], clean: Sequence[Branch]) -> dict[str, list[float]]:
    pairs, first = list(zip(runs, clean, strict=True)), Plan().trunk
    return {
        f"rise minus clean/{name}": [
            max(_minus(one.losses[first:], base.losses[first:])) for one, base in pairs
        ],
        f"rise on fixed windows minus clean/{name}": [
            max(_minus(one.fixed[1:], base.fixed[1:])) for one, base in pairs
        ],
        f"held-out loss minus clean/{name}": [one.held_out - base.held_out for one, base in pairs],
        f"steps to recover/{name}": [float(recovery(one.fixed)) for one in runs],
    }


def _relapse(fixed: Sequence[float]) -> float:
    return max(_minus(fixed, list(accumulate(fixed, min))))


def _minus(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]
