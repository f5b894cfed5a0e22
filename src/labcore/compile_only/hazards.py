"""Find registers that are rewritten while an asynchronous matrix instruction may still use them.

On Hopper, HGMMA (PTX's wgmma) adds to registers, and may read its left operand from registers,
after later instructions have started. `WARPGROUP.DEPBAR` waits for it. Releases of ptxas before
CUDA 13.3 could reuse a left operand's registers too early
(https://github.com/triton-lang/triton/pull/11781), so the gate reads the machine code.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["pending_writes"]

LABEL = re.compile(r"^(\.L_\w+):")
LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
# Their first operand is a predicate, and the register they write comes second.
AFTER_PREDICATE = ("SHFL", "LOP3", "ATOM")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of machine code. guarded: whether a predicate decides if it runs."""

    guarded: bool
    op: str
    operands: str


def pending_writes(sass: str) -> tuple[list[str], int | None]:
    """Return what is written while an HGMMA may be pending, on any path through a kernel.

    sass: what `nvdisasm -c` prints. The first result has a sentence for each instruction that
    writes a register to which a pending HGMMA adds; there must be none. The second is the fewest
    instructions from an HGMMA to a write of its left operand, or None if it always waits first.
    """
    code, labels = _parsed(sass)
    wrong, soonest = dict[int, str](), None
    for at, one in enumerate(code):
        if not one.op.startswith("HGMMA"):
            continue
        sums, left = _used(one)
        for distance, then in _while_pending(code, labels, at):
            written = _written(code[then])
            if names := ", ".join(f"R{n}" for n in sorted(written & sums)):
                text = f"{code[then].op} {code[then].operands}"
                wrong[then] = f"{text} writes {names}, to which a pending HGMMA adds"
            if written & left and (soonest is None or distance < soonest):
                soonest = distance
    return [wrong[at] for at in sorted(wrong)], soonest


def _parsed(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions, and the index of the one after each label."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in sass.splitlines():
        if match := LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := LINE.search(line):
            code.append(Instruction(bool(match[1]), match[2], match[3]))
    return code, labels


def _while_pending(
    code: list[Instruction], labels: dict[str, int], start: int
) -> Iterator[tuple[int, int]]:
    """Yield the distance and index of each instruction that may run while code[start] is pending.

    Skips HGMMAs, which run in order.
    """
    # Instruction, and how many groups have been committed since, the HGMMA's own included.
    waiting = deque([(start, 0, 0)])
    seen = set[tuple[int, int]]()
    while waiting:
        at, committed, distance = waiting.popleft()
        one = code[at]
        if one.op.startswith("HGMMA"):
            committed += "gsb0" in one.operands
        elif one.op.startswith("WARPGROUP.DEPBAR"):
            if committed > int(one.operands.rsplit(",", 1)[1], 16):
                continue
        elif (at, committed) not in seen:
            yield distance, at
        seen.add((at, committed))
        for then in _next(code, labels, at):
            if (then, committed) not in seen:
                waiting.append((then, committed, distance + 1))


def _next(code: list[Instruction], labels: dict[str, int], at: int) -> list[int]:
    """Return the instructions that may come after code[at]."""
    one = code[at]
    branch = re.search(r"\((\.L_\w+)\)", one.operands) if one.op.startswith("BRA") else None
    # A condition may also be an operand, as in "BRA P0, `(.L_x_1)".
    always = not one.guarded and (one.op.startswith(("EXIT", "RET")) or one.operands[:1] == "`")
    follows = [] if always or at + 1 == len(code) else [at + 1]
    return [*follows, labels[branch[1]]] if branch and branch[1] in labels else follows


def _used(one: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Return the registers to which an HGMMA adds and those of its left operand."""
    result, left = one.operands.split(", ")[:2]
    shape = re.search(r"64x(\d+)x", one.op)
    columns = int(shape[1]) if shape else 0
    return _span(result, columns // (2 if ".F32." in one.op else 4)), _span(left, 4)


def _written(one: Instruction) -> frozenset[int]:
    """Return the registers that an instruction other than HGMMA writes."""
    named, parts = one.operands.split(", "), set(one.op.split("."))
    first = named[1] if one.op.startswith(AFTER_PREDICATE) and named[0][0] in "PU" else named[0]
    if "128" in parts or {"M88", "4"} <= parts or one.op.startswith("HMMA"):
        return _span(first, 4)
    pairs = parts & {"64", "WIDE"} or {"M88", "2"} <= parts or one.op.startswith(("D", "CS2R"))
    return _span(first, 2 if pairs else 1)


def _span(operand: str, count: int) -> frozenset[int]:
    """Return `count` registers from the one that `operand` names; none if it names no register."""
    match = re.match(r"R(\d+)\b", operand)
    return frozenset(range(int(match[1]), int(match[1]) + count)) if match else frozenset()
