"""Attention against SDPA, FlexAttention and the naive form; decoding against a copy.

On a GPU the cases measure the rates and memory of the Triton kernels. On a CPU the same functions
run in plain PyTorch: the cases whose names begin with "cpu" time it and count its memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.runner import Measurement, case, exact, seen
from labcore.attention import Pattern, flash_attention, paged_attention, quantize_kv, traffic
from labcore.attention.configs import DESCRIBED, FORWARD, KEYS, QUERIES
from labcore.attention.reference import masked_scores
from labcore.attention.traffic import Shape
from labcore.compile_only import TARGETS
from labcore.compile_only.tiles import measure_tiles, measure_timeline
from labcore.device import Backend, default_device, hardware
from labcore.timing import Comparison, paired

Call = Callable[[], Any]
OURS, FLASH, NAIVE = "labcore", "SDPA FLASH", "naive"
WHOLE = "SDPA, whole rows"
GEMM, ROUNDS, INNER = 8192, 9, 10  # INNER calls between two events: the queue hides launch costs
# Target speedup over SDPA FLASH for 4k tokens or more: (direction, D, causal).
BARS = {
    ("forward", 64, False): 1.25,
    ("forward", 64, True): 1.25,
    ("forward", 128, False): 1.25,
    ("forward", 128, True): 1.2,
    ("backward", 64, False): 1.05,
    ("backward", 128, False): 1.05,
}
NAIVE_TILE = 128  # rows and columns of a tile of the naive form's matrix products
CPU_HEADS = 2
FORMS: tuple[traffic.Form, ...] = ("naive", "flash")
DIRECTIONS: tuple[traffic.Direction, ...] = ("forward", "backward")
# A decode step's sequences, query heads, key heads, D, keys, keys per page.
DECODE = {
    "batch-32": (32, 32, 8, 128, 8192, 16),
    "batch-4": (4, 32, 8, 128, 32_768, 16),
    "batch-1": (1, 32, 8, 128, 131_072, 16),
}
RESOURCES = Path(__file__).resolve().parent.parent / "tests" / "kernel_resources.json"
KERNELS = ("forward_", "described_", "delta_", "dkdv_", "dq_", "decode_", "reduce_")
PARITY_HEADS = 4
BACKENDS: tuple[Backend, ...] = ("auto", "torch")
# Of each kernel, what the chapter draws.
SHOWN = (
    *("bfloat16-d64", "bfloat16-d128-causal", "bfloat16-d128-window-causal-softcap"),
    "float32-d64-causal",
)


GRID: dict[str, tuple[Any, ...]] = {  # tiles of the forward kernel to compile
    "target": ("sm_80", "sm_90"),
    "head_dim": (64, 128),
    "rows": (64, 128, 256),
    "columns": (32, 64, 128),
    "stages": (2, 3),
    "warps": (4, 8),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    # On a GPU, as in the papers: 16k tokens and a width of 2048 at every length.
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384)
    tokens: int = 16_384
    width: int = 2048
    flex_lengths: tuple[int, ...] = (1024, 4096, 16_384)  # each is compiled separately
    cpu_lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    cpu_rounds: int = 5
    cpu_gemm: int = 1024
    parity_length: int = 333
    cpu_decode: tuple[int, int, int, int, int, int] = (8, 8, 4, 64, 2048, 16)  # like DECODE's
    every_tile: bool = True  # of GRID, or only the first


FULL = Sizes()
SMALL = Sizes(
    lengths=(64, 128), tokens=128, width=128, flex_lengths=(), cpu_lengths=(64, 128),
    cpu_rounds=3, cpu_gemm=64, parity_length=19, cpu_decode=(2, 4, 2, 16, 64, 16),
    every_tile=False,
)  # fmt: skip


def naive(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Compute attention naively by three operations, with all scores in the inputs' dtype."""
    scores = (query @ key.mT).mul_(query.shape[-1] ** -0.5)
    if is_causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill_(unseen, -torch.inf)
    scores = torch.softmax(scores, dim=-1)  # now the weights; reusing the name frees the scores
    return scores @ value


