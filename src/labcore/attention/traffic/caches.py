"""Count both forms' bytes in two ways: what programs request, and what moves to and from HBM.

A program is what runs on one SM or CU at a time and computes one tile of a result. Each request for
a tile counts in `requested_bytes`, although a cache may answer it. `hbm_bytes` models that cache.
Letters as in `counts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labcore.attention.traffic.counts import (
    STATISTIC,
    Direction,
    Form,
    Shape,
    compulsory_bytes,
    flash_bytes,
    tile_walks,
)
from labcore.attention.traffic.gpus import Gpu
from labcore.checks import one_of, positive_int

__all__ = ["hbm_bytes", "requested_bytes"]


def requested_bytes(
    shape: Shape, form: Form, direction: Direction = "forward", *, block_q: int, block_k: int
) -> int:
    """Count the bytes that the programs of a form request from the memory system, with its caches.

    flash: `flash_bytes`, with two kernels in the backward pass. naive: each matrix product is a
    kernel of its own, and so is softmax. A program of a product computes a tile of its result,
    block_q rows by block_k columns, and reads those rows of one operand and those columns of the
    other. Softmax reads and writes each score once (backward: it reads two and writes one).
    Masked pairs cost the naive form as much as visible ones.
    """
    one_of("form", form, ("naive", "flash"))
    if form == "flash":
        return flash_bytes(shape, direction, block_q=block_q, block_k=block_k)
    positive_int("block_q", block_q)
    positive_int("block_k", block_k)
    elements = _softmax_elements(shape, direction)
    for rows, columns, inner in _products(shape, direction):
        elements += rows * inner * -(-columns // block_k) + columns * inner * -(-rows // block_q)
        elements += rows * columns
    return shape.batch * shape.heads * elements * shape.dtype_bytes


def hbm_bytes(
    shape: Shape,
    form: Form,
    gpu: Gpu,
    direction: Direction = "forward",
    *,
    block_q: int,
    block_k: int,
) -> int:
    """Estimate the bytes that a form reads from HBM and writes to it.

    The model: programs start in order, tile by tile and head by head, in waves of one per SM. The
    programs of a wave run in step, so a wave reads nothing twice. If what a wave reads and writes
    fits in the GPU's cache, the next wave finds it there, and a kernel reads each operand once.
    Otherwise, each wave reads its operands again. A kernel finds nothing that the one before it
    wrote, unless all tensors fit in the cache; then only inputs and results count. The cache must
    hold at least one step of each program in a wave, which every GPU's cache in `GPUS` does.
    The tests compare the model with a cache that drops the least recently used element.
    block_q, block_k: as in `requested_bytes`.
    """
    one_of("form", form, ("naive", "flash"))
    one_of("direction", direction, ("forward", "backward"))
    positive_int("block_q", block_q)
    positive_int("block_k", block_k)
    return (_naive if form == "naive" else _flash)(shape, gpu, direction, block_q, block_k)


def _products(shape: Shape, direction: Direction) -> list[tuple[int, int, int]]:
    """Return one head's matrix products of the naive form, as rows, columns and inner length."""
    one_of("direction", direction, ("forward", "backward"))
    queries, keys, dim = shape.length, shape.keys, shape.head_dim
    if direction == "forward":  # scores; out
        return [(queries, keys, dim), (queries, dim, keys)]
    # The gradients of v, of the weights, of q and of k.
    gradient_of_keys = (keys, dim, queries)
    return [gradient_of_keys, (queries, keys, dim), (queries, dim, keys), gradient_of_keys]


def _softmax_elements(shape: Shape, direction: Direction) -> int:
    return (2 if direction == "forward" else 3) * shape.length * shape.keys


