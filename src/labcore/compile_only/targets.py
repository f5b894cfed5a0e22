"""The GPUs to compile for, and what a compiled kernel needs of one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labcore.compile_only.hazards import pending_writes
from labcore.compile_only.pipeline import blocks_per_sm, inner_loop

__all__ = ["TARGETS", "Target", "machine_code", "needs"]

KIB = 1024
# PTX and AMD's assembly -> the unit that runs the instruction.
MATRIX = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"\bmma\.sync",
    "mfma": r"\bv_mfma_",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A GPU to compile for. shared_limit: bytes of shared memory (LDS) that one block may use."""

    backend: str
    arch: int | str
    warp: int
    shared_limit: int

    @property
    def major(self) -> int:
        """NVIDIA's major compute capability; 0 for AMD's GPUs."""
        return self.arch // 10 if isinstance(self.arch, int) else 0

    @property
    def float8(self) -> bool:
        """Return whether Triton compiles float8_e4m3fn for it."""
        return not isinstance(self.arch, int) or self.arch >= 89


# No sm_75: Triton 3.7 emits no matrix instruction for it, so a T4 runs plain PyTorch.
TARGETS: Mapping[str, Target] = {
    "sm_80": Target(backend="cuda", arch=80, warp=32, shared_limit=163 * KIB),
    "sm_89": Target(backend="cuda", arch=89, warp=32, shared_limit=99 * KIB),
    "sm_90": Target(backend="cuda", arch=90, warp=32, shared_limit=227 * KIB),
    "sm_100": Target(backend="cuda", arch=100, warp=32, shared_limit=227 * KIB),
    "gfx90a": Target(backend="hip", arch="gfx90a", warp=64, shared_limit=64 * KIB),
    "gfx942": Target(backend="hip", arch="gfx942", warp=64, shared_limit=64 * KIB),
    "gfx950": Target(backend="hip", arch="gfx950", warp=64, shared_limit=160 * KIB),
}


def needs(compiled: Any) -> dict[str, Any]:
    """Return what a compiled kernel needs.

    registers: per thread. spills: bytes (NVIDIA) or vector registers (AMD) that did not fit.
    shared: bytes. matrix, unit: the number of matrix instructions and what runs them, such as
    "wgmma". buffers: the fewest tiles of an operand that a pipelined loop keeps in shared memory,
    0 without one.
    warnings: sentences on matrix instructions that wait for each other or whose registers are
    rewritten too early. reuse: see `pending_writes`.
    loop: `inner_loop` as a dictionary, for sm_90; None for other targets and without one.
    """
    asm, metadata = compiled.asm, compiled.metadata
    text = asm.get("ptx") or asm["amdgcn"]
    counts = {unit: len(re.findall(pattern, text)) for unit, pattern in MATRIX.items()}
    unit = max(counts, key=lambda name: counts[name])
    tiles = re.findall(r"local_alloc.*memdesc<(\d+)x\d+x\d+x(?:b?f|i8)", asm["ttgir"])
    return {
        **(_of_ptx(asm, metadata) if "ptx" in asm else _of_amdgcn(text)),
        "shared": int(metadata.shared),
        "matrix": counts[unit],
        "unit": unit if counts[unit] else "",
        "buffers": min(map(int, tiles), default=0),
    }


def _of_ptx(asm: Mapping[str, Any], metadata: Any) -> dict[str, Any]:
    chip = re.search(r"\.target\s+(sm_(\d+)\w*)", asm["ptx"])
    if chip is None:
        raise RuntimeError("the PTX must name its target, got none; report it to Triton")
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(asm["ptx"], encoding="utf-8")
        assembler = "ptxas-blackwell" if int(chip[2]) >= 100 else "ptxas"
        log = _tool(assembler, "-v", f"--gpu-name={chip[1]}", ptx, "-o", cubin).stderr
        sass = _tool("nvdisasm", "-c", cubin).stdout if chip[2] == "90" else ""
    # C7510 and related warnings say that matrix instructions in a loop wait for each other.
    serialized = [line.strip() for line in log.splitlines() if "serialized" in line]
    written, reuse = pending_writes(sass)
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    blocks = blocks_per_sm(
        warps=metadata.num_warps, registers=registers, shared=int(metadata.shared)
    )
    loop = inner_loop(sass, warps=metadata.num_warps, blocks=blocks)
    return {
        "registers": registers,
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        "warnings": [*serialized, *written],
        "reuse": reuse,
        "loop": asdict(loop) if loop else None,
    }


def machine_code(compiled: Any) -> str:
    """Return a kernel's machine code for an NVIDIA GPU, as `nvdisasm -c` prints it."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        return _tool("nvdisasm", "-c", cubin).stdout


def _tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one of the NVIDIA tools that come with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)


def _of_amdgcn(text: str) -> dict[str, Any]:
    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    # A scalar register that doesn't fit goes to a lane of a vector register, not to memory.
    return {
        "registers": count("vgpr_count"),
        "spills": count("vgpr_spill_count"),
        "warnings": [],
        "reuse": None,
        "loop": None,
    }
