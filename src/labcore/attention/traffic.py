"""What attention costs: FLOPs, exponentials, bytes moved and held, and the time a GPU needs for it.

Letters: B batch, H query heads, Hkv key and value heads, T queries, S keys, D head dimension. Two
forms are counted. "naive" writes the scores [B, H, T, S] to memory and reads them again; "flash"
keeps a tile of them on chip and reads keys and values once for each tile of queries.
Source: Dao, Fu, Ermon, Rudra and Ré, 2022, arXiv 2205.14135; Dao, 2023, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from labcore.checks import one_of, positive_int

__all__ = [
    "GPUS",
    "Gpu",
    "Roofline",
    "Shape",
    "compulsory_bytes",
    "decode_bytes",
    "exponentials",
    "flash_bytes",
    "flops",
    "forward_peak_bytes",
    "kept_bytes",
    "largest_block",
    "live_tiles",
    "naive_bytes",
    "roofline",
    "sram_bytes",
]

Direction = Literal["forward", "backward"]
Form = Literal["naive", "flash"]

STATISTIC = 4  # bytes of one float32: a row's log-sum-exp, or a row's part of the gradient
# Vector instructions a score besides its exponential: the maximum, one multiply-add for scale and
# shift, the sum, and half of a conversion that packs two into one register.
FP32_A_SCORE = 3.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One call of attention.

    batch: B; heads: H; length: T; head_dim: D; kv_heads: Hkv, default H; key_length: S, default T;
    dtype_bytes: of one element of queries, keys, values and output.
    is_causal: the last query sees every key, each one before it one key less; S >= T then.
    Raises ValueError for sizes that are no whole numbers of at least 1 or do not fit.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    kv_heads: int | None = None
    key_length: int | None = None
    dtype_bytes: int = 2
    is_causal: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "is_causal" and value is not None:
                positive_int(field.name, value)
        if self.heads % self.shared_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.is_causal and self.keys < self.length:
            raise ValueError(
                f"key_length must be at least length for causal attention, got {self.keys} and "
                f"{self.length}; queries before the first key see nothing and cost nothing"
            )

    @property
    def keys(self) -> int:
        """S."""
        return self.length if self.key_length is None else self.key_length

    @property
    def shared_heads(self) -> int:
        """Hkv."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def pairs(self) -> int:
        """Queries and keys that see each other, of all heads."""
        hidden = self.length * (self.length - 1) // 2 if self.is_causal else 0
        return self.batch * self.heads * (self.length * self.keys - hidden)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries; the output has as many."""
        return self.batch * self.heads * self.length * self.head_dim * self.dtype_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys; the values have as many."""
        return self.batch * self.shared_heads * self.keys * self.head_dim * self.dtype_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one float32 for each query of each head."""
        return self.batch * self.heads * self.length * STATISTIC


def flops(shape: Shape, direction: Direction = "forward", *, fused: bool = True) -> int:
    """Multiplications and additions of the matrix products, over pairs that see each other.

    Two products forward, five backward (the scores again, and the gradients of values, weights,
    queries and keys). fused=False counts what the backward in two kernels computes: the scores and
    the gradient of the weights in each, seven products. A TFLOP/s is quoted over the five.
    """
    one_of("direction", direction, ("forward", "backward"))
    products = 2 if direction == "forward" else 5 if fused else 7
    return 2 * products * shape.pairs * shape.head_dim


def exponentials(shape: Shape, direction: Direction = "forward", *, fused: bool = True) -> int:
    """One for each pair that sees each other; two in a backward of two kernels."""
    one_of("direction", direction, ("forward", "backward"))
    return shape.pairs * (1 if direction == "forward" or fused else 2)


def compulsory_bytes(shape: Shape, direction: Direction = "forward") -> int:
    """Bytes if every input were read once and every output written once, and nothing else."""
    one_of("direction", direction, ("forward", "backward"))
    if direction == "forward":  # q, k, v; out, lse
        return 2 * shape.query_bytes + 2 * shape.key_bytes + shape.row_bytes
    # q, k, v, out, its gradient, lse; three gradients
    return 4 * shape.query_bytes + 4 * shape.key_bytes + shape.row_bytes


def naive_bytes(shape: Shape, direction: Direction = "forward") -> int:
    """Bytes that separate operations move: each reads its operands and writes its result.

    The scale counts as part of a product.
    Forward: scores (written), softmax (read, written), times values (read): 4 passes over T * S.
    Backward: values' gradient (read), weights' gradient (written), softmax (read twice, written),
    queries' and keys' gradients (read each): 7 passes. Pairs that do not see each other cost as
    much, and grouped heads read their own copies of keys and values.
    """
    one_of("direction", direction, ("forward", "backward"))
    scores = shape.batch * shape.heads * shape.length * shape.keys * shape.dtype_bytes
    keys = shape.key_bytes * (shape.heads // shape.shared_heads)
    if direction == "forward":  # q, k; v, out
        return 4 * scores + 2 * shape.query_bytes + 2 * keys
    # grad_out; grad_out, v; k; q; gradients of v, q and k
    return 7 * scores + 4 * shape.query_bytes + 4 * keys


def live_tiles(shape: Shape, block_q: int, block_k: int) -> int:
    """Tiles [block_q, block_k] of one head's scores in which a query sees a key."""
    return sum(tiles for _, tiles, _ in _walks(shape, block_q, block_k))


