"""Spikes of a finished run, judged against the steps on both sides."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Change, Mistake

__all__ = ["SPIKES"]

REACHES = (4, 5, 7, 8)  # student 0 has 6


def spikes(losses: Tensor, *, reach: int, factor: float, floor: float) -> Tensor:
    """Which steps are spikes [T, bool] among the up to 2 · `reach` steps around each."""
    padded = torch.nn.functional.pad(losses, (reach, reach), value=torch.nan)
    near = padded.unfold(0, 2 * reach + 1, 1).clone()  # [T, 2 reach + 1]
    near[:, reach] = torch.nan  # the step itself
    near[~near.isfinite()] = torch.nan
    # torch.nanmedian would take the lower one of two in the middle.
    median = near.nanquantile(0.5, dim=1)
    spread = (near - median[:, None]).abs().nanquantile(0.5, dim=1).clamp(min=floor)
    # Without a finite neighbor the median is NaN, and the comparison False.
    above = losses > median + factor * spread
    return above | ~losses.isfinite()


def _loss_cases(seed: int) -> list[dict[str, Any]]:
    """Falling curves with heavy tails, so that all margins occur; some losses are not finite."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for steps, factor, floor in ((150, 5.0, 0.01), (400, 3.0, 0.04), (400, 4.0, 0.001)):
        noise = torch.randn(2, steps, generator=generator, dtype=torch.float64)
        curve = 2 + 2 * torch.exp(-torch.arange(steps) / 60) + 0.05 * noise[0] / noise[1].abs()
        curve[[0, -1]] += 99
        cases.append({"losses": curve, "factor": factor, "floor": floor})
    flat = torch.full((40,), 2.0, dtype=torch.float64)  # the limit is 3 exactly
    flat[[5, 12, 19, 26, 33]] = torch.tensor([3.0, 2.5, 3.125, 2.125, 0.5], dtype=torch.float64)
    cases.append({"losses": flat, "factor": 4.0, "floor": 0.25})
    broken = 1 + torch.rand(100, generator=generator, dtype=torch.float64)
    bad = [torch.nan, torch.inf, -torch.inf, torch.nan]
    broken[[12, 30, 31, 45]] = torch.tensor(bad, dtype=torch.float64)
    broken[60:68], broken[80:88] = torch.inf, -torch.inf  # half of the neighbors of 68 and 88
    broken[[14, 28, 44, 68, 88]] += 20
    cases.append({"losses": broken, "factor": 6.0, "floor": 0.01})
    return cases


