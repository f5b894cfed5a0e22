"""Compile every Triton kernel for GPUs this machine may not have, and check its resources.

A module that defines kernels registers the ones it launches. `python -m labcore.compile_only`
compiles them for each of `TARGETS`, in a process without Triton's interpreter, and prints
registers, spills, matrix instructions and shared memory. With `--check TABLE` it fails if a kernel
needs more than the committed table allows or the target has. `--write TABLE` rewrites the table.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "TARGETS",
    "Specialization",
    "Target",
    "launched_kernels",
    "measure",
    "problems",
    "register",
    "registered",
]

KIB = 1024
SLACK = 1.05  # allowed growth of registers and shared memory over the committed table


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A GPU to compile for. shared_limit: bytes of shared memory (LDS) that one block may use."""

    backend: str
    arch: int | str
    warp: int
    shared_limit: int


# No sm_75: Triton 3.7 emits no matrix instruction for it, so a T4 runs plain PyTorch.
TARGETS: Mapping[str, Target] = {
    "sm_80": Target(backend="cuda", arch=80, warp=32, shared_limit=163 * KIB),
    "sm_89": Target(backend="cuda", arch=89, warp=32, shared_limit=99 * KIB),
    "sm_90": Target(backend="cuda", arch=90, warp=32, shared_limit=227 * KIB),
    "gfx90a": Target(backend="hip", arch="gfx90a", warp=64, shared_limit=64 * KIB),
    "gfx942": Target(backend="hip", arch="gfx942", warp=64, shared_limit=64 * KIB),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Specialization:
    """One version of a kernel to compile."""

    kernel: Any  # the @triton.jit function
    case: str  # distinguishes this version from the kernel's other versions
    signature: Mapping[str, str]  # argument -> Triton type, without constexprs
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...]  # arguments divisible by 16; without them, loads stay scalar
    options: Mapping[str, int]  # num_warps, num_stages
    targets: tuple[str, ...]  # names in TARGETS to compile this version for

    @property
    def name(self) -> str:
        """The kernel and its case, such as "lion_kernel/float32"."""
        return f"{self.kernel.__name__}/{self.case}"


_REGISTRY: dict[tuple[str, tuple[str, ...]], Specialization] = {}
# kernel -> target -> {"registers": …, "spills": …, "matrix": …, "shared": …, "warnings": […]}
Resources: TypeAlias = dict[str, dict[str, dict[str, Any]]]


def register(
    kernel: Any,
    case: str,
    *,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    aligned: Sequence[str] = (),
    targets: Sequence[str] = tuple(TARGETS),
    **options: int,
) -> None:
    """Register one version of `kernel`, which `measure` compiles for each of `targets`.

    signature: argument -> Triton type ("*fp32", "i32") of every argument that is not a constexpr.
    If GPUs use different tiles, register the case several times, once per group of targets.
    Raises ValueError if signature and constexprs do not name exactly the kernel's arguments.
    """
    named = {*signature, *constexprs, *aligned}
    wanted = set(kernel.arg_names)
    if named != wanted:
        wrong = sorted(named ^ wanted)
        raise ValueError(
            f"{kernel.__name__}/{case}: signature and constexprs must name its arguments, "
            f"got a difference in {wrong}; put each argument in one of the two"
        )
    entry = Specialization(
        kernel=kernel,
        case=case,
        signature=dict(signature),
        constexprs=dict(constexprs),
        aligned=tuple(aligned),
        options=dict(options),
        targets=tuple(targets),
    )
    _REGISTRY[entry.name, entry.targets] = entry


def registered() -> list[Specialization]:
    """Import each module of the package that defines kernels and return all registered ones."""
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "\n@triton.jit" in path.read_text(encoding="utf-8"):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            importlib.import_module(f"labcore.{module}")
    return list(_REGISTRY.values())


def launched_kernels(root: Path | None = None) -> dict[str, str]:
    """Find the kernels that the source under `root` can launch, each with a file and line.

    A kernel counts as launched if the source contains `kernel[grid](...)`. A @triton.jit function
    that no other such function calls also counts, however its launch is written.
    """
    root = root or Path(__file__).parent
    defined: dict[str, str] = {}
    called: set[str] = set()
    subscripted: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _is_jit(node):
                defined[node.name] = f"{path.relative_to(root)}:{node.lineno}"
                called |= {
                    inner.func.id
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
                }
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = _last_name(node.func.value)
                subscripted.setdefault(name, f"{path.relative_to(root)}:{node.lineno}")
    entries = {name: place for name, place in defined.items() if name not in called}
    launches = {
        name: place
        for name, place in subscripted.items()
        if name in defined or name.endswith("_kernel")
    }
    return {**entries, **launches}


def measure(targets: Sequence[str] = tuple(TARGETS)) -> Resources:
    """Compile every registered kernel for `targets` in a fresh process and return what each needs.

    registers: per thread. spills: bytes (NVIDIA) or vector registers (AMD) that did not fit.
    matrix: number of matrix instructions. shared: bytes. Takes 1-8 s per kernel and target. Raises
    RuntimeError if a kernel does not compile.
    """
    # Set the flag to "0" explicitly: importing labcore turns it on when no GPU is visible.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "labcore.compile_only", "--here", *targets]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a kernel did not compile: {done.stderr.strip()[-2000:]}")
    found: Resources = json.loads(done.stdout)
    return found


