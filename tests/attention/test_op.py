"""The public door: what it refuses, which form runs, and what torch's machinery sees of it."""

import functools
import itertools
import math
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from labcore import device
from labcore.attention import (
    Pattern,
    flash_attention,
    flash_attention_varlen,
    library,
    merge_states,
    op,
    safe_attention,
)
from labcore.models import Llama, LlamaConfig
from tests.attention.cases import draw, draw_tree, error, exact, grads, plain
from tests.attention.kernels import needs_interpreter

causal = functools.partial(flash_attention, is_causal=True, enable_gqa=True)
GRAPH = pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="torch 2.11 breaks a graph at torch.amp.is_autocast_available",
)


# -- the law


@st.composite
def calls(draw_from):
    """Keyword arguments of a call, and the pattern that they mean."""
    bound = st.none() | st.integers(0, 40)
    q_len, k_len = draw_from(st.integers(1, 70)), draw_from(st.integers(1, 70))
    kv_heads = draw_from(st.integers(1, 2))
    shape = {
        "q_len": q_len,
        "k_len": k_len,
        "batch": draw_from(st.integers(1, 2)),
        "heads": kv_heads * draw_from(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "dim": draw_from(st.sampled_from([1, 8, 16, 20])),
    }
    same = {
        "is_causal": draw_from(st.booleans()),
        "window": draw_from(st.none() | st.tuples(bound, bound)),
        "softcap": draw_from(st.none() | st.floats(0.5, 20)),
        "scale": draw_from(st.floats(0.05, 2)),
    }
    bottom_right = draw_from(st.booleans())
    alignment = "bottom_right" if bottom_right else "top_left"
    return (
        shape,
        {**same, "causal_alignment": alignment},
        Pattern(**same, bottom_right=bottom_right),
    )


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(call=calls())
def test_any_call_gives_safe_attention(call, seed: int) -> None:
    shape, keywords, pattern = call
    generator = torch.Generator().manual_seed(seed)
    leaves = draw(generator, **shape)
    ours = flash_attention(*leaves, enable_gqa=True, return_lse=True, **keywords)
    dy, dl = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in ours)
    dl = dl.masked_fill(ours[1] == -torch.inf, 0)
    copies, out, lse = exact(*leaves, pattern)
    truth = (out, lse, *grads((out, lse), copies, (dy, dl)))
    ours = (*ours, *grads(ours, leaves, (dy, dl)))
    assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-10


