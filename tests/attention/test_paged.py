"""The door to paged attention: what torch sees of it, what it refuses, how it cuts sequences."""

import functools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from labcore.attention import Pattern, paged, paged_attention
from tests.attention.pages import (
    FORMS,
    causal,
    gap,
    interpreted,
    queries,
    scatter,
    truth,
    watched,
)

ALL_CHECKS = (
    "test_schema",
    "test_faketensor",
    "test_autograd_registration",
    "test_aot_dispatch_dynamic",
)


@FORMS
def test_torch_sees_an_operator(backend, generator) -> None:
    held = scatter([5, 9], page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 1, 2, generator)
    tree = torch.tensor([[-1, 0], [-1, -1]], dtype=torch.int32)
    counts = torch.tensor([1, 2], dtype=torch.int32)
    # What a tracer sees does not depend on the form, whose results are checked against its promise.
    tests = ("test_schema", "test_faketensor") if backend == "triton" else ALL_CHECKS
    for some, parents, left in ((None, None, 3), (counts, tree, None)):
        torch.library.opcheck(
            torch.ops.labcore.paged_attention.default,
            (query, *held.tensors(), None, None, some, parents, 0.25, None, left, 1, backend),
            test_utils=tests,
        )


@FORMS
def test_compile_takes_it_into_one_graph(backend, generator, monkeypatch) -> None:
    ran = watched(monkeypatch)
    held = scatter([5, 9], page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 2, 1, generator)
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(query: Tensor, *tensors: Tensor) -> Tensor:
        return paged_attention(2 * query, *tensors, window=(4, 0), backend=backend) + 1

    found = step(query, *held.tensors())
    assert counter.frame_count == 1 and ran == [backend]
    wanted = paged_attention(2 * query, *held.tensors(), window=(4, 0), backend=backend) + 1
    assert torch.equal(found, wanted)


def test_a_gradient_is_refused_with_a_way_out(generator) -> None:
    held = scatter([5], page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 1, 1, generator).requires_grad_()
    out = paged_attention(query, *held.tensors())
    with pytest.raises(RuntimeError, match="train with flash_attention"):
        out.sum().backward()


def test_autocast_leaves_the_products_alone(generator) -> None:
    held = scatter([60], page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 1, 1, generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = paged_attention(query, *held.tensors(), return_lse=True)
    assert gap(found, truth(query, held, causal([60], 1))) < 3e-6


def test_float64_takes_the_torch_form(generator) -> None:
    held = scatter([33], page=4, kv_heads=1, head_dim=16, generator=generator, dtype=torch.float64)
    query = queries(held, 2, 1, generator)
    found = paged_attention(query, *held.tensors(), return_lse=True)
    assert found[1].dtype == torch.float64
    assert gap(found, truth(query, held, causal([33], 1))) < 1e-14
    with pytest.raises(ValueError, match="got float64; use backend='torch'"):
        paged_attention(query, *held.tensors(), backend="triton")


def test_no_sequences_are_no_error() -> None:
    pages = torch.zeros(2, 4, 1, 16)
    none = torch.zeros(0, dtype=torch.int32)
    out = paged_attention(torch.zeros(0, 2, 1, 16), pages, pages, none[:, None], none)
    assert out.shape == (0, 2, 1, 16)


INT = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"query": torch.zeros(2, 3, 16)}, ValueError, r"\[B, H, T, D\], got \(2, 3, 16\)"),
        ({"query": torch.zeros(2, 3, 1, 16)}, ValueError, "heads must be a multiple"),
        ({"query": torch.zeros(2, 2, 1, 8)}, ValueError, "share a head dimension D of 1 to 256"),
        ({"query": torch.zeros(2, 2, 1, 16).half()}, TypeError, "one device and one dtype"),
        ({"key_pages": torch.zeros(5, 4, 2, 16)[:0]}, ValueError, r"key_pages.*\(0, 4, 2, 16\)"),
        ({"query": [0.0]}, TypeError, "query must be a torch.Tensor, got list"),
        ({"lengths": [1, 1]}, TypeError, "lengths must be a tensor of int32, got list"),
        ({"lengths": None}, TypeError, "lengths must be a tensor of int32, got NoneType"),
        ({"block_table": INT[0]}, ValueError, r"block_table must have shape \(2, 1\), got \(\)"),
        ({"lengths": INT.long()}, TypeError, "lengths must be int32"),
        ({"lengths": INT[:1]}, ValueError, r"lengths must have shape \(2,\), got \(1,\)"),
        ({"lengths": INT + 13}, ValueError, "lengths.* 12 keys .* got 13 in row 0"),
        ({"counts": INT[:, None]}, ValueError, "counts must have shape"),
        ({"counts": INT + 2}, ValueError, "counts.* 1 queries, got 2 in row 0"),
        ({"tree": INT[:, None].long()}, TypeError, "tree must be int32"),
        ({"tree": INT[:, None] - 1, "window": (2, 0)}, ValueError, "tree and window.*both"),
        ({"window": (-1, 0)}, ValueError, "window must be a tuple"),
        ({"splits": 0}, ValueError, "splits must be at least 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number above 0"),
        ({"backend": "gpu"}, ValueError, "backend must be one of"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, error, sentence: str) -> None:
    pages = torch.zeros(5, 4, 2, 16)
    fitting = {
        "query": torch.zeros(2, 2, 1, 16),
        "key_pages": pages,
        "value_pages": pages,
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": INT + 1,
    }
    paged_attention(**fitting)
    with pytest.raises(error, match=sentence):
        paged_attention(**{**fitting, **change})


