"""rocprofv3's counters beside the emulator's: which count of a launch predicts which counter.

Source: AMD, MI300 and MI200 Series performance counters and metrics, ROCm 7.14.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROCPROF", "Rocprof"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rocprof:
    """A counter of rocprofv3.

    counts: what it counts. field: the field of `LaunchCounters` that predicts it, "" if none does.
    differs: where the two differ, or why the emulator has none.
    """

    name: str
    counts: str
    field: str
    differs: str


ROCPROF = (
    Rocprof(
        name="SQ_WAVES",
        counts="wavefronts, new and restored",
        field="",
        differs="known without a run: blocks times waves per block; preempted ones count again",
    ),
    Rocprof(
        name="SQ_INSTS_LDS",
        counts="LDS instructions",
        field="merged_lds",
        differs="MI200 adds flat instructions, MI300 doesn't; shuffles count, and are added here",
    ),
    Rocprof(
        name="SQ_LDS_BANK_CONFLICT",
        counts="cycles lost to bank conflicts",
        field="lds_conflicts",
        differs="as right as the published groups of lanes are",
    ),
    Rocprof(
        name="SQ_INSTS_MFMA",
        counts="matrix instructions",
        field="mfma",
        differs="should agree: one for each builtin in the source",
    ),
    Rocprof(
        name="TCP_TOTAL_CACHE_ACCESSES_sum",
        counts="cache lines that the L1 caches look up",
        field="merged_lines",
        differs="a line of CDNA3 has 128 bytes; lines of MI200 have 64, so expect more there",
    ),
    Rocprof(
        name="TCC_HIT_sum, TCC_MISS_sum",
        counts="requests that the L2 caches answer, or don't",
        field="",
        differs="the emulator has no caches",
    ),
    Rocprof(
        name="FETCH_SIZE",
        counts="KB that the L2 caches fetch",
        field="",
        differs="the model of caches predicts it; on MI300X the Infinity Cache may answer",
    ),
    Rocprof(
        name="SQ_INSTS_VALU",
        counts="vector instructions, matrix instructions included",
        field="",
        differs="only the compiled program has them; subtract SQ_INSTS_MFMA",
    ),
    Rocprof(
        name="SQ_BUSY_CYCLES",
        counts="busy cycles",
        field="",
        differs="the emulator has no clock",
    ),
)
