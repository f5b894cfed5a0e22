"""Build the steps for this machine's GPU, check them against PyTorch, and time them.

On an AMD CDNA GPU, hipcc builds all steps. On an NVIDIA GPU, nvcc builds the steps that don't use
AMD's matrix cores. `python -m labcore.hip` does all of this and writes records.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labcore.device import gpu_visible
from labcore.hip.build import DECODE, SOURCE, STEPS, step_source
from labcore.hip.compile import call
from labcore.hip.decode import check_decode, launches
from labcore.hip.emulate import DTYPES, HEAD_DIMS
from labcore.timing import Comparison, paired

__all__ = [
    "Case",
    "Decoder",
    "Library",
    "Step",
    "architecture",
    "build",
    "build_decoder",
    "problem",
    "timed_cases",
    "times",
    "wrong",
    "wrong_decoder",
]

CDNA = ("gfx90a", "gfx94", "gfx95")
# Largest difference from fp64 on normal inputs, due to rounding the output and 16-bit weights.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
PIECE = 256  # keys that a block of the decode step gets at least, by default
LENGTHS = ((1, 1), (31, 63), (100, 129), (129, 31), (512, 512))  # queries, keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One attention problem; heads counts the query heads of the whole batch.

    group: query heads that share a key head.
    """

    dtype: torch.dtype
    dim: int
    is_causal: bool
    heads: int
    q_len: int
    k_len: int
    group: int = 1

    @property
    def name(self) -> str:
        """The form's name, as in the table of `compile`: "float16-d64-causal"."""
        mask = "causal" if self.is_causal else "full"
        return f"{str(self.dtype).removeprefix('torch.')}-d{self.dim}-{mask}"

    def inputs(self, device: torch.device, seed: int = 0) -> list[Tensor]:
        """Draw query [1, H, T, D], key and value [1, Hkv, S, D] from a normal distribution."""
        generator = torch.Generator().manual_seed(seed)
        keys = (1, self.heads // self.group, self.k_len, self.dim)
        shapes = [(1, self.heads, self.q_len, self.dim), keys, keys]
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


class Library:
    """Kernels built for a GPU."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def block(self, dtype: torch.dtype, dim: int) -> tuple[int, int]:
        """Return the queries and threads per block."""
        queries, threads = ctypes.c_int(), ctypes.c_int()
        half = dtype.itemsize == 2
        self._library.attention_block(half, dim, ctypes.byref(queries), ctypes.byref(threads))
        return queries.value, threads.value

    def launch(
        self,
        name: str,
        *,
        grid: Sequence[int],
        threads: int,
        values: Iterable[Tensor | int | float],
        stream: int = 0,
    ) -> None:
        """Launch the ENTRY `name` with the kernel's arguments `values`.

        Raises RuntimeError with the runtime's error number if the launch fails.
        """
        plain = [_argument(value) for value in values]
        pointers = (ctypes.c_void_p * len(plain))(*map(ctypes.addressof, plain))
        blocks = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
        block = (ctypes.c_uint * 3)(threads, 1, 1)
        error = getattr(self._library, name)(blocks, block, pointers, ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"the GPU's runtime must accept the launch, got its error {error}")


class Step(Library):
    """A step of the forward pass for a GPU."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the step takes."""
        return tuple(
            dtype
            for dtype, name in DTYPES.items()
            if hasattr(self._library, f"attention_forward_{name}_d64_full")
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run attention on the current stream; return out [B, H, T, D] and fp32 lse [B, H, T].

        query: [B, H, T, D]; key, value: [B, Hkv, S, D], where Hkv divides H; contiguous, on the
        GPU, one of `dtypes`, D = 64 or 128. is_causal: query i sees the keys up to i. Raises
        ValueError for other tensors, and RuntimeError with the runtime's error number if the launch
        fails.
        """
        keys = (*query.shape[:1], *key.shape[1:3], *query.shape[3:])
        alike = query.ndim == 4 and key.shape == value.shape == keys
        if not alike or query.shape[1] % (key.shape[1] or 1):
            raise ValueError(
                "query must be [B, H, T, D], key and value [B, Hkv, S, D], where Hkv divides H, "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            fits = tensor.dtype in self.dtypes and tensor.shape[-1] in HEAD_DIMS and tensor.numel()
            alike = tensor.dtype == query.dtype and tensor.is_cuda and tensor.is_contiguous()
            if not fits or not alike:
                raise ValueError(
                    f"{name} must be contiguous, on the GPU, with query's dtype, one of "
                    f"{self.dtypes}, and a head dimension of 64 or 128, got {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)} on {tensor.device}"
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
                *(query, key, value, out, lse),
                *(q_len, key.shape[2], heads // key.shape[1], dim**-0.5),
            ],
            stream=torch.cuda.current_stream().cuda_stream,
        )
        return out, lse


class Decoder(Library):
    """The decode step for a GPU."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        *,
        splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decode on the current stream; return out [B, H, D] and fp32 lse [B, H].

        The arguments are those of `labcore.hip.decode.decode`, on the GPU. splits: by default as
        many as give each compute unit two blocks, but at least PIECE keys each.
        """
        check_decode(query, key, value, lengths)
        if not query.is_cuda:
            raise ValueError(f"query must be on the GPU, got {query.device}")
        block = self.block(query.dtype, query.shape[-1])
        if splits is None:
            tiles = key.shape[1] * math.ceil(query.shape[1] / (key.shape[1] or 1) / block[0])
            units = torch.cuda.get_device_properties(query.device).multi_processor_count
            wanted = 2 * units // max(1, tiles * len(query))
            splits = max(1, min(wanted, key.shape[2] // PIECE))
        out, lse, planned = launches(
            query, key, value, lengths, splits=splits, scale=None, block=block
        )
        for launch in planned:
            self.launch(
                launch.name,
                grid=launch.grid,
                threads=launch.threads,
                values=launch.arguments.values(),
                stream=torch.cuda.current_stream().cuda_stream,
            )
        return out, lse


def _argument(value: Tensor | int | float) -> ctypes._SimpleCData[Any]:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


def build(arch: str | None = None) -> Iterator[tuple[str, Step]]:
    """Yield the name and library of each step that `arch` (default: this machine's GPU) can run.

    Takes 5-20 s per step. Raises RuntimeError if a step doesn't compile, or if its library loads a
    second HIP runtime, which couldn't access memory allocated by the first.
    """
    arch = arch or architecture()
    for number, name in STEPS.items():
        source = step_source(number)
        if arch.startswith("gfx") or "_mfma_" not in source.read_text(encoding="utf-8"):
            yield name, _built(source, arch, Step)


def build_decoder(arch: str | None = None) -> Decoder | None:
    """Return the decode step built like `build`'s, or None for a GPU without its instructions."""
    arch = arch or architecture()
    return _built(DECODE, arch, Decoder) if arch.startswith("gfx") else None


Kind = TypeVar("Kind", bound=Library)


def _built(source: Path, arch: str, kind: Callable[[Path], Kind]) -> Kind:
    amd, name = arch.startswith("gfx"), source.stem
    flags = [f"--offload-arch={arch}", "-fPIC"] if amd else [f"-arch={arch}", "-Xcompiler=-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.so"
        command = ["hipcc" if amd else "nvcc", *flags, "-O3", "-std=c++17", "-shared"]
        command += [] if amd else ["-x", "cu"]
        done = call([*command, f"-I{SOURCE}", str(source), "-o", str(path)])
        if done.returncode:
            raise RuntimeError(f"{name} does not compile for {arch}: {done.stderr[-2000:]}")
        library = kind(path)
    runtimes = _hip_runtimes()
    if len(runtimes) > 1:
        raise RuntimeError(
            "PyTorch and hipcc must use the same HIP runtime, got "
            f"{' and '.join(sorted(runtimes))}; install the ROCm version that PyTorch was "
            "built for, or PyTorch for the installed ROCm"
        )
    return library


def _hip_runtimes() -> set[str]:
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    return set(re.findall(r"/\S*libamdhip64\S*", text))


def wrong(step: Step, device: torch.device) -> list[str]:
    """Return a sentence for each form and length where `step` differs from PyTorch in fp64."""
    found: list[str] = []
    for dtype, dim, is_causal in itertools.product(step.dtypes, HEAD_DIMS, (False, True)):
        for q_len, k_len in LENGTHS:
            sizes = {"heads": 6, "group": 3, "q_len": q_len, "k_len": k_len}
            case = Case(dtype=dtype, dim=dim, is_causal=is_causal, **sizes)
            found += _differences(step, case, device)
    return found


def wrong_decoder(decoder: Decoder, device: torch.device) -> list[str]:
    """Return a sentence for each form and group where `decoder` differs from PyTorch in fp64."""
    found: list[str] = []
    lengths = torch.tensor([300, 0, 1, 129], dtype=torch.int32)
    for dtype, dim in itertools.product((torch.float16, torch.bfloat16), HEAD_DIMS):
        for group, splits in ((1, None), (8, 3), (20, 1)):
            generator = torch.Generator().manual_seed(group)
            shapes = (4, 2 * group, dim), (4, 2, 300, dim), (4, 2, 300, dim)
            drawn = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
            on_device = (x.to(device) for x in (*drawn, lengths))
            got = [x.double().cpu() for x in decoder(*on_device, splits=splits)]
            query, key, value = (x.double() for x in drawn)
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
            unseen = torch.arange(300) >= lengths[:, None, None]
            scores = (key @ query[..., None])[..., 0] * dim**-0.5
            scores = scores.masked_fill(unseen, -math.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)  # a sequence without keys
            right = (weights[:, :, None] @ value)[:, :, 0], scores.logsumexp(-1)
            where = f"{str(dtype).removeprefix('torch.')}-d{dim} with {group} heads per key head"
            found += _gaps(where, got, right, TOLERANCES[dtype])
    return found


def _differences(step: Step, case: Case, device: torch.device) -> Iterator[str]:
    query, key, value = case.inputs(device)
    out, lse = (
        tensor.double().cpu() for tensor in step(query, key, value, is_causal=case.is_causal)
    )
    q, k, v = (tensor.double().cpu() for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(case.group, dim=1) for tensor in (k, v))
    scores = q @ k.mT * case.dim**-0.5
    if case.is_causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -math.inf)
    right = scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)
    where = f"{case.name} with {case.q_len} queries and {case.k_len} keys"
    yield from _gaps(where, (out, lse), (right, scores.logsumexp(-1)), TOLERANCES[case.dtype])


def _gaps(
    where: str, got: Sequence[Tensor], right: Sequence[Tensor], bound: float
) -> Iterator[str]:
    for name, ours, theirs in zip(("out", "lse"), got, right, strict=True):
        gap = float((ours - theirs).masked_fill(ours == theirs, 0.0).abs().max())  # -inf - -inf
        if not gap <= bound:
            yield (
                f"{where}: {name} must be within {bound:g} of PyTorch's in fp64, got a difference "
                f"of {gap:.3g}"
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
