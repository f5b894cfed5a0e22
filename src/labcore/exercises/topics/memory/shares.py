"""Count what one device holds of weights, gradients and state that do not divide evenly."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["HELD_BYTES"]

DEVICES = (3, 5, 6, 7)  # a student's; student 0 has 4
_Shapes = Sequence[Sequence[int]]
_Bytes = tuple[int, int, int]


def held_bytes(shapes: _Shapes, *, stage: int, device: int, devices: int, factored: bool) -> _Bytes:
    """Return (weights, gradients, optimizer state) in bytes on one device."""
    del factored
    whole = sum(math.prod(shape) for shape in shapes)
    share = 0
    for rows, *others in shapes:
        longest = -(-rows // devices)
        mine = min(longest, max(0, rows - device * longest))
        share += mine * math.prod(others)
    weights, gradients, state = (share if stage >= first else whole for first in (3, 2, 1))
    return 2 * weights, 4 * gradients, 12 * state


def _cases(seed: int) -> list[dict[str, Any]]:
    """Draw parameters with few rows, long rows, and vectors, for each stage on three devices."""
    chance = random.Random(seed)
    cases = []
    for stage in (0, 1, 2, 3):
        for device in (0, 1, 2):
            shapes = [
                [chance.choice((29, 41, 58, 73)), chance.randint(20, 90)],
                [2, chance.randint(30, 60)],
                [chance.choice((22, 23, 37, 64))],
                [chance.choice((8, 9, 16, 17)), 3, chance.randint(5, 9)],
                [1],
                [421],  # one more than a multiple of 3, 4, 5, 6 and 7, so none divides it
            ]
            chance.shuffle(shapes)
            cases.append({"shapes": shapes, "stage": stage, "device": device, "factored": False})
    return cases


def _own_devices(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"memory.held_bytes:{student}")
    return {"devices": chance.choice(DEVICES) if student else 4}


_MISTAKES = [
    Mistake("even rows",
            ("min(longest, max(0, rows - device * longest))",
             "rows // devices + (device < rows % devices)"),
            "Your devices hold rows as evenly as can be. The rule here is another: each but the "
            "last ones takes the same number, rounded up."),
    Mistake("rest at the end",
            ("min(longest, max(0, rows - device * longest))",
             "rows // devices + rows % devices * (device == devices - 1)"),
            "You round the rows of a device down and give the rest to the last one. They are "
            "rounded up, and the last ones get what is left, which may be nothing."),
    Mistake("padded rows", ("min(longest, max(0, rows - device * longest))", "longest"),
            "You count as many rows on every device, rounded up, as if each parameter were filled "
            "up. The devices at the end hold what is left and no more."),
    Mistake("one line", ("    weights,", "    share = -(-whole // devices)\n    weights,"),
            "You divide the number of all elements, rounded up. Here each parameter is divided by "
            "itself, and by rows."),
    Mistake("one line, cut off", ("    weights,", "    share = whole // devices\n    weights,"),
            "You divide the number of all elements, rounded down. Here each parameter is divided "
            "by itself, and by rows."),
    Mistake("elements", ("in shapes:", "in [[math.prod(shape)] for shape in shapes]:"),
            "You divide a parameter by its elements. A row stays in one piece."),
    Mistake("vectors whole",
            ("mine * math.prod(others)", "mine * math.prod(others) if others else rows"),
            "You leave vectors whole on every device. An element of a vector is a row."),
    Mistake("weights first", ("(3, 2, 1)", "(1, 2, 3)"),
            "At stage 1 you divide the weights. They are the last to be divided, since each "
            "forward then has to gather them."),
    Mistake("gradients first", ("(3, 2, 1)", "(3, 1, 2)"),
            "At stage 1 you divide the gradients. The optimizer's state comes first: it is the "
            "largest part, and nobody else asks for it."),
    Mistake("one stage late", ("(3, 2, 1)", "(4, 3, 2)"),
            "Your parts are divided one stage too late: stage 0 divides nothing."),
    Mistake("all at once", ("(3, 2, 1)", "(1, 1, 1)"),
            "You divide everything from stage 1 on. Each stage divides one part more."),
    Mistake("only one divided", ("stage >= first", "stage == first"),
            "Each of your stages divides one part alone. What an earlier stage divides stays "
            "divided."),
    Mistake("two numbers", ("12 * state", "8 * state"),
            "Your state has two numbers for each weight. It has three: two moments, and a copy of "
            "the weight in 32 bits, or small steps would be lost."),
    Mistake("no moments", ("12 * state", "4 * state"),
            "Your state is the copy of the weights alone. The two moments belong to it."),
    Mistake("narrow state", ("12 * state", "6 * state"),
            "Your state has 16 bits a number. It is kept in 32."),
    Mistake("narrow gradients", ("4 * gradients", "2 * gradients"),
            "Your gradients have 16 bits. Here they are kept in 32."),
    Mistake("numbers, not bytes",
            ("2 * weights, 4 * gradients, 12 * state", "weights, gradients, 3 * state"),
            "You count numbers. Bytes are asked for."),
]  # fmt: skip

HELD_BYTES = Exercise(
    id="memory.held_bytes",
    points=5,
    beyond=2,
    reference=held_bytes,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_devices,
    returns=("bytes of weights", "bytes of gradients", "bytes of state"),
    explanation="Here 18 bytes a parameter become 6 + 12/N, 2 + 16/N and 18/N, if N devices divide "
    "them evenly. They do not: rows are cut by rounding up, as `torch.chunk` and FSDP2 do, so the "
    "first device is the fullest, and of a parameter with fewer rows than devices some have "
    "nothing. In a large model that is a matter of thousandths; in a small one, or for many "
    "devices, it decides which device runs out first. This reference knows an optimizer of two "
    "moments.",
    hints=(
        "For the example, list how many rows of [5, 3] and how many of [2] each of the four "
        "devices holds. Are the rows spread as evenly as they could be?",
        "The devices before yours have taken ⌈r / N⌉ rows of a parameter each, and yours takes "
        "the same number or the fewer that are left. Add up the numbers in its rows over all "
        "parameters. That sum is for what the stage divides, and the count of all numbers is for "
        "the rest.",
        "`mine = min(longest, max(0, rows - device * longest))` is the number of a parameter's "
        "rows on the device, where `longest = -(-rows // devices)` is the quotient rounded up.",
    ),
)
