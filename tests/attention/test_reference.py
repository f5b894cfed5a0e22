"""The first rungs against torch's own attention, and where each of them ends."""

import pytest
import torch
from torch.nn import functional as F

from labcore.attention import Pattern, allowed, naive_attention, safe_attention
from tests.attention.cases import BANDS, draw, error, exact

SIZES = ((1, 1), (31, 63), (63, 31), (100, 128))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_safe_attention_is_torch_s(kv_heads: int, size, generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=kv_heads, q_len=size[0], k_len=size[1])
    mask = torch.rand(2, 4, *size, generator=generator) < 0.7
    mask[..., 0] = True  # torch gives NaN to a row that sees nothing
    bias = torch.randn(2, 1, *size, generator=generator, dtype=torch.float64)
    pattern, scale = Pattern(scale=0.3), {"scale": 0.3, "enable_gqa": True}
    for attn_mask in (None, mask, bias):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **scale)
        assert (
            error(safe_attention(q, k, v, pattern=pattern, attn_mask=attn_mask)[0], expected)
            < 1e-12
        )
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, **scale)
    ours, _ = safe_attention(q, k, v, pattern=Pattern(scale=0.3, is_causal=True))
    assert error(ours, causal) < 1e-12


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_lse_is_of_the_scores_that_are_seen(band: dict, generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=2, q_len=31, k_len=63)
    pattern = Pattern(scale=0.5, **band)
    scores = 0.5 * q @ k.mT
    if pattern.softcap is not None:
        scores = pattern.softcap * (scores / pattern.softcap).tanh()
    scores = scores.masked_fill(~allowed(pattern, 31, 63), -torch.inf)
    assert error(safe_attention(q, k, v, pattern=pattern)[1], scores.logsumexp(-1)) < 1e-12


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_naive_attention_is_the_same_until_exp_overflows(
    band: dict, generator: torch.Generator
) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=63, k_len=31, dtype=torch.float32)
    pattern = Pattern(scale=0.25, **band)
    safe, _ = safe_attention(q, k, v, pattern=pattern)
    assert error(naive_attention(q, k, v, pattern=pattern), safe) < 1e-5


def test_only_the_naive_form_overflows() -> None:
    ones = torch.ones(1, 1, 3, 16)
    pattern = Pattern(scale=89 / 16)  # scores of 89, exp of which is more than fp32 holds
    assert naive_attention(ones, ones, ones, pattern=pattern).isnan().all()
    out, lse = safe_attention(ones, ones, ones, pattern=pattern)
    assert error(out, ones) < 1e-6
    assert error(lse, 89 + torch.tensor(3.0).log()) < 1e-4


def test_a_row_that_sees_nothing_gives_zeros(generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=9, k_len=4)
    pattern = Pattern(scale=1.0, is_causal=True, bottom_right=True)  # rows 0-4 come before key 0
    out, lse = safe_attention(q, k, v, pattern=pattern)
    assert not out[:, :, :5].any()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    assert not naive_attention(q, k, v, pattern=pattern)[:, :, :5].any()
    (out.sum() + lse[:, :, 5:].sum()).backward()
    assert not q.grad[:, :, :5].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    empty = q.new_zeros(2, 2, 0, 16)
    out, lse = safe_attention(q, empty, empty, pattern=Pattern(scale=1.0))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    "band", [{"softcap": 1.0}, {"is_causal": True, "bottom_right": True}], ids=str
)
def test_gradients_of_both_orders(band: dict, generator: torch.Generator) -> None:
    q, k, v = draw(generator, batch=1, heads=2, kv_heads=1, q_len=4, k_len=3, dim=2)
    bias = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()

    def attention(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = safe_attention(
            *leaves[:3], pattern=Pattern(scale=0.7, **band), attn_mask=leaves[3]
        )
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(attention, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(attention, (q, k, v, bias))


def test_dropout_drops_weights_and_scales_the_rest(seed: int, generator: torch.Generator) -> None:
    q, k, _ = draw(generator, batch=1, q_len=31, k_len=100)
    identity = torch.eye(100, dtype=torch.float64).expand(1, 2, 100, 100)  # out is the weights
    pattern = Pattern(scale=0.3)
    weights, lse = safe_attention(q, k, identity, pattern=pattern)
    torch.manual_seed(seed)
    dropped, same_lse = safe_attention(q, k, identity, pattern=pattern, dropout_p=0.25)
    gone = dropped == 0
    assert error(dropped, (weights / 0.75).masked_fill(gone, 0)) < 1e-12
    assert torch.equal(lse, same_lse)
    # 6,200 draws: a share this far from 0.25 has a chance below 1e-9.
    assert abs(gone.double().mean().item() - 0.25) < 0.034


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_go_in_and_out(dtype: torch.dtype, generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=100, k_len=128, dim=32, dtype=dtype)
    pattern = Pattern(scale=0.2, is_causal=True)
    _, truth, true_lse = exact(q, k, v, pattern)
    out, lse = safe_attention(q, k, v, pattern=pattern)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    # Rounded once: half a step of the dtype, and what fp32 does not know before it.
    half = torch.finfo(dtype).eps / 2 * truth.abs()
    assert ((out.double() - truth).abs() <= half + 5e-6).all()
    assert error(lse, true_lse) < 1e-5
