"""A clipping limit that follows the median of earlier norms."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

__all__ = ["HISTORY"]

WINDOWS = (4, 8, 10)  # even, so that torch.median differs; student 0 has 6
FACTORS = (1.25, 1.75, 2.0)  # student 0 has 1.5


def coefficients(norms: Tensor, *, window: int, factor: float) -> Tensor:
    """What each step's gradient is multiplied by [T], from its norm before clipping [T]."""
    history: list[float] = []
    found = torch.ones_like(norms)
    for step, norm in enumerate(norms.tolist()):
        if not math.isfinite(norm):
            found[step] = 0.0
            continue
        latest = history[-window:]
        if len(latest) == window:
            limit = factor * statistics.median(latest)
            if norm > limit:
                found[step] = limit / norm
                norm = limit
        history.append(norm)
    return found


def _norm_cases(seed: int) -> list[dict[str, Any]]:
    """Falling norms with heavy tails, a lasting rise, and norms that are not finite."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(steps: int) -> Tensor:
        return torch.randn(steps, generator=generator, dtype=torch.float64).mul(0.8).exp()

    rise = drawn(90)
    rise[45:] *= 6
    rise[:2] = torch.tensor([0.05, 20.0], dtype=torch.float64)
    broken = drawn(80)
    places = [2, 20, 21, 22, 23, 24, 25, 40, 60]
    broken[places] = torch.tensor([torch.nan, torch.inf, torch.nan] * 3, dtype=torch.float64)
    # Every window that is full one finite norm too early meets a spike at its end.
    broken[[*WINDOWS, 6, 26, 41, 61]] = 50.0
    return [
        {"norms": drawn(120) * torch.exp(-torch.arange(120) / 50)},
        {"norms": rise},
        {"norms": broken},
    ]


_EDITS: dict[str, Change] = {
    "raw norm enters": ("norm = limit", "pass"),
    "clipped left out": ("norm = limit", "continue"),
    "own norm included": ("history[-window:]", "[*history, norm][-window:]"),
    "broken let through": ("found[step] = 0.0", "found[step] = 1.0"),
    "broken enters": [
        ("continue", "history.append(math.nan)\n            continue"),
        ("len(latest) == window", "len(latest) == window and not math.isnan(sum(latest))"),
    ],
    "broken kept in the window": [
        ("continue", "history.append(math.nan)\n            continue"),
        ("history[-window:]", "[one for one in history[-window:] if math.isfinite(one)]"),
        ("len(latest) == window", "latest and len(history) >= window"),
    ],
    "torch's median": ("median(", "median_low("),
    "mean": ("statistics.median(", "statistics.mean("),
    "largest": ("statistics.median(", "max("),
    "all norms": ("median(latest)", "median(history)"),
    "too early": ("len(latest) == window", "latest"),
    "factor forgotten": ("median(latest)", "median(latest) / factor"),
    "raised to the limit": ("if norm > limit", "if True"),
    "clipped to the median": ("limit / norm", "limit / factor / norm"),
}
_HINTS = {
    "raw norm enters": "A step that was clipped enters your history with the norm that it had "
    "before. A few spikes then raise the limit for those that follow.",
    "clipped left out": "A step that was clipped does not enter your history at all. If all norms "
    "rise for good, the limit can never follow.",
    "own norm included": "The norm that is judged stands in the history that it is judged by.",
    "broken let through": "A step whose norm is NaN or infinite has the coefficient 1. A "
    "comparison with NaN is False; ask whether the norm is finite.",
    "broken enters": "After a norm that is not finite your function clips nothing for some steps: "
    "the median of values with a NaN among them is NaN.",
    "broken kept in the window": "A step that is not finite takes a place among your `window` "
    "steps. The history holds the latest norms that entered, however long ago.",
    "torch's median": "torch.median returns the lower one of two values in the middle, not the "
    "mean of both: your limit is a little low.",
    "mean": "Your limit is made from the mean. The median does not follow a single large value.",
    "largest": "Your limit is made from the largest norm of the window, not from its median.",
    "all norms": "Your median is that of all norms since the start. Early ones, of another phase "
    "of training, then hold the limit forever.",
    "too early": "You clip before `window` norms have entered.",
    "factor forgotten": "Your limit is the median itself, so that about half of all steps are "
    "clipped.",
    "raised to the limit": "A norm below the limit has a coefficient above 1. Clipping never "
    "scales up.",
    "clipped to the median": "The right steps are clipped, but too far: to the median, in place of "
    "the limit.",
}


def _own_numbers(student: int) -> dict[str, Any]:
    chance = random.Random(f"history:{student}")
    if not student:
        return {"window": 6, "factor": 1.5}
    return {"window": chance.choice(WINDOWS), "factor": chance.choice(FACTORS)}


HISTORY = Exercise(
    id="clipping.history",
    points=4,
    reference=coefficients,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_norm_cases,
    variant=_own_numbers,
    explanation="A limit by history is a control loop: what enters the history decides what will "
    "be clipped. Raw norms let spikes raise the limit. Clipped steps left out keep it where it "
    "was, though the gradients may have grown for good. To enter by the clipped norm is the middle "
    "way: a spike counts as a large ordinary step, and after a lasting rise the limit climbs by at "
    "most `factor` each time that the window has turned over by half. What is not finite must "
    "never enter: one NaN would switch the clipping off.",
    hints=(
        "Write down the history of the example after each of the six steps. Which values in it do "
        "not occur among the norms?",
        "Keep a list of what has entered, which is the norm, or the limit where the step was "
        "clipped, and judge each norm by the last `window` entries before it enters itself. Skip "
        "a norm that is not finite before you compare it with anything.",
        "`limit = factor * statistics.median(history[-window:])` is the limit once the list "
        "`history` has at least `window` entries. What then enters is `min(norm, limit)`.",
    ),
)
