"""Read the machine code of NVIDIA's GPUs, as `nvdisasm -c` prints it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Instruction", "following", "parsed", "read", "target", "used", "written"]

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


def parsed(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions, and the index of the one after each label."""
    code, labels = list[Instruction](), dict[str, int]()
    for line in sass.splitlines():
        if match := LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := LINE.search(line):
            code.append(Instruction(bool(match[1]), match[2], match[3]))
    return code, labels


def following(code: list[Instruction], labels: dict[str, int], at: int) -> list[int]:
    """Return the instructions that may come after code[at]."""
    one = code[at]
    branch = target(one)
    # A condition may also be an operand, as in "BRA P0, `(.L_x_1)".
    always = not one.guarded and (one.op.startswith(("EXIT", "RET")) or one.operands[:1] == "`")
    follows = [] if always or at + 1 == len(code) else [at + 1]
    return [*follows, labels[branch]] if branch in labels else follows


def target(one: Instruction) -> str:
    """Return the label that a branch names, or ""."""
    found = re.search(r"\((\.L_\w+)\)", one.operands) if one.op.startswith("BRA") else None
    return found[1] if found else ""


def used(one: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Return the registers to which an HGMMA adds and those of its left operand."""
    result, left = one.operands.split(", ")[:2]
    shape = re.search(r"64x(\d+)x", one.op)
    columns = int(shape[1]) if shape else 0
    return _span(result, columns // (2 if ".F32." in one.op else 4)), _span(left, 4)


def written(one: Instruction) -> frozenset[int]:
    """Return the registers that an instruction other than HGMMA writes."""
    first, parts = one.operands.split(", ")[_result(one)], set(one.op.split("."))
    if "128" in parts or {"M88", "4"} <= parts or one.op.startswith("HMMA"):
        return _span(first, 4)
    pairs = parts & {"64", "WIDE"} or {"M88", "2"} <= parts or one.op.startswith(("D", "CS2R"))
    return _span(first, 2 if pairs else 1)


def read(one: Instruction) -> frozenset[int]:
    """Return the registers that an instruction reads, without those to which an HGMMA adds."""
    if one.op.startswith("HGMMA"):
        return used(one)[1]
    operands = one.operands.split(", ")
    if _span(operands[_result(one)], 1):
        del operands[_result(one)]
    whole = (4, 2, 4) if one.op.startswith("HMMA") else (1,) * len(operands)
    if one.op.startswith("ST") and one.op.endswith((".64", ".128")):
        whole = (1, 4 if one.op.endswith(".128") else 2)
    found = frozenset[int]()
    for operand, count in zip(operands, whole, strict=False):
        if name := re.search(r"R\d+(\.64)?", operand.replace("UR", "U")):
            found |= _span(name[0], 2 if name[1] else count)
    return found


def _result(one: Instruction) -> int:
    """Return which operand an instruction writes, if it writes a register."""
    return int(one.op.startswith(AFTER_PREDICATE) and one.operands[0] in "PU")


def _span(operand: str, count: int) -> frozenset[int]:
    """Return `count` registers from the one that `operand` names; none if it names no register."""
    match = re.match(r"R(\d+)\b", operand)
    return frozenset(range(int(match[1]), int(match[1]) + count)) if match else frozenset()
