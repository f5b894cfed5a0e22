"""What one device holds of weights, gradients and optimizer state that nothing divides evenly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["HELD_BYTES"]

DEVICES = (3, 5, 6, 7)  # a student's; nobody's are 4
WEIGHT, GRADIENT, SINGLE = 2, 4, 4  # bytes
_Shapes = Sequence[Sequence[int]]
_Bytes = tuple[int, int, int]


def held_bytes(shapes: _Shapes, *, stage: int, device: int, devices: int, factored: bool) -> _Bytes:
    """(weights, gradients, optimizer state) in bytes on one device."""
    del factored
    whole = sum(math.prod(shape) for shape in shapes)
    share = 0
    for rows, *others in shapes:
        longest = -(-rows // devices)
        mine = min(longest, max(0, rows - device * longest))
        share += mine * math.prod(others)
    return (
        2 * (share if stage >= 3 else whole),
        4 * (share if stage >= 2 else whole),
        12 * (share if stage >= 1 else whole),
    )


def _rows(rows: int, device: int, devices: int, fault: str) -> int:
    if fault == "even rows":
        return rows // devices + (device < rows % devices)
    if fault == "rest at the end":
        return rows // devices + (rows % devices if device == devices - 1 else 0)
    longest = -(-rows // devices)
    return min(longest, max(0, rows - device * longest))


def _share(shapes: _Shapes, device: int, devices: int, fault: str) -> int:
    sizes = [math.prod(shape) for shape in shapes]
    if fault == "one line":
        return -(-sum(sizes) // devices)
    if fault == "one line, cut off":
        return sum(sizes) // devices
    if fault == "elements":
        return sum(_rows(size, device, devices, "") for size in sizes)
    if fault == "padded rows":
        return sum(-(-shape[0] // devices) * math.prod(shape[1:]) for shape in shapes)
    if fault == "vectors whole":
        return sum(
            math.prod(shape[1:]) * _rows(shape[0], device, devices, "")
            if len(shape) > 1
            else shape[0]
            for shape in shapes
        )
    return sum(_rows(shape[0], device, devices, fault) * math.prod(shape[1:]) for shape in shapes)


def _wrongly(fault: str) -> Callable[..., _Bytes]:
    def held(shapes: _Shapes, *, stage: int, device: int, devices: int, factored: bool) -> _Bytes:
        del factored
        whole = sum(math.prod(shape) for shape in shapes)
        share = _share(shapes, device, devices, fault)
        from_stage = {
            "weights first": (1, 2, 3),
            "gradients first": (3, 1, 2),
            "one stage late": (4, 3, 2),
            "all at once": (1, 1, 1),
        }.get(fault, (3, 2, 1))
        state = {"two numbers": 2, "no moments": 1}.get(fault, 3)
        state *= WEIGHT if fault == "narrow state" else SINGLE
        gradient = WEIGHT if fault == "narrow gradients" else GRADIENT
        divided = [
            stage == first if fault == "only one divided" else stage >= first
            for first in from_stage
        ]
        numbers = [share if one else whole for one in divided]
        if fault == "numbers, not bytes":
            return numbers[0], numbers[1], numbers[2] * 3
        weights, gradients, kept = numbers
        return weights * WEIGHT, gradients * gradient, kept * state

    return held


def _cases(seed: int) -> list[dict[str, Any]]:
    """All stages on the first three devices; few rows, long ones, vectors."""
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
                [421],  # one more than a multiple of 3, 4, 5, 6 and 7: no number of devices fits
            ]
            chance.shuffle(shapes)
            cases.append({"shapes": shapes, "stage": stage, "device": device, "factored": False})
    return cases


def _own_devices(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"memory.held_bytes:{student}")
    return {"devices": chance.choice(DEVICES) if student else 4}


_HINTS = {
    "even rows": "Your devices hold rows as evenly as can be. The rule here is another: each but "
    "the last ones takes the same number, rounded up.",
    "rest at the end": "You round the rows of a device down and give the rest to the last one. "
    "They are rounded up, and the last ones get what is left, which may be nothing.",
    "padded rows": "You count as many rows on every device, rounded up, as if each parameter were "
    "filled up. The devices at the end hold what is left and no more.",
    "one line": "You divide the number of all elements, rounded up. Here each parameter is "
    "divided by itself, and by rows.",
    "one line, cut off": "You divide the number of all elements, rounded down. Here each parameter "
    "is divided by itself, and by rows.",
    "elements": "You divide a parameter by its elements. A row stays in one piece.",
    "vectors whole": "You leave vectors whole on every device. An element of a vector is a row.",
    "weights first": "At stage 1 you divide the weights. They are the last to be divided, since "
    "each forward then has to gather them.",
    "gradients first": "At stage 1 you divide the gradients. The optimizer's state comes first: it "
    "is the largest part, and nobody else asks for it.",
    "one stage late": "Your parts are divided one stage too late: stage 0 divides nothing.",
    "all at once": "You divide everything from stage 1 on. Each stage divides one part more.",
    "only one divided": "Each of your stages divides one part alone. What an earlier stage divides "
    "stays divided.",
    "two numbers": "Your state has two numbers for each weight. It has three: two moments, and a "
    "copy of the weight in 32 bits, or small steps would be lost.",
    "no moments": "Your state is the copy of the weights alone. The two moments belong to it.",
    "narrow state": "Your state has 16 bits a number. It is kept in 32.",
    "narrow gradients": "Your gradients have 16 bits. Here they are kept in 32.",
    "numbers, not bytes": "You count numbers. Bytes are asked for.",
}

HELD_BYTES = Exercise(
    id="memory.held_bytes",
    reference=held_bytes,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_devices,
    returns=("bytes of weights", "bytes of gradients", "bytes of state"),
    explanation="Here 18 bytes a parameter become 6 + 12/N, 2 + 16/N and 18/N, if N devices divide "
    "them evenly. They do not: rows are cut by rounding up, as `torch.chunk` and FSDP2 do, so the "
    "first device is the fullest, and of a parameter with fewer rows than devices some have "
    "nothing. In a large model that is a matter of thousandths; in a small one, or for many "
    "devices, it decides which device runs out first. This reference knows an optimizer of two "
    "moments.",
)
