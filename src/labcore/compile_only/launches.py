"""Which programs the package's kernels are launched as, found by calling its public functions.

A program is a kernel with its constants, its arguments' types, and which of them are known to be
multiples of 16. Calls run on small CPU tensors up to the launch, which Triton's own hook hands over
before anything is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import torch

from labcore import device
from labcore.attention import Pattern, flash_attention, flash_attention_varlen, paged_attention
from labcore.attention.configs import kind_for
from labcore.compile_only.targets import TARGETS
from labcore.optim import AdamW, AdamW8bit, Lion, elementwise
from labcore.optim.adamw8bit_optimizer import SMALLEST

__all__ = ["Program", "build", "launching", "programs"]

Call: TypeAlias = Callable[[], object]

FLAGS = {"LEFT": "window", "RIGHT": "causal"}  # other constants keep their names
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES |= {"i8": "int8", "fp8e4nv": "float8"}
HEADS, TOKENS, PAGE = 4, 64, 16
FLOAT32 = ("lse_ptr", "part_lse_ptr", "grad_lse_ptr", "delta_ptr", "k_scales_ptr", "v_scales_ptr")
TILE = ("N", "D_PAD", "BLOCK", "TILE")  # left out of names: the target and the rest decide them


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What Triton would compile for a launch: the arguments of its ASTSource, and options."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        """The kernel, then types and constants, such as "forward_kernel/bfloat16-d128-causal"."""
        names = self.kernel.arg_names
        told: Mapping[str, Any] = {names[at]: value for (at,), value in self.constants.items()}
        types = {name: kind[1:] for name, kind in self.signature.items() if kind[0] == "*"}
        main = types.get("q_ptr", types.get("out_ptr"))  # None for an optimizer's tables
        if "q_desc" in self.signature:
            main = self.signature["q_desc"].removeprefix("tensordesc<").partition("[")[0]
        parts = [DTYPES[main]] if main else []
        hidden = {*TILE, *(() if "PAGE" in told else ("M",))}
        for name, value in told.items():
            if value is None or value is False or name in hidden:
                continue
            word = FLAGS.get(name, name.lower())
            parts.append(word if value is True else f"{word}{getattr(value, 'name', value)}")
        parts += [
            f"{name.removesuffix('_ptr')}:{DTYPES[kind]}"
            for name, kind in types.items()
            if main and kind in DTYPES and kind != main and name not in FLOAT32
        ]
        if "grad_lse_ptr" in types:
            parts.append("grad_lse")
        if odd := [name for name in types if not self._divisible(name)]:
            parts.append(f"odd:{','.join(odd)}")
        strides = [name for name in self.signature if name.startswith("stride_")]
        if odd := [name[7:] for name in strides if not self._divisible(name)]:
            parts.append(f"odd:{','.join(odd)}")
        # On AMD's GPUs, Triton knows which tensors are under 2 GiB, and reads others differently.
        small = [name for name in types if self._knows(name, "tt.pointer_range")]
        if small and len(small) < len(types):
            parts.append(f"large:{','.join(name for name in types if name not in small)}")
        return f"{self.kernel.__name__}/{'-'.join(parts)}"

    def _knows(self, name: str, attribute: str) -> bool:
        at = self.kernel.arg_names.index(name)
        return any(known == attribute for known, _ in self.attributes.get((at,), ()))

    def _divisible(self, name: str) -> bool:
        """Return whether the program knows that an argument is a multiple of 16, or needn't."""
        at = self.kernel.arg_names.index(name)
        if (at,) in self.constants or self.kernel.params[at].do_not_specialize:
            return True
        return self._knows(name, "tt.divisibility")


def _attention(
    dtype: torch.dtype, head_dim: int, *, kv_heads: int = HEADS, loss: str = "out", **given: Any
) -> Call:
    def call() -> None:
        inputs = [
            torch.zeros(1, heads, TOKENS, head_dim, dtype=dtype, requires_grad=True)
            for heads in (HEADS, kv_heads, kv_heads)
        ]
        results = flash_attention(
            *inputs, enable_gqa=True, return_lse=True, backend="triton", **given
        )
        sum(result.sum() for result in results[: 1 if loss == "out" else 2]).backward()

    return call


def _packed(dtype: torch.dtype, head_dim: int, kv_heads: int, *, is_causal: bool) -> Call:
    def call() -> None:
        q, k = (
            torch.zeros(2 * TOKENS, heads, head_dim, dtype=dtype, requires_grad=True)
            for heads in (HEADS, kv_heads)
        )
        starts = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
        flash_attention_varlen(
            q, k, k, starts, starts, is_causal=is_causal, enable_gqa=True, backend="triton"
        ).sum().backward()

    return call


