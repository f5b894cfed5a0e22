"""Triton kernel: AdamW on a list of tensors whose moments have 8 bits.

Tables are as in `kernels`, with codes in the rows of the moments. A second table has the addresses
of their scales in the same rows. Tensors are in row-major order. Tiles have a row for each block of
the quantization, so that a block's largest magnitude is a reduction over a row.
"""

import triton
import triton.language as tl

from labcore.optim.kernels import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    MASTER,
    NUMEL,
    PARAM,
    adamw_update,
    address_of,
    load,
    read,
    read_weight,
    store,
    write_weight,
)
from labcore.optim.map_8bit import DECADES

WARPS = 8  # with 4, which is 8 elements per thread, more programs spill registers
CODES = tl.constexpr(256)
ZERO = tl.constexpr(127)  # the signed code of 0
LOWER = tl.constexpr(DECADES - 1)  # decades below the one from 0.1 to 1
DOUBLED = tl.constexpr(2 ** (DECADES - 1))  # a decade has twice the steps of the next


@triton.jit
def nearest_code(unit, borders_ptr, SIGNED: tl.constexpr):
    """Return the codes of numbers from -1 to 1 [any shape], int32; NaN becomes 255.

    A code is the number of borders not above the value. A search would read 8 of the 255 borders.
    But borders are evenly spaced within a decade, so arithmetic finds the nearest one, and one
    comparison with it is exact. The borders at 1, at 0.1 and so on, where steps change,
    are out of place by less than half a step.
    """
    if SIGNED:
        FEWEST: tl.constexpr = 1  # steps in the last decade
        x = tl.abs(unit)
    else:
        FEWEST: tl.constexpr = 2
        x = unit
    x = tl.where(x < 1, x, 1.0)
    steps = tl.full(x.shape, DOUBLED * FEWEST, tl.float32)
    for _ in tl.static_range(LOWER):
        small = x < 0.1
        x = tl.where(small, 10 * x, x)
        steps = tl.where(small, 0.5 * steps, steps)
    place = tl.maximum((x - 0.1) * (1 / 0.9) * steps, 0.0) + 0.5
    border = steps.to(tl.int32) - FEWEST + place.to(tl.int32)
    if SIGNED:
        border = tl.maximum(tl.where(unit < 0, ZERO - 1 - border, ZERO + border), 0)
    return border + tl.where(unit < tl.load(borders_ptr + border), 0, 1)


@triton.jit
def _restore(
    codes, scales, offs, inside, block, live, maps_ptr,
    S: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    code = load(codes, offs, inside, S, ALIGNED, MASKED).to(tl.int32)
    scale = load(scales, block, live, tl.float32, False, MASKED)
    return tl.load(maps_ptr + code) * scale


@triton.jit
def _quantize(
    codes, scales, x, offs, inside, block, live, maps_ptr, SIGNED: tl.constexpr,
    S: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers, NaN is the largest
    if MASKED:
        magnitude = tl.where(inside, magnitude, 0)
    scale = tl.max(magnitude, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    unit = tl.div_rn(x, tl.where(scale == 0, 1.0, scale))
    code = nearest_code(unit, maps_ptr + CODES, SIGNED)
    if not SIGNED:
        code = tl.maximum(code, tl.where(x > 0, 1, 0))
    store(codes, offs, inside, code.to(S), S, ALIGNED, MASKED)
    store(scales, block, live, scale, tl.float32, False, MASKED)


@triton.jit
def _adamw8bit_tile(
    param, grad, exp_avg, exp_avg_sq, master, exp_avg_scales, exp_avg_sq_scales, maps_ptr,
    first, numel, size, keep, blend, remember, forget, unbias, eps, seed,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    block = first // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)[:, None]
    offs = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    live, inside = block * BLOCK_SIZE < numel, offs < numel
    weight = read_weight(param, master, offs, inside, P, HAS_MASTER, ALIGNED, MASKED)
    g = read(grad, offs, inside, G, ALIGNED, MASKED)
    if MAXIMIZE:
        g = -g
    unsigned_ptr = maps_ptr + 2 * CODES
    m = _restore(
        exp_avg, exp_avg_scales, offs, inside, block, live, maps_ptr, S, ALIGNED, MASKED
    )  # fmt: skip
    v = _restore(
        exp_avg_sq, exp_avg_sq_scales, offs, inside, block, live, unsigned_ptr, S, ALIGNED, MASKED
    )  # fmt: skip
    weight, m, v = adamw_update(
        weight, g, m, v, size, keep, blend, remember, forget, unbias, eps, 0.0
    )
    # Weights come before the codes, so that no registers hold them during the quantization.
    write_weight(
        param, master, first, offs, inside, weight, seed, P, HAS_MASTER, STOCHASTIC, ALIGNED,
        MASKED, TILE,
    )  # fmt: skip
    _quantize(
        exp_avg, exp_avg_scales, m, offs, inside, block, live, maps_ptr, True, S, ALIGNED, MASKED
    )
    _quantize(
        exp_avg_sq, exp_avg_sq_scales, v, offs, inside, block, live, unsigned_ptr, False, S,
        ALIGNED, MASKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tensors", "seed"])
def adamw8bit_kernel(
    table_ptr,
    scales_ptr,  # [ROWS, tensors] int64: addresses of scales in the rows of the moments
    blocks_ptr,
    maps_ptr,  # [4, 256] float32: values and borders of the signed map, then of the unsigned one
    tensors,
    size,  # lr / (1 − beta1^t)
    keep,  # 1 − lr · weight decay
    blend,  # 1 − beta1
    remember,  # beta2
    forget,  # 1 − beta2
    unbias,  # 1 / (1 − beta2^t)
    eps,
    seed,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run AdamW with 8-bit moments; weights use the moments before they are quantized again.

    P, G, S: dtypes of parameters, gradients and codes. BLOCK_SIZE: a power of two, at most TILE.
    """
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    start = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    numel = address_of(table_ptr, tensors, tensor, NUMEL)
    param = address_of(table_ptr, tensors, tensor, PARAM)
    grad = address_of(table_ptr, tensors, tensor, GRAD)
    exp_avg = address_of(table_ptr, tensors, tensor, EXP_AVG)
    exp_avg_sq = address_of(table_ptr, tensors, tensor, EXP_AVG_SQ)
    master = address_of(table_ptr, tensors, tensor, MASTER)
    exp_avg_scales = address_of(scales_ptr, tensors, tensor, EXP_AVG)
    exp_avg_sq_scales = address_of(scales_ptr, tensors, tensor, EXP_AVG_SQ)
    seed += tensor
    stop = tl.minimum(start + BLOCK, numel)
    whole = start + (stop - start) // TILE * TILE
    for first in tl.range(start, whole, TILE):
        _adamw8bit_tile(
            param, grad, exp_avg, exp_avg_sq, master, exp_avg_scales, exp_avg_sq_scales, maps_ptr,
            first, numel, size, keep, blend, remember, forget, unbias, eps, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    if whole < stop:
        _adamw8bit_tile(
            param, grad, exp_avg, exp_avg_sq, master, exp_avg_scales, exp_avg_sq_scales, maps_ptr,
            whole, numel, size, keep, blend, remember, forget, unbias, eps, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
