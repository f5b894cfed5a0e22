"""What each GPU does for one token of a Llama: kernels by their work, collectives by their bytes.

A kernel takes the longer of its compute time and its memory time at the GPU's published peaks (the
roofline: Williams, Waterman and Patterson, 2009). A collective takes what
`cost.all_reduce_seconds` predicts. Kernels reach 60 to 90 % of a peak, so these times are lower
bounds.

Letters: N ranks, B rows, C hidden_size, F intermediate_size, H heads, Hkv kv heads, D head_dim,
V vocabulary.

Which operations could run at the same time follows from what they read. In a Llama, an all-reduce
reads the product before it, the norm after it reads whole rows of the sum, and all that follows
reads that norm: a chain, in which nothing is independent. Two things break the chain. Rows in
micro-batches share nothing but weights, which each of them then reads again. And in a block where
attention and the MLP read the same norm (GPT-J; PaLM, arXiv 2204.02311), the MLP doesn't wait for
the sum of attention; that is another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.models.config import LlamaConfig
from labcore.parallel.cost import Link, all_reduce_seconds

__all__ = [
    "GPUS",
    "MODELS",
    "Collective",
    "GpuRates",
    "Kernel",
    "decode_step",
    "held_bytes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """The figures of a GPU that a timeline needs.

    flops: dense 16-bit FLOP/s with float32 accumulation; bandwidth: bytes/s of its memory;
    capacity: bytes of its memory; launch: host seconds per launch, of a kernel or of a whole graph;
    gap: seconds from the end of a kernel to the start of the next one in a graph. eager_gap: the
    same between kernels that the host launched one by one, ahead of the device.
    Raises ValueError for numbers that no GPU can have.
    """

    name: str
    flops: float
    bandwidth: float
    capacity: float
    launch: float
    gap: float
    eager_gap: float
    source: str

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "capacity"):
            positive(name, getattr(self, name))
        for name in ("launch", "gap", "eager_gap"):
            non_negative(name, getattr(self, name))


# None of these is on a data sheet. Gray, "Getting started with CUDA graphs", NVIDIA, 2019: a kernel
# of 2.9 us takes 3.4 us in a graph's replay and 3.8 us if launches run ahead of it. The first
# difference includes a share of the graph's launch, and in the second the host may have been the
# slower, so both are upper bounds of a gap. The launch is assumed: Gray's took the host less than
# 3.8 us, and through a torch operator, dispatch and Python add to it.
_LAUNCH = 5e-6
_GAP, _EAGER_GAP = 0.5e-6, 0.9e-6


def _gpu(name: str, flops: float, bandwidth: float, capacity: float, source: str) -> GpuRates:
    return GpuRates(
        name=name, flops=flops, bandwidth=bandwidth, capacity=capacity, launch=_LAUNCH, gap=_GAP,
        eager_gap=_EAGER_GAP, source=source,
    )  # fmt: skip


_HALF = "FLOP/s: half of those with sparsity"
GPUS: Mapping[str, GpuRates] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100 SXM", 312e12, 2039e9, 80e9, "NVIDIA A100 80GB SXM, data sheet, 2021"),
        _gpu("RTX 4090", 165.2e12, 1008e9, 24e9, "NVIDIA Ada architecture paper, 2022"),
        _gpu("H100 SXM", 989.4e12, 3350e9, 80e9, f"NVIDIA H100 SXM, data sheet, 2022, {_HALF}"),
        _gpu("H200", 989.4e12, 4800e9, 141e9, f"NVIDIA H200 SXM, data sheet, 2023, {_HALF}"),
    )
}
"""GPUs by name: data-sheet peaks, with 5 us per launch and gaps of 0.5 and 0.9 us for all."""

MODELS: Mapping[str, LlamaConfig] = {
    name: LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_theta=base,
    )
    for name, (vocabulary, width, wide, layers, heads, kv_heads, length, base) in {
        "7B": (32000, 4096, 11008, 32, 32, 32, 4096, 1e4),
        "8B": (128256, 4096, 14336, 32, 32, 8, 8192, 5e5),
        "13B": (32000, 5120, 13824, 40, 40, 40, 4096, 1e4),
        "70B": (32000, 8192, 28672, 80, 64, 8, 4096, 1e4),
    }.items()
}
"""The shapes of Llama 2 (7B, 13B, 70B: arXiv 2307.09288) and of Llama 3 (8B: arXiv 2407.21783)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """What one GPU does in one launch.

    flops: floating-point operations. weights: bytes of parameters read. inputs: bytes of
    activations and cache read. outputs: bytes written.
    after: offsets back to the operations whose results it reads. An offset that reaches before the
    first operation counts as done.
    """

    name: str
    flops: float
    weights: float = 0
    inputs: float = 0
    outputs: float = 0
    after: tuple[int, ...] = (1,)

    @property
    def nbytes(self) -> float:
        """All bytes moved between the kernel and memory."""
        return self.weights + self.inputs + self.outputs

    def seconds(self, gpu: GpuRates) -> float:
        """Return the longer of compute time and memory time, each at its peak."""
        return max(self.flops / gpu.flops, self.nbytes / gpu.bandwidth)

    def chunk(self, chunks: int) -> Kernel:
        """Return one of `chunks` kernels that compute equal parts of the output's columns.

        Each reads its part of the weights and all of the inputs. Chunks of rows suit a prompt, but
        in a decode step each would read all of the weights.
        """
        return Kernel(
            name=self.name,
            flops=self.flops / chunks,
            weights=self.weights / chunks,
            inputs=self.inputs,
            outputs=self.outputs / chunks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """What N ranks do together. kind: all_reduce or all_gather; nbytes: of the whole result.

    after: as in `Kernel`.
    Raises ValueError for another kind or for fewer than two ranks.
    """

    name: str
    kind: str
    ranks: int
    nbytes: float
    after: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("all_reduce", "all_gather"))
        if positive_int("ranks", self.ranks) < 2:
            raise ValueError(
                f"ranks must be at least 2, got {self.ranks}; one rank needs no collective"
            )

    def seconds(self, link: Link | Mapping[str, Link], algorithm: str) -> float:
        """Return the alpha-beta model's time. An all-gather is the second half of an all-reduce.

        one_shot has no such half, so for it the all-gather is that of two_shot. The link's base is
        paid whole by either. link: as in `cost.all_reduce_seconds`.
        """
        if self.kind == "all_reduce":
            return all_reduce_seconds(algorithm, self.ranks, self.nbytes, link)
        halves = "two_shot" if algorithm == "one_shot" else algorithm
        links = (link,) if isinstance(link, Link) else link.values()
        return min(
            (one.base + all_reduce_seconds(halves, self.ranks, self.nbytes, one)) / 2
            for one in links
        )

    def chunk(self, chunks: int) -> Collective:
        """Return one of `chunks` collectives over equal parts of the message."""
        return Collective(
            name=self.name, kind=self.kind, ranks=self.ranks, nbytes=self.nbytes / chunks
        )


