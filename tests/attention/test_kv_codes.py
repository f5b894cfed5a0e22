"""Pages of 8-bit codes: what a code loses, and attention over the numbers that codes stand for."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from labcore.attention import kv_codes, paged_attention, quantize_kv
from tests.attention.pages import (
    FORMS,
    Scattered,
    causal,
    gap,
    interpreted,
    paths,
    queries,
    scatter,
    truth,
    watched,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
LENGTHS = [31, 0, 100, 2]
TREE = torch.tensor([[-1, 0, 0]], dtype=torch.int32).repeat(4, 1)


def coded(held: Scattered, dtype: torch.dtype) -> tuple[Scattered, dict[str, Tensor]]:
    """The same sequences as codes: pages, and keys and values that the codes stand for; scales."""
    pages, scales = zip(
        *(quantize_kv(x, dtype) for x in (held.key_pages, held.value_pages)), strict=True
    )
    read = []
    for side in (held.keys, held.values):
        pairs = [quantize_kv(x.float(), dtype) for x in side]
        read.append([codes.double() * steps.double()[..., None] for codes, steps in pairs])
    new = replace(held, keys=read[0], values=read[1], key_pages=pages[0], value_pages=pages[1])
    return new, {"key_scales": scales[0], "value_scales": scales[1]}


@DTYPES
def test_a_code_is_off_by_no_more_than_is_said(dtype, generator) -> None:
    size = torch.randn(7, 3, 1, generator=generator).mul(9).exp()  # from 1e-8 to 1e8 or so
    x = size * torch.randn(7, 3, 37, generator=generator).pow(3)
    x[2, 1] = 0
    codes, scales = quantize_kv(x, dtype)
    assert codes.dtype == dtype and scales.shape == (7, 3) and scales[2, 1] == 0
    x = x.double()
    off = (codes.double() * scales.double()[..., None] - x).abs()
    most = x.abs().amax(-1, keepdim=True)
    bound = most / 254 if dtype == torch.int8 else torch.maximum(x.abs() / 16, most / 458_752)
    assert (off <= bound * (1 + 1e-5)).all()
    assert (off / bound).nan_to_num().max() > 0.8  # the bound is no looser than it must be


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(dtype, bad: float, generator) -> None:
    x = torch.randn(5, 8, generator=generator)
    x[3, 2] = bad
    codes, scales = quantize_kv(x, dtype)
    assert scales.isfinite().tolist() == [True, True, True, False, True]
    assert not (codes.float() * scales[:, None])[3].isfinite().any()


@FORMS
@DTYPES
@pytest.mark.parametrize(
    "choice",
    [{}, {"window": (20, None)}, {"softcap": 2.0}, {"splits": 3}, {"tree": TREE}],
    ids=lambda choice: next(iter(choice), "plain"),
)
def test_attention_is_that_of_the_numbers_behind_the_codes(
    backend, dtype, choice, generator, monkeypatch
) -> None:
    ran = watched(monkeypatch)
    held = scatter(LENGTHS, page=4, kv_heads=2, head_dim=24, generator=generator)
    query = queries(held, 4, 3, generator)
    held, scales = coded(held, dtype)
    found = paged_attention(
        query, *held.tensors(), **scales, **choice, backend=backend, return_lse=True
    )
    left = choice.get("window", (None,))[0]
    seen = paths(LENGTHS, TREE) if "tree" in choice else causal(LENGTHS, 3, left=left)
    assert gap(found, truth(query, held, seen, softcap=choice.get("softcap"))) < 3e-6
    assert ran == [backend]


@FORMS
@DTYPES
@pytest.mark.parametrize("query_dtype", [torch.float16, torch.bfloat16])
def test_queries_of_16_bits_lose_no_more_than_with_pages_of_16_bits(
    backend, dtype, query_dtype, generator
) -> None:
    lengths = [63, 128]
    held = scatter(lengths, page=16, kv_heads=1, head_dim=32, generator=generator)
    query = queries(held, 2, 2, generator).to(query_dtype)
    held, scales = coded(held, dtype)
    wanted = truth(query, held, causal(lengths, 2))[0]
    found = paged_attention(query, *held.tensors(), **scales, splits=2, backend=backend)
    assert found.dtype == query_dtype
    steps = torch.finfo(query_dtype).eps
    assert (found.double() - wanted).abs().max() <= 2 * steps * wanted.abs().max()


@DTYPES
def test_the_error_of_the_result_is_within_its_bound(dtype, generator) -> None:
    held = scatter([200], page=16, kv_heads=1, head_dim=64, generator=generator)
    query = queries(held, 2, 1, generator)
    exact = truth(query, held, causal([200], 1))[0]
    (codes, scales), half = coded(held, dtype), 1 / 254
    found = paged_attention(query, *codes.tensors(), **scales).double()
    if dtype == torch.float8_e4m3fn:
        half = 1 / 16
    keys, values = held.keys[0][:, 0], held.values[0][:, 0]
    most = keys.abs().amax(-1) if dtype == torch.int8 else keys.abs()
    off = half * (most.max() * query.double().abs().sum(-1)).amax() / 8
    bound = values.abs().max() * (math.expm1(2 * off) + half)
    assert (found - exact).abs().max() <= bound


@interpreted
@DTYPES
def test_codes_past_the_end_and_of_other_pages_are_not_read(dtype, generator) -> None:
    held, scales = coded(scatter([13], page=4, kv_heads=1, head_dim=16, generator=generator), dtype)
    query = torch.randn(1, 1, 1, 16, generator=generator)
    wanted = paged_attention(query, *held.tensors(), **scales, backend="triton")
    used = held.block_table[0, :4].long()
    others = sorted(set(range(len(held.key_pages))) - set(used.tolist()))
    for steps in scales.values():
        steps[others], steps[used[-1], 1:] = math.nan, math.nan
    assert torch.equal(paged_attention(query, *held.tensors(), **scales, backend="triton"), wanted)


SCALES = torch.ones(5, 4, 2)
CODES = torch.zeros(5, 4, 2, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"key_scales": None}, TypeError, "key_scales must be a tensor of float32.*NoneType"),
        ({"value_scales": SCALES.half()}, TypeError, "value_scales must .*float32.*float16"),
        ({"value_scales": SCALES[:, 1:]}, ValueError, r"\(5, 4, 2\) on cpu, got \(5, 3, 2\)"),
        (
            {"value_pages": CODES.to(torch.uint8)},
            TypeError,
            "uint8 for value_pages; use quantize_kv",
        ),
        ({"key_pages": CODES.float()}, TypeError, "float32 for key_pages.*leave the scales out"),
        ({"value_pages": CODES.to(torch.float8_e4m3fn)}, TypeError, "both the same"),
        ({"query": CODES[:1]}, TypeError, "query must be floating point"),
        ({"key_scales": None, "value_scales": None}, TypeError, "pass key_scales and value_scales"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_scales_that_do_not_fit_are_refused(change, error, sentence: str) -> None:
    fitting = {
        "query": torch.zeros(2, 2, 1, 16),
        "key_pages": CODES,
        "value_pages": CODES,
        "key_scales": SCALES,
        "value_scales": SCALES,
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
    }
    paged_attention(**fitting)
    with pytest.raises(error, match=sentence):
        paged_attention(**{**fitting, **change})


def test_float8_needs_a_gpu_that_compiles_it(monkeypatch) -> None:
    class Pages:
        dtype, is_cuda, device = torch.float8_e4m3fn, True, torch.device("cuda")

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    kv_codes.check_readable(Pages())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"need compute capability \(8, 9\), got \(8, 0\)"):
        kv_codes.check_readable(Pages())


def test_other_codes_are_no_choice() -> None:
    with pytest.raises(ValueError, match="dtype must be one of torch.int8"):
        quantize_kv(torch.zeros(2, 4), torch.uint8)