_EDITS: dict[str, Change] = {
    "mean and deviation": [
        ("near.nanquantile(0.5, dim=1)", "near.nanmean(1)"),
        (".abs().nanquantile(0.5, dim=1)", ".square().nanmean(1).sqrt()"),
    ],
    "mean distance": (".abs().nanquantile(0.5, dim=1)", ".abs().nanmean(1)"),
    "own loss included": ("near[:, reach] = torch.nan", ""),
    "before alone": [
        ("(reach, reach)", "(2 * reach, 0)"),
        ("near[:, reach]", "near[:, 2 * reach]"),
    ],
    "before alone, half as far": [("(reach, reach)", "(reach, 0)"), ("(0, 2 * reach", "(0, reach")],
    "NaN passes": ("| ~losses", "& losses"),
    "infinity alone": ("~losses.isfinite()", "losses.isposinf()"),
    "NaN among the neighbors": (
        "above = ",
        "beside = torch.nn.functional.pad(losses.isnan(), (reach, reach))\n"
        "    median[beside.unfold(0, 2 * reach + 1, 1).any(1)] = torch.nan\n"
        "    above = ",
    ),
    "torch's median": [
        ("near.nanquantile(0.5, dim=1)", "near.nanmedian(1).values"),
        (".abs().nanquantile(0.5, dim=1)", ".abs().nanmedian(1).values"),
    ],
    "floor forgotten": (".clamp(min=floor)", ""),
    "floor added": (".clamp(min=floor)", " + floor"),
    "floor of the distance": [
        (".clamp(min=floor)", ""),
        ("factor * spread", "(factor * spread).clamp(min=floor)"),
    ],
    "dips too": ("losses > median + ", "(losses - median).abs() > "),
    "edge is a spike": ("losses > median", "losses >= median"),
    "ends left out": ("return", "above[:reach] = above[-reach:] = False\n    return"),
    "scaled": (".clamp(min=floor)", ".mul(1.4826).clamp(min=floor)"),
    "ratio": ("factor * spread", "(factor - 1) * median.abs()"),
}
_HINTS = {
    "mean and deviation": "Your level and spread are mean and standard deviation. One large loss "
    "nearby raises both, so that a spike hides its neighbor.",
    "mean distance": "Your spread is a mean of distances, which one large loss nearby raises. "
    "It is a median, as the level is.",
    "own loss included": "The step's own loss is among those that it is compared with. It is to be "
    "judged by the others alone.",
    "before alone": "Each step is compared with earlier ones only, as one must while a run goes "
    "on. This one is over: the steps behind are known.",
    "before alone, half as far": "Each step is compared with the `reach` steps before it only. "
    "As many behind it are known as well.",
    "NaN passes": "A loss that is NaN or infinite is not reported, though nothing is worse. A "
    "comparison with NaN is False.",
    "infinity alone": "An infinite loss is reported and NaN is not, or −inf: neither is larger "
    "than anything. Ask whether the loss is finite.",
    "NaN among the neighbors": "Next to a NaN your spikes are missed: the median of numbers with a "
    "NaN among them is NaN. What is not finite does not count as a neighbor.",
    "torch's median": "Of an even number of losses torch.median returns the lower one in the "
    "middle, not the mean of both: your level and spread are a little low.",
    "floor forgotten": "Where most neighbors are equal, their spread is 0, and any step above them "
    "is a spike of yours. What is the floor for?",
    "floor added": "The floor is added to the median of the distances. It is the least that the "
    "spread can be, and has no part where that median is larger.",
    "floor of the distance": "Your floor holds for the distance as a whole. It is a floor of the "
    "spread, before that is multiplied by `factor`.",
    "dips too": "Losses far below their neighbors are reported. A spike stands above.",
    "edge is a spike": "A loss exactly at the limit is reported; only one above it is a spike.",
    "ends left out": "No finite loss of the first and last `reach` steps is ever a spike of "
    "yours. There the neighbors are fewer, and enough.",
    "scaled": "Your spread is multiplied by 1.4826, which makes a standard deviation of it for "
    "normal noise. Here it stays the median of the distances.",
    "ratio": "You report losses above `factor` times the level. The distance is measured in "
    "spreads: where a curve is smooth, a small rise is a spike.",
}

SPIKES = Exercise(
    id="shuffling.spikes",
    points=4,
    reference=spikes,
    mistakes=[Mistake(name, _EDITS[name], hint) for name, hint in _HINTS.items()],
    cases=_loss_cases,
    variant=lambda student: {
        "reach": random.Random(f"reach:{student}").choice(REACHES) if student else 6
    },
    explanation="Half of the neighbors may be spikes and the median still stands where the others "
    "are; mean and standard deviation follow each of them. The loss that is judged must not take "
    "part in its own measure. The floor keeps a flat curve quiet, whose distances are 0. NaN is "
    "caught before any comparison, and kept away from the neighbors, where it would make every "
    "comparison False: a detector without these two lines is silent when it matters most.",
    hints=(
        "Take the losses 2, 2, 2, 3, 2, 2, 2, a `reach` of 3, and a `floor` of 0.1. What are the "
        "level and the spread of the fourth step, and what are they if one of the twos is NaN?",
        "For each step, collect the finite losses on both sides without its own, and take level "
        "and spread from them with a median that averages the two values in the middle. Report a "
        "loss that is not finite without any comparison, since a comparison with NaN is False.",
        "`near = torch.cat([losses[max(0, t - reach) : t], losses[t + 1 : t + 1 + reach]])` holds "
        "the losses on both sides of step `t`. If any of them are finite, "
        "`near[near.isfinite()].quantile(0.5)` is the level.",
    ),
)