def _walks(shape: Shape, block_q: int, block_k: int) -> Iterator[tuple[int, int, int]]:
    """Of each tile of one head's queries: its queries, the tiles it walks over, their keys."""
    positive_int("block_q", block_q)
    positive_int("block_k", block_k)
    for first in range(0, shape.length, block_q):
        last = min(first + block_q, shape.length)
        seen = shape.keys - (shape.length - last if shape.is_causal else 0)
        tiles = -(-seen // block_k)
        yield last - first, tiles, min(tiles * block_k, shape.keys)


def flash_bytes(
    shape: Shape,
    direction: Direction = "forward",
    *,
    block_q: int = 128,
    block_k: int = 64,
    fused: bool = False,
) -> int:
    """Bytes that the programs of the flash form ask for, in tiles of block_q queries, block_k keys.

    Forward: a tile of queries walks over the tiles of keys and values that it sees. Backward in two
    kernels: so does the one for the queries' gradient, and in the other a tile of keys walks over
    queries and gradients of the output. fused: one kernel, which adds to the queries' gradient in
    float32 memory at every tile. What the L2 cache keeps never reaches HBM, so the traffic there
    lies between `compulsory_bytes` and this.
    """
    one_of("direction", direction, ("forward", "backward"))
    heads = shape.batch * shape.heads
    walks = list(_walks(shape, block_q, block_k))
    row = shape.head_dim * shape.dtype_bytes
    keys_and_values = heads * sum(keys for _, _, keys in walks) * 2 * row
    if direction == "forward":
        return keys_and_values + 2 * shape.query_bytes + shape.row_bytes
    # A first kernel reads out and its gradient and writes one number a row. Then a tile of keys
    # reads q, the gradient of out and two numbers of each row that sees it, and its own k and v
    # once, and writes their gradients.
    rows = heads * sum(queries * tiles for queries, tiles, _ in walks)
    total = 2 * shape.query_bytes + shape.row_bytes
    total += rows * (2 * row + 2 * STATISTIC) + 4 * shape.key_bytes
    if fused:
        wide = heads * shape.length * shape.head_dim * STATISTIC
        # Cleared, added to at each visit, at last read and written in the queries' dtype.
        return total + 2 * wide + rows * shape.head_dim * 2 * STATISTIC + shape.query_bytes
    # A tile of queries reads its q, the gradient of out and two numbers a row, walks over k and v
    # and writes the gradient of q.
    return total + keys_and_values + 3 * shape.query_bytes + 2 * shape.row_bytes


def decode_bytes(shape: Shape, splits: int = 1) -> int:
    """Bytes of one decode step: the cache once, and the pieces' results written and read again."""
    positive_int("splits", splits)
    pieces = shape.batch * shape.heads * shape.length * splits * (shape.head_dim + 1) * STATISTIC
    return compulsory_bytes(shape) + (2 * pieces if splits > 1 else 0)


def kept_bytes(shape: Shape, form: Form) -> int:
    """Bytes that wait between forward and backward, besides queries, keys and values.

    naive: the weights [B, H, T, S]; flash: the output and one log-sum-exp a row.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "naive":
        return shape.batch * shape.heads * shape.length * shape.keys * shape.dtype_bytes
    return shape.query_bytes + shape.row_bytes


def forward_peak_bytes(shape: Shape, form: Form) -> int:
    """The most bytes that a forward without gradients holds, besides queries, keys and values.

    naive: the scores and the weights [B, H, T, S] that the softmax makes of them, which outweigh
    the output; flash: the output and one log-sum-exp a row.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "naive":
        return max(2 * kept_bytes(shape, "naive"), kept_bytes(shape, "naive") + shape.query_bytes)
    return kept_bytes(shape, "flash")


def sram_bytes(
    *, block_q: int, block_k: int, head_dim: int, dtype_bytes: int = 2, stages: int = 2
) -> int:
    """Shared memory of one program: its queries, and `stages` tiles of keys and of values.

    Scores, weights and sums live in registers.
    """
    return (block_q + 2 * stages * block_k) * head_dim * dtype_bytes


def largest_block(
    sram: int, *, head_dim: int, dtype_bytes: int = 2, stages: int = 2, block_k: int | None = None
) -> int:
    """The largest power of two of queries whose tile fits in `sram` bytes; 0 where not even 1 does.

    block_k: keys of a tile, default as many as queries.
    """
    positive_int("sram", sram)
    block = 0
    following = 1
    while (
        sram_bytes(
            block_q=following,
            block_k=following if block_k is None else block_k,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
            stages=stages,
        )
        <= sram
    ):
        block, following = following, 2 * following
    return block


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Published peaks of one GPU.

    units: SMs or CUs; clock: Hz, the boost clock that the peaks are quoted at; matmul: dense 16-bit
    FLOP/s with float32 sums; bandwidth: bytes/s of its memory; sram: bytes of shared memory that
    one program may use; exponentials, fp32: results a clock and unit; memory: bytes.
    """

    name: str
    units: int
    clock: float
    matmul: float
    bandwidth: float
    sram: int
    memory: float
    exponentials: int = 16
    fp32: int = 128


KIB = 1024
# Matrix peaks, bandwidths, units and boost clocks: NVIDIA's data sheets of T4 (2018), A100 80GB SXM
# (2021), H100 SXM (2022) and H200 (2023), the Ada architecture paper (2022, RTX 4090, float32
# sums); AMD's data sheets of MI250X (2021; one of its two dies) and MI300X (2023).
# Exponentials and float32 a clock and SM, shared memory of a block: the CUDA C++ programming guide,
# tables "throughput of native arithmetic instructions" and "technical specifications per compute
# capability". A CU has four units of 16 lanes; they take 4 clocks for an exponential.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="T4", units=40, clock=1.59e9, matmul=65e12, bandwidth=320e9, sram=64 * KIB,
            memory=16e9, fp32=64),
        Gpu(name="A100", units=108, clock=1.41e9, matmul=312e12, bandwidth=2039e9, sram=163 * KIB,
            memory=80e9, fp32=64),
        Gpu(name="RTX 4090", units=128, clock=2.52e9, matmul=165.2e12, bandwidth=1008e9,
            sram=99 * KIB, memory=24e9),
        Gpu(name="H100", units=132, clock=1.83e9, matmul=989.4e12, bandwidth=3350e9,
            sram=227 * KIB, memory=80e9),
        Gpu(name="H200", units=132, clock=1.83e9, matmul=989.4e12, bandwidth=4800e9,
            sram=227 * KIB, memory=141e9),
        Gpu(name="MI250X die", units=110, clock=1.7e9, matmul=191.5e12, bandwidth=1638e9,
            sram=64 * KIB, memory=64e9, fp32=64),
        Gpu(name="MI300X", units=304, clock=2.1e9, matmul=1307.4e12, bandwidth=5300e9,
            sram=64 * KIB, memory=192e9),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Seconds that each part of a GPU needs at its peak, and the FLOPs that count."""

    flops: int
    matmul: float
    softmax: float  # exponentials and the other float32 work on the scores
    memory: float

    @property
    def seconds(self) -> float:
        """If all parts work at the same time: the slowest one's time."""
        return max(self.matmul, self.softmax, self.memory)

    @property
    def serial_seconds(self) -> float:
        """If the softmax waits for the matrix products and they for it."""
        return max(self.matmul + self.softmax, self.memory)

    @property
    def bound(self) -> str:
        """The slowest part: "matmul", "softmax" or "memory"."""
        parts = {"matmul": self.matmul, "softmax": self.softmax, "memory": self.memory}
        return max(parts, key=parts.__getitem__)

    @property
    def flop_rate(self) -> float:
        """FLOP/s of `seconds`."""
        return self.flops / self.seconds

    @property
    def serial_flop_rate(self) -> float:
        """FLOP/s of `serial_seconds`."""
        return self.flops / self.serial_seconds


def roofline(
    shape: Shape, gpu: Gpu, form: Form = "flash", direction: Direction = "forward"
) -> Roofline:
    """The least time of one call: published peaks, memory moved once (flash) or by naive passes.

    The naive form computes the pairs that do not see each other too; the flash backward is that of
    two kernels. `flops` counts the same for both, so that their rates compare.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "flash":
        moved = compulsory_bytes(shape, direction)
        work = flops(shape, direction, fused=False)
        scores = exponentials(shape, direction, fused=False)
    else:
        moved = naive_bytes(shape, direction)
        every = replace(shape, is_causal=False)
        # It has kept the weights: no scores, no exponentials, four products instead of five.
        work = flops(every, direction) * (4 if direction == "backward" else 5) // 5
        scores = exponentials(every) if direction == "forward" else 0
    a_score = 1 / gpu.exponentials + FP32_A_SCORE / gpu.fp32
    return Roofline(
        flops=flops(shape, direction),
        matmul=work / gpu.matmul,
        softmax=scores * a_score / (gpu.units * gpu.clock),
        memory=moved / gpu.bandwidth,
    )
