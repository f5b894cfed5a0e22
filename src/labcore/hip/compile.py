"""Compile every step for GPUs without having them, and check its resources against a table.

hipcc compiles for gfx90a with HIP's headers, clang 19 for gfx942 without any, and nvcc, if
installed, for NVIDIA. The compiler reports registers, spills, LDS and occupancy; matrix
instructions are counted in its assembly. `python -m labcore.hip --check TABLE` fails if a form
needs more than the committed table allows or than the target has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from labcore.checks import one_of
from labcore.hip.build import SOURCE, STEPS

__all__ = [
    "TARGETS",
    "Target",
    "beside_triton",
    "call",
    "compiler_of",
    "measure",
    "missing",
    "problems",
    "registers",
    "rows",
    "table_of",
]

KIB = 1024
SLACK = 1.05  # how far registers and LDS may exceed the committed table
# form -> target -> {"vgprs": …, "agprs": …, "sgprs": …, "spills": …, "lds": …, …}
Resources: TypeAlias = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A GPU to compile for.

    program, arguments: the compiler, and its arguments before the source's name.
    shared_limit: bytes of LDS (shared memory) that one block may use.
    install: how to install the compiler.
    gated: whether to enforce the table; CI has the compilers of these targets.
    """

    program: str
    arguments: tuple[str, ...]
    shared_limit: int
    install: str
    gated: bool = True


_COMMON = ("-O3", "-std=c++17")
_REPORT = "-Rpass-analysis=kernel-resource-usage"
_DEVICE = ("--cuda-device-only", "-S", _REPORT, *_COMMON)


