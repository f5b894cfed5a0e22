"""Triton kernels: one launch updates a list of tensors.

`table` [ROWS, tensors] int64 has a row of addresses per operand (param, grad, exp_avg, exp_avg_sq,
master) and a last row with the numbers of elements. `blocks` [programs, 2] int32 gives the tensor
and block that each program works on. A tensor's operands share strides, so their memory is
traversed in the same order. Arithmetic is in float32. bfloat16 is read and written as bits, which
also works in the interpreter. A block that lies wholly inside its tensor is loaded without a mask,
because a mask would make every load scalar.
"""

import triton
import triton.language as tl

from labcore.compile_only import register

BLOCK = 1024  # 8 elements per thread: two 16-byte loads per operand
WARPS = 4

PARAM = tl.constexpr(0)
GRAD = tl.constexpr(1)
EXP_AVG = tl.constexpr(2)
EXP_AVG_SQ = tl.constexpr(3)
MASTER = tl.constexpr(4)
NUMEL = tl.constexpr(5)
ROWS = 6


@triton.jit
def _address(table_ptr, tensors, tensor, ROW: tl.constexpr):
    return tl.load(table_ptr + ROW * tensors + tensor)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(address, offs, inside, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """Load the elements at offs [BLOCK] as float32."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        pointer = _pointer(address, tl.int16, ALIGNED)
    else:
        pointer = _pointer(address, DTYPE, ALIGNED)
    if MASKED:  # noqa: SIM108
        values = tl.load(pointer + offs, mask=inside, other=0)
    else:
        values = tl.load(pointer + offs)
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


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
    """Store x [BLOCK] float32 as DTYPE. For bfloat16, add `added` to its bits; NaN is kept."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        pointer = _pointer(address, tl.int16, ALIGNED)
        rounded = (x.to(tl.int32, bitcast=True) + added) >> 16
        values = tl.where(x == x, rounded, 0x7FC0).to(tl.int16)
    else:
        pointer = _pointer(address, DTYPE, ALIGNED)
        values = x.to(DTYPE)
    if MASKED:
        tl.store(pointer + offs, values, mask=inside)
    else:
        tl.store(pointer + offs, values)


@triton.jit
def _write_weight(
    table_ptr,
    tensors,
    tensor,
    offs,
    inside,
    x,
    seed,
    DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    if HAS_MASTER:
        master = _address(table_ptr, tensors, tensor, MASTER)
        _write(master, offs, inside, x, 0, tl.float32, ALIGNED, MASKED)
    if STOCHASTIC:
        added = tl.randint(seed + tensor, offs.to(tl.int32)).to(tl.int32) & 0xFFFF
    else:
        added = _nearest_bits(x)
    param = _address(table_ptr, tensors, tensor, PARAM)
    _write(param, offs, inside, x, added, DTYPE, ALIGNED, MASKED)


@triton.jit
def _lion_block(
    table_ptr,
    tensors,
    tensor,
    offs,
    inside,
    lr,
    keep,
    blend,
    forget,
    seed,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    exp_avg_at = _address(table_ptr, tensors, tensor, EXP_AVG)
    if HAS_MASTER:
        master = _address(table_ptr, tensors, tensor, MASTER)
        weight = _read(master, offs, inside, tl.float32, ALIGNED, MASKED)
    else:
        param = _address(table_ptr, tensors, tensor, PARAM)
        weight = _read(param, offs, inside, P, ALIGNED, MASKED)
    grad_at = _address(table_ptr, tensors, tensor, GRAD)
    grad = _read(grad_at, offs, inside, G, ALIGNED, MASKED)
    if MAXIMIZE:
        grad = -grad
    exp_avg = _read(exp_avg_at, offs, inside, S, ALIGNED, MASKED)
    update = exp_avg + blend * (grad - exp_avg)
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    sign = tl.where(
        tl.abs(update) < float("inf"), sign, float("nan")
    )  # don't hide non-finite values
    weight = weight * keep - lr * sign
    exp_avg = exp_avg + forget * (grad - exp_avg)
    _write(exp_avg_at, offs, inside, exp_avg, _nearest_bits(exp_avg), S, ALIGNED, MASKED)
    _write_weight(
        table_ptr, tensors, tensor, offs, inside, weight, seed, P, HAS_MASTER, STOCHASTIC, ALIGNED,
        MASKED
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
):
    """Lion on a list of tensors. P, G, S: dtypes of parameters, gradients and state."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    start = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    numel = _address(table_ptr, tensors, tensor, NUMEL)
    inside = offs < numel
    if ON_DEVICE:
        lr = tl.load(scalars_ptr + 4 * tensor)
        keep = tl.load(scalars_ptr + 4 * tensor + 1)
        blend = tl.load(scalars_ptr + 4 * tensor + 2)
        forget = tl.load(scalars_ptr + 4 * tensor + 3)
    if start + BLOCK <= numel:
        _lion_block(
            table_ptr, tensors, tensor, offs, inside, lr, keep, blend, forget, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, False,
        )  # fmt: skip
    else:
        _lion_block(
            table_ptr, tensors, tensor, offs, inside, lr, keep, blend, forget, seed,
            P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, True,
        )  # fmt: skip


@triton.jit
def _adamw_block(
    table_ptr,
    tensors,
    tensor,
    offs,
    inside,
    size,
    keep,
    blend,
    remember,
    forget,
    unbias,
    eps,
    eps_root,
    seed,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    exp_avg_at = _address(table_ptr, tensors, tensor, EXP_AVG)
    exp_avg_sq_at = _address(table_ptr, tensors, tensor, EXP_AVG_SQ)
    if HAS_MASTER:
        master = _address(table_ptr, tensors, tensor, MASTER)
        weight = _read(master, offs, inside, tl.float32, ALIGNED, MASKED)
    else:
        param = _address(table_ptr, tensors, tensor, PARAM)
        weight = _read(param, offs, inside, P, ALIGNED, MASKED)
    grad_at = _address(table_ptr, tensors, tensor, GRAD)
    grad = _read(grad_at, offs, inside, G, ALIGNED, MASKED)
    if MAXIMIZE:
        grad = -grad
    exp_avg = _read(exp_avg_at, offs, inside, S, ALIGNED, MASKED)
    exp_avg_sq = _read(exp_avg_sq_at, offs, inside, S, ALIGNED, MASKED)
    exp_avg = exp_avg + blend * (grad - exp_avg)
    exp_avg_sq = remember * exp_avg_sq + forget * grad * grad
    root = tl.sqrt(exp_avg_sq * unbias + eps_root) + eps
    weight = weight * keep - size * exp_avg / root
    _write(exp_avg_at, offs, inside, exp_avg, _nearest_bits(exp_avg), S, ALIGNED, MASKED)
    _write(exp_avg_sq_at, offs, inside, exp_avg_sq, _nearest_bits(exp_avg_sq), S, ALIGNED, MASKED)
    _write_weight(
        table_ptr, tensors, tensor, offs, inside, weight, seed, P, HAS_MASTER, STOCHASTIC, ALIGNED,
        MASKED
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
):
    """AdamW on a list of tensors: `m̂ / (√(v̂ + eps_root) + eps)`. Dtypes are as in lion_kernel."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    start = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    numel = _address(table_ptr, tensors, tensor, NUMEL)
    inside = offs < numel
    if ON_DEVICE:
        size = tl.load(scalars_ptr + 8 * tensor)
        keep = tl.load(scalars_ptr + 8 * tensor + 1)
        blend = tl.load(scalars_ptr + 8 * tensor + 2)
        remember = tl.load(scalars_ptr + 8 * tensor + 3)
        forget = tl.load(scalars_ptr + 8 * tensor + 4)
        unbias = tl.load(scalars_ptr + 8 * tensor + 5)
        eps = tl.load(scalars_ptr + 8 * tensor + 6)
        eps_root = tl.load(scalars_ptr + 8 * tensor + 7)
    if start + BLOCK <= numel:
        _adamw_block(
            table_ptr, tensors, tensor, offs, inside, size, keep, blend, remember, forget, unbias,
            eps, eps_root, seed, P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, False,
        )  # fmt: skip
    else:
        _adamw_block(
            table_ptr, tensors, tensor, offs, inside, size, keep, blend, remember, forget, unbias,
            eps, eps_root, seed, P, G, S, MAXIMIZE, HAS_MASTER, STOCHASTIC, ALIGNED, True,
        )  # fmt: skip


def _register() -> None:
    tables = {"table_ptr": "*i64", "blocks_ptr": "*i32", "scalars_ptr": "*fp32"}
    counts = {"tensors": "i32", "seed": "i32"}
    plain = {"MAXIMIZE": False, "HAS_MASTER": False, "STOCHASTIC": False, "ON_DEVICE": False,
             "ALIGNED": True, "BLOCK": BLOCK}  # fmt: skip
    float32 = {**plain, "P": tl.float32, "G": tl.float32, "S": tl.float32}
    bfloat16 = {**plain, "P": tl.bfloat16, "G": tl.bfloat16, "S": tl.float32, "STOCHASTIC": True}
    for kernel in (lion_kernel, adamw_kernel):
        given = {*tables, *counts, *float32}
        floats = {name: "fp32" for name in kernel.arg_names if name not in given}
        for case, constexprs in (("float32", float32), ("bfloat16-stochastic", bfloat16)):
            register(
                kernel,
                case,
                signature={**tables, **counts, **floats},
                constexprs=constexprs,
                aligned=tuple(tables),
                num_warps=WARPS,
            )


_register()
