"""Which lane of a wavefront holds which element in CDNA's matrix instructions.

D = A B + C with A [TILE, DEPTH], B [DEPTH, TILE], C and D [TILE, TILE]. No thread has a whole
matrix. Each of the 64 lanes holds a few elements of each matrix, and the hardware fixes which ones.
The 64 / TILE lanes with the same lane % TILE share a row of A, a column of B and a column of D. The
group, lane // TILE, selects the part that a lane holds.

The maps apply to CDNA2 (gfx90a) and CDNA3 (gfx942). The emulator has them in source/cpu_mfma.h.
Source: AMD's matrix instruction calculator; the tests check its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from labcore.checks import one_of

__all__ = ["INSTRUCTIONS", "LANES", "Instruction", "element", "layout"]

LANES = 64  # per wavefront


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One matrix instruction.

    tile: rows of A and D, columns of B and D. depth: columns of A, rows of B.
    bits: bits per element of A and B; C and D are fp32. builtin: the instruction's name in C++.
    """

    tile: int
    depth: int
    bits: int
    builtin: str

    @property
    def groups(self) -> int:
        """Lanes that share a row of A, a column of B and a column of D."""
        return LANES // self.tile

    @property
    def operands(self) -> int:
        """Elements of A that a lane holds, and also of B."""
        return self.depth // self.groups

    @property
    def results(self) -> int:
        """Elements of D that a lane holds, one per register."""
        return self.tile * self.tile // LANES

    @property
    def flops(self) -> int:
        """Additions and multiplications of one instruction."""
        return 2 * self.tile * self.tile * self.depth


INSTRUCTIONS = {
    "32x32x8_f16": Instruction(
        tile=32, depth=8, bits=16, builtin="__builtin_amdgcn_mfma_f32_32x32x8f16"
    ),
    "16x16x16_f16": Instruction(
        tile=16, depth=16, bits=16, builtin="__builtin_amdgcn_mfma_f32_16x16x16f16"
    ),
    "32x32x8_bf16": Instruction(
        tile=32, depth=8, bits=16, builtin="__builtin_amdgcn_mfma_f32_32x32x8bf16_1k"
    ),
    "16x16x16_bf16": Instruction(
        tile=16, depth=16, bits=16, builtin="__builtin_amdgcn_mfma_f32_16x16x16bf16_1k"
    ),
    "32x32x2_f32": Instruction(
        tile=32, depth=2, bits=32, builtin="__builtin_amdgcn_mfma_f32_32x32x2f32"
    ),
    "16x16x4_f32": Instruction(
        tile=16, depth=4, bits=32, builtin="__builtin_amdgcn_mfma_f32_16x16x4f32"
    ),
}


def element(instruction: Instruction, matrix: str, lane: int, item: int) -> tuple[int, int]:
    """Return the (row, column) of a lane's element number `item`.

    matrix: "A", "B" or "D" (C has D's layout). lane: 0 … 63.
    item: index among the lane's elements of the matrix, starting at its first register. A register
    holds one 32-bit element or two 16-bit elements, the low half first.
    Raises ValueError for a matrix, lane or item that doesn't exist.
    """
    one_of("matrix", matrix, "ABD")
    held = instruction.results if matrix == "D" else instruction.operands
    one_of("lane", lane, range(LANES))
    one_of("item", item, range(held))
    line, group = lane % instruction.tile, lane // instruction.tile
    if matrix == "D":
        # Every four registers hold four consecutive rows of each group.
        return 4 * instruction.groups * (item // 4) + 4 * group + item % 4, line
    k = instruction.operands * group + item
    return (line, k) if matrix == "A" else (k, line)


def layout(instruction: Instruction, matrix: str) -> list[list[tuple[int, int]]]:
    """Return the inverse map: [row][column] -> the (lane, item) that holds the element.

    matrix: as in `element`.
    """
    rows, columns = {
        "A": (instruction.tile, instruction.depth),
        "B": (instruction.depth, instruction.tile),
        "D": (instruction.tile, instruction.tile),
    }[one_of("matrix", matrix, "ABD")]
    held = instruction.results if matrix == "D" else instruction.operands
    holder = {
        element(instruction, matrix, lane, item): (lane, item)
        for lane in range(LANES)
        for item in range(held)
    }
    return [[holder[row, column] for column in range(columns)] for row in range(rows)]
