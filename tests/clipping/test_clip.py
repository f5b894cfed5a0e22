"""Global, local and value clipping: laws on awkward lists, parity with torch where it is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from labcore.clipping import Clipped, clip_by_global_norm, clip_by_local_norm, clip_by_value
from tests.clipping.lists import SHAPES, awkward, copies, cosine, exact_norm, put

ORDERS = (2.0, 1.0, math.inf, 3.0, 0.5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
# Relative rounding of one element, of a norm after clipping.
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-12}
Clip = Callable[..., Clipped]


def rounding(dtype: torch.dtype) -> float:
    return ROUNDING.get(dtype, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_is_right_to_a_millionth_and_ends_at_the_limit(
    dtype: torch.dtype, order: float, seed: int
) -> None:
    params = awkward(dtype, seed)
    before = copies(params)
    exact = exact_norm(before, order)
    limit = 0.37 * float(exact)
    clipped = clip_by_global_norm(params, limit, order)
    assert clipped.norms.dtype == clipped.coefficients.dtype == torch.float64
    assert clipped.norms.shape == clipped.coefficients.shape == (1,)
    assert clipped.norm_type == order and bool(clipped.finite)
    torch.testing.assert_close(clipped.norm, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        clipped.coefficients[0], torch.tensor(0.37).double(), rtol=2e-6, atol=0
    )
    after = copies(params)
    assert float(exact_norm(after, order)) == pytest.approx(limit, rel=3 * rounding(dtype))
    for grad, old in zip(after, before, strict=True):
        torch.testing.assert_close(grad, (old * clipped.coefficients[0]).to(dtype))
        assert grad.stride() == old.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
def test_parity_with_torch_where_its_arithmetic_holds(
    dtype: torch.dtype, order: float, seed: int
) -> None:
    shapes = [shape for shape in SHAPES if shape != (0,)]  # torch has no inf norm of nothing
    ours, theirs = (awkward(dtype, seed, shapes) for _ in range(2))
    limit = 0.5 * float(exact_norm(copies(ours), order))
    clipped = clip_by_global_norm(ours, limit, order)
    norm = torch.nn.utils.clip_grad_norm_(theirs, limit, order)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(clipped.norm, norm.double(), rtol=tolerance, atol=0)
    for a, b in zip(copies(ours), copies(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-7)
    grads = copies(ours)
    total = torch.nn.utils.get_total_norm(grads, order)
    norm = clip_by_global_norm(ours, math.inf, order).norm
    torch.testing.assert_close(norm, total.double(), rtol=tolerance, atol=0)


def test_a_limit_below_a_millionth_is_met_where_torch_misses_it() -> None:
    ours, theirs = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    ours.grad, theirs.grad = torch.tensor([1e-6]), torch.tensor([1e-6])
    clip_by_global_norm(ours, 5e-7)
    torch.nn.utils.clip_grad_norm_(theirs, 5e-7)
    assert ours.grad.item() == pytest.approx(5e-7, rel=1e-6)
    assert theirs.grad.item() == pytest.approx(2.5e-7, rel=1e-4)  # 1e-6 is added to its norm


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e21),
        (torch.float32, 1e37),
        (torch.float32, 1e-30),
        (torch.float32, 1e-42),
        (torch.float64, 1e200),
        (torch.float64, 1e-200),
        (torch.float16, 1e4),
        (torch.float16, 1e-6),
        (torch.bfloat16, 1e30),
        (torch.bfloat16, 1e-30),
        (torch.complex64, 1e25),
    ],
)
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0])
def test_finite_gradients_of_any_size_end_at_the_limit(
    dtype: torch.dtype, size: float, order: float, seed: int
) -> None:
    params = awkward(dtype, seed, size=size)
    before = copies(params)
    assert all(torch.isfinite(g).all() for g in before)
    exact = exact_norm(before, order)
    # In float16 a limit of 1 would leave elements of 1e-5, which have few digits.
    limit = 1.0 if size > 1 and dtype != torch.float16 else 0.01 * float(exact)
    clipped = clip_by_global_norm(params, limit, order)
    torch.testing.assert_close(clipped.norm, exact, rtol=1e-6, atol=0)
    after = copies(params)
    if size not in (1e-42, 1e-6):  # the same is true of these sizes from the start
        close = 3 * rounding(dtype)
        assert float(exact_norm(after, order)) == pytest.approx(limit, rel=close)
        if not dtype.is_complex:
            assert cosine(before, after) == pytest.approx(1, abs=close**2 + 1e-9)


@pytest.mark.parametrize("sizes", [(1e-30, 1e-30, 1e-30), (1.0, 1e-30, 1e21), (1e21, 0.0, 1e-9)])
def test_each_norm_is_right_beside_others_of_any_size(
    sizes: tuple[float, ...], generator: torch.Generator
) -> None:
    params = []
    for shape, size in zip(((70_001,), (3, 5), (64, 128)), sizes, strict=True):
        param = nn.Parameter(torch.zeros(shape))
        param.grad = size * torch.randn(shape, generator=generator)
        params.append(param)
    exact = torch.stack([exact_norm([grad]) for grad in copies(params)])
    norms = clip_by_local_norm(params, math.inf).norms
    torch.testing.assert_close(norms, exact, rtol=1e-6, atol=0)
    total = clip_by_global_norm(params, math.inf).norm
    torch.testing.assert_close(total, exact_norm(copies(params)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("clip", [clip_by_global_norm, clip_by_local_norm])
def test_float16_is_not_multiplied_by_a_float16(clip: Clip, foreach: bool | None) -> None:
    """The coefficient, 6.3e-8, would be 6.0e-8 there, and a little smaller one 0."""
    for element in (6e4, 4e3):
        param = nn.Parameter(torch.zeros(70_000, dtype=torch.float16))
        param.grad = torch.full_like(param, element)
        limit = element / 6e4
        clipped = clip(param, limit / 10, foreach=foreach)
        assert clipped.coefficients.item() == pytest.approx(1e-1 / (6e4 * 70_000**0.5), rel=1e-3)
        assert param.grad.double().norm().item() == pytest.approx(limit / 10, rel=1e-2)


def test_torch_zeroes_huge_gradients_and_takes_negative_limits() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.full((3,), 1e21)
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    assert (param.grad == 0).all()
    param.grad = torch.full((3,), 1e21)
    clip_by_global_norm([param], 1.0)
    torch.testing.assert_close(param.grad, torch.full((3,), 3**-0.5))
    param.grad = torch.ones(3)
    torch.nn.utils.clip_grad_norm_([param], -1.0)
    assert (param.grad < 0).all()
    with pytest.raises(ValueError, match="max_norm must be"):
        clip_by_global_norm([param], -1.0)


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, -math.inf])
@pytest.mark.parametrize("clip", [clip_by_global_norm, clip_by_local_norm, clip_by_value])
def test_limits_that_mean_nothing_are_refused(bad: float, clip: Clip) -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match=f"(max_norm|limit) must be .*above 0, got {bad}; .*inf"):
        clip(param, bad)
    assert (param.grad == 1).all()


def test_an_infinite_limit_only_measures(seed: int) -> None:
    params = awkward(torch.float32, seed)
    before = copies(params)
    for clip in (clip_by_global_norm, clip_by_local_norm, clip_by_value):
        clipped = clip(params, math.inf)
        assert (clipped.coefficients == 1).all()
        assert all(map(torch.equal, copies(params), before))


@pytest.mark.parametrize("order", [0.0, -2.0, math.nan])
def test_orders_that_are_none_are_refused(order: float) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        clip_by_global_norm([], 1.0, order)


def test_what_is_no_parameter_and_misspelt_choices_are_refused() -> None:
    for wrong in (nn.Linear(2, 2), [3.0], [("a", "b")]):
        with pytest.raises(TypeError, match=r"named_parameters\(\)"):
            clip_by_global_norm(wrong, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'skip'"):
        clip_by_global_norm([], 1.0, nonfinite="skipp")  # codespell:ignore
    with pytest.raises(ValueError, match="by must be one of"):
        clip_by_local_norm([], 1.0, by="module")
    with pytest.raises(ValueError, match="named_parameters"):
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        clip_by_local_norm([param], 1.0, by="layer")


def test_global_keeps_the_direction_and_local_bends_it(seed: int) -> None:
    params = awkward(torch.float32, seed)
    before = copies(params)
    clip_by_global_norm(params, 0.01)
    assert cosine(before, copies(params)) == pytest.approx(1, abs=1e-9)
    put(params, before)
    clip_by_local_norm(params, 0.01)
    assert cosine(before, copies(params)) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
def test_local_norms_are_each_at_most_the_limit(
    dtype: torch.dtype, order: float, foreach: bool | None, seed: int
) -> None:
    params = awkward(dtype, seed)
    before = copies(params)
    limit = 2.0
    clipped = clip_by_local_norm(params, limit, order, foreach=foreach)
    assert clipped.names == tuple(str(i) for i in range(len(params)))
    for index, (old, new) in enumerate(zip(before, copies(params), strict=True)):
        norm = float(exact_norm([old], order)) if old.numel() else 0.0
        assert float(clipped.norms[index]) == pytest.approx(norm, rel=1e-6)
        expected = min(1.0, limit / norm) if norm else 1.0
        assert float(clipped.coefficients[index]) == pytest.approx(expected, rel=1e-6)
        if norm <= limit:
            assert torch.equal(old, new)
        else:
            assert float(exact_norm([new], order)) == pytest.approx(limit, rel=2 * rounding(dtype))


def test_a_layer_is_what_shares_a_name_but_for_its_last_part(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model(torch.randn(7, 3)).square().sum().backward()
    before = dict(zip(dict(model.named_parameters()), copies([*model.parameters()]), strict=True))
    clipped = clip_by_local_norm(model.named_parameters(), 0.1, by="layer")
    assert clipped.names == ("0", "1.0", "1.1")
    for name, (norm, factor) in clipped.by_name().items():
        members = [grad for key, grad in before.items() if key.rpartition(".")[0] == name]
        assert len(members) == 2
        torch.testing.assert_close(norm[0], exact_norm(members), rtol=1e-6, atol=0)
        torch.testing.assert_close(factor[0], (0.1 / norm[0]).clamp(max=1))
    for name, param in model.named_parameters():
        factor = clipped.by_name()[name.rpartition(".")[0]][1]
        torch.testing.assert_close(param.grad, before[name] * factor.float())
    torch.testing.assert_close(clipped.norm, exact_norm([*before.values()]), rtol=1e-6, atol=0)
    blocks = clip_by_local_norm(model.named_parameters(), 1.0, by=lambda name: name.split(".")[0])
    assert blocks.names == ("0", "1")
    with_none = clip_by_local_norm([("weight", param)], 1.0, by="layer")
    assert with_none.names == ("weight",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_value_clamps_as_torch_does(dtype: torch.dtype, seed: int) -> None:
    ours, theirs = (awkward(dtype, seed) for _ in range(2))
    before = copies(ours)
    clipped = clip_by_value(ours, 0.75)
    torch.nn.utils.clip_grad_value_(theirs, 0.75)
    assert all(map(torch.equal, copies(ours), copies(theirs)))
    largest = [float(g.abs().max()) if g.numel() else 0.0 for g in before]
    assert clipped.norms.tolist() == pytest.approx(largest)
    expected = [min(1.0, 0.75 / x) if x else 1.0 for x in largest]
    assert clipped.coefficients.tolist() == pytest.approx(expected)


def test_value_clamps_both_parts_of_a_complex_number() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.tensor([3 - 0.5j, -0.25 + 4j])
    clipped = clip_by_value(param, 1.0)
    assert param.grad.tolist() == [1 - 0.5j, -0.25 + 1j]
    assert clipped.norms.tolist() == [4.0]


@pytest.mark.parametrize("clip", [clip_by_global_norm, clip_by_local_norm, clip_by_value])
def test_twice_is_once_and_scale_is_covariant(clip: Clip, seed: int) -> None:
    params = awkward(torch.float64, seed)
    before = copies(params)
    first = clip(params, 0.6)
    once = copies(params)
    second = clip(params, 0.6)
    torch.testing.assert_close(second.coefficients, torch.ones_like(second.coefficients))
    for a, b in zip(once, copies(params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    put(params, [1e5 * g for g in before])
    scaled = clip(params, 0.6e5)
    torch.testing.assert_close(scaled.norms, 1e5 * first.norms)
    torch.testing.assert_close(scaled.coefficients, first.coefficients)
    for a, b in zip(once, copies(params), strict=True):
        torch.testing.assert_close(1e5 * a, b)


@pytest.mark.parametrize("order", ORDERS)
def test_foreach_is_the_loop(order: float, seed: int) -> None:
    lists = [awkward(torch.float32, seed) for _ in range(3)]
    for params, foreach in zip(lists, (None, True, False), strict=True):
        clip_by_global_norm(params, 1.0, order, foreach=foreach)
    for together, again, alone in zip(*map(copies, lists), strict=True):
        assert torch.equal(together, again)
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)


def test_tied_weights_count_once_and_missing_gradients_never() -> None:
    tied, frozen, shared = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    tied.grad = torch.tensor([3.0, 4.0])
    shared.grad = tied.grad
    named: Iterable[tuple[str, Tensor]] = (
        pair for pair in [("a", tied), ("b", frozen), ("c", tied), ("d", shared)]
    )
    clipped = clip_by_local_norm(named, 2.5)
    assert clipped.names == ("a",)
    assert clipped.norm.item() == pytest.approx(5)
    assert tied.grad.tolist() == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("clip", [clip_by_global_norm, clip_by_local_norm, clip_by_value])
@pytest.mark.parametrize("empty", [[], [nn.Parameter(torch.ones(2))]])
def test_nothing_to_clip(clip: Clip, empty: list[Tensor]) -> None:
    clipped = clip((p for p in empty), 1.0)
    assert clipped.norm.item() == 0 and bool(clipped.finite)
    assert (clipped.coefficients == 1).all()


def test_zero_gradients_stay_and_have_coefficient_one() -> None:
    param = nn.Parameter(torch.ones(20_000))
    param.grad = torch.zeros(20_000)
    clipped = clip_by_global_norm(param, 1.0)
    assert clipped.norm.item() == 0 and clipped.coefficients.item() == 1
    assert (param.grad == 0).all()


def test_mixed_dtypes_are_one_vector(seed: int) -> None:
    params = [p for dtype in DTYPES for p in awkward(dtype, seed)]
    before = copies(params)
    exact = exact_norm(before)
    clipped = clip_by_global_norm(params, 0.5 * float(exact))
    torch.testing.assert_close(clipped.norm, exact, rtol=1e-6, atol=0)
    for old, new in zip(before, copies(params), strict=True):
        assert old.dtype == new.dtype
        torch.testing.assert_close(new, (0.5 * old).to(old.dtype), rtol=1e-2, atol=1e-6)


def test_gradients_that_are_lazy_views_or_in_a_graph() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.tensor([3 + 4j, 0]).conj()
    assert clip_by_global_norm(param, 1.0).norm.item() == pytest.approx(5)
    assert param.grad.resolve_conj().tolist() == pytest.approx([0.6 - 0.8j, 0])
    weight = nn.Parameter(torch.full((9000,), 3.0))
    (weight.grad,) = torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    assert weight.grad is not None and weight.grad.requires_grad
    assert clip_by_global_norm(weight, 1.0).norm.item() == pytest.approx(6 * 9000**0.5)
    weight.grad = None
    negative = torch.full((9000,), 2j).conj().imag
    assert negative.is_neg()
    weight.grad = negative
    assert clip_by_global_norm(weight, 1.0).norm.item() == pytest.approx(2 * 9000**0.5)


def test_inner_tensor_gradient_is_clipped_without_a_warning() -> None:
    inner = 2 * torch.ones(3, requires_grad=True)
    clip_by_global_norm(inner, 1.0)  # it has none
    inner.retain_grad()
    inner.sum().backward()
    assert clip_by_global_norm(inner, 1.0).norm.item() == pytest.approx(3**0.5)


@pytest.mark.parametrize("by", ["parameter", "layer"])
def test_two_models_with_the_same_names_are_not_taken_for_one(by: str) -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    for model in models:
        model(torch.ones(1, 3)).sum().backward()
    pairs = [pair for model in models for pair in model.named_parameters()]
    before = [weight.grad.clone() for _, weight in pairs]
    with pytest.raises(ValueError, match="two gradients named 'weight'"):
        clip_by_local_norm(pairs, 1e-3, by=by)
    assert all(
        torch.equal(weight.grad, old) for (_, weight), old in zip(pairs, before, strict=True)
    )
    named = [pair for n, model in enumerate(models) for pair in model.named_parameters(f"{n}")]
    assert len(clip_by_local_norm(named, 1e-3, by=by).norms) == {"parameter": 4, "layer": 2}[by]
