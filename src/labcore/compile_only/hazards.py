"""Find registers that are rewritten while an asynchronous matrix instruction may still use them.

On Hopper, HGMMA (PTX's wgmma) adds to registers, and may read its left operand from registers,
after later instructions have started. `WARPGROUP.DEPBAR` waits for it. Releases of ptxas before
CUDA 13.3 could reuse a left operand's registers too early
(https://github.com/triton-lang/triton/pull/11781), so the gate reads the machine code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from labcore.compile_only.sass import Instruction, following, parsed, used, written

__all__ = ["pending_writes"]


def pending_writes(sass: str) -> tuple[list[str], int | None]:
    """Return what is written while an HGMMA may be pending, on any path through a kernel.

    sass: what `nvdisasm -c` prints. The first result has a sentence for each instruction that
    writes a register to which a pending HGMMA adds; there must be none. The second is the fewest
    instructions from an HGMMA to a write of its left operand, or None if it always waits first.
    """
    code, labels = parsed(sass)
    wrong, soonest = dict[int, str](), None
    for at, one in enumerate(code):
        if not one.op.startswith("HGMMA"):
            continue
        sums, left = used(one)
        for distance, then in _while_pending(code, labels, at):
            changed = written(code[then])
            if names := ", ".join(f"R{n}" for n in sorted(changed & sums)):
                text = f"{code[then].op} {code[then].operands}"
                wrong[then] = f"{text} writes {names}, to which a pending HGMMA adds"
            if changed & left and (soonest is None or distance < soonest):
                soonest = distance
    return [wrong[at] for at in sorted(wrong)], soonest


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
        for then in following(code, labels, at):
            if (then, committed) not in seen:
                waiting.append((then, committed, distance + 1))
