"""FLOPs, exponentials, and bytes moved and stored.

Letters: B batch, H query heads, Hkv key and value heads, T queries, S keys, D head dimension. The
functions count two forms. "naive" writes the scores [B, H, T, S] to memory and reads them back;
"flash" keeps a tile of them on chip and reads keys and values once per tile of queries.
Source: Dao, Fu, Ermon, Rudra and Ré, 2022, arXiv 2205.14135; Dao, 2023, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from labcore.checks import one_of, positive_int

__all__ = [
    "STATISTIC",
    "Direction",
    "Form",
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
    "sram_bytes",
    "tile_walks",
]

Direction = Literal["forward", "backward"]
Form = Literal["naive", "flash"]

STATISTIC = 4  # bytes of one float32: a row's log-sum-exp, or a row's part of the gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of one attention call.

    batch: B; heads: H; length: T; head_dim: D; kv_heads: Hkv, default H; key_length: S, default T.
    dtype_bytes: bytes per element of queries, keys, values and output.
    is_causal: the last query sees every key and each earlier query one key less; requires S >= T.
    Raises ValueError for sizes that aren't integers of at least 1, or that don't match.
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
                f"{self.length}; leave out the queries before the first key, which see no key"
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
        """Pairs of a query and a key it sees, over all heads."""
        hidden = self.length * (self.length - 1) // 2 if self.is_causal else 0
        return self.batch * self.heads * (self.length * self.keys - hidden)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries, and also of the output."""
        return self.batch * self.heads * self.length * self.head_dim * self.dtype_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys, and also of the values."""
        return self.batch * self.shared_heads * self.keys * self.head_dim * self.dtype_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one float32 per query and head."""
        return self.batch * self.heads * self.length * STATISTIC


def flops(shape: Shape, direction: Direction = "forward", *, fused: bool = True) -> int:
    """Count the multiplications and additions of the matrix products, over visible pairs.

    The forward pass has two products and the backward pass five: the scores again, and the
    gradients of values, weights, queries and keys. fused=False counts a backward pass in two
    kernels, which both compute the scores and the gradient of the weights: seven products.
    Published TFLOP/s count five.
    """
    one_of("direction", direction, ("forward", "backward"))
    products = 2 if direction == "forward" else 5 if fused else 7
    return 2 * products * shape.pairs * shape.head_dim


def exponentials(shape: Shape, direction: Direction = "forward", *, fused: bool = True) -> int:
    """Count one exponential per visible pair, or two for a backward pass in two kernels."""
    one_of("direction", direction, ("forward", "backward"))
    return shape.pairs * (1 if direction == "forward" or fused else 2)


def compulsory_bytes(shape: Shape, direction: Direction = "forward") -> int:
    """Count the bytes if every input is read once, every output written once, and nothing else."""
    one_of("direction", direction, ("forward", "backward"))
    if direction == "forward":  # q, k, v; out, lse
        return 2 * shape.query_bytes + 2 * shape.key_bytes + shape.row_bytes
    # q, k, v, out, its gradient, lse; three gradients
    return 4 * shape.query_bytes + 4 * shape.key_bytes + shape.row_bytes


