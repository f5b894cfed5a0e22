"""Build the steps for this machine's GPU, check them against PyTorch, and time them.

On an AMD CDNA GPU, hipcc builds all steps. On an NVIDIA GPU, nvcc builds the steps that don't use
AMD's matrix cores. `python -m labcore.hip` does all of this and writes records.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labcore.device import gpu_visible
from labcore.hip.build import SOURCE, STEPS, step_source
from labcore.hip.compile import call
from labcore.hip.emulate import DTYPES, HEAD_DIMS
from labcore.timing import Comparison, paired

__all__ = ["Case", "Step", "architecture", "build", "problem", "timed_cases", "times", "wrong"]

CDNA = ("gfx90a", "gfx94", "gfx95")
# Largest difference from fp64 on normal inputs, due to rounding the output and the fp16 weights.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}
LENGTHS = ((1, 1), (31, 63), (100, 129), (129, 31), (512, 512))  # queries, keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One attention problem; heads counts the heads of the whole batch."""

    dtype: torch.dtype
    dim: int
    is_causal: bool
    heads: int
    q_len: int
    k_len: int

    @property
    def name(self) -> str:
        """The form's name, as in the table of `compile`: "float16-d64-causal"."""
        mask = "causal" if self.is_causal else "full"
        return f"{str(self.dtype).removeprefix('torch.')}-d{self.dim}-{mask}"

    def inputs(self, device: torch.device, seed: int = 0) -> list[Tensor]:
        """Draw query [1, H, T, D], key and value [1, H, S, D] from a normal distribution."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, self.heads, n, self.dim) for n in (self.q_len, self.k_len, self.k_len)]
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        return [tensor.to(self.dtype).to(device) for tensor in drawn]


def architecture() -> str:
    """Return the GPU's name for its compiler, such as "gfx942" or "sm_90"."""
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def problem() -> str | None:
    """Return None if the steps can be built for this machine's GPU, else a sentence on why not."""
    if not gpu_visible():
        return (
            "no GPU: the steps need an AMD CDNA GPU (MI200, MI300) with PyTorch for ROCm, or, for "
            "some of the steps, an NVIDIA GPU, but PyTorch finds neither; use "
            "labcore.hip.emulate to run them on the CPU"
        )
    arch = architecture()
    if torch.version.hip and not arch.startswith(CDNA):
        return f"the steps need wavefronts of 64 lanes (AMD CDNA), but this GPU is {arch}"
    program = _program()
    if shutil.which(program) is None:
        return (
            f"building the steps for {arch} needs {program}, which is not on this machine's PATH; "
            f"{'install ROCm' if torch.version.hip else 'install the CUDA toolkit'} and try again"
        )
    return None


def _program() -> str:
    return "hipcc" if torch.version.hip else "nvcc"


