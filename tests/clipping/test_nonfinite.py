"""The three policies for NaN and infinity, and that two of them never read a number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from labcore.clipping import (
    AutoClip,
    Clipped,
    ZClip,
    clip_adaptive,
    clip_by_global_norm,
    clip_by_local_norm,
    clip_by_value,
)
from labcore.clipping.contract import gradients
from labcore.clipping.norms import gradient_norms
from tests.clipping.lists import awkward, copies, exact_norm

Clip = Callable[..., Clipped]

CLIPS: dict[str, Clip] = {
    "global": lambda params, policy: clip_by_global_norm(params, 1.0, nonfinite=policy),
    "global inf": lambda params, policy: clip_by_global_norm(
        params, 1.0, math.inf, nonfinite=policy
    ),
    "global 3": lambda params, policy: clip_by_global_norm(params, 1.0, 3.0, nonfinite=policy),
    "no foreach": lambda params, policy: clip_by_global_norm(
        params, 1.0, nonfinite=policy, foreach=False
    ),
    "local": lambda params, policy: clip_by_local_norm(params, 1.0, nonfinite=policy),
    "value": lambda params, policy: clip_by_value(params, 1.0, nonfinite=policy),
    "adaptive": lambda params, policy: clip_adaptive(params, nonfinite=policy),
    "autoclip": lambda params, policy: AutoClip(nonfinite=policy).clip(params),
    "zclip": lambda params, policy: ZClip(max_norm=1.0, nonfinite=policy).clip(params),
}


def spoiled(value: float, seed: int) -> list[tuple[str, Tensor]]:
    """Named parameters; "b" and "d", a small and a big one, have one bad element each."""
    params = awkward(torch.float32, seed, ((3, 5), (2, 7), (9001,), (150, 70)))[:4]
    named = list(zip("abcd", params, strict=True))
    for name, param in named:
        if name in "bd":
            assert param.grad is not None
            param.grad.view(-1)[3] = value
    return named


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_raise_names_the_parameters_and_changes_nothing(
    clip: Clip, value: float, seed: int
) -> None:
    named = spoiled(value, seed)
    before = copies([p for _, p in named])
    with pytest.raises(RuntimeError, match=r"in 2 of 4: b, d; nothing was changed"):
        clip(named, "raise")
    for old, (_, param) in zip(before, named, strict=True):
        torch.testing.assert_close(param.grad, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_skip_leaves_a_step_of_zero_and_says_so(clip: Clip, value: float, seed: int) -> None:
    named = spoiled(value, seed)
    clipped = clip(named, "skip")
    assert not clipped.finite
    assert (clipped.coefficients == 0).all()
    assert not torch.isfinite(clipped.norm)
    assert all((p.grad == 0).all() for _, p in named)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_zero_drops_the_elements_and_clips_the_rest(clip: Clip, value: float, seed: int) -> None:
    named, clean = spoiled(value, seed), spoiled(0.0, seed)
    clipped, expected = clip(named, "zero"), clip(clean, "raise")
    assert not clipped.finite and bool(expected.finite)
    assert torch.equal(clipped.norms, expected.norms)
    if clip is not CLIPS["autoclip"]:  # its history has nothing in it
        assert torch.equal(clipped.coefficients, expected.coefficients)
        for (_, one), (_, other) in zip(named, clean, strict=True):
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_policies_agree_on_finite_gradients(clip: Clip, policy: str, seed: int) -> None:
    named, other = spoiled(1.0, seed), spoiled(1.0, seed)
    first, second = clip(named, "raise"), clip(other, policy)
    assert bool(second.finite)
    assert torch.equal(first.coefficients, second.coefficients)
    assert all(torch.equal(a.grad, b.grad) for (_, a), (_, b) in zip(named, other, strict=True))


def on_meta() -> list[Tensor]:
    """Parameters without numbers: whoever reads one gets an error."""
    shapes_and_dtypes = [
        ((3, 5), torch.float32),
        ((), torch.float32),
        ((9001,), torch.bfloat16),
        ((4, 2, 3, 3), torch.float64),
        ((5,), torch.complex64),
        ((0,), torch.float16),
    ]
    found: list[Tensor] = []
    for shape, dtype in shapes_and_dtypes:
        param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        param.grad = torch.empty_like(param)
        found.append(param)
    return found


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_nothing_is_read_off_a_device(clip: Clip, policy: str) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.empty((), device="meta"))
    clipped = clip(on_meta(), policy)
    assert clipped.norms.device.type == clipped.coefficients.device.type == "meta"
    assert clipped.norms.dtype == torch.float64


def test_the_limits_that_follow_a_history_read_nothing_either() -> None:
    for clipper in (
        AutoClip(nonfinite="skip", window=3),
        AutoClip(nonfinite="skip"),
        ZClip(warmup=2, nonfinite="zero"),
    ):
        for _ in range(5):
            clipper.clip(on_meta())


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_raise_passes_where_there_is_no_number_to_judge(clip: Clip) -> None:
    clipped = clip(on_meta(), "raise")
    assert clipped.norms.is_meta and clipped.coefficients.is_meta and clipped.finite.is_meta
    assert torch.nn.utils.clip_grad_norm_(on_meta(), 1.0).is_meta  # as torch's function does


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_the_path_without_reads_gives_the_same(
    clip: Clip, policy: str, value: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = spoiled(value, seed), spoiled(value, seed)
    expected = clip(here, policy)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    clipped = clip(there, policy)
    assert torch.equal(clipped.finite, expected.finite)
    torch.testing.assert_close(clipped.norms, expected.norms, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(clipped.coefficients, expected.coefficients, rtol=2e-6, atol=0)
    for (_, one), (_, other) in zip(here, there, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_path_without_reads_ends_at_the_limit_in_every_dtype(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    params = awkward(dtype, seed, size=1e4)
    exact = exact_norm(copies(params))
    clipped = clip_by_global_norm(params, 10.0, nonfinite="skip")
    torch.testing.assert_close(clipped.norm, exact, rtol=1e-6, atol=0)
    tolerance = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6
    assert float(exact_norm(copies(params))) == pytest.approx(10.0, rel=tolerance)


def test_a_nan_is_seen_in_every_row_and_at_every_end(generator: torch.Generator) -> None:
    param = nn.Parameter(torch.zeros(3 * 8192 + 5))
    for place in (0, 8191, 8192, 3 * 8192 - 1, 3 * 8192, -1):
        param.grad = torch.randn(param.shape, generator=generator)
        param.grad[place] = math.nan
        assert torch.isnan(gradient_norms(gradients(param), 2.0)).all()
        param.grad[place] = math.inf
        assert torch.isinf(gradient_norms(gradients(param), 2.0)).all()