def problems(found: Resources, table: Mapping[str, Any]) -> list[str]:
    """Describe every kernel that needs more than its target has or than `table` allows.

    table: {"triton": version, "kernels": Resources}. Any new spill is a problem. So is growth of
    registers or shared memory by more than 5%, which is compared only under the Triton version
    that wrote the table.
    """
    wrong = []
    compared = {"spills": 1.0}
    if table.get("triton") == _triton_version():
        compared |= {"registers": SLACK, "shared": SLACK}
    allowed: Mapping[str, Any] = table.get("kernels", {})
    for kernel, targets in found.items():
        for target, need in targets.items():
            where = f"{kernel} on {target}"
            limit = TARGETS[target].shared_limit
            if need["shared"] > limit:
                wrong.append(
                    f"{where}: {need['shared']} bytes of shared memory, but a block may use "
                    f"{limit}; use a smaller block or fewer stages"
                )
            for warning in need["warnings"]:
                wrong.append(f"{where}: the assembler warns: {warning}")
            bound = allowed.get(kernel, {}).get(target)
            if bound is None:
                wrong.append(f"{where}: not in the table; rewrite it with --write")
                continue
            if bound["matrix"] and not need["matrix"]:
                wrong.append(f"{where}: no matrix instruction, but the table has {bound['matrix']}")
            for quantity, slack in compared.items():
                if need[quantity] > slack * bound[quantity]:
                    wrong.append(
                        f"{where}: {need[quantity]} {quantity}, but the table has {bound[quantity]}"
                    )
    return wrong


def _is_jit(node: ast.FunctionDef) -> bool:
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if _last_name(target) == "jit":
            return True
    return False


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _triton_version() -> str:
    from importlib.metadata import version

    return version("triton")


def _compile(entry: Specialization, target: Target) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = entry.kernel.arg_names
    signature = {name: entry.signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in entry.constexprs.items()}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in entry.aligned}
    source = ASTSource(entry.kernel, signature, constexprs, divisible)
    device = GPUTarget(target.backend, target.arch, target.warp)
    compiled = triton.compile(source, target=device, options=dict(entry.options))
    read = _read_ptx if target.backend == "cuda" else _read_amdgcn
    return {**read(compiled.asm), "shared": int(compiled.metadata.shared)}


def _read_ptx(asm: Mapping[str, str]) -> dict[str, Any]:
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    arch = re.search(r"\.target\s+(\w+)", asm["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(asm["ptx"], encoding="utf-8")
        chip = f"--gpu-name={arch[1] if arch else ''}"
        command: list[str | Path] = [assembler, "-v", chip, path, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        "matrix": len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", asm["ptx"])),
        # C7510 and related warnings: matrix instructions in a loop wait for each other.
        "warnings": [line.strip() for line in log.splitlines() if "serialized" in line],
    }


def _read_amdgcn(asm: Mapping[str, str]) -> dict[str, Any]:
    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", asm["amdgcn"])
        return int(found[1]) if found else 0

    # A scalar register that doesn't fit goes to a lane of a vector register, not to memory.
    spills = count("vgpr_spill_count")
    matrix = len(re.findall(r"\bv_mfma_", asm["amdgcn"]))
    registers = count("vgpr_count")
    return {"registers": registers, "spills": spills, "matrix": matrix, "warnings": []}


def _rows(found: Resources) -> Iterator[str]:
    width = max((len(kernel) for kernel in found), default=6)
    yield f"{'kernel':{width}}  {'target':7} registers spills matrix  shared / limit"
    for kernel, targets in found.items():
        for target, need in targets.items():
            limit = TARGETS[target].shared_limit
            yield (
                f"{kernel:{width}}  {target:7} {need['registers']:9} {need['spills']:6} "
                f"{need['matrix']:6} {need['shared']:7} / {limit}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if all kernels compile and, with --check, stay within the table."""
    parser = argparse.ArgumentParser(prog="python -m labcore.compile_only", description=__doc__)
    parser.add_argument(
        "--check", type=Path, metavar="TABLE", help="fail if a kernel exceeds this table"
    )
    parser.add_argument("--write", type=Path, metavar="TABLE", help="rewrite this table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--here", nargs="+", choices=list(TARGETS), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    out = sys.stdout.write
    if chosen.here:
        entries = registered()
        result: Resources = {entry.name: {} for entry in entries}
        for target in chosen.here:
            for entry in entries:
                if target in entry.targets:
                    result[entry.name][target] = _compile(entry, TARGETS[target])
        out(json.dumps(result))
        return 0
    found = measure()
    out(json.dumps(found, indent=1) + "\n" if chosen.json else "\n".join(_rows(found)) + "\n")
    if chosen.write:
        table = {"triton": _triton_version(), "kernels": found}
        chosen.write.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if chosen.check is None:
        return 0
    known = {name.split("/")[0] for name in found}
    wrong = [
        f"{place}: {name} is launched but not registered; call compile_only.register next to it"
        for name, place in launched_kernels().items()
        if name not in known
    ]
    wrong += problems(found, json.loads(chosen.check.read_text(encoding="utf-8")))
    out("".join(f"{sentence}\n" for sentence in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    # Under -m this file is a second module, but kernels register with the imported one.
    from labcore import compile_only

    raise SystemExit(compile_only.main())