def _fused_backward(dtype: torch.dtype, head_dim: int, *, is_causal: bool) -> Call:
    def call() -> None:
        from labcore.attention.backward import flash_backward

        x = torch.zeros(1, HEADS, TOKENS, head_dim, dtype=dtype)
        lse = torch.zeros(1, HEADS, TOKENS)
        pattern = Pattern(scale=1.0, is_causal=is_causal)
        flash_backward(x, x, x, x, x, lse, pattern=pattern, fused=True)

    return call


def _paged(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    queries: int = 1,
    splits: int = 1,
    padded: bool = False,
    tree: bool = False,
    codes: torch.dtype | None = None,
    **given: Any,
) -> Call:
    def call() -> None:
        query = torch.zeros(2, 2 * group, queries, head_dim, dtype=dtype)
        pages = torch.zeros(9, PAGE, 2, head_dim, dtype=codes or dtype)
        scales: dict[str, Any] = {}
        if codes is not None:
            scales = dict.fromkeys(("key_scales", "value_scales"), torch.zeros(9, PAGE, 2))
        table = torch.zeros(2, 4, dtype=torch.int32)
        lengths = torch.full((2,), 4 * PAGE, dtype=torch.int32)
        counts = torch.full((2,), queries, dtype=torch.int32) if padded else None
        parents = torch.arange(-1, queries - 1, dtype=torch.int32).expand(2, -1) if tree else None
        paged_attention(
            query, pages, pages, table, lengths, counts=counts, tree=parents, splits=splits,
            backend="triton", **scales, **given,
        )  # fmt: skip

    return call


def _step(
    kind: type, dtype: torch.dtype, *, elements: int = TOKENS, offset: int = 0, **settings: Any
) -> Call:
    def call() -> None:
        parameter = torch.zeros(elements + offset, dtype=dtype)[offset:].requires_grad_()
        parameter.grad = torch.zeros_like(parameter)
        kind([parameter], lr=1e-3, fused=True, **settings).step()

    return call


