"""Learning rate and decay, carried over from AdamW to Lion."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["TRANSFER"]


def transfer(
    lr: float, decay: float, *, factor: float, decay_times_lr: bool
) -> tuple[float, float]:
    """Lion's learning rate and decay from AdamW's; every step shrinks the weights as before."""
    shrink = lr * decay
    new_lr = lr / factor
    return new_lr, shrink / new_lr if decay_times_lr else shrink


def _transferred_wrongly(fault: str) -> Callable[..., tuple[float, float]]:
    def settings(
        lr: float, decay: float, *, factor: float, decay_times_lr: bool
    ) -> tuple[float, float]:
        if fault == "rate multiplied":
            return lr * factor, decay / factor if decay_times_lr else lr * decay
        if fault == "exchanged":
            return (decay * factor if decay_times_lr else lr * decay), lr / factor
        times_lr, alone = {
            "decay kept": (decay, lr * decay),
            "decay divided": (decay / factor, lr * decay),
            "new rate": (decay * factor, lr / factor * decay),
            "one form": (decay * factor, decay * factor),
            "decay copied": (decay, decay),
            "decay copied where it acts alone": (decay * factor, decay),
            "product times factor": (decay * factor, lr * decay * factor),
            "flag backwards": (lr * decay, decay * factor),
        }[fault]
        return lr / factor, times_lr if decay_times_lr else alone

    return settings


def _transfer_cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "lr": 10 ** chance.uniform(-4, -2),
            "decay": chance.uniform(0.01, 0.3),
            "factor": 5.0,
            "decay_times_lr": times_lr,
        }
        for times_lr in (True, False, True, False)
    ]


def _own_factor(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"lion.transfer:{student}")
    return {"factor": chance.randrange(12, 41) / 4 if student else 5.0}


TRANSFER = Exercise(
    id="lion.transfer",
    points=2,
    reference=transfer,
    mistakes=[
        Mistake(name, _transferred_wrongly(name), hint)
        for name, hint in {
            "decay kept": "Where the decay acts through lr * decay, it is still AdamW's. With a "
            "smaller rate the weights now shrink less in each step.",
            "decay divided": "Where the decay acts through lr * decay, it is divided by the "
            "factor. The rate is already smaller; the product is now smaller by the factor twice.",
            "new rate": "Where the decay acts alone, it is computed from Lion's rate. The shrink "
            "to keep is the one that AdamW had, with AdamW's rate.",
            "one form": "Both forms get one decay. Where the decay acts alone, a step multiplies "
            "the weights by 1 - decay: try your number in that.",
            "decay copied": "AdamW's decay is returned in both forms. Write down by what a step "
            "multiplies the weights before and after the change.",
            "decay copied where it acts alone": "Where the decay acts alone, it is AdamW's own "
            "number. There a step of AdamW shrank the weights by lr * decay, a step of this Lion "
            "by the decay itself.",
            "product times factor": "Where the decay acts alone, it is multiplied by the factor. "
            "There Lion's rate has no part in the shrink, so nothing has to be made up for.",
            "exchanged": "The two results have changed places: the rate comes first, then the "
            "decay.",
            "flag backwards": "Each of your two decays is right in the other case. What does a "
            "step multiply the weights by where `decay_times_lr` is true?",
            "rate multiplied": "The rate grew by the factor. Lion's updates have full length where "
            "AdamW's are shorter, so its rate is the smaller one.",
        }.items()
    ],
    cases=_transfer_cases,
    variant=_own_factor,
    returns=("lr", "decay"),
    rtol=1e-9,
    explanation="A step of AdamW multiplies the weights by `1 - lr * decay`. That factor is what "
    "has to stay. A Lion that multiplies by its own rate needs the decay `factor` times larger; "
    "one that does not gets the product itself.",
    hints=(
        "By what number does one step multiply the weights? Write it down for AdamW and for both "
        "kinds of Lion.",
        "AdamW takes the share `lr * decay` off each weight per step, and this share has to stay "
        "the same. It must equal Lion's rate times Lion's decay where `decay_times_lr` is true, "
        "and Lion's decay alone where it is false.",
        "`lr * decay / new_lr if decay_times_lr else lr * decay` is Lion's decay, where `new_lr` "
        "is Lion's rate.",
    ),
)