def pinned(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
) -> Tensor:
    """Run torch's attention with a fixed backend; its default choice changes between versions."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def flex(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """Return FlexAttention compiled for one shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # otherwise the eighth shape would not be compiled
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if shape.is_causal:
        mask = create_block_mask(
            lambda b, h, q, k: q >= k,  # noqa: ARG005
            None,
            None,
            shape.length,
            shape.keys,
            device=device.type,
        )

    def run(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:  # noqa: ARG001
        return compiled(query, key, value, block_mask=mask)

    return run


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return query, key and value as views of one [B, T, 3, H, D], like a fused projection's."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.length, 3, shape.heads, shape.head_dim)
    fused = torch.randn(size, generator=generator, device=device, dtype=dtype)
    return [x.transpose(1, 2).requires_grad_() for x in fused.unbind(2)]


def forwards(
    shape: Shape, tensors: list[Tensor], flex_lengths: Sequence[int] = ()
) -> dict[str, Call]:
    """Return a forward call of every implementation on the same query, key and value."""
    (query, key, value), causal = tensors, shape.is_causal
    every: dict[str, Any] = {
        OURS: flash_attention,
        FLASH: functools.partial(pinned, SDPBackend.FLASH_ATTENTION),
        NAIVE: naive,
    }
    if query.is_cuda:
        every["SDPA CUDNN"] = functools.partial(pinned, SDPBackend.CUDNN_ATTENTION)
        if shape.length in flex_lengths:
            every["FlexAttention"] = flex(shape, query.device)
        if 2 * traffic.forward_peak_bytes(shape, "naive") > torch.cuda.mem_get_info()[0]:
            del every[NAIVE]
    return {
        name: functools.partial(function, query, key, value, is_causal=causal)
        for name, function in every.items()
    }


def gradients(calls: Mapping[str, Call], tensors: list[Tensor]) -> dict[str, Call]:
    """Return calls for the gradients of query, key and value, from one gradient of the output."""
    given = torch.ones_like(tensors[0]) + tensors[0].detach()
    return {
        name: functools.partial(torch.autograd.grad, call(), tensors, given, retain_graph=True)
        for name, call in calls.items()
    }


def without_gradients(call: Call) -> Call:
    """Return `call` without gradients, as in inference."""

    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def that_run(calls: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the calls that this machine can run, and the first line of the others' errors."""
    able, left_out = {}, {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            if name in (OURS, FLASH, NAIVE):
                raise
            left_out[name] = str(error).splitlines()[0][:200]
        else:
            able[name] = call
    return able, left_out


def refuse_wrong(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return every implementation's largest error against float32, including gradients.

    Raises RuntimeError if ours is too large to be timed.
    """
    small = replace(shape, batch=1, heads=2, length=min(512, shape.length))
    tensors = inputs(small, device, dtype)
    calls, _ = that_run(forwards(small, tensors))
    wide = [x.detach().float().requires_grad_() for x in tensors]
    right = {NAIVE: functools.partial(naive, *wide, is_causal=small.is_causal)}
    given = [right[NAIVE]().detach(), *gradients(right, wide)[NAIVE]()]
    errors = {}
    for name, call in gradients(calls, tensors).items():
        pairs = zip([calls[name]().detach(), *call()], given, strict=True)
        errors[name] = float(torch.stack([(x.float() - y).abs().max() for x, y in pairs]).max())
    if not errors[OURS] <= 3 * max(errors[FLASH], errors[NAIVE]) + 1e-5:
        raise RuntimeError(
            f"labcore's error must be at most three times the largest peer's, got {errors}"
        )
    return errors


def parity_forms() -> Iterator[tuple[str, torch.dtype, int, int, dict[str, Any]]]:
    """Yield what `parity` compares: a name, dtype, head dimension, key heads and a pattern."""
    half = torch.bfloat16
    patterns: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"is_causal": True},
        "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
        "window": {"window": (60, 0)},
        "two-sided": {"window": (60, 60)},
        "softcap": {"softcap": 5.0},
        "window, softcap": {"window": (60, 0), "softcap": 5.0},
    }
    for head_dim, (name, pattern) in itertools.product((64, 128), patterns.items()):
        yield name, half, head_dim, PARITY_HEADS, pattern
    for head_dim in (64, 128):
        yield "causal, grouped", half, head_dim, 1, patterns["causal"]
        for dtype in (torch.float16, torch.float32):
            yield "causal", dtype, head_dim, PARITY_HEADS, patterns["causal"]
    for head_dim in (80, 256):
        yield "causal", half, head_dim, PARITY_HEADS, patterns["causal"]


def in_the_dtype(query: Tensor, key: Tensor, value: Tensor, *, pattern: Pattern) -> Tensor:
    """Compute attention with weights of the inputs' dtype, as plain PyTorch would."""
    weights = torch.softmax(masked_scores(query, key, pattern=pattern), dim=-1)
    return weights.to(value.dtype) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def result_and_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], grad_out: Tensor
) -> list[Tensor]:
    """Return the result of `function` and the gradients of `tensors`, in float64."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    grads = torch.autograd.grad(out, tensors, grad_out.to(out.dtype))
    return [x.detach().double() for x in (out, *grads)]


@case("parity/attention", minutes=2.0, needs="gpu")
def parity(sizes: Sizes = FULL) -> list[Measurement]:
    """Compare results and gradients of each form with float64, beside plain PyTorch's error.

    Raises RuntimeError with the forms whose error is over twice that of plain PyTorch.
    """
    device, length = default_device(), sizes.parity_length
    ratios: dict[str, float] = {}
    for name, dtype, head_dim, kv_heads, given in parity_forms():
        generator = torch.Generator(device).manual_seed(len(ratios))
        query, key, value, grad_out = (
            torch.randn(2, tokens, heads, head_dim, generator=generator, device=device)
            .to(dtype)
            .transpose(1, 2)
            for tokens, heads in (
                *((length, PARITY_HEADS), (length + 50, kv_heads)),
                *((length + 50, kv_heads), (length, PARITY_HEADS)),
            )
        )
        ours = functools.partial(flash_attention, enable_gqa=True, **given)
        placed = {name: value for name, value in given.items() if name != "causal_alignment"}
        pattern = Pattern(scale=head_dim**-0.5, bottom_right="causal_alignment" in given, **placed)

        plain = functools.partial(in_the_dtype, pattern=pattern)
        tensors = [query, key, value]
        right = result_and_gradients(plain, [x.double() for x in tensors], grad_out)
        errors = [
            max(float((x - y).abs().max()) for x, y in zip(found, right, strict=True))
            for found in (
                result_and_gradients(ours, tensors, grad_out),
                result_and_gradients(plain, tensors, grad_out),
            )
        ]
        ratios[f"{name}, D {head_dim}, {str(dtype)[6:]}"] = errors[0] / errors[1]
    return [held_to_plain(ratios, length=length)]


def held_to_plain(ratios: dict[str, float], **details: Any) -> Measurement:
    """Return each form's error over plain PyTorch's. Raises RuntimeError for one over 2."""
    wrong = {form: ratio for form, ratio in ratios.items() if not ratio <= 2}
    if wrong:
        raise RuntimeError(
            f"an error must be at most twice that of plain PyTorch, got its multiples {wrong}"
        )
    title = "largest error over plain PyTorch's"
    return seen(title, "ratio", ratios.values(), forms=ratios, **details)


@case("parity/decode", minutes=0.5, needs="gpu")
def parity_decode(sizes: Sizes = FULL) -> list[Measurement]:
    """Compare paged attention with float64 over the same numbers, beside plain PyTorch's error.

    Raises RuntimeError with the forms whose error is over twice that of plain PyTorch.
    """
    device, length, page, queries = default_device(), sizes.parity_length, 16, 4
    pages = -(-length // page)
    table = torch.randperm(2 * pages, device=device).view(2, pages).int()
    lengths = torch.tensor([length, length // 2], dtype=torch.int32, device=device)
    tree = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32, device=device)
    half, codes = torch.bfloat16, [torch.int8, torch.float8_e4m3fn]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        codes.pop()
    forms: list[tuple[str, torch.dtype, torch.dtype, dict[str, Any]]] = [
        *((f"{n} splits", half, half, {"splits": n}) for n in (1, 7)),
        ("window, softcap", half, half, {"window": (60, 0), "softcap": 5.0}),
        ("tree", half, half, {"tree": tree}),
        *(("plain", dtype, dtype, {}) for dtype in (torch.float16, torch.float32)),
        *((f"codes, {n} splits", half, code, {"splits": n}) for code in codes for n in (1, 7)),
    ]
    ratios: dict[str, float] = {}
    for head_dim, (name, dtype, stored, given) in itertools.product((64, 128), forms):
        generator = torch.Generator(device).manual_seed(len(ratios))
        draw = functools.partial(torch.randn, generator=generator, device=device)
        query = draw(2, 2 * PARITY_HEADS, queries, head_dim).to(dtype)
        keys_values = [draw(2 * pages, page, 2, head_dim).to(dtype) for _ in range(2)]
        (keys, values), scales = keys_values, dict[str, Any]()
        meant = [x.double() for x in keys_values]
        if stored != dtype:
            (keys, key_scales), (values, value_scales) = (
                quantize_kv(x, stored) for x in keys_values
            )
            scales = {"key_scales": key_scales, "value_scales": value_scales}
            meant[0] = keys.double() * key_scales.double()[..., None]
            meant[1] = values.double() * value_scales.double()[..., None]
        right = paged_attention(
            query.double(), meant[0], meant[1], table, lengths, backend="torch", **given
        )
        ours, plain = (
            paged_attention(query, keys, values, table, lengths, backend=backend, **scales, **given)
            for backend in BACKENDS
        )
        errors = [float((found.double() - right).abs().max()) for found in (ours, plain)]
        of = f"{name}, D {head_dim}, {str(stored)[6:]}"
        ratios[of] = errors[0] / errors[1]
    return [held_to_plain(ratios, length=length)]


def repeated(call: Call, times: int) -> Call:
    """Return a function that calls `call` `times` times."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def rates(comparison: Comparison, name: str, work: float) -> list[float]:
    """Return GFLOP/s, round by round."""
    return [work / seconds / 1e9 for seconds in comparison.timings[name].samples]


def predicted(shape: Shape, direction: traffic.Direction, gpu: traffic.Gpu) -> list[float]:
    """Return the lowest and the highest GFLOP/s that the compiled loops of 16-bit kernels allow.

    gpu: one of Hopper's. The two follow from `Loop.clocks`, at the boost clock; the ends of loops
    and masked tiles cost nothing here.
    """
    table = json.loads(RESOURCES.read_text(encoding="utf-8"))["kernels"]
    form = f"bfloat16-d{shape.head_dim}" + "-causal" * shape.is_causal
    tiles = {"described": DESCRIBED[shape.head_dim]}
    if direction == "backward":
        tiles = {"dkdv": KEYS[shape.head_dim]["hopper"], "dq": QUERIES[shape.head_dim]["hopper"]}
    seconds = [0.0, 0.0]
    for kernel, tile in tiles.items():
        loop = table[f"{kernel}_kernel/{form}"]["sm_90"]["loop"]
        walks = shape.batch * shape.heads * traffic.live_tiles(shape, tile.m, tile.n)
        for n, clocks in enumerate(loop["clocks"]):
            seconds[n] += walks / loop["blocks"] / gpu.units * clocks / gpu.clock
    return [traffic.flops(shape, direction) / time / 1e9 for time in sorted(seconds, reverse=True)]


def race(
    direction: traffic.Direction,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
) -> list[Measurement]:
    """Time every implementation and a GEMM in the same rounds; refuse to time wrong results."""
    gpu = device.type == "cuda"
    errors = refuse_wrong(shape, device, dtype)
    tensors = inputs(shape, device, dtype)
    calls, left_out = that_run(forwards(shape, tensors, sizes.flex_lengths))
    if direction == "forward":
        calls = {name: without_gradients(call) for name, call in calls.items()}
    else:
        calls = gradients(calls, tensors)
    size, inner = (GEMM, INNER) if gpu else (sizes.cpu_gemm, 1)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timed: dict[str, Call] = {**calls, "GEMM": functools.partial(torch.matmul, a, b)}
    comparison = paired(
        {name: repeated(call, inner) for name, call in timed.items()},
        rounds=ROUNDS if gpu else sizes.cpu_rounds,
        warmup=1,
        device=device,
    )
    work = inner * traffic.flops(shape, direction)
    every = {name: rates(comparison, name, work) for name in calls}
    gemm = statistics.median(rates(comparison, "GEMM", inner * 2 * size**3))
    details: dict[str, Any] = {
        "batch, heads, tokens, D": [shape.batch, shape.heads, shape.length, shape.head_dim],
        "causal": shape.is_causal,
        "dtype": str(dtype).removeprefix("torch."),
        "form": "Triton kernels" if gpu else "plain torch, tiled",
        "left out": left_out,
        "largest error": errors,
        "GEMM GFLOP/s": gemm,
    }
    for name in ("H100", "H200"):
        if name in hardware().name:
            details["predicted GFLOP/s"] = predicted(shape, direction, traffic.GPUS[name])
    bar = BARS.get((direction, shape.head_dim, shape.is_causal))
    held: dict[str, Any] = {"bar": bar} if gpu and bar and shape.length >= 4096 else {}
    at = f"{'causal' if shape.is_causal else 'full'}, {shape.length} tokens"
    others = {name: found for name, found in every.items() if name != OURS}
    speeds, shares = comparison.ratios(FLASH, OURS), [rate / gemm for rate in every[OURS]]
    return [
        seen(f"{direction}/{at}", "GFLOP/s", every[OURS], peers=others, **details),
        seen(f"{direction} speed over {FLASH}/{at}", "ratio", speeds, **details, **held),
        seen(f"{direction} share of a GEMM's rate/{at}", "ratio", shares, **details),
    ]


def on_gpu(
    direction: traffic.Direction, head_dim: int, is_causal: bool
) -> Callable[..., list[Measurement]]:
    """Return a case that runs every length in bf16."""

    def measured(sizes: Sizes = FULL) -> list[Measurement]:
        found = []
        for length in sizes.lengths:
            shape = Shape(
                batch=sizes.tokens // length,
                heads=sizes.width // head_dim,
                length=length,
                head_dim=head_dim,
                is_causal=is_causal,
            )
            found += race(direction, shape, default_device(), torch.bfloat16, sizes)
        return found

    return measured


for _direction, _head_dim, _causal in itertools.product(DIRECTIONS, (64, 128), (False, True)):
    _name = f"{_direction}/d{_head_dim}-{'causal' if _causal else 'full'}"
    case(_name, minutes=1, needs="gpu")(on_gpu(_direction, _head_dim, _causal))


def on_cpu(direction: traffic.Direction, sizes: Sizes) -> list[Measurement]:
    """Time plain PyTorch in float32 on one thread."""
    found = []
    for is_causal, length in itertools.product((False, True), sizes.cpu_lengths):
        shape = Shape(
            batch=1,
            heads=CPU_HEADS,
            length=length,
            head_dim=64,
            dtype_bytes=4,
            is_causal=is_causal,
        )
        found += race(direction, shape, torch.device("cpu"), torch.float32, sizes)
    return found


@case("cpu/forward", minutes=0.4, needs="cpu")
def cpu_forward(sizes: Sizes = FULL) -> list[Measurement]:
    """Tiles in plain PyTorch against torch's attention and the naive form."""
    return on_cpu("forward", sizes)


@case("cpu/backward", minutes=0.9, needs="cpu")
def cpu_backward(sizes: Sizes = FULL) -> list[Measurement]:
    """Recomputation in plain PyTorch."""
    return on_cpu("backward", sizes)


def allocations(call: Call, device: torch.device) -> tuple[int, int]:
    """Return the peak bytes of `call`, and the bytes that remain while its result lives."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        del result
        return peak - before, left - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = list(itertools.accumulate(size for _, size in changes))
    del result
    return max(held, default=0), held[-1] if held else 0


@case("memory/forward-and-backward", minutes=0.3)
def memory(sizes: Sizes = FULL) -> list[Measurement]:
    """Peak memory of a forward, what it keeps for the backward, and the peak of both."""
    device = default_device()
    gpu = device.type == "cuda"
    found = []
    for length in sizes.lengths if gpu else sizes.cpu_lengths:
        shape = Shape(
            batch=1,
            heads=sizes.width // 128 if gpu else CPU_HEADS,
            length=length,
            head_dim=64,
            dtype_bytes=2 if gpu else 4,
        )
        views = inputs(shape, device, torch.bfloat16 if gpu else torch.float32)
        # A batched product copies views, and the copies would count for that implementation.
        tensors = [x.detach().contiguous().requires_grad_() for x in views]
        calls, _ = that_run(forwards(shape, tensors, sizes.flex_lengths))
        given = torch.ones_like(tensors[0])
        held: dict[str, dict[str, int]] = {"forward peak": {}, "kept": {}, "training peak": {}}
        for name, call in calls.items():
            held["forward peak"][name] = allocations(without_gradients(call), device)[0]
            held["kept"][name] = allocations(call, device)[1]
            step = functools.partial(_step, call, tensors, given)
            held["training peak"][name] = allocations(step, device)[0]
        # The kept bytes include the output, which the flash form needs for its backward anyway.
        kept = traffic.kept_bytes(shape, "naive") + shape.query_bytes
        predicted = {
            "forward peak": {form: traffic.forward_peak_bytes(shape, form) for form in FORMS},
            "kept": {"naive": kept, "flash": traffic.kept_bytes(shape, "flash")},
        }
        for quantity, by_name in held.items():
            peers = {name: [size] for name, size in by_name.items() if name != OURS}
            details: dict[str, Any] = {
                "batch, heads, tokens, D": [1, shape.heads, length, 64],
                "bytes of an element": shape.dtype_bytes,
                "predicted": predicted.get(quantity, {}),
            }
            name, samples = f"{quantity}/{length} tokens", [by_name[OURS]]
            found.append(seen(name, "bytes", samples, peers=peers, **details))
    return found


def _step(call: Call, tensors: list[Tensor], given: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(), tensors, given)


def decode(
    step: tuple[int, int, int, int, int, int],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Measurement]:
    """Time one token per sequence over scattered pages, against SDPA on whole rows and a copy."""
    batch, heads, kv_heads, head_dim, keys, page = step
    shape = Shape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        length=1,
        key_length=keys,
        head_dim=head_dim,
        dtype_bytes=dtype.itemsize,
    )
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
    pages = batch * keys // page
    key_pages, value_pages = (draw(pages, page, kv_heads, head_dim) for _ in range(2))
    order = torch.randperm(pages, generator=generator, device=device)
    table = order.view(batch, -1).to(torch.int32)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    query = draw(batch, heads, 1, head_dim)
    whole_keys, whole_values = (
        x[order].view(batch, keys, kv_heads, head_dim).transpose(1, 2).contiguous()
        for x in (key_pages, value_pages)
    )
    target, source = (torch.empty_like(key_pages) for _ in range(2))
    attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=heads != kv_heads)
    calls: dict[str, Call] = {
        OURS: functools.partial(paged_attention, query, key_pages, value_pages, table, lengths),
        WHOLE: functools.partial(attend, query, whole_keys, whole_values),
        "copy": functools.partial(target.copy_, source),
    }
    gap = float(
        (calls[OURS]().float() - attend(query, whole_keys, whole_values).float()).abs().max()
    )
    if not gap <= (1e-2 if dtype == torch.bfloat16 else 1e-5):
        raise RuntimeError(
            f"paged attention and SDPA must agree before they are timed, got a gap of {gap}"
        )
    gpu = device.type == "cuda"
    inner = INNER if gpu else 1
    timed = {name: repeated(call, inner) for name, call in calls.items()}
    comparison = paired(timed, rounds=rounds, warmup=2, device=device)
    moved = traffic.decode_bytes(shape) / (2 * key_pages.numel() * dtype.itemsize)
    details: dict[str, Any] = {
        "batch, heads, key heads, D, keys, page": list(step),
        "dtype": str(dtype).removeprefix("torch."),
        "form": "Triton kernels" if gpu else "plain torch, a sequence at a time",
        "bytes": traffic.decode_bytes(shape),
        "largest gap": gap,
    }
    times = {
        name: [1e6 * s / inner for s in timing.samples]
        for name, timing in comparison.timings.items()
    }
    others = {name: found for name, found in times.items() if name != OURS}
    shares = [moved * ratio for ratio in comparison.ratios("copy", OURS)]
    bar: dict[str, Any] = {"bar": 0.75} if gpu else {}
    return [
        seen("decode step", "us", times[OURS], peers=others, **details),
        seen("share of copy bandwidth", "ratio", shares, **details, **bar),
        seen(f"speed over {WHOLE}", "ratio", comparison.ratios(WHOLE, OURS), **details),
    ]


def decode_on_gpu(name: str) -> Callable[[], list[Measurement]]:
    """Return a case that runs one entry of DECODE in bf16."""
    return lambda: decode(DECODE[name], ROUNDS, default_device(), torch.bfloat16)


for _name in DECODE:
    case(f"decode/{_name}", minutes=0.2, needs="gpu")(decode_on_gpu(_name))


@case("cpu/decode", minutes=0.1, needs="cpu")
def cpu_decode(sizes: Sizes = FULL) -> list[Measurement]:
    """Plain PyTorch over scattered pages, in float32."""
    return decode(sizes.cpu_decode, sizes.cpu_rounds, torch.device("cpu"), torch.float32)


@case("memory/ratios", minutes=0.3)
def memory_ratios(sizes: Sizes = FULL) -> list[Measurement]:
    """Growth of memory with the length, and the ratio of the naive form's memory to ours."""
    counted: dict[str, dict[int, Mapping[str, float]]] = {}
    for item in memory(sizes):
        kind, tokens = item.quantity.removesuffix(" tokens").split("/")
        peers = {name: samples[0] for name, samples in item.peers.items()}
        counted.setdefault(kind, {})[int(tokens)] = {OURS: item.samples[0], **peers}
    found = []
    for kind, by_length in counted.items():
        for length, held in by_length.items():
            if NAIVE in held:
                ratio = held[NAIVE] / held[OURS]
                found.append(exact(f"{kind}, naive over labcore/{length} tokens", "ratio", ratio))
        for name in (OURS, FLASH, NAIVE):
            *_, shorter, longer = (length for length, held in by_length.items() if name in held)
            growth = by_length[longer][name] / by_length[shorter][name]
            exponent = math.log(growth) / math.log(longer / shorter)
            at = [shorter, longer]
            found.append(exact(f"{kind}, exponent/{name}", "power of T", exponent, tokens=at))
    return found


@case("law/bytes", minutes=0.01)
def law_bytes() -> list[Measurement]:
    """Bytes of the naive form over those of the kernels' 16-bit tiles, and its products.

    Bytes are counted by what programs request, and by a model of what comes from HBM.
    """
    found = []
    machines = {"hopper": "H100", "ampere": "A100", "ada": "RTX 4090", "cdna": "MI300X"}
    for head_dim, (kind, name) in itertools.product(FORWARD, machines.items()):
        tile, gpu = FORWARD[head_dim][kind], traffic.GPUS[name]
        shape = Shape(batch=1, heads=16, length=4096, head_dim=head_dim)
        both: list[tuple[traffic.Form, int, int]]
        both = [("naive", NAIVE_TILE, NAIVE_TILE), ("flash", tile.m, tile.n)]
        requested, moved = (
            [count(form=form, block_q=m, block_k=n) for form, m, n in both]
            for count in (
                functools.partial(traffic.requested_bytes, shape),
                functools.partial(traffic.hbm_bytes, shape, gpu=gpu),
            )
        )
        told: dict[str, Any] = {"tile": [tile.m, tile.n], "tokens": 4096, "heads": 16}
        at = f"naive over flash/D {head_dim}, {name}"
        found.append(exact(f"bytes requested, {at}", "ratio", requested[0] / requested[1], **told))
        ratio = moved[0] / moved[1]
        found.append(exact(f"bytes from HBM, {at}", "ratio", ratio, mode="simulated", **told))
    shape = Shape(batch=1, heads=1, length=4096, head_dim=64)
    kept = 4 * traffic.flops(shape, "backward") // 5  # the naive form doesn't recompute its weights
    for form, fused in (("two kernels", False), ("fused", True)):
        ratio = traffic.flops(shape, "backward", fused=fused) / kept
        found.append(exact(f"backward products, flash over naive/{form}", "ratio", ratio))
    return found


@case("law/longest", minutes=0.01)
def law_longest() -> list[Measurement]:
    """The largest power of two of tokens whose q, k, v and kept tensors fit in a GPU's memory."""
    found = []
    for gpu in traffic.GPUS.values():
        fits = {}
        for form in FORMS:
            shape = Shape(batch=1, heads=32, length=1024, head_dim=128)
            while 3 * shape.query_bytes + traffic.kept_bytes(shape, form) <= gpu.memory:
                shape = replace(shape, length=2 * shape.length)
            fits[form] = shape.length // 2
        ratio = fits["flash"] / fits["naive"]
        settings: dict[str, Any] = {"tokens": fits, "heads, D, bytes": [32, 128, 2]}
        found.append(exact(f"tokens, flash over naive/{gpu.name}", "ratio", ratio, **settings))
    return found


@case("cpu/against-naive", minutes=0.7, needs="cpu")
def cpu_against_naive(sizes: Sizes = FULL) -> list[Measurement]:
    """Ratio of plain PyTorch's time to the naive form's, in float32 on one thread.

    Each sample is the median of three rounds on its own tensors.
    """
    found = []
    for length in (sizes.cpu_lengths[0], sizes.cpu_lengths[-1]):
        shape = Shape(batch=1, heads=CPU_HEADS, length=length, head_dim=64, dtype_bytes=4)
        ratios: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        for seed in range(sizes.cpu_rounds):
            tensors = inputs(shape, torch.device("cpu"), torch.float32, seed)
            both = forwards(shape, tensors)
            calls = {name: both[name] for name in (OURS, NAIVE)}
            timed = {
                "forward": {name: without_gradients(call) for name, call in calls.items()},
                "backward": gradients(calls, tensors),
            }
            for direction, pair in timed.items():
                comparison = paired(pair, rounds=3, warmup=1, seed=seed)
                ratios[direction].append(comparison.ratio(OURS, NAIVE))
        told: dict[str, Any] = {"batch, heads, tokens, D": [1, CPU_HEADS, length, 64]}
        for direction, samples in ratios.items():
            quantity = f"{direction} time, labcore over naive/{length} tokens"
            found.append(seen(quantity, "ratio", samples, **told))
    return found


@case("compiled/rates", minutes=0.01)
def compiled_rates() -> list[Measurement]:
    """What the compiled loops allow at 16k tokens on an H200; a GPU's record is held against it."""
    found = []
    for direction, head_dim, causal in itertools.product(DIRECTIONS, (64, 128), (False, True)):
        shape = Shape(batch=1, heads=16, length=16_384, head_dim=head_dim, is_causal=causal)
        at = f"{direction}, D {head_dim}, {'causal' if causal else 'full'}"
        rates = predicted(shape, direction, traffic.GPUS["H200"])
        title = f"highest predicted rate/{at}"
        found.append(exact(title, "GFLOP/s", rates[1], mode="compiled", lowest=rates[0]))
    return found


@case("compiled/resources", minutes=0.01)
def compiled_resources() -> list[Measurement]:
    """The committed table of the compile gate, which checks it against the compilers."""
    return [of_table(json.loads(RESOURCES.read_text(encoding="utf-8")))]


def of_table(table: dict[str, Any]) -> Measurement:
    """Count the programs of attention that spill, and keep the most common ones' needs.

    Raises RuntimeError for a table without them.
    """
    kernels = {name: row for name, row in table["kernels"].items() if name.startswith(KERNELS)}
    if not kernels:
        raise RuntimeError(
            f"{RESOURCES.name} must have rows for the attention kernels, got none; write them with "
            "`python -m labcore.compile_only --write`"
        )
    spilled = sum(any(need["spills"] for need in row.values()) for row in kernels.values())
    limits = {name: target.shared_limit for name, target in TARGETS.items()}
    shown = {name: row for name, row in kernels.items() if name.partition("/")[2] in SHOWN}
    for name in [name for name in shown if name.startswith("described_")]:
        # Where this kernel runs, the other isn't launched.
        row = shown.get(name.replace("described_", "forward_"), {}) | shown.pop(name)
        shown[name.replace("described_", "forward_")] = {t: row[t] for t in TARGETS if t in row}
    told = {"triton": table["triton"], "programs": len(kernels), "kernels": shown, "limits": limits}
    return exact("programs that spill", "programs", spilled, mode="compiled", **told)


@case("compiled/tiles", minutes=6.0, needs="cpu")
def compiled_tiles(sizes: Sizes = FULL) -> list[Measurement]:
    """What the 16-bit forward kernel needs without a mask, compiled with tiles of GRID."""
    grid = GRID if sizes.every_tile else {name: one[:1] for name, one in GRID.items()}
    found = measure_tiles(grid)
    fit = sum(
        not need["spills"] and need["shared"] <= TARGETS[name.split()[0]].shared_limit
        for name, need in found.items()
    )
    limits = {name: TARGETS[name].shared_limit for name in grid["target"]}
    return [exact("tiles that fit", "programs", fit, mode="compiled", tiles=found, limits=limits)]


@case("compiled/timeline", minutes=0.3, needs="cpu")
def compiled_timeline() -> list[Measurement]:
    """When the tensor cores and the softmax of our Hopper loop work, by the model of its code.

    The number is the share of the time in which the tensor cores work, for two schedulers.
    """
    found = []
    for head_dim in DESCRIBED:
        told = measure_timeline(head_dim)
        for scheduler, clocks in told["clocks"].items():
            rows = told[scheduler]
            share = sum(map(sum, rows["matrix"])) / len(rows["matrix"][0])
            title = f"tensor cores at work/D {head_dim}, {scheduler}"
            found.append(exact(title, "share", share, mode="compiled", clocks=clocks, rows=rows))
    return found