class Step:
    """A step's library for a GPU. `Step(path)` loads a library built by `build`."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def block(self, dtype: torch.dtype, dim: int) -> tuple[int, int]:
        """Return the queries and threads per block."""
        queries, threads = ctypes.c_int(), ctypes.c_int()
        half = dtype == torch.float16
        self._library.attention_block(half, dim, ctypes.byref(queries), ctypes.byref(threads))
        return queries.value, threads.value

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run attention on the current stream; return out [B, H, T, D] and fp32 lse [B, H, T].

        query: [B, H, T, D]; key, value: [B, H, S, D]; contiguous, on the GPU, fp32 or fp16, D = 64
        or 128. is_causal: query i sees the keys up to i. Raises ValueError for other tensors, and
        RuntimeError with the runtime's error number if the launch fails.
        """
        keys = (*query.shape[:2], *key.shape[2:3], *query.shape[3:])
        if query.ndim != 4 or not key.shape == value.shape == keys:
            raise ValueError(
                "query must be [B, H, T, D], key and value [B, H, S, D], got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            fits = tensor.dtype in DTYPES and tensor.shape[-1] in HEAD_DIMS and tensor.numel()
            alike = tensor.dtype == query.dtype and tensor.is_cuda and tensor.is_contiguous()
            if not fits or not alike:
                raise ValueError(
                    f"{name} must be contiguous, on the GPU, fp32 or fp16 like query, with a head "
                    f"dimension of 64 or 128, got {tensor.dtype} of shape {tuple(tensor.shape)} "
                    f"on {tensor.device}"
                )
        batch, heads, q_len, dim = query.shape
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        queries, threads = self.block(query.dtype, dim)
        self.launch(
            f"attention_forward_{DTYPES[query.dtype]}_d{dim}_{'causal' if is_causal else 'full'}",
            grid=(math.ceil(q_len / queries), batch * heads),
            threads=threads,
            values=[
                *(ctypes.c_void_p(t.data_ptr()) for t in (query, key, value, out, lse)),
                *(ctypes.c_int(q_len), ctypes.c_int(key.shape[2]), ctypes.c_float(dim**-0.5)),
            ],
            stream=torch.cuda.current_stream().cuda_stream,
        )
        return out, lse

    def launch(
        self,
        name: str,
        *,
        grid: tuple[int, int],
        threads: int,
        values: Sequence[ctypes._SimpleCData[Any]],
        stream: int = 0,
    ) -> None:
        """Launch the ENTRY `name` with the kernel's arguments `values`.

        Raises RuntimeError with the runtime's error number if the launch fails.
        """
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        blocks, block = (ctypes.c_uint * 3)(*grid, 1), (ctypes.c_uint * 3)(threads, 1, 1)
        error = getattr(self._library, name)(blocks, block, pointers, ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"the GPU's runtime must accept the launch, got its error {error}")


def build(arch: str | None = None) -> Iterator[tuple[str, Step]]:
    """Yield the name and library of each step that `arch` (default: this machine's GPU) can run.

    Takes 5-20 s per step. Raises RuntimeError if a step doesn't compile, or if its library loads a
    second HIP runtime, which couldn't access memory allocated by the first.
    """
    arch = arch or architecture()
    amd = arch.startswith("gfx")
    flags = [f"--offload-arch={arch}", "-fPIC"] if amd else [f"-arch={arch}", "-Xcompiler=-fPIC"]
    language = [] if amd else ["-x", "cu"]
    for number, name in STEPS.items():
        if not amd and "_mfma_" in step_source(number).read_text(encoding="utf-8"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.so"
            command = ["hipcc" if amd else "nvcc", *flags, "-O3", "-std=c++17", "-shared"]
            command += [*language, f"-I{SOURCE}", str(step_source(number)), "-o", str(path)]
            done = call(command)
            if done.returncode:
                raise RuntimeError(f"{name} does not compile for {arch}: {done.stderr[-2000:]}")
            step = Step(path)
        runtimes = _hip_runtimes()
        if len(runtimes) > 1:
            raise RuntimeError(
                "PyTorch and hipcc must use the same HIP runtime, got "
                f"{' and '.join(sorted(runtimes))}; install the ROCm version that PyTorch was "
                "built for, or PyTorch for the installed ROCm"
            )
        yield name, step


def _hip_runtimes() -> set[str]:
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    return set(re.findall(r"/\S*libamdhip64\S*", text))


def wrong(step: Step, device: torch.device) -> list[str]:
    """Return a sentence for each form and length where `step` differs from PyTorch in fp64."""
    found: list[str] = []
    for dtype in DTYPES:
        for dim in HEAD_DIMS:
            for is_causal in (False, True):
                for q_len, k_len in LENGTHS:
                    case = Case(
                        dtype=dtype, dim=dim, is_causal=is_causal, heads=3, q_len=q_len, k_len=k_len
                    )
                    found += _differences(step, case, device)
    return found


def _differences(step: Step, case: Case, device: torch.device) -> Iterator[str]:
    query, key, value = case.inputs(device)
    out, lse = (
        tensor.double().cpu() for tensor in step(query, key, value, is_causal=case.is_causal)
    )
    q, k, v = (tensor.double().cpu() for tensor in (query, key, value))
    scores = q @ k.mT * case.dim**-0.5
    if case.is_causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -math.inf)
    right = scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)
    where = f"{case.name} with {case.q_len} queries and {case.k_len} keys"
    for name, ours, theirs in (("out", out, right), ("lse", lse, scores.logsumexp(-1))):
        gap = float((ours - theirs).abs().max())
        if not gap <= TOLERANCES[case.dtype]:
            yield (
                f"{where}: {name} must be within {TOLERANCES[case.dtype]:g} of PyTorch's in fp64, "
                f"got a difference of {gap:.3g}"
            )


def timed_cases() -> list[Case]:
    """Return the cases to time: fp16, 32 heads with 4096 queries and keys."""
    return [
        Case(dtype=torch.float16, dim=dim, is_causal=mask, heads=32, q_len=4096, k_len=4096)
        for dim in HEAD_DIMS
        for mask in (False, True)
    ]


def times(
    steps: Mapping[str, Step], case: Case, device: torch.device, *, rounds: int = 20
) -> Comparison:
    """Time every step and PyTorch's attention ("torch"), interleaved in the same rounds."""
    query, key, value = case.inputs(device)

    def of(step: Step) -> Callable[[], object]:
        return lambda: step(query, key, value, is_causal=case.is_causal)

    calls = {name: of(step) for name, step in steps.items()}
    calls["torch"] = lambda: scaled_dot_product_attention(
        query, key, value, is_causal=case.is_causal
    )
    return paired(calls, rounds=rounds, device=device)
