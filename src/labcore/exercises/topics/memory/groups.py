"""Pack weights into a few bits: one signed scale per group, and two codes per byte."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["PACKED_GROUPS"]

GROUPS = (8, 16, 32)
_Packed = tuple[Tensor, Tensor]


def packed_groups(weight: Tensor, *, group: int, bits: int) -> _Packed:
    """Return codes uint8 [O, G, group / 2] and scales float16 [O, G] of a weight [O, I]."""
    del bits
    groups = weight.unflatten(1, (-1, group))
    places = groups.abs().argmax(-1, keepdim=True)
    scales = (groups.gather(-1, places) / -8).half()
    steps = scales.float()
    codes = (groups / torch.where(steps == 0, 1.0, steps)).round() + 8
    codes = codes.clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scales.squeeze(-1)


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw weights whose quotients never lie near the middle between two codes."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)
    cases = []
    for group in (*GROUPS, 16):
        rows, count = chance.randint(3, 6), chance.randint(2, 5)
        shape = (rows, count, group)
        codes = torch.randint(-7, 8, shape, generator=generator).float()
        codes += 0.35 * (2 * torch.rand(shape, generator=generator) - 1)
        # The side away from the largest weight has one code less; some weights would need it.
        codes[torch.rand(shape, generator=generator) < 0.1] = 7.7
        place = torch.randint(0, group, (rows, count, 1), generator=generator)
        codes.scatter_(-1, place, -8.0)
        # In a low half, with an odd code in the high one, sums of codes that are not cut carry.
        beside = (place + 1) % (group // 2)
        codes.scatter_(-1, beside, 7.7).scatter_(-1, beside + group // 2, 3.0)
        steps = 0.01 + torch.rand(rows, count, 1, generator=generator)
        steps *= torch.where(torch.rand(rows, count, 1, generator=generator) < 0.5, -1.0, 1.0)
        weight = codes * steps
        weight[chance.randrange(rows), chance.randrange(count)] = 0.0
        cases.append({"weight": weight.flatten(1), "group": group, "bits": 4})
    return cases


_MISTAKES = [
    Mistake("no sign",
            ("groups.gather(-1, places) / -8", "groups.abs().amax(-1, keepdim=True) / 8"),
            "Your scales are all positive. Code 0 stands for -8 steps and code 15 for 7: the "
            "number of the largest magnitude shall be the one with 8, whichever its sign is."),
    Mistake("divided by 7", ("/ -8", "/ -7"),
            "Your largest number lies 7 steps from 0. With 16 codes there are 8 steps on one "
            "side."),
    Mistake("divided by 7.5", ("/ -8", "/ -7.5"),
            "Your largest number lies 7.5 steps from 0, so that no code hits it."),
    Mistake("positive largest", ("groups.gather(-1, places)", "groups.amax(-1, keepdim=True)"),
            "Your scale comes from the largest number. The largest magnitude decides, and that may "
            "be a negative number's."),
    Mistake("upside down", ("/ -8", "/ 8"),
            "Your scales have the wrong sign: the largest magnitude lands on code 16, which there "
            "is not, where it should land on code 0."),
    Mistake("one scale a row",
            ("    steps =",
             "    largest = weight.gather(1, weight.abs().argmax(1, keepdim=True))[..., None]\n"
             "    scales = (largest / -8).half().expand_as(scales)\n    steps ="),
            "Your groups of a row share one scale. One large weight then takes the digits from the "
            "whole row."),
    Mistake("every so many", ("(1, (-1, group))", "(1, (group, -1)).transpose(1, 2)"),
            "Your groups take every so many-th weight of a row. A group is made of neighbors."),
    Mistake("cut off", (".round()", ".trunc()"),
            "Your codes are cut off towards 0. The nearest code errs half as much."),
    Mistake("rounded down", (".round()", ".floor()"),
            "Your codes are rounded down. The nearest code errs half as much."),
    Mistake("two's complement",
            [(" + 8", ""), ("codes.clamp(0, 15)", "(codes.clamp(-8, 7).int() & 15)")],
            "Your codes are signed numbers in two's complement: 0 is code 0. Here a code is the "
            "number of steps plus 8."),
    Mistake("shifted by 7", ("+ 8", "+ 7"),
            "Your codes are one too small: 0 is code 8."),
    Mistake("empty group is 0", ("codes.clamp(0, 15)", "codes.where(steps != 0, 0).clamp(0, 15)"),
            "A group of zeros has code 0 with you. What stands for 0 is code 8, also where the "
            "scale is 0."),
    Mistake("no clamp", ("codes.clamp(0, 15)", "codes.int()"),
            "Some of your codes are 16, and the extra bit spoils the code that shares their "
            "byte, or is lost. Code 15 is the last."),
    Mistake("no clamp, added up",
            [("codes.clamp(0, 15)", "codes.int()"), ("low | high << 4", "low + (high << 4)")],
            "Some of your codes are 16, and 15 is the last: there are only 7 steps on the side "
            "away from the largest magnitude. In a byte, the extra bit is added to the other "
            "code or lost."),
    Mistake("neighbors", ("codes.chunk(2, dim=-1)", "codes[..., ::2], codes[..., 1::2]"),
            "In a byte of yours two neighbors stand. Here it holds one code of the group's first "
            "half and one of its second."),
    Mistake("high half first", ("low | high << 4", "high | low << 4"),
            "Your first half stands in the high four bits. It belongs into the low ones."),
]  # fmt: skip

PACKED_GROUPS = Exercise(
    id="memory.packed_groups",
    points=5,
    beyond=2,
    reference=packed_groups,
    mistakes=_MISTAKES,
    cases=_cases,
    returns=("codes", "scales"),
    explanation="Sixteen codes around 0 are not symmetric: there is one more on one side. With a "
    "signed scale that side is given to the largest magnitude, which is then exact but for the "
    "scale's own rounding; on the other side the last half step is cut off. The codes are made "
    "with the rounded scale, which is the one that will be multiplied with. Halves of a group in "
    "one byte suit vector units: one mask and one shift give two runs of neighbors. This is the "
    "form that llama.cpp calls Q4_0, and this reference knows 4 bits.",
    hints=(
        "Flip all signs in the example: −0.5, 4, −1, −3.2. What are the scale and the codes of "
        "this group?",
        "Find the place of the largest magnitude in each group, and take the number at that place "
        "with its sign. Round the scale to float16 before you divide by it, and divide by another "
        "number, such as 1, where the scale is 0.",
        "`scales = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half()` makes "
        "the signed scales, [O, G, 1], from `groups = weight.unflatten(1, (-1, group))`.",
    ),
)
