"""Triton kernels: one launch updates a list of tensors.

`table` [ROWS, tensors] int64 has a row of addresses per operand (param, grad, exp_avg, exp_avg_sq,
master) and a last row with the numbers of elements. `blocks` [programs, 2] int32 gives the tensor
and block of BLOCK elements that each program works on, TILE at a time. A tensor's operands share
strides, so their memory is traversed in the same order. Arithmetic is in float32. bfloat16 is read
and written as bits, which also works in the interpreter. A tile that lies wholly inside its tensor
is loaded without a mask, because a mask would make every load scalar.

`kernels_8bit` builds on the functions without an underscore.
"""

import triton
import triton.language as tl

BLOCK = 8192  # a table of a byte per thousand elements
TILE = 1024  # 8 elements per thread: two 16-byte loads of float32, or one of bfloat16
WARPS = 4

PARAM = tl.constexpr(0)
GRAD = tl.constexpr(1)
EXP_AVG = tl.constexpr(2)
EXP_AVG_SQ = tl.constexpr(3)
MASTER = tl.constexpr(4)
NUMEL = tl.constexpr(5)
ROWS = 6


@triton.jit
def address_of(table_ptr, tensors, tensor, ROW: tl.constexpr):
    """Return an entry of a table [ROWS, tensors]."""
    return tl.load(table_ptr + ROW * tensors + tensor)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(address, offs, inside, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Load the elements at offs [any shape]; those outside are 0."""
    pointer = _pointer(address, DTYPE, ALIGNED)
    if MASKED:  # noqa: SIM108
        values = tl.load(pointer + offs, mask=inside, other=0)
    else:
        values = tl.load(pointer + offs)
    return values


@triton.jit
def store(
    address, offs, inside, values, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """Store values of DTYPE [shape of offs]."""
    pointer = _pointer(address, DTYPE, ALIGNED)
    if MASKED:
        tl.store(pointer + offs, values, mask=inside)
    else:
        tl.store(pointer + offs, values)


@triton.jit
def read(address, offs, inside, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Load the elements at offs [any shape] as float32."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = load(address, offs, inside, tl.int16, ALIGNED, MASKED)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return load(address, offs, inside, DTYPE, ALIGNED, MASKED).to(tl.float32)


@triton.jit
def _nearest_bits(x):
    """Return what to add before dropping the low 16 bits of x, to round to nearest even."""
    return 0x7FFF + ((x.to(tl.int32, bitcast=True) >> 16) & 1)


@triton.jit
def _write(
    address,
    offs,
    inside,
    x,
    added,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store x [any shape] float32 as DTYPE. For bfloat16, add `added` to its bits; NaN is kept."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        rounded = (x.to(tl.int32, bitcast=True) + added) >> 16
        values = tl.where(x == x, rounded, 0x7FC0).to(tl.int16)
        store(address, offs, inside, values, tl.int16, ALIGNED, MASKED)
    else:
        store(address, offs, inside, x.to(DTYPE), DTYPE, ALIGNED, MASKED)


@triton.jit
def _random_bits(seed, first, TILE: tl.constexpr):
    """Return 16 random bits for each of the elements first … first + TILE - 1, in an int32."""
    # One call gives 128 bits, enough for eight elements.
    eighth = tl.cast(first // 8, tl.int32) + tl.arange(0, TILE // 8)
    a, b, c, d = tl.randint4x(seed, eighth)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.int32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [TILE])


@triton.jit
def read_weight(
    param, master, offs, inside, P: tl.constexpr, HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load weights, from the master copy if there is one, as float32."""
    if HAS_MASTER:
        weight = read(master, offs, inside, tl.float32, ALIGNED, MASKED)
    else:
        weight = read(param, offs, inside, P, ALIGNED, MASKED)
    return weight


@triton.jit
def write_weight(
    param, master, first, offs, inside, x, seed, P: tl.constexpr, HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store x [shape of offs: TILE elements from `first`] as weights, and as the master copy."""
    if HAS_MASTER:
        _write(master, offs, inside, x, 0, tl.float32, ALIGNED, MASKED)
    if STOCHASTIC:  # noqa: SIM108
        added = tl.reshape(_random_bits(seed, first, TILE), x.shape)
    else:
        added = _nearest_bits(x)
    _write(param, offs, inside, x, added, P, ALIGNED, MASKED)


@triton.jit
def _lion_tile(
    param, grad, exp_avg, master, first, numel, lr, keep, blend, forget, seed,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offs = first + tl.arange(0, TILE)
    inside = offs < numel
    weight = read_weight(param, master, offs, inside, P, HAS_MASTER, ALIGNED, MASKED)
    g = read(grad, offs, inside, G, ALIGNED, MASKED)
    if MAXIMIZE:
        g = -g
    m = read(exp_avg, offs, inside, S, ALIGNED, MASKED)
    update = m + blend * (g - m)
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    sign = tl.where(tl.abs(update) < float("inf"), sign, float("nan"))  # don't hide NaN
    weight = weight * keep - lr * sign
    m = m + forget * (g - m)
    _write(exp_avg, offs, inside, m, _nearest_bits(m), S, ALIGNED, MASKED)
    write_weight(
        param, master, first, offs, inside, weight, seed, P, HAS_MASTER, STOCHASTIC, ALIGNED,
        MASKED, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tensors", "seed"])
def lion_kernel(
    table_ptr,
    blocks_ptr,
    scalars_ptr,  # [tensors, 4] float32: lr, keep, blend, forget; read if ON_DEVICE
    tensors,
    lr,
    keep,  # 1 − lr · weight decay
    blend,  # 1 − beta1
    forget,  # 1 − beta2
    seed,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lion on a list of tensors. P, G, S: dtypes of parameters, gradients and state."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    start = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    numel = address_of(table_ptr, tensors, tensor, NUMEL)
    param = address_of(table_ptr, tensors, tensor, PARAM)
    grad = address_of(table_ptr, tensors, tensor, GRAD)
    exp_avg = address_of(table_ptr, tensors, tensor, EXP_AVG)
    master = address_of(table_ptr, tensors, tensor, MASTER)
    if ON_DEVICE:
        lr = tl.load(scalars_ptr + 4 * tensor)
        keep = tl.load(scalars_ptr + 4 * tensor + 1)
        blend = tl.load(scalars_ptr + 4 * tensor + 2)
        forget = tl.load(scalars_ptr + 4 * tensor + 3)
    seed += tensor
    stop = tl.minimum(start + BLOCK, numel)
    whole = start + (stop - start) // TILE * TILE
    for first in tl.range(start, whole, TILE):
        _lion_tile(
            param, grad, exp_avg, master, first, numel, lr, keep, blend, forget, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, TILE, False,
        )  # fmt: skip
    if whole < stop:
        _lion_tile(
            param, grad, exp_avg, master, whole, numel, lr, keep, blend, forget, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, TILE, True,
        )  # fmt: skip


@triton.jit
def adamw_update(weight, g, m, v, size, keep, blend, remember, forget, unbias, eps, eps_root):
    """Return the new weight and moments; see `adamw_kernel` for the scalars."""
    m = m + blend * (g - m)
    v = remember * v + forget * g * g
    root = tl.sqrt(v * unbias + eps_root) + eps
    return weight * keep - size * m / root, m, v


@triton.jit
def _adamw_tile(
    param, grad, exp_avg, exp_avg_sq, master, first, numel,
    size, keep, blend, remember, forget, unbias, eps, eps_root, seed,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offs = first + tl.arange(0, TILE)
    inside = offs < numel
    weight = read_weight(param, master, offs, inside, P, HAS_MASTER, ALIGNED, MASKED)
    g = read(grad, offs, inside, G, ALIGNED, MASKED)
    if MAXIMIZE:
        g = -g
    m = read(exp_avg, offs, inside, S, ALIGNED, MASKED)
    v = read(exp_avg_sq, offs, inside, S, ALIGNED, MASKED)
    weight, m, v = adamw_update(
        weight, g, m, v, size, keep, blend, remember, forget, unbias, eps, eps_root
    )
    _write(exp_avg, offs, inside, m, _nearest_bits(m), S, ALIGNED, MASKED)
    _write(exp_avg_sq, offs, inside, v, _nearest_bits(v), S, ALIGNED, MASKED)
    write_weight(
        param, master, first, offs, inside, weight, seed, P, HAS_MASTER, STOCHASTIC, ALIGNED,
        MASKED, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tensors", "seed"])
def adamw_kernel(
    table_ptr,
    blocks_ptr,
    scalars_ptr,  # [tensors, 8] float32: size … eps_root; read if ON_DEVICE
    tensors,
    size,  # lr / (1 − beta1^t)
    keep,  # 1 − lr · weight decay
    blend,  # 1 − beta1
    remember,  # beta2
    forget,  # 1 − beta2
    unbias,  # 1 / (1 − beta2^t)
    eps,
    eps_root,
    seed,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """AdamW on a list of tensors: `m̂ / (√(v̂ + eps_root) + eps)`. Dtypes are as in lion_kernel."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    start = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    numel = address_of(table_ptr, tensors, tensor, NUMEL)
    param = address_of(table_ptr, tensors, tensor, PARAM)
    grad = address_of(table_ptr, tensors, tensor, GRAD)
    exp_avg = address_of(table_ptr, tensors, tensor, EXP_AVG)
    exp_avg_sq = address_of(table_ptr, tensors, tensor, EXP_AVG_SQ)
    master = address_of(table_ptr, tensors, tensor, MASTER)
    if ON_DEVICE:
        size = tl.load(scalars_ptr + 8 * tensor)
        keep = tl.load(scalars_ptr + 8 * tensor + 1)
        blend = tl.load(scalars_ptr + 8 * tensor + 2)
        remember = tl.load(scalars_ptr + 8 * tensor + 3)
        forget = tl.load(scalars_ptr + 8 * tensor + 4)
        unbias = tl.load(scalars_ptr + 8 * tensor + 5)
        eps = tl.load(scalars_ptr + 8 * tensor + 6)
        eps_root = tl.load(scalars_ptr + 8 * tensor + 7)
    seed += tensor
    stop = tl.minimum(start + BLOCK, numel)
    whole = start + (stop - start) // TILE * TILE
    for first in tl.range(start, whole, TILE):
        _adamw_tile(
            param, grad, exp_avg, exp_avg_sq, master, first, numel,
            size, keep, blend, remember, forget, unbias, eps, eps_root, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, TILE, False,
        )  # fmt: skip
    if whole < stop:
        _adamw_tile(
            param, grad, exp_avg, exp_avg_sq, master, whole, numel,
            size, keep, blend, remember, forget, unbias, eps, eps_root, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, TILE, True,
        )  # fmt: skip