@needs_interpreter
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(call=calls(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_kernels_err_at_most_a_few_times_as_much_as_plain_torch(call, dtype, seed: int) -> None:
    shape, keywords, pattern = call
    generator = torch.Generator().manual_seed(seed)
    leaves = draw(generator, **shape, dtype=dtype)
    copies, out, _ = exact(*leaves, pattern)
    dy = torch.randn(out.shape, generator=generator).to(dtype)
    truth = (out.detach(), *grads(out, copies, dy.double()))
    errors = []
    for result in (
        flash_attention(*leaves, enable_gqa=True, backend="triton", **keywords),
        plain(*leaves, pattern),
    ):
        found = (result, *grads(result, leaves, dy))
        errors.append([error(a, b) for a, b in zip(found, truth, strict=True)])
    # Kernels sum in float32. Terms of a gradient may cancel, so the sizes of the inputs count, and
    # a softcap of c adds up to 1e-7 c to a score.
    sizes = math.prod(max(1.0, float(x.detach().abs().max())) for x in (*leaves, dy))
    sums = max(1.0, shape["dim"] * pattern.scale) * sizes * (1 + (pattern.softcap or 0))
    largest = max(float(x.abs().max()) for x in truth)
    room = 4 * torch.finfo(dtype).eps * largest + 4e-7 * sums
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 3 * theirs + room, (errors, room)


def test_names_and_defaults_are_torch_s(generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, q_len=31, k_len=63)
    same = {"query": q, "key": k, "value": v}
    for keywords in ({}, {"is_causal": True}, {"scale": 0.7}):
        expected = F.scaled_dot_product_attention(**same, **keywords)
        assert error(flash_attention(**same, **keywords), expected) < 1e-12
    grouped = (q, k[:, :2], v[:, :2])
    expected = F.scaled_dot_product_attention(*grouped, enable_gqa=True)
    assert error(flash_attention(*grouped, enable_gqa=True), expected) < 1e-12


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("far", [2**31 - 1, sys.maxsize, 10**20])
def test_a_bound_that_no_key_reaches_is_none(far: int, backend: str, generator) -> None:
    if backend == "triton" and not device.interpreting():
        pytest.skip("needs Triton's interpreter")
    q, k, v = draw(generator, q_len=20, k_len=30, dtype=torch.float32)
    call = functools.partial(
        flash_attention, q, k, v, causal_alignment="bottom_right", backend=backend
    )
    for window, same in (((None, far), None), ((far, 3), (None, 3))):
        assert error(call(window=window), call(window=same)) == 0


def test_a_tree_goes_through_the_door(generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=2, kv_heads=1, q_len=20, k_len=33)
    tree = draw_tree(generator, batch=2, nodes=20, padding=(0, 8))
    ours = flash_attention(q, k, v, tree=tree.long(), enable_gqa=True, return_lse=True)
    _, out, lse = exact(q, k, v, Pattern(scale=0.25, tree=tree))
    assert error(ours[0], out) < 1e-12
    assert error(ours[1], lse) < 1e-12


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_packed_sequences(alignment: str, generator: torch.Generator) -> None:
    q_lens, k_lens = (5, 0, 31, 1), (5, 9, 40, 0)
    leaves = [
        torch.randn(sum(lens), heads, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for lens, heads in ((q_lens, 4), (k_lens, 2), (k_lens, 2))
    ]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
        for lens in (q_lens, k_lens)
    )
    keywords = {"is_causal": True, "enable_gqa": True, "causal_alignment": alignment}
    out, lse = flash_attention_varlen(*leaves, cu_q, cu_k, return_lse=True, **keywords)
    assert out.shape == leaves[0].shape
    assert lse.shape == (4, sum(q_lens))
    assert out.is_contiguous()
    single = []
    for i in range(4):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x[s].transpose(0, 1)[None] for x, s in zip(leaves, (rows, keys, keys), strict=True)]
        single.append(flash_attention(*one, return_lse=True, **keywords))
        assert error(out[rows], single[i][0][0].transpose(0, 1)) < 1e-12
        assert error(lse[:, rows], single[i][1][0]) < 1e-12
    dy = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    joined = torch.cat([x[0] for x, _ in single], dim=1).transpose(0, 1)
    pairs = zip(grads(out, leaves, [dy]), grads(joined, leaves, [dy]), strict=True)
    assert max(error(a, b) for a, b in pairs) < 1e-12


def test_the_lse_is_differentiable_so_parts_merge_in_training(generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=31, k_len=63)
    parts = [
        flash_attention(q, k[:, :, c], v[:, :, c], return_lse=True)
        for c in (slice(0, 40), slice(40, 63))
    ]
    whole = flash_attention(q, k, v)
    merged, _ = merge_states(*parts[0], *parts[1])
    dy = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
    pairs = zip(grads(merged, (q, k, v), [dy]), grads(whole, (q, k, v), [dy]), strict=True)
    assert error(merged, whole) < 1e-12
    assert max(error(a, b) for a, b in pairs) < 1e-12


@pytest.mark.parametrize("score", [math.nan, math.inf, 3e38])
def test_a_key_that_is_not_seen_may_hold_anything(score: float, generator: torch.Generator) -> None:
    query, key, value = (torch.randn(1, 2, 700, 8, generator=generator) for _ in range(3))
    for window, at in (((None, 0), 699), ((3, 0), 0)):
        clean = flash_attention(query, key, value, window=window)
        changed = key.clone()
        changed[0, 0, at] = score
        rows = slice(0, 699) if at else slice(4, 700)
        found = flash_attention(query, changed, value, window=window)
        assert torch.equal(found[:, :, rows], clean[:, :, rows])


def test_rows_that_see_nothing(generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=9, k_len=4)
    out, lse = causal(q, k, v, causal_alignment="bottom_right", return_lse=True)
    assert not out[:, :, :5].any()
    assert (lse[:, :, :5] == -torch.inf).all()
    both = torch.logaddexp(lse, lse)  # has gradient NaN where both are -inf, and none goes on
    for grad in grads(out.sum() + both.sum(), (q, k, v), [torch.ones((), dtype=out.dtype)]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "shape",
    [{"q_len": 0}, {"q_len": 3, "k_len": 0}, {"q_len": 3, "batch": 0}, {"q_len": 3, "heads": 0}],
    ids=str,
)
def test_tensors_of_nothing(backend: str, shape: dict, generator: torch.Generator) -> None:
    if backend == "triton" and not device.interpreting():
        pytest.skip("needs Triton's interpreter")
    leaves = draw(generator, **shape, dtype=torch.float32)
    out, lse = flash_attention(*leaves, return_lse=True, backend=backend)
    assert out.shape == leaves[0].shape
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in grads(out, leaves, [torch.ones_like(out)]))
    dense, dense_lse = flash_attention(*leaves, attn_mask=torch.tensor([True]), return_lse=True)
    assert torch.equal(dense, out)
    assert torch.equal(dense_lse, lse)