@pytest.mark.parametrize("tree", [None, torch.tensor([[-1, 0, 0]], dtype=torch.int32)])
def test_the_torch_form_asks_for_no_other_device(tree, generator) -> None:
    held = scatter([9], page=4, kv_heads=1, head_dim=16, generator=generator)
    call = functools.partial(
        paged._torch_form,
        queries(held, 2, 3, generator),
        *held.tensors(),
        pattern=Pattern(scale=0.25, is_causal=tree is None, bottom_right=True, tree=tree),
        counts=None,
        scales=None,
    )
    wanted = call()
    with torch.device("meta"):  # what is made without a device would go there
        found = call()
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_a_forward_mode_derivative_is_refused(generator) -> None:
    held = scatter([5], page=4, kv_heads=1, head_dim=16, generator=generator)
    query = queries(held, 1, 1, generator)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: paged_attention(q, *held.tensors()), (query,), (query,))


@interpreted
def test_a_length_past_the_table_reads_no_other_page(generator) -> None:
    held = scatter([12], page=4, kv_heads=1, head_dim=16, generator=generator, spare=0)
    query = queries(held, 1, 1, generator)
    wanted = paged_attention(query, *held.tensors(), backend="triton")
    held.lengths += 5  # what lies behind the table is no page
    assert torch.equal(paged_attention(query, *held.tensors(), backend="triton"), wanted)


def test_splits_fill_a_gpu_and_no_more(monkeypatch) -> None:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)

    def splits(batch: int, kv_heads: int, pages: int) -> int:
        query = torch.empty(batch, 8, 1, 16, device="meta")
        query = type("Query", (), {"shape": query.shape, "device": torch.device("cuda")})()
        table = torch.empty(batch, pages, device="meta")
        return paged._splits(query, torch.empty(9, 16, kv_heads, 16, device="meta"), table)

    assert splits(1, 8, 2048) == 66  # 528 programs, four per multiprocessor
    assert splits(64, 8, 1024) == 1  # the batch fills it already
    assert splits(1, 8, 64) == 4  # no piece below 256 keys
    assert splits(1, 1, 1 << 16) == paged.MOST_SPLITS