def _large(call: Call) -> Call:
    """Return `call` with the limit of 2 GiB lowered, so that queries, keys and pages are over it.

    Smaller tensors, such as lse or a table of pages, stay under it.
    """

    def scaled() -> None:
        from triton.backends.amd.compiler import HIPBackend

        def within(tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage().nbytes() <= 1 << 14

        with mock.patch.object(HIPBackend, "is_within_2gb", within):
            call()

    return scaled


def _calls(*, float8: bool) -> Iterator[tuple[Call, bool]]:
    """Yield the calls, and whether the gate compiles their programs each time.

    float8: whether Triton compiles it for the target.
    """
    half, wide = torch.bfloat16, torch.float32
    causal: dict[str, Any] = {"is_causal": True}
    aligned = {**causal, "causal_alignment": "bottom_right"}
    window: dict[str, Any] = {"window": (TOKENS // 2, 0)}
    capped = {**window, "softcap": 30.0}
    tree: dict[str, Any] = {"tree": torch.arange(-1, TOKENS - 1, dtype=torch.int32)[None]}
    patterns: tuple[dict[str, Any], ...] = (
        {},
        causal,
        aligned,
        window,
        {"softcap": 30.0},
        capped,
        tree,
    )
    for head_dim in (64, 128):
        gated = head_dim == 128
        for given, kv_heads in itertools.product(patterns, (HEADS, 1)):
            often = gated and (given, kv_heads) in ((causal, 1), (capped, HEADS))
            yield _attention(half, head_dim, kv_heads=kv_heads, **given), often
        for is_causal, kv_heads in itertools.product((False, True), (HEADS, 1)):
            yield _packed(half, head_dim, kv_heads, is_causal=is_causal), False
        yield _attention(half, head_dim, loss="out and lse", **causal), False
        yield _attention(torch.float16, head_dim, **causal), False
        yield _attention(wide, head_dim), False
        yield _attention(wide, head_dim, **causal), not gated
    for head_dim in (80, 96, 192, 256):
        yield _attention(half, head_dim, **causal), False
    yield _attention(half, 256, **capped), False
    for head_dim, is_causal in itertools.product((64, 128), (False, True)):
        often = head_dim == 128 and not is_causal
        yield _fused_backward(half, head_dim, is_causal=is_causal), often

    for group in (1, 4, 8):
        yield _paged(half, 128, group), False
        yield _paged(half, 128, group, splits=4), group == 8
    yield _paged(half, 128, 4, splits=100), False
    yield _paged(half, 128, 4, queries=16, tree=True), False
    yield _paged(half, 128, 4, queries=16, tree=True, splits=4), False
    yield _paged(half, 128, 4, queries=4, padded=True, splits=4), False
    yield _paged(half, 64, 4, splits=4), False
    yield _paged(half, 64, 1, **window), False
    yield _paged(half, 256, 2, splits=4, **capped), False
    yield _paged(torch.float16, 128, 4, splits=4), False
    yield _paged(wide, 128, 4, splits=4), False
    for codes in (torch.int8, torch.float8_e4m3fn)[: 1 + float8]:
        yield _paged(half, 128, 8, splits=4, codes=codes), False
        yield _paged(half, 64, 4, splits=4, codes=codes), False

    for head_dim in (64, 128):
        yield _large(_attention(half, head_dim, **causal)), False
    yield _large(_paged(half, 64, 4, splits=4)), False
    yield _large(_paged(half, 128, 8)), False

    for kind in (Lion, AdamW):
        yield _step(kind, wide), kind is AdamW
        yield _step(kind, half, state_dtype=wide, stochastic_rounding=True), kind is Lion
        yield _step(kind, half, state_dtype=wide, master_weights=True), False
        yield _step(kind, half), False
        yield _step(kind, wide, capturable=True), False
        yield _step(kind, wide, maximize=True), False
        yield _step(kind, wide, offset=1), False
    eighth = functools.partial(_step, AdamW8bit, elements=SMALLEST)
    yield eighth(half, stochastic_rounding=True), True
    yield eighth(torch.float16, master_weights=True), False
    yield eighth(wide), False
    yield eighth(wide, block_size=1024), False


class _Driver:
    """Stands in for a GPU's driver: it only says what to compile for.

    Triton keeps what it knows of a target by the device's number, so each target has its own.
    """

    def __init__(self, target: Any, device: int) -> None:
        self._target, self._device = target, device

    def get_current_target(self) -> Any:
        """Return the target."""
        return self._target

    def get_current_device(self) -> int:
        """Return the device's number."""
        return self._device

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        """Return the default stream."""
        return 0


@contextlib.contextmanager
def launching(target: str) -> Iterator[dict[str, Program]]:
    """Collect what is launched, as on `target`, by name; nothing is compiled or runs.

    Raises RuntimeError if Triton's interpreter is on, or if one name stands for two programs.
    """
    if device.interpreting():
        raise RuntimeError(
            "launches are collected without Triton's interpreter, got a process with it; start "
            "Python with TRITON_INTERPRET=0"
        )
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from labcore.attention import backward, decode, forward, library, paged

    gpu = TARGETS[target]
    found: dict[str, Program] = {}

    def keep(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        every = json.loads(compile["specialization_data"])["options"]
        wanted = ("num_warps", "num_stages", "maxnreg")
        options = {name: every[name] for name in wanted if every.get(name) is not None}
        (attributes,) = compile["configs"]
        program = Program(
            kernel=fn.jit_function,
            signature=compile["signature"],
            constants=compile["constants"],
            attributes=attributes,
            options=options,
        )
        if found.setdefault(program.name, program) != program:
            raise RuntimeError(f"two programs are called {program.name}; tell their names apart")
        return True  # don't compile

    kind = kind_for(gpu.backend, gpu.major, gpu.shared_limit)
    gpu_target = GPUTarget(gpu.backend, gpu.arch, gpu.warp)
    driver.set_active(_Driver(gpu_target, list(TARGETS).index(target)))
    with contextlib.ExitStack() as stack:
        for module in (forward, backward, decode):
            stack.enter_context(mock.patch.object(module, "kind_of", return_value=kind))
        for module in (device, library, paged):
            stack.enter_context(mock.patch.object(module, "choose_backend", return_value="triton"))
        stack.enter_context(mock.patch.object(elementwise, "by_triton", return_value=True))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", keep))
        yield found


@functools.cache
def programs(target: str, *, gated: bool = False) -> dict[str, Program]:
    """Return the programs that the package launches on a target, by name.

    gated: only those that the gate compiles each time.
    """
    with launching(target) as found:
        for call, always in _calls(float8=TARGETS[target].float8):
            if always or not gated:
                call()
    return found


def build(program: Program, target: str) -> Any:
    """Compile a program as its launch on `target` would, and return Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = TARGETS[target]
    source = ASTSource(program.kernel, program.signature, program.constants, program.attributes)
    device = GPUTarget(gpu.backend, gpu.arch, gpu.warp)
    return triton.compile(source, target=device, options=dict(program.options))
