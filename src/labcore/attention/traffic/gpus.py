"""GPUs' published peaks, and the minimum time of one call at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from labcore.attention.traffic.counts import (
    Direction,
    Form,
    Shape,
    compulsory_bytes,
    exponentials,
    flops,
    naive_bytes,
)
from labcore.checks import one_of

__all__ = ["GPUS", "Gpu", "Roofline", "roofline"]

# Vector instructions per score besides its exponential: the maximum, one multiply-add for scale and
# shift, the sum, and half of a conversion that packs two scores into one register.
FP32_A_SCORE = 3.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Published peaks of one GPU.

    units: SMs or CUs.
    clock: the boost clock in Hz that the peaks assume.
    matmul: dense 16-bit FLOP/s with float32 accumulation.
    bandwidth: memory bandwidth in bytes/s.
    sram: bytes of shared memory that one program may use.
    cache: bytes of the last cache before the memory, an L2 or, on MI300X, the Infinity Cache.
    exponentials, fp32: results per clock and unit.
    memory: bytes.
    """

    name: str
    units: int
    clock: float
    matmul: float
    bandwidth: float
    sram: int
    cache: int
    memory: float
    exponentials: int = 16
    fp32: int = 128


KIB, MIB = 1024, 1024**2
# Matrix peaks, bandwidths, units and boost clocks: NVIDIA's data sheets of T4 (2018), A100 80GB SXM
# (2021), H100 SXM (2022) and H200 (2023), the Ada architecture paper (2022, RTX 4090, float32
# sums); AMD's data sheets of MI250X (2021; one of its two dies) and MI300X (2023).
# Caches: NVIDIA's papers on the architectures Turing (2018), Ampere (2020), Hopper (2022) and Ada
# (2022); AMD's on CDNA 2 (2021) and CDNA 3 (2023). An XCD of MI300X has an L2 of 4 MiB, too.
# Exponentials and float32 operations per clock and SM, shared memory per block: the CUDA C++
# programming guide, tables "throughput of native arithmetic instructions" and "technical
# specifications per compute capability". A CU has four units of 16 lanes, which take 4 clocks for
# an exponential.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="T4", units=40, clock=1.59e9, matmul=65e12, bandwidth=320e9, sram=64 * KIB,
            cache=4 * MIB, memory=16e9, fp32=64),
        Gpu(name="A100", units=108, clock=1.41e9, matmul=312e12, bandwidth=2039e9, sram=163 * KIB,
            cache=40 * MIB, memory=80e9, fp32=64),
        Gpu(name="RTX 4090", units=128, clock=2.52e9, matmul=165.2e12, bandwidth=1008e9,
            sram=99 * KIB, cache=72 * MIB, memory=24e9),
        Gpu(name="H100", units=132, clock=1.83e9, matmul=989.4e12, bandwidth=3350e9,
            sram=227 * KIB, cache=50 * MIB, memory=80e9),
        Gpu(name="H200", units=132, clock=1.83e9, matmul=989.4e12, bandwidth=4800e9,
            sram=227 * KIB, cache=50 * MIB, memory=141e9),
        Gpu(name="MI250X die", units=110, clock=1.7e9, matmul=191.5e12, bandwidth=1638e9,
            sram=64 * KIB, cache=8 * MIB, memory=64e9, fp32=64),
        Gpu(name="MI300X", units=304, clock=2.1e9, matmul=1307.4e12, bandwidth=5300e9,
            sram=64 * KIB, cache=256 * MIB, memory=192e9),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Seconds that each part of a GPU needs at its peak, and the FLOPs for a quoted rate."""

    flops: int
    matmul: float
    softmax: float  # exponentials or the other float32 work on the scores: the slower one
    memory: float

    @property
    def seconds(self) -> float:
        """The time if all parts work at the same time: that of the slowest part."""
        return max(self.matmul, self.softmax, self.memory)

    @property
    def serial_seconds(self) -> float:
        """The minimum time if softmax and matrix products take turns."""
        return max(self.matmul + self.softmax, self.memory)

    @property
    def bound(self) -> str:
        """The slowest part: "matmul", "softmax" or "memory"."""
        parts = {"matmul": self.matmul, "softmax": self.softmax, "memory": self.memory}
        return max(parts, key=parts.__getitem__)

    @property
    def flop_rate(self) -> float:
        """FLOP/s at `seconds`."""
        return self.flops / self.seconds

    @property
    def serial_flop_rate(self) -> float:
        """FLOP/s at `serial_seconds`."""
        return self.flops / self.serial_seconds


def roofline(
    shape: Shape, gpu: Gpu, form: Form = "flash", direction: Direction = "forward"
) -> Roofline:
    """Return the minimum time of one call at published peaks.

    Exponentials and the other float32 instructions have units of their own on NVIDIA's GPUs, so
    the softmax takes at least the longer of the two times, and not their sum.
    The flash form moves memory once and the naive form in `naive_bytes` passes. The naive form also
    computes masked pairs, and the flash backward pass uses two kernels. The result's `flops` are
    the same for both, which makes their rates comparable.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "flash":
        moved = compulsory_bytes(shape, direction)
        work = flops(shape, direction, fused=False)
        scores = exponentials(shape, direction, fused=False)
    else:
        moved = naive_bytes(shape, direction)
        every = replace(shape, is_causal=False)
        # The naive backward pass has the weights: no scores, no exponentials, four products.
        work = flops(every, direction) * (4 if direction == "backward" else 5) // 5
        scores = exponentials(every) if direction == "forward" else 0
    a_score = max(1 / gpu.exponentials, FP32_A_SCORE / gpu.fp32)
    return Roofline(
        flops=flops(shape, direction),
        matmul=work / gpu.matmul,
        softmax=scores * a_score / (gpu.units * gpu.clock),
        memory=moved / gpu.bandwidth,
    )