def _naive(shape: Shape, gpu: Gpu, direction: Direction, block_q: int, block_k: int) -> int:
    heads, size = shape.batch * shape.heads, shape.dtype_bytes
    scores = heads * shape.length * shape.keys * size
    copies = shape.key_bytes * (shape.heads // shape.shared_heads)
    if direction == "forward":  # q, out; k, v
        least = 2 * shape.query_bytes + 2 * copies
    else:  # q, its gradient, that of out; k, v and theirs; weights
        least = 3 * shape.query_bytes + 4 * copies + scores
    if least + 2 * scores <= gpu.cache:
        return least
    moved = heads * _softmax_elements(shape, direction) * size
    for rows, columns, inner in _products(shape, direction):
        across = -(-columns // block_k)

        def distinct(
            first: int, last: int, m: int = rows, n: int = columns, k: int = inner, a: int = across
        ) -> int:
            down = -(-last // a) - first // a
            return (min(down * block_q, m) + min((last - first) * block_k, n)) * k * size

        programs = -(-rows // block_q) * across
        moved += _reads(heads, programs, distinct, block_q * block_k * size, gpu)
        moved += heads * rows * columns * size
    return moved


def _flash(shape: Shape, gpu: Gpu, direction: Direction, block_q: int, block_k: int) -> int:
    least = compulsory_bytes(shape, direction)
    backward = direction == "backward"
    if least + (shape.row_bytes if backward else 0) <= gpu.cache:  # with a number for each row
        return least
    row, groups = shape.head_dim * shape.dtype_bytes, shape.batch * shape.shared_heads
    group = shape.heads // shape.shared_heads
    walks = list(tile_walks(shape, block_q, block_k))
    # A program's own rows, and the keys and values that it walks over.
    walked = [2 * keys * row for _, _, keys in walks] * group
    own_rows = [queries for queries, _, _ in walks] * group
    if not backward:
        own = [queries * row for queries in own_rows]
        written = own[0] + own_rows[0] * STATISTIC
        moved = _walk(groups, own, walked, written, gpu)
        return moved + shape.query_bytes + shape.row_bytes
    # The gradient of q: q, the gradient of out and two numbers per row; one result.
    own = [queries * (2 * row + 2 * STATISTIC) for queries in own_rows]
    moved = _walk(groups, own, walked, own_rows[0] * row, gpu) + shape.query_bytes
    # The gradients of k and v: a tile of keys walks over the queries of its group that see it.
    own, walked = [], []
    for tile, first in enumerate(range(0, shape.keys, block_k)):
        keys = min(block_k, shape.keys - first)
        seen = sum(queries for queries, tiles, _ in walks if tiles > tile)
        own.append(2 * keys * row)
        walked.append(group * seen * (2 * row + 2 * STATISTIC))
    moved += _walk(groups, own, walked, own[0], gpu) + 2 * shape.key_bytes
    # A first kernel reads out and its gradient, and writes one number per row.
    return moved + 2 * shape.query_bytes + shape.row_bytes


def _walk(groups: int, own: Sequence[int], walked: Sequence[int], written: int, gpu: Gpu) -> int:
    """Return the bytes read by programs that each hold `own` bytes and walk over `walked` bytes.

    Of two programs of a group, one walks over all that the other does, or more.
    """

    def distinct(first: int, last: int) -> int:
        return sum(own[first:last]) + max(walked[first:last])

    return _reads(groups, len(own), distinct, written, gpu)


def _reads(
    groups: int, programs: int, distinct: Callable[[int, int], int], written: int, gpu: Gpu
) -> int:
    """Return the bytes that a kernel reads from HBM; see `hbm_bytes`.

    groups: how many groups of `programs` programs share operands. distinct: the bytes that
    programs first … last - 1 of a group read, without repetition. written: bytes per program.
    """
    total = most = 0
    for start in range(0, groups * programs, gpu.units):
        stop = min(start + gpu.units, groups * programs)
        wave = sum(
            distinct(max(start - base, 0), min(stop - base, programs))
            for base in range(start // programs * programs, stop, programs)
        )
        total += wave
        most = max(most, wave + (stop - start) * written)
    return groups * distinct(0, programs) if most <= gpu.cache else total
