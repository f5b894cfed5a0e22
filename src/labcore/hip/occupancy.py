"""How many waves a compute unit of CDNA2 to CDNA4 can hold at once, and what limits the number.

A compute unit has four SIMDs. Each SIMD has room for eight waves and has 512 registers per lane,
shared by vector and accumulation registers. The four SIMDs share the LDS: 64 KiB in CDNA2 (gfx90a)
and CDNA3 (gfx942), 160 KiB in CDNA4 (gfx950). A workgroup runs entirely on one compute unit.
Sources: AMD, CDNA 2 and CDNA 3 instruction set architecture; ROCm, AMD GPU specifications (gfx950);
LLVM, User Guide for AMDGPU Backend, and pull request 208046 (2026), which has gfx950's LDS step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labcore.checks import one_of, positive_int

__all__ = ["LIMITS", "Limits", "Occupancy", "occupancy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources of one compute unit.

    wave: lanes per wave.
    simds: SIMDs per compute unit.
    slots: waves that one SIMD can hold.
    registers: registers per lane, allocated in multiples of register_step.
    lane_registers: the most registers of each kind (vector, accumulation) that a lane can address.
    scalars: scalar registers per SIMD.
    lds: bytes, allocated in multiples of lds_step.
    threads: the most threads per workgroup.
    """

    wave: int = 64
    simds: int = 4
    slots: int = 8
    registers: int = 512
    register_step: int = 8
    lane_registers: int = 256
    scalars: int = 800
    lds: int = 64 * 1024
    lds_step: int = 512
    threads: int = 1024


LIMITS: Mapping[str, Limits] = {
    "gfx90a": Limits(),
    "gfx942": Limits(),
    "gfx950": Limits(lds=160 * 1024, lds_step=1280),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """The waves and workgroups that fit.

    waves_per_simd: as a compiler counts it, the minimum over `allowed`; 0 if no workgroup fits.
    groups, waves: whole workgroups per compute unit, and their waves.
    allowed: waves per SIMD that each resource ("registers", "scalars", "lds", "slots") allows.
    bound_by: the resources that allow the fewest; "slots" alone means that nothing else is a limit.
    """

    waves_per_simd: int
    groups: int
    waves: int
    allowed: Mapping[str, int]
    bound_by: tuple[str, ...]


def occupancy(
    arch: str, *, vgprs: int, agprs: int = 0, sgprs: int = 0, lds: int, threads: int
) -> Occupancy:
    """Return how many waves fit on one SIMD of `arch`, a key of `LIMITS`, and what limits them.

    vgprs, agprs: vector and accumulation registers per lane, 0 to 256 each.
    sgprs: scalar registers per wave.
    lds: bytes per workgroup.
    threads: threads per workgroup, 1 to 1024.
    Raises ValueError for values that no kernel on that GPU can have. Too much LDS isn't an error;
    then no workgroup fits.
    """
    one_of("arch", arch, LIMITS)
    limits = LIMITS[arch]
    most = {"vgprs": limits.lane_registers, "agprs": limits.lane_registers, "sgprs": 128}
    for name, value in (("vgprs", vgprs), ("agprs", agprs), ("sgprs", sgprs)):
        if not 0 <= value <= most[name]:
            raise ValueError(
                f"{name} must be between 0 and {most[name]}, got {value}; a kernel that needs "
                "more registers spills to memory"
            )
    if lds < 0:
        raise ValueError(f"lds must be at least 0 bytes, got {lds}")
    if positive_int("threads", threads) > limits.threads:
        raise ValueError(
            f"threads must be at most {limits.threads}, got {threads}; launch more workgroups"
        )
    group = -(-threads // limits.wave)  # waves per workgroup
    held = _up(_up(vgprs, 4) + agprs if agprs else vgprs, limits.register_step)
    by_lds = limits.lds // _up(lds, limits.lds_step) if lds else limits.simds * limits.slots
    allowed = {
        "registers": min(limits.slots, limits.registers // held) if held else limits.slots,
        "scalars": min(limits.slots, limits.scalars // sgprs) if sgprs else limits.slots,
        "lds": min(limits.slots, -(-by_lds * group // limits.simds)),
        "slots": limits.slots,
    }
    fewest = min(allowed.values())
    standing = limits.simds * min(allowed["registers"], allowed["scalars"], limits.slots)
    groups = min(by_lds, standing // group)
    return Occupancy(
        waves_per_simd=fewest if groups else 0,
        groups=groups,
        waves=groups * group,
        allowed=allowed,
        bound_by=tuple(name for name, waves in allowed.items() if waves == fewest),
    )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