def _nvidia(arch: str, shared_limit: int) -> Target:
    return Target(
        program="nvcc",
        arguments=(f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-x", "cu", *_COMMON),
        shared_limit=shared_limit,
        install="install NVIDIA's CUDA toolkit",
        gated=False,
    )


TARGETS: Mapping[str, Target] = {
    "gfx90a": Target(
        program="hipcc",
        arguments=("--offload-arch=gfx90a", *_DEVICE, "-Wno-unused-command-line-argument"),
        shared_limit=64 * KIB,
        install="on Debian or Ubuntu: apt install hipcc",
    ),
    "gfx942": Target(
        program="clang++-19",
        arguments=(
            *("-x", "hip", "--offload-arch=gfx942", "-nogpulib", "-nogpuinc", "-DNO_HIP_RUNTIME"),
            *_DEVICE,
        ),
        shared_limit=64 * KIB,
        install="on Debian or Ubuntu: apt install clang-19",
    ),
    "sm_80": _nvidia("sm_80", 163 * KIB),
    "sm_90": _nvidia("sm_90", 227 * KIB),
}


def call(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a compiler. HIP_PLATFORM keeps hipcc from compiling for NVIDIA if it finds nvcc."""
    environment = {**os.environ, "HIP_PLATFORM": "amd"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def missing(target: str) -> str | None:
    """Return None if this machine can compile for `target`, else a sentence on what's missing."""
    one_of("target", target, TARGETS)
    wanted = TARGETS[target]
    if shutil.which(wanted.program):
        return None
    return f"{target} is compiled by {wanted.program}, which is not here; {wanted.install}"


def compiler_of(target: str) -> str:
    """Return the version that `target`'s compiler reports, in one line."""
    said = call([TARGETS[target].program, "--version"]).stdout
    lines = re.findall(r"^(?:HIP version|.*clang version|.*release).*$", said, re.MULTILINE)
    return "; ".join(" ".join(line.split()) for line in lines)


def measure(targets: Sequence[str] | None = None, *, folder: Path = SOURCE) -> Resources:
    """Compile every step in `folder` for `targets` and return the resources of each form.

    targets: names in TARGETS; by default those with an installed compiler.
    The resources of a form on a target are:

    - vgprs, agprs: registers per lane; sgprs: registers per wave
    - spills: registers kept in memory; sgpr_spills: scalars kept in lanes of vector registers
    - scratch: bytes of memory per lane; lds: bytes per block
    - occupancy: waves per SIMD; mfma: matrix instructions; threads: the most that a block may have

    NVIDIA's compiler reports only vgprs, spills (in bytes), scratch and lds.
    Raises RuntimeError if a compiler is missing or a step doesn't compile.
    """
    chosen = list(targets) if targets is not None else [t for t in TARGETS if not missing(t)]
    for lacking in filter(None, map(missing, chosen)):
        raise RuntimeError(lacking)
    sources = sorted(folder.glob("step*.hip"))
    jobs = [
        (source, target)
        for source in sources
        for target in chosen
        # NVIDIA can't run the steps that use AMD's matrix cores.
        if TARGETS[target].program != "nvcc" or "_mfma_" not in source.read_text(encoding="utf-8")
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        results = list(pool.map(lambda job: _compile(*job), jobs))
    found: Resources = {}
    for (source, target), forms in zip(jobs, results, strict=True):
        for form, need in forms.items():
            found.setdefault(f"{source.stem}/{form}", {})[target] = need
    return found


def registers(need: Mapping[str, int]) -> int:
    """Return a lane's registers in the file that vector and accumulation registers share.

    need: the resources of one form and target, from `measure`. Accumulation registers start at a
    multiple of 4.
    """
    vgprs, agprs = need["vgprs"], need.get("agprs", 0)
    return -(-vgprs // 4) * 4 + agprs if agprs else vgprs


def problems(found: Resources, table: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each form that needs more than its target has or than `table` allows.

    table: the result of `table_of`. A new spill, the loss of all matrix instructions or more LDS
    than a block may use is always a problem. Growth of registers or LDS by more than 5 %, new
    scalar spills and lost occupancy count only with the table's compiler version, because other
    versions allocate differently. Targets that aren't gated are skipped.
    """
    allowed: Mapping[str, Any] = table.get("forms", {})
    wrong = [
        f"{form} on {target}: in the table and not compiled; rewrite the table with --write"
        for form, targets in allowed.items()
        for target in targets
        if TARGETS[target].gated and target not in found.get(form, {})
    ]
    same = {
        target: table.get("compilers", {}).get(target) == compiler_of(target)
        for target in {target for targets in found.values() for target in targets}
        if TARGETS[target].gated
    }
    for form, targets in found.items():
        for target, need in targets.items():
            if TARGETS[target].gated:
                where, bound = f"{form} on {target}", allowed.get(form, {}).get(target)
                wrong += [f"{where}: {what}" for what in _complaints(need, bound, target)]
                if bound is not None and same[target]:
                    wrong += [f"{where}: {what}" for what in _growth(need, bound)]
    return wrong


def _complaints(
    need: Mapping[str, int], bound: Mapping[str, int] | None, target: str
) -> Iterator[str]:
    limit = TARGETS[target].shared_limit
    if need["lds"] > limit:
        yield (
            f"{need['lds']} bytes of LDS, and a block may use {limit}; use a smaller tile or "
            "fewer stages"
        )
    if bound is None:
        yield "not in the table; rewrite it with --write"
        return
    for quantity in ("spills", "scratch"):
        if need[quantity] > bound[quantity]:
            yield f"{need[quantity]} {quantity}, and the table has {bound[quantity]}"
    if bound["mfma"] and not need["mfma"]:
        yield f"no matrix instruction, and the table has {bound['mfma']}"


def _growth(need: Mapping[str, int], bound: Mapping[str, int]) -> Iterator[str]:
    if registers(need) > SLACK * registers(bound):
        yield f"{registers(need)} registers, and the table has {registers(bound)}"
    if need["lds"] > SLACK * bound["lds"]:
        yield f"{need['lds']} bytes of LDS, and the table has {bound['lds']}"
    if need["sgpr_spills"] > bound["sgpr_spills"]:
        yield f"{need['sgpr_spills']} scalar spills, and the table has {bound['sgpr_spills']}"
    if need["occupancy"] < bound["occupancy"]:
        yield f"{need['occupancy']} waves on a SIMD, and the table has {bound['occupancy']}"


def table_of(found: Resources) -> dict[str, Any]:
    """Return the table for --write: {"compilers": target -> version, "forms": Resources}."""
    targets = [t for t in TARGETS if any(t in needs for needs in found.values())]
    return {"compilers": {target: compiler_of(target) for target in targets}, "forms": found}


def beside_triton(table: Mapping[str, Any], triton: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare our last step with the Triton forward kernel of the same dtype, D and mask.

    table: this module's table; triton: the table of `labcore.compile_only`. Each row has target,
    form (ours), kernel (Triton's), and pairs (ours, Triton's) for registers, spills, mfma and lds.
    """
    last = STEPS[max(STEPS)]
    result = []
    for kernel, targets in triton["kernels"].items():
        name, _, case = kernel.partition("/")
        dtype, _, rest = case.partition("-")
        # The names of Triton's cases mention a mask only if there is one.
        ours = f"{last}/bfloat16-{rest}{'' if 'causal' in rest else '-full'}"
        if (name, dtype) != ("forward_kernel", "bfloat16") or ours not in table["forms"]:
            continue
        for target in ("gfx90a", "gfx942"):
            need, theirs = table["forms"][ours].get(target), targets.get(target)
            if need and theirs:
                result.append(
                    {
                        "target": target,
                        "form": ours,
                        "kernel": kernel,
                        "registers": (registers(need), theirs["registers"]),
                        "spills": (need["spills"] + need["sgpr_spills"], theirs["spills"]),
                        "mfma": (need["mfma"], theirs["matrix"]),
                        "lds": (need["lds"], theirs["shared"]),
                    }
                )
    return result


def rows(found: Resources) -> Iterator[str]:
    """Yield the resources as lines of text, one per form and target."""
    width = max((len(form) for form in found), default=4)
    yield f"{'form':{width}}  target  VGPR AGPR SGPR spills mfma    LDS waves"
    for form, targets in found.items():
        for target, need in targets.items():
            figures = [need.get(name) for name in ("vgprs", "agprs", "sgprs", "spills", "mfma")]
            text = " ".join(f"{'-' if n is None else n:>4}" for n in figures)
            yield (
                f"{form:{width}}  {target:6} {text}   {need['lds']:6} "
                f"{need.get('occupancy', '-'):>5}"
            )


def _compile(source: Path, target: str) -> dict[str, dict[str, int]]:
    wanted = TARGETS[target]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command: list[str | Path] = [wanted.program, *wanted.arguments, f"-I{SOURCE}", source]
        done = call([*command, "-o", out])
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise RuntimeError(
                f"{source.name} must compile for {target}, got: {first or done.stderr[-500:]}; "
                f"run {' '.join(map(str, command))} -o /dev/null"
            )
        if wanted.program == "nvcc":
            found = _read_ptxas(done.stderr)
        else:
            found = _read_amd(done.stderr, out.read_text(encoding="utf-8"))
    if not found:
        raise RuntimeError(
            f"the report of {wanted.program} on {source.name} must name a kernel attention_…, got: "
            f"{done.stderr[:500]!r}; teach this module the compiler's new format"
        )
    return found


_SYMBOL = re.compile(
    r"attention_(?P<kernel>forward|split|combine)I(?P<dtype>f|DF16_|6__half|6BFloat)"
    r"Li(?P<dim>\d+)E(?:Lb(?P<mask>[01]))?"
)
_MASKS = {"0": "full", "1": "causal"}
_QUANTITIES = {
    "VGPRs": "vgprs",
    "AGPRs": "agprs",
    "SGPRs": "sgprs",
    "TotalSGPRs": "sgprs",  # the same number; clang's name for it since version 16
    "VGPRs Spill": "spills",
    "SGPRs Spill": "sgpr_spills",
    "ScratchSize": "scratch",
    "LDS Size": "lds",
    "Occupancy": "occupancy",
}


def _form(symbol: str) -> str | None:
    """Return a mangled kernel name's form, or None for other functions.

    It is "float16-d64-causal" or, for the kernels of decode, "float16-d64-split" and "…-combine".
    """
    named = _SYMBOL.search(symbol)
    if named is None:
        return None
    dtype = {"f": "float32", "6BFloat": "bfloat16"}.get(named["dtype"], "float16")
    return f"{dtype}-d{named['dim']}-{_MASKS.get(named['mask'], named['kernel'])}"


def _read_amd(report: str, assembly: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for block in report.split("Function Name: ")[1:]:
        symbol = block.split()[0]
        form = _form(symbol)
        if form is None:
            continue
        need = {
            _QUANTITIES[name]: int(value)
            for name, value in re.findall(r"remark: +([\w ]+?)(?: \[[^]]*\])?: (\d+)", block)
            if name in _QUANTITIES
        }
        body = assembly.split(f"\n{symbol}:", 1)[1].split("\n.Lfunc_end", 1)[0]
        need["mfma"] = len(re.findall(r"\bv_mfma_", body))
        described = assembly.split("amdhsa.kernels:", 1)[1]
        record = next(part for part in described.split("\n  - ") if f" {symbol}\n" in part)
        size = re.search(r"\.max_flat_workgroup_size: *(\d+)", record)
        if size:
            need["threads"] = int(size[1])
        wanted = dict.fromkeys((*_QUANTITIES.values(), "mfma", "threads"))
        _all_there(form, wanted, need)
        found[form] = {name: need[name] for name in wanted}
    return found


def _read_ptxas(report: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for block in report.split("Compiling entry function '")[1:]:
        form = _form(block.split("'")[0])
        if form is None:
            continue
        numbers = {
            "vgprs": r"Used (\d+) registers",
            "spills": r"(\d+) bytes spill stores",
            "scratch": r"(\d+) bytes stack frame",
            "lds": r"(\d+) bytes smem",
        }
        matches = {name: re.search(pattern, block) for name, pattern in numbers.items()}
        need = {name: int(hit[1]) for name, hit in matches.items() if hit}
        need.setdefault("lds", 0)  # ptxas doesn't mention LDS if there is none
        _all_there(form, numbers, need)
        found[form] = {name: need[name] for name in numbers}
    return found


def _all_there(form: str, wanted: Iterable[str], need: Mapping[str, int]) -> None:
    lacking = [name for name in wanted if name not in need]
    if lacking:
        raise RuntimeError(
            f"the compiler's report of {form} must give {', '.join(lacking)}, got none; teach "
            "this module the compiler's new format"
        )