def _part(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ValueError(
            f"{name} must be a multiple of ranks, got {size} and {ranks}; ranks may be {fitting}"
        )
    return size // ranks


def _kv_part(config: LlamaConfig, ranks: int) -> int:
    """Return the kv heads per rank; with fewer heads than ranks, some ranks share one."""
    if config.kv_heads < ranks and ranks % config.kv_heads == 0:
        return 1
    return _part("num_key_value_heads", config.kv_heads, ranks)


def decode_step(
    config: LlamaConfig,
    *,
    ranks: int = 1,
    batch: int = 1,
    context: int = 1024,
    dtype_bytes: int = 2,
    micro_batches: int = 1,
    parallel_block: bool = False,
    one_sum: bool = False,
) -> tuple[Kernel | Collective, ...]:
    """List what each of N ranks does for one token of each of B rows, in order.

    Embedding; in each layer norm, qkv, attention, o, all-reduce, norm, gate and up, silu and
    product, down, all-reduce; norm, head, all-gather of the logits. As in `parallelize`, the
    embedding is divided by vocabulary, so an all-reduce follows it too. One rank has no
    collectives. Kernels are fused as in serving engines (rotary embedding with attention, residual
    sums with norms); torch's separate operators are two to three times as many.

    ranks: must divide H, F and V. If Hkv is smaller, ranks that share a kv head hold copies of it,
    as in vLLM; `parallelize` rejects that. context: tokens of each row in the cache, including this
    one.
    dtype_bytes: of weights, activations, cache and messages.
    micro_batches: parts into which the rows are cut, a divisor of batch. The parts take turns: each
    goes as far as its next collective.
    parallel_block: attention and the MLP read the same norm, which is the only one of a layer. It
    isn't a Llama any more.
    one_sum: a parallel block's down adds attention's partial output to its own, so that one
    all-reduce sums both (as in vLLM's Falcon). Reading that output isn't counted, neither here nor
    in the norm of a block with two sums.
    Raises ValueError with the name of a dimension that ranks or micro_batches doesn't divide, and
    for one_sum without parallel_block.
    """
    if positive_int("micro_batches", micro_batches) > 1:
        if batch % micro_batches:
            raise ValueError(
                f"batch must be a multiple of micro_batches, got {batch} and {micro_batches}"
            )
        part = decode_step(
            config, ranks=ranks, batch=batch // micro_batches, context=context,
            dtype_bytes=dtype_bytes, parallel_block=parallel_block, one_sum=one_sum,
        )  # fmt: skip
        return _in_turns(part, micro_batches)
    if one_sum and not parallel_block:
        raise ValueError(
            "one_sum needs parallel_block, because in a Llama's layer the MLP reads attention's sum"
        )
    for name, value in (("ranks", ranks), ("batch", batch), ("context", context)):
        positive_int(name, value)
    size, width = positive_int("dtype_bytes", dtype_bytes), config.hidden_size
    queries = config.head_size * _part("num_attention_heads", config.num_attention_heads, ranks)
    keys = config.head_size * _kv_part(config, ranks)
    wide = _part("intermediate_size", config.intermediate_size, ranks)
    vocabulary = _part("vocab_size", config.vocab_size, ranks)
    hidden = size * batch * width  # bytes of the residual stream, and of an all-reduce

    def product(name: str, wide_in: int, wide_out: int, bias: int = 0) -> Kernel:
        return Kernel(
            name=name,
            flops=2 * batch * wide_in * wide_out,
            weights=size * (wide_in * wide_out + bias),
            inputs=size * batch * wide_in,
            outputs=size * batch * wide_out,
        )

    norm = Kernel(  # adds to the residual stream and writes both that sum and the normed rows
        name="norm", flops=5 * batch * width, weights=size * width, inputs=2 * hidden,
        outputs=2 * hidden,
    )  # fmt: skip
    silu = Kernel(
        name="silu", flops=5 * batch * wide, inputs=2 * size * batch * wide,
        outputs=size * batch * wide,
    )  # fmt: skip
    heads = queries + 2 * keys
    summed = _together("all_reduce", ranks, hidden)
    mixed = (
        product("qkv", width, heads, bias=heads if config.qkv_bias else 0),
        _attention(batch, context, queries, keys, size),
        product("o", queries, width, bias=width if config.output_bias else 0),
        *(() if one_sum else summed),
    )
    gate, down = product("gate, up", width, 2 * wide), product("down", wide, width)
    between: tuple[Kernel, ...] = (norm,)
    if parallel_block:
        # The MLP's start is as far from its norm as a norm is from the end of attention in the
        # previous layer.
        back = len(mixed) + 1
        norm, gate, between = replace(norm, after=(1, back)), replace(gate, after=(back,)), ()
    if one_sum:
        norm = replace(norm, after=(1,))
        down = replace(down, after=(1, 3))  # silu, and attention's o
    fed = (gate, silu, down, *summed)
    layer = (norm, *mixed, *between, *fed)
    return (
        Kernel(name="embedding", flops=0, inputs=hidden, outputs=hidden),
        *summed,
        *(layer * config.num_hidden_layers),
        norm,
        product("head", width, vocabulary),
        *_together("all_gather", ranks, size * batch * config.vocab_size),
    )


def _in_turns(step: Sequence[Kernel | Collective], parts: int) -> tuple[Kernel | Collective, ...]:
    """Return the steps of equal parts of the rows, which take turns at each collective."""
    order: list[tuple[int, int]] = []  # part and place in its step
    begin = 0
    for at, op in enumerate(step):
        if isinstance(op, Collective) or at == len(step) - 1:
            order += [(part, one) for part in range(parts) for one in range(begin, at + 1)]
            begin = at + 1
    place = {which: number for number, which in enumerate(order)}

    def after(part: int, at: int) -> tuple[int, ...]:
        reads = (at - back for back in step[at].after if back <= at)
        return tuple(place[part, at] - place[part, one] for one in reads)

    return tuple(replace(step[at], after=after(part, at)) for part, at in order)


def _attention(batch: int, context: int, queries: int, keys: int, size: int) -> Kernel:
    """Return the attention kernel, which reads cached keys and values and writes the new ones.

    queries, keys: features per token on one rank, over all its heads.
    """
    return Kernel(
        name="attention",
        flops=4 * batch * queries * context,
        inputs=size * batch * (2 * keys * context + queries),
        outputs=size * batch * (2 * keys + queries),
    )


def _together(kind: str, ranks: int, nbytes: int) -> tuple[Kernel | Collective, ...]:
    name = kind.replace("_", "-")
    return (Collective(name=name, kind=kind, ranks=ranks, nbytes=nbytes),) if ranks > 1 else ()


def held_bytes(
    config: LlamaConfig,
    *,
    ranks: int = 1,
    batch: int = 1,
    context: int = 1024,
    dtype_bytes: int = 2,
) -> int:
    """Return the bytes of weights and cache on each rank, to compare with `GpuRates.capacity`.

    Arguments and errors are those of `decode_step`; activations aren't counted.
    """
    step = decode_step(config, ranks=ranks, batch=batch, context=context, dtype_bytes=dtype_bytes)
    weights = sum(op.weights for op in step if isinstance(op, Kernel))
    if not config.tie_word_embeddings:
        weights += dtype_bytes * config.vocab_size * config.hidden_size // ranks
    keys = config.head_size * _kv_part(config, ranks)
    cache = 2 * config.num_hidden_layers * keys * batch * context * dtype_bytes
    return int(weights) + cache
