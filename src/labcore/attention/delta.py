"""The kernel that computes delta, which both backward kernels subtract; see `backward`."""

import triton
import triton.language as tl
from torch import Tensor

from labcore.attention.configs import padded
from labcore.attention.launch import launch, readable, strides
from labcore.attention.tiling import NUMBERS, load_rows

__all__ = ["delta_kernel", "launch_delta"]

ROWS = 32  # per program


@triton.jit(do_not_specialize=NUMBERS)
def delta_kernel(
    out_ptr, do_ptr, grad_lse_ptr, delta_ptr,
    stride_ob, stride_oh, stride_ot, stride_dob, stride_doh, stride_dot, stride_lb, stride_lh,
    heads, max_q, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute delta [B, H, T], the sum over D of out * grad_out, minus lse's gradient if any."""
    blocks = tl.cdiv(max_q, M)
    m0 = tl.program_id(0) % blocks * M
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    rows = m0.to(tl.int64) + tl.arange(0, M)
    out_base = out_ptr + batch * stride_ob + head * stride_oh
    do_base = do_ptr + batch * stride_dob + head * stride_doh
    out = load_rows(out_base, stride_ot, rows, max_q, D, D_PAD, True).to(tl.float32)
    do = load_rows(do_base, stride_dot, rows, max_q, D, D_PAD, True).to(tl.float32)
    delta = tl.sum(out * do, 1)
    at = batch * stride_lb + head * stride_lh + rows
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + at, mask=rows < max_q, other=0.0)
    tl.store(delta_ptr + at, delta, mask=rows < max_q)


def launch_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, delta: Tensor) -> None:
    """Fill delta [B, H, T]; this needs no sequence bounds, even for packed rows."""
    batch, heads, tokens, dim = out.shape
    out = readable(out)
    programs = triton.cdiv(tokens, ROWS) * heads * batch
    launch(
        delta_kernel,
        programs,
        out,
        out_ptr=out,
        do_ptr=grad_out,
        grad_lse_ptr=None if grad_lse is None else grad_lse.contiguous(),
        delta_ptr=delta,
        heads=heads,
        max_q=tokens,
        D=dim,
        D_PAD=padded(dim),
        M=ROWS,
        num_warps=4,
        num_stages=1,
        **strides(False, o=out, do=grad_out, l=delta),
    )
