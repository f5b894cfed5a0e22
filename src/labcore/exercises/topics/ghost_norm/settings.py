"""Choose learning rate, momentum of the running statistics, and epochs for a larger batch."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["LARGE_BATCH"]

# Divisors of 60: the cases rely on it.
FACTORS = (4, 5, 6, 10, 12)
POWERS = (0.5, 0.6, 0.75, 0.8)


def large_batch(
    lr: float,
    momentum: float,
    epochs: int,
    *,
    rows: int,
    batch: int,
    factor: int,
    power: float,
) -> tuple[float, float, int]:
    """Learning rate, momentum and epochs for batches that are `factor` times as large."""
    updates = epochs * math.ceil(rows / batch)
    an_epoch = math.ceil(rows / (factor * batch))
    return lr * factor**power, 1 - (1 - momentum) ** factor, math.ceil(updates / an_epoch)


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw between 61.5 and 62 batches per epoch: the last one is short, before and after.

    For each of FACTORS, the epochs of the first four cases have fractions above and below a half
    before they are rounded up. Twenty epochs or more need fewer than `factor` times as many.
    For each of FACTORS, the first momentum times it is below 1, and the last above.
    """
    chance = random.Random(seed)
    cases = []
    for epochs, low, high in (
        (1, 0.02, 0.08), (3, 0.02, 0.3), (4, 0.02, 0.3), (5, 0.02, 0.3),
        (chance.randint(20, 40), 0.26, 0.3),
    ):  # fmt: skip
        batch = chance.choice((8, 16, 32, 50))
        cases.append(
            {
                "lr": 10 ** chance.uniform(-3, 0),
                "momentum": chance.uniform(low, high),
                "epochs": epochs,
                "rows": 61 * batch + chance.randint(batch // 2 + 1, batch - 1),
                "batch": batch,
            }
        )
    return cases


def _own_factor(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"ghost_norm.large_batch:{student}")
    return {"factor": chance.choice(FACTORS), "power": chance.choice(POWERS)}


_MISTAKES = [
    Mistake("linear rate", ("factor**power", "factor"),
            "The learning rate grows by the factor itself, which is linear scaling. The rule here "
            "raises the factor to `power` first."),
    Mistake("rate divided", ("factor**power", "factor**-power"),
            "The learning rate shrinks. A larger batch makes fewer and steadier steps, and the "
            "rule lets each of them be longer."),
    Mistake("rate kept", ("lr * factor**power", "lr"),
            "The learning rate is that of the small batch."),
    Mistake("momentum kept", ("1 - (1 - momentum) ** factor", "momentum"),
            "The momentum is that of the small batch. One update now stands for `factor` of them: "
            "what do so many updates leave of the statistics that were there before?"),
    Mistake("momentum times factor", ("1 - (1 - momentum) ** factor", "momentum * factor"),
            "The momentum is multiplied by the factor. That is nearly right for a tiny momentum, "
            "and above 1 for a large factor. What is left after two updates with a momentum of "
            "0.1 is not 0.8."),
    Mistake("momentum times factor, up to 1",
            ("1 - (1 - momentum) ** factor", "min(1.0, momentum * factor)"),
            "You multiply the momentum by the factor and stop at 1. A momentum of 1 would keep "
            "nothing of the old statistics, and `factor` updates always keep some."),
    Mistake("momentum divided", ("1 - (1 - momentum) ** factor", "momentum / factor"),
            "The momentum is divided by the factor, so the statistics now forget more slowly per "
            "row by the factor twice: fewer updates, and each of them smaller."),
    Mistake("what is kept", ("1 - (1 - momentum) ** factor", "(1 - momentum) ** factor"),
            "This is the share that `factor` updates keep. In torch the momentum is the share of "
            "the new statistics."),
    Mistake("root", ("(1 - momentum) ** factor", "(1 - momentum) ** (1 / factor)"),
            "Your exponent is upside down: `factor` updates of yours would make one of the old "
            "ones. It is one of the new ones that replaces `factor` of the old."),
    Mistake("power of the momentum", ("1 - (1 - momentum) ** factor", "momentum**factor"),
            "The momentum itself is raised to a power. What shrinks by the same factor in each "
            "update is the share of the old statistics, not that of the new."),
    Mistake("epochs kept", ("math.ceil(updates / an_epoch)", "epochs"),
            "The epochs are those of the small batch, so the large one sees as many rows and "
            "makes far fewer updates. It is the updates that have to be as many."),
    Mistake("epochs times factor", ("math.ceil(updates / an_epoch)", "epochs * factor"),
            "The epochs are multiplied by the factor. That would do if the rows of an epoch "
            "filled its batches; where the last batch is short, the updates of an epoch do not "
            "shrink by the whole factor. Count them on both sides."),
    Mistake("last batch dropped",
            [("math.ceil(rows / batch)", "(rows // batch)"),
             ("math.ceil(rows / (factor * batch))", "rows // (factor * batch)")],
            "The short batch at the end of an epoch is not counted. It makes an update as well, "
            "in the small run and in the large one."),
    Mistake("part of an update", ("math.ceil(rows / (factor * batch))", "rows / (factor * batch)"),
            "The large run's updates of an epoch are not rounded up, as if its short last batch "
            "made only a part of an update."),
    Mistake("updates counted", ("math.ceil(updates / an_epoch)", "updates"),
            "This is the number of updates of the small run. How many epochs does the large run "
            "need for them?"),
    Mistake("one update too few", ("math.ceil(updates / an_epoch)", "updates // an_epoch"),
            "The epochs are rounded down, and the run ends before it has made as many updates as "
            "the small one."),
    Mistake("nearest", ("math.ceil(updates", "round(updates"),
            "The epochs are rounded to the nearest whole number, which sometimes ends the run "
            "before it has made as many updates as the small one."),
]  # fmt: skip

LARGE_BATCH = Exercise(
    id="ghost_norm.large_batch",
    points=2,
    reference=large_batch,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_factor,
    returns=("lr", "momentum", "epochs"),
    rtol=1e-9,
    explanation="An update keeps the share 1 - momentum of the running statistics, so `factor` "
    "updates keep the share (1 - momentum)**factor, and one update that keeps as much takes the "
    "rest from the new batch. An epoch makes as many updates as it has batches, the short last one "
    "included: rows / batch, rounded up. The large run needs as many epochs as its updates of an "
    "epoch go into all updates of the small run, rounded up once at the end. That many epochs look "
    "at nearly `factor` times as many rows: to make as many updates with larger batches costs "
    "that much more arithmetic.",
    hints=(
        "With a momentum of 0.1, what share of the old statistics is left after two updates? And "
        "how many updates does the short last batch of an epoch make?",
        "One update keeps the share 1 − `momentum`, so `factor` updates keep this share to the "
        "power of `factor`, and the new momentum is the rest. For the epochs, divide all updates "
        "of the old run by the updates of one new epoch, count the short batches in both, and "
        "round up.",
        "`math.ceil(epochs * math.ceil(rows / batch) / math.ceil(rows / (factor * batch)))` is "
        "the number of epochs: all updates of the old run, divided by those of one new epoch.",
    ),
)