# -- which form runs


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the forms that a test runs, in order."""
    ran: list[str] = []

    def watch(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments, **keywords):
            ran.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (library, "tiled_forward"),
        (library, "tiled_backward"),
        (op, "safe_attention"),
    ):
        watch(owner, name)
    if device.triton_problem() is None:
        from labcore.attention import backward, forward

        watch(forward, "flash_forward")
        watch(backward, "flash_backward")
    return ran


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_on_a_cpu_the_tiled_form_runs(backend, forms: list[str], generator) -> None:
    q, k, v = draw(generator, q_len=7)
    flash_attention(q, k, v, backend=backend).sum().backward()
    assert forms == ["tiled_forward", "tiled_backward"]


@pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
def test_kernels_run_where_they_are_asked_for(forms: list[str], generator) -> None:
    q, k, v = draw(generator, q_len=20, heads=2, kv_heads=1, dtype=torch.float32)
    out, lse = causal(q, k, v, backend="triton", return_lse=True)
    dy, dl = torch.randn(out.shape), torch.randn(lse.shape)
    ours = (out, lse, *grads((out, lse), (q, k, v), (dy, dl)))
    assert forms == ["flash_forward", "flash_backward"]
    leaves, out, lse = exact(q, k, v, Pattern(scale=0.25, is_causal=True))
    truth = (out, lse, *grads((out, lse), leaves, (dy.double(), dl.double())))
    assert max(error(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-5


@pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
def test_kernels_take_packed_sequences(forms: list[str], generator) -> None:
    q, k, v = (torch.randn(40, 2, 16, generator=generator).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 3, 3, 40], dtype=torch.int32)
    both = [
        flash_attention_varlen(
            q, k, v, cu, cu, is_causal=True, return_lse=True, backend=backend, max_seqlen_q=longest
        )
        for backend, longest in (("triton", None), ("triton", 37), ("torch", None))
    ]
    assert forms == ["flash_forward", "flash_forward", "tiled_forward"]
    dy = torch.randn(q.shape, generator=generator)
    backs = [grads(out, (q, k, v), [dy]) for out, _ in both]
    for i in (0, 1):
        for a, b in zip((*both[i], *backs[i]), (*both[2], *backs[2]), strict=True):
            assert error(a, b) < 1e-5


@pytest.mark.parametrize(
    "keywords", [{"dropout_p": 0.5}, {"attn_mask": torch.ones(7) > 0}], ids=str
)
def test_masks_and_dropout_keep_all_scores(keywords, forms: list[str], generator) -> None:
    q, k, v = draw(generator, q_len=7)
    flash_attention(q, k, v, **keywords).sum().backward()
    assert forms == ["safe_attention"]
    with pytest.raises(ValueError, match="neither attn_mask nor dropout_p"):
        flash_attention(q, k, v, backend="triton", **keywords)


def test_a_dense_mask_joins_the_pattern_and_takes_gradients(generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=9, k_len=12)
    bias = torch.randn(4, 9, 12, generator=generator, dtype=torch.float64).requires_grad_()
    ours = causal(q, k, v, attn_mask=bias, scale=0.3)
    seen = torch.ones(9, 12, dtype=torch.bool).tril()
    both = torch.where(seen, bias, -torch.inf)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=both, scale=0.3, enable_gqa=True)
    dy = torch.randn(ours.shape, generator=generator, dtype=ours.dtype)
    pairs = zip(grads(ours, (q, bias), [dy]), grads(theirs, (q, bias), [dy]), strict=True)
    assert error(ours, theirs) < 1e-12
    assert max(error(a, b) for a, b in pairs) < 1e-12


def test_dropout_follows_torch_s_generator(seed: int, generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=31)
    torch.manual_seed(seed)
    first = flash_attention(q, k, v, dropout_p=0.5)
    second = flash_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(seed)
    assert torch.equal(first, flash_attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


# -- torch's machinery


ALL_CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def operator_arguments(generator: torch.Generator, form: str) -> tuple:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=9, k_len=12, dtype=torch.float32)
    chosen = {
        "tree": None, "cu_q": None, "cu_k": None, "max_q": None, "max_k": None, "scale": 0.3,
        "softcap": None, "is_causal": False, "bottom_right": True, "left": None, "right": None,
        "backend": "torch",
    }  # fmt: skip
    if form == "tree":
        chosen |= {"tree": draw_tree(generator, batch=2, nodes=9), "softcap": 2.0}
    elif form == "packed":
        q, k, v = (x.detach()[:1].requires_grad_() for x in (q, k, v))
        chosen |= {"cu_q": torch.tensor([0, 4, 9], dtype=torch.int32), "max_q": 5, "left": 3}
        chosen |= {"cu_k": torch.tensor([0, 4, 12], dtype=torch.int32)}
    else:
        chosen |= {"is_causal": True, "backend": "triton" if form == "kernels" else "torch"}
    return q, k, v, *library.Settings(**chosen)


@pytest.mark.parametrize("form", ["causal", "tree", "packed", "kernels"])
def test_the_operators_pass_opcheck(form: str, generator: torch.Generator) -> None:
    if form == "kernels" and not device.interpreting():
        pytest.skip("needs Triton's interpreter")
    arguments = operator_arguments(generator, form)
    # Tracing is the slow part, and the kernels are slow here; neither needs every form.
    usual = ALL_CHECKS[2:3] if form == "kernels" else ALL_CHECKS[:3]
    tests = ALL_CHECKS if form == "causal" else usual
    torch.library.opcheck(library.forward, arguments, test_utils=tests)
    with torch.no_grad():
        out, lse = library.forward(*arguments)
        q, k, v, *others = arguments
        kept = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
        kept = tuple(x.detach() for x in kept)
    torch.library.opcheck(library.backward, (*kept, *others), test_utils=usual)
    without = (kept[0], None, *kept[2:], *others)  # no gradient of lse
    torch.library.opcheck(library.backward, without, test_utils=usual)


def test_gradcheck_of_both_results(generator: torch.Generator) -> None:
    q, k, v = draw(generator, batch=1, heads=2, kv_heads=1, q_len=4, k_len=5, dim=3)
    assert torch.autograd.gradcheck(
        functools.partial(causal, softcap=1.0, return_lse=True), (q, k, v)
    )


@GRAPH
def test_compile_has_no_graph_break(generator: torch.Generator) -> None:
    graphs: list[int] = []

    def count(graph, inputs):
        graphs.append(sum("labcore" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(causal, fullgraph=True, backend=count, dynamic=True)
    for length in (9, 20):
        leaves = draw(generator, heads=4, kv_heads=2, q_len=length, dtype=torch.float32)
        assert error(compiled(*leaves), causal(*leaves)) == 0
    assert graphs == [1]  # one graph for both lengths, with one operator of ours
    torch._dynamo.reset()


@GRAPH
def test_compiled_training_is_the_eager_one(generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=9, dtype=torch.float32)
    tree = draw_tree(generator, batch=2, nodes=9)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    mask = torch.rand(9, 9, generator=generator) < 0.8

    def all_forms(q, k, v):
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = flash_attention(q, k, v, tree=tree, enable_gqa=True, return_lse=True)
        return (
            out.sum()
            + lse.sum()
            + causal(q, k, v, attn_mask=mask, window=(3, None)).square().sum()
            + flash_attention_varlen(*packed, cu, cu, enable_gqa=True).square().sum()
        )

    compiled = torch.compile(all_forms, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(q, k, v), all_forms(q, k, v)
    one = [torch.ones(())]
    pairs = zip(grads(ours, (q, k, v), one), grads(theirs, (q, k, v), one), strict=True)
    assert error(ours, theirs) < 1e-4
    assert max(error(a, b) for a, b in pairs) < 1e-5
    torch._dynamo.reset()


def test_the_result_joins_its_heads_without_a_copy(generator: torch.Generator) -> None:
    q, k, v = draw(generator, heads=4, kv_heads=2, q_len=9, dtype=torch.float32)
    for tensors in ((q, k, v), (q.mT.contiguous().mT, k, v)):
        out = causal(*tensors)
        assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()
    empty = [x.detach().to("meta") for x in (q, k, v)]
    for keywords in ({}, {"attn_mask": torch.ones(9, 9, device="meta") > 0}):
        assert causal(*empty, **keywords).shape == out.shape


def test_autocast(generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=31, dtype=torch.float32)
    half = [x.detach().bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = causal(q, k, v, return_lse=True)
        mixed = causal(q, half[1], v)
        dense = causal(q, k, v, attn_mask=torch.ones(31, 31) > 0)
        double = causal(*(x.double() for x in (q, k, v)))
    assert (out.dtype, lse.dtype, double.dtype) == (torch.bfloat16, torch.float32, torch.float64)
    assert torch.equal(out, causal(*half))
    assert torch.equal(out, mixed)
    assert error(dense, out) <= 2**-7 * 4
    leaves = [x.requires_grad_() for x in half]
    dy = torch.randn(out.shape, generator=generator).bfloat16()
    outside = grads(causal(*leaves), leaves, [dy])
    again = causal(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # its products are not autocast's
        inside = grads(again, leaves, [dy])
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_a_second_derivative_is_refused(generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=7)
    first = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"differentiated at most once.*safe_attention"):
        first.square().sum().backward()
    kept, _ = safe_attention(q, k, v, pattern=Pattern(scale=0.25))
    torch.autograd.grad(kept.sum(), q, create_graph=True)[0].square().sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_a_forward_mode_derivative_is_refused(generator: torch.Generator) -> None:
    q, k, v = (x.detach() for x in draw(generator, q_len=7))
    with pytest.raises(RuntimeError, match=r"no forward-mode derivative.*safe_attention"):
        torch.func.jvp(lambda k: flash_attention(q, k, v), (k,), (k,))
    safe = functools.partial(safe_attention, pattern=Pattern(scale=0.25))
    dense = functools.partial(flash_attention, attn_mask=torch.tensor([True]), scale=0.25)
    wanted = torch.func.jvp(lambda k: safe(q, k, v)[0], (k,), (k,))[1]
    assert error(torch.func.jvp(lambda k: dense(q, k, v), (k,), (k,))[1], wanted) < 1e-12


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_llama_is_the_same_with_it(kv_heads: int, seed: int) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )
    found = []
    for keywords in ({}, {"attention": causal}):
        model = Llama(config, generator=torch.Generator().manual_seed(seed), **keywords)
        tokens = torch.arange(2 * 40).view(2, 40) % 64
        logits = model(tokens).logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        found.append((logits, *(p.grad for p in model.parameters())))
    assert max(error(a, b) for a, b in zip(*found, strict=True)) < 1e-5
