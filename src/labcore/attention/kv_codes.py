"""Keys and values in eight bits: the D numbers of a key or value become codes that share a scale.

A KV cache of 8-bit codes needs about half the bytes of one in 16 bits, and decoding reads the whole
cache for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labcore.attention.arguments import DTYPES
from labcore.checks import floating, one_of

__all__ = ["check_codes", "check_readable", "quantize_kv"]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FLOAT8_FROM = (8, 9)  # NVIDIA's compute capability


@torch.no_grad()
def quantize_kv(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return codes in `dtype` and each row's scale; x is about codes * scales[..., None].

    x: [..., D], float; computed in float32. dtype: torch.int8 or torch.float8_e4m3fn.
    codes: [..., D]. scales: float32 [...], a row's largest magnitude over the dtype's, 127 or 448;
    0 for a row of zeros.
    An int8 code is off by at most half a step, 1/254 of the row's largest magnitude. A float8 code
    is off by at most 1/16 of its own number, or 1/458,752 of the row's largest magnitude if that
    is more. Both hold unless a scale is too small for a normal float32.
    The scale of a row with NaN or infinity is not finite, nor is what is read from it: checking
    would make the host wait for the GPU.
    Raises TypeError or ValueError for another dtype.
    """
    one_of("dtype", dtype, LARGEST)
    wide = floating("x", x).float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    steps = torch.where(scales == 0, 1.0, scales)  # 0 / 0 has no code
    codes = wide / steps[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def check_codes(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Raise unless pages hold codes of one dtype and scales fit them, all on the query's device."""
    if floating("query", query).dtype not in DTYPES:
        raise TypeError(f"query must be float16, bfloat16, float32 or float64, got {query.dtype}")
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        dtype = x.dtype if isinstance(x, Tensor) else type(x).__name__
        if dtype not in LARGEST or dtype != key_pages.dtype or x.device != query.device:
            raise TypeError(
                "pages with scales must hold int8 or float8_e4m3fn, both the same, on the query's "
                f"device {query.device}, got {dtype} for {name}; use quantize_kv, or leave the "
                "scales out"
            )
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
            got = getattr(scales, "dtype", type(scales).__name__)
            raise TypeError(f"{name} must be a tensor of float32, as from quantize_kv, got {got}")
        if scales.shape != key_pages.shape[:3] or scales.device != query.device:
            raise ValueError(
                f"{name} must have a scale for each key of each head, shape "
                f"{tuple(key_pages.shape[:3])} on {query.device}, got {tuple(scales.shape)} on "
                f"{scales.device}"
            )


def check_readable(pages: Tensor) -> None:
    """Raise ValueError for float8 on an NVIDIA GPU for which Triton doesn't compile it."""
    if pages.dtype != torch.float8_e4m3fn or not pages.is_cuda or torch.version.hip:
        return
    if (found := torch.cuda.get_device_capability(pages.device)) < FLOAT8_FROM:
        raise ValueError(
            f"pages of float8_e4m3fn need compute capability {FLOAT8_FROM}, got {found}; quantize "
            "to torch.int8, or use backend='torch'"
        )