def naive_bytes(shape: Shape, direction: Direction = "forward") -> int:
    """Count the bytes that separate operations move; each reads its operands and writes its result.

    The scale counts as part of a product.
    Forward: scores (written), softmax (read, written), times values (read): 4 passes over T * S.
    Backward: values' gradient (read), weights' gradient (written), softmax (read twice, written),
    queries' and keys' gradients (one read each): 7 passes. Masked pairs cost as much as visible
    ones, and grouped heads read separate copies of keys and values.
    """
    one_of("direction", direction, ("forward", "backward"))
    scores = shape.batch * shape.heads * shape.length * shape.keys * shape.dtype_bytes
    keys = shape.key_bytes * (shape.heads // shape.shared_heads)
    if direction == "forward":  # q, k; v, out
        return 4 * scores + 2 * shape.query_bytes + 2 * keys
    # grad_out; grad_out, v; k; q; gradients of v, q and k
    return 7 * scores + 4 * shape.query_bytes + 4 * keys


def live_tiles(shape: Shape, block_q: int, block_k: int) -> int:
    """Count the tiles [block_q, block_k] of one head's scores in which a query sees a key."""
    return sum(tiles for _, tiles, _ in tile_walks(shape, block_q, block_k))


def tile_walks(shape: Shape, block_q: int, block_k: int) -> Iterator[tuple[int, int, int]]:
    """Yield, for each tile of one head's queries, its queries, its key tiles and their keys."""
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
    """Count the bytes that flash programs request, with tiles of block_q queries and block_k keys.

    Forward: a program holds a tile of queries and loops over the tiles of keys and values that it
    sees. Backward: one of two kernels loops the same way for the queries' gradient. In the other, a
    program holds a tile of keys and loops over queries and gradients of the output.
    fused: a single backward kernel, which adds to the queries' gradient in float32 memory at every
    tile. Requests that hit the L2 cache don't reach HBM, so HBM traffic is between
    `compulsory_bytes` and this count.
    """
    one_of("direction", direction, ("forward", "backward"))
    heads = shape.batch * shape.heads
    walks = list(tile_walks(shape, block_q, block_k))
    row = shape.head_dim * shape.dtype_bytes
    keys_and_values = heads * sum(keys for _, _, keys in walks) * 2 * row
    if direction == "forward":
        return keys_and_values + 2 * shape.query_bytes + shape.row_bytes
    # A first kernel reads out and its gradient and writes one number per row. Then a tile of keys
    # reads its k and v once, reads q, the gradient of out and two numbers for each row that sees
    # it, and writes the gradients of k and v.
    rows = heads * sum(queries * tiles for queries, tiles, _ in walks)
    total = 2 * shape.query_bytes + shape.row_bytes
    total += rows * (2 * row + 2 * STATISTIC) + 4 * shape.key_bytes
    if fused:
        wide = heads * shape.length * shape.head_dim * STATISTIC
        # Zeroed, added to at each tile, then read and written in the queries' dtype.
        return total + 2 * wide + rows * shape.head_dim * 2 * STATISTIC + shape.query_bytes
    # A tile of queries reads its q, the gradient of out and two numbers per row, loops over k and v
    # and writes the gradient of q.
    return total + keys_and_values + 3 * shape.query_bytes + 2 * shape.row_bytes


def decode_bytes(shape: Shape, splits: int = 1) -> int:
    """Count a decode step's bytes: the KV cache once, and split results written and read."""
    positive_int("splits", splits)
    pieces = shape.batch * shape.heads * shape.length * splits * (shape.head_dim + 1) * STATISTIC
    return compulsory_bytes(shape) + (2 * pieces if splits > 1 else 0)


def kept_bytes(shape: Shape, form: Form) -> int:
    """Count the bytes saved for the backward pass, besides queries, keys and values.

    naive: the weights [B, H, T, S]; flash: the output and one log-sum-exp per row.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "naive":
        return shape.batch * shape.heads * shape.length * shape.keys * shape.dtype_bytes
    return shape.query_bytes + shape.row_bytes


def forward_peak_bytes(shape: Shape, form: Form) -> int:
    """Return the peak bytes of a forward pass without gradients, besides queries, keys and values.

    naive: the scores and the weights [B, H, T, S], or the weights and the output if that's more.
    flash: the output and one log-sum-exp per row.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "naive":
        return max(2 * kept_bytes(shape, "naive"), kept_bytes(shape, "naive") + shape.query_bytes)
    return kept_bytes(shape, "flash")


def sram_bytes(
    *, block_q: int, block_k: int, head_dim: int, dtype_bytes: int = 2, stages: int = 2
) -> int:
    """Return one program's shared memory: its queries, and `stages` tiles of keys and of values.

    Scores, weights and sums are in registers.
    """
    return (block_q + 2 * stages * block_k) * head_dim * dtype_bytes


def largest_block(
    sram: int, *, head_dim: int, dtype_bytes: int = 2, stages: int = 2, block_k: int | None = None
) -> int:
    """Return the most queries, a power of two, whose tile fits in `sram` bytes, or 0 if none fits.

    block_k: keys per tile, by default as many as queries.
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
