"""Weights in a few bits: one signed scale a group, and codes that lie in parts of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["PACKED_GROUPS"]

GROUPS = (8, 16, 32)
_Packed = tuple[Tensor, Tensor]


def packed_groups(weight: Tensor, *, group: int, bits: int) -> _Packed:
    """Codes uint8 [O, G, group / 2] and scales float16 [O, G] of a weight [O, I]."""
    del bits
    groups = weight.unflatten(1, (-1, group))
    places = groups.abs().argmax(-1, keepdim=True)
    scales = (groups.gather(-1, places) / -8).half()
    steps = scales.float()
    codes = (groups / torch.where(steps == 0, 1.0, steps)).round() + 8
    codes = codes.clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scales.squeeze(-1)


def _scales(groups: Tensor, fault: str) -> Tensor:
    """float32 [O, G, 1]."""
    sizes = groups.abs()
    largest = groups.gather(-1, sizes.argmax(-1, keepdim=True))
    return {
        "no sign": sizes.amax(-1, keepdim=True) / 8,
        "divided by 7": largest / -7,
        "divided by 7.5": largest / -7.5,
        "positive largest": groups.amax(-1, keepdim=True) / -8,
        "upside down": largest / 8,
        "one scale a row": largest.gather(1, largest.abs().argmax(1, keepdim=True)).expand_as(
            largest
        )
        / -8,
    }.get(fault, largest / -8)


def _wrongly(fault: str) -> Callable[..., _Packed]:
    def packed(weight: Tensor, *, group: int, bits: int) -> _Packed:
        del bits
        groups = weight.unflatten(1, (-1, group))
        if fault == "every so many":
            groups = weight.unflatten(1, (group, -1)).transpose(1, 2)
        scales = _scales(groups, fault).half()
        steps = scales.float()
        exact = groups / torch.where(steps == 0, 1.0, steps)
        whole = exact.trunc() if fault == "cut off" else exact.round()
        if fault == "rounded down":
            whole = exact.floor()
        shift = {"two's complement": 0, "shifted by 7": 7}.get(fault, 8)
        codes = whole.int() + shift
        if fault == "empty group is 0":
            codes = torch.where(steps == 0, 0, codes)
        if fault == "two's complement":
            codes = codes.clamp(-8, 7) & 15
        codes = codes & 255 if fault == "no clamp" else codes.clamp(0, 15)
        codes = codes.to(torch.uint8)
        low, high = codes.chunk(2, dim=-1)
        if fault == "neighbours":
            low, high = codes[..., ::2], codes[..., 1::2]
        if fault == "high half first":
            low, high = high, low
        return low | high << 4, scales.squeeze(-1)

    return packed


def _cases(seed: int) -> list[dict[str, Any]]:
    """Weights no quotient of which lies near the middle between two codes."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)
    cases = []
    for group in (*GROUPS, 16):
        rows, count = chance.randint(3, 6), chance.randint(2, 5)
        shape = (rows, count, group)
        codes = torch.randint(-7, 8, shape, generator=generator).float()
        codes += 0.35 * (2 * torch.rand(shape, generator=generator) - 1)
        # On the side away from the largest there is one code less: some want it.
        codes[torch.rand(shape, generator=generator) < 0.1] = 7.7
        place = torch.randint(0, group, (rows, count, 1), generator=generator)
        codes.scatter_(-1, place, -8.0)
        steps = 0.01 + torch.rand(rows, count, 1, generator=generator)
        steps *= torch.where(torch.rand(rows, count, 1, generator=generator) < 0.5, -1.0, 1.0)
        weight = codes * steps
        weight[chance.randrange(rows), chance.randrange(count)] = 0.0
        cases.append({"weight": weight.flatten(1), "group": group, "bits": 4})
    return cases


_HINTS = {
    "no sign": "Your scales are all positive. Code 0 stands for -8 steps and code 15 for 7: the "
    "number of the largest magnitude shall be the one with 8, whichever its sign is.",
    "divided by 7": "Your largest number lies 7 steps from 0. With 16 codes there are 8 steps on "
    "one side.",
    "divided by 7.5": "Your largest number lies 7.5 steps from 0, so that no code hits it.",
    "positive largest": "Your scale comes from the largest number. The largest magnitude decides, "
    "and that may be a negative number's.",
    "upside down": "Your scales have the wrong sign: the largest magnitude lands on code 16, which "
    "there is not, where it should land on code 0.",
    "one scale a row": "Your groups of a row share one scale. One large weight then takes the "
    "digits from the whole row.",
    "every so many": "Your groups take every so many-th weight of a row. A group is made of "
    "neighbours.",
    "cut off": "Your codes are cut off towards 0. The nearest code errs half as much.",
    "rounded down": "Your codes are rounded down. The nearest code errs half as much.",
    "two's complement": "Your codes are signed numbers in two's complement: 0 is code 0. Here a "
    "code is the number of steps plus 8.",
    "shifted by 7": "Your codes are one too small: 0 is code 8.",
    "empty group is 0": "A group of zeros has code 0 with you. What stands for 0 is code 8, also "
    "where the scale is 0.",
    "no clamp": "Some of your codes are 16, and the bit too many spoils the code that shares their "
    "byte, or is lost. Code 15 is the last.",
    "neighbours": "In a byte of yours two neighbours stand. Here it holds one code of the group's "
    "first half and one of its second.",
    "high half first": "Your first half stands in the high four bits. It belongs into the low "
    "ones.",
}

PACKED_GROUPS = Exercise(
    id="memory.packed_groups",
    reference=packed_groups,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    returns=("codes", "scales"),
    explanation="Sixteen codes around 0 are not symmetric: there is one more on one side. With a "
    "signed scale that side is given to the largest magnitude, which is then exact but for the "
    "scale's own rounding; on the other side the last half step is cut off. The codes are made "
    "with the rounded scale, which is the one that will be multiplied with. Halves of a group in "
    "one byte suit vector units: one mask and one shift give two runs of neighbours. This is the "
    "form that llama.cpp calls Q4_0, and this reference knows 4 bits.",
)
