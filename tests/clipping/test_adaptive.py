"""Adaptive clipping: the unit's axis, the formula, and optax's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from labcore.clipping import clip_adaptive
from tests.clipping.lists import awkward, copies

FIXTURE = json.loads((Path(__file__).parent / "optax_agc.json").read_text())


def with_gradient(weight: Tensor, grad: Tensor) -> Tensor:
    param = nn.Parameter(weight)
    param.grad = grad.clone()
    return param


def by_formula(weight: Tensor, grad: Tensor, clipping: float, eps: float) -> Tensor:
    """timm's rule in float64: units along the first axis, whole vectors otherwise."""

    def norm(x: Tensor) -> Tensor:
        dims = tuple(range(1, x.ndim)) or None
        return torch.linalg.vector_norm(x, dim=dims, keepdim=dims is not None)

    weight, grad = weight.detach().double(), grad.double()
    limit = norm(weight).clamp(min=eps) * clipping
    size = norm(grad)
    return torch.where(size < limit, grad, grad * (limit / size.clamp(min=1e-30)))


@pytest.mark.parametrize("kept", ["[out, in]", "[in, out]"])
@pytest.mark.parametrize("setting", FIXTURE["clipped"])
def test_optax_whose_kernels_end_with_the_output(kept: str, setting: str) -> None:
    clipping, eps = map(float, setting.split())
    for name, weight in FIXTURE["parameters"].items():
        tensors = [weight, FIXTURE["gradients"][name], FIXTURE["clipped"][setting][name]]
        w, g, expected = (torch.tensor(each, dtype=torch.float64) for each in tensors)
        if kept == "[out, in]" and w.ndim > 1:
            w, g, expected = (x.movedim(-1, 0).contiguous() for x in (w, g, expected))
        param = with_gradient(w, g)
        clip_adaptive(param, clipping, eps, unit_axis=0 if kept == "[out, in]" else -1)
        torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clipping", [0.01, 0.3, 2.0])
def test_the_formula_on_awkward_shapes(dtype: torch.dtype, clipping: float, seed: int) -> None:
    params = awkward(dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for param in params:
        drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.data.copy_(0.2 * drawn)
    before = copies(params)
    clipped = clip_adaptive(params, clipping)
    assert sum(clipped.sizes) == len(clipped.norms) == len(clipped.coefficients)
    rounding = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-5)
    for param, old in zip(params, before, strict=True):
        expected = by_formula(param, old, clipping, 1e-3).to(dtype)
        torch.testing.assert_close(param.grad, expected, rtol=rounding, atol=1e-7)


@pytest.mark.parametrize(
    ("layer", "axis", "units"),
    [
        (nn.Linear(5, 3), 0, 3),
        (nn.Conv1d(4, 6, 3), 0, 6),
        (nn.Conv2d(4, 6, 3, groups=2), 0, 6),
        (nn.Embedding(11, 4), 0, 11),
        (nn.ConvTranspose2d(4, 7, 3), 1, 7),
    ],
)
def test_a_unit_is_what_feeds_one_output(
    layer: nn.Module, axis: int, units: int, generator: torch.Generator
) -> None:
    """One unit with a huge gradient is cut; the gradients of the others stay as they are."""
    weight = dict(layer.named_parameters())["weight"]
    grad = 1e-6 * torch.randn(weight.shape, generator=generator)
    grad.select(axis, 1).mul_(1e9)
    weight.grad = grad.clone()
    clipped = clip_adaptive([("weight", weight)], unit_axis={"weight": axis})
    assert clipped.sizes == (units,)
    assert (clipped.coefficients < 1).nonzero().flatten().tolist() == [1]
    others = [i for i in range(units) if i != 1]
    index = torch.tensor(others)
    assert torch.equal(weight.grad.index_select(axis, index), grad.index_select(axis, index))
    limit = 0.01 * weight.detach().select(axis, 1).norm()
    torch.testing.assert_close(weight.grad.select(axis, 1).norm(), limit)


def test_the_wrong_axis_lets_a_loud_unit_through(generator: torch.Generator) -> None:
    """The classic bug: clipped by input, the loud output still dominates, and all inputs suffer."""
    weight, grad = torch.ones(4, 6), torch.full((4, 6), 1e-6)
    grad[2] = 1.0
    right, wrong = with_gradient(weight, grad), with_gradient(weight, grad)
    clip_adaptive(right, unit_axis=0)
    clip_adaptive(wrong, unit_axis=1)
    assert right.grad is not None and wrong.grad is not None
    quiet = [0, 1, 3]
    assert torch.equal(right.grad[quiet], grad[quiet])
    assert (wrong.grad[quiet] < 0.1 * grad[quiet]).all()


def test_weights_of_zero_still_learn_and_zero_gradients_stay() -> None:
    param = with_gradient(torch.zeros(3, 2), torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-6, 4e-6]]))
    clip_adaptive(param, 0.01, 1e-3)
    expected = torch.tensor([[6e-6, 8e-6], [0.0, 0.0], [3e-6, 4e-6]])
    torch.testing.assert_close(param.grad, expected)


def test_finite_gradients_never_become_zero_steps(seed: int) -> None:
    for size in (1e21, 1e-30):
        params = awkward(torch.float32, seed, size=size)
        for param in params:
            param.data.fill_(1.0 if size > 1 else 1e-33)
        clipped = clip_adaptive(params, 0.01, 1e-35)
        assert bool((clipped.coefficients < 1).any())
        for param in params:
            assert param.grad is not None
            if param.numel():
                limit = 0.01 * param.detach().double().norm()
                units = param.grad.flatten(1) if param.ndim > 1 else param.grad.reshape(1, -1)
                assert float(units.double().norm(dim=1).max()) <= 1.001 * float(limit)
                assert float(units.double().norm()) > 0


def test_the_head_is_left_alone_by_name(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    clipped = clip_adaptive(model.named_parameters(), exclude=("head.",))
    assert clipped.names == ("body.weight", "body.bias") and clipped.sizes == (4, 1)
    norms, factors = clipped.by_name()["body.weight"]
    torch.testing.assert_close(norms, torch.full((4,), 3**0.5, dtype=torch.float64))
    assert factors.shape == (4,)
    assert (model["head"].weight.grad == 1).all()
    with pytest.raises(ValueError, match=r"match names of parameters, got 'hed\.'"):
        clip_adaptive(model.named_parameters(), exclude="hed.")
    with pytest.raises(ValueError, match="'body', which matches none"):
        clip_adaptive(model.named_parameters(), unit_axis={"body": 1})
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        clip_adaptive(model.parameters(), exclude="head.")


def test_settings_that_mean_nothing_are_refused() -> None:
    param = with_gradient(torch.ones(2, 3), torch.ones(2, 3))
    for setting in ({"clipping": 0.0}, {"clipping": -1.0}, {"eps": 0.0}, {"unit_axis": 2}):
        with pytest.raises(ValueError, match=r"clipping|eps|unit_axis"):
            clip_adaptive(param, **setting)  # type: ignore[arg-type]
    assert (param.grad == 1).all()  # type: ignore[union-attr]


def test_complex_units_keep_their_phase(generator: torch.Generator) -> None:
    weight = torch.randn(3, 4, generator=generator, dtype=torch.complex64)
    grad = torch.randn(3, 4, generator=generator, dtype=torch.complex64)
    param = with_gradient(weight, grad)
    clip_adaptive(param, 0.1)
    limit = 0.1 * weight.norm(dim=1)
    assert param.grad is not None
    torch.testing.assert_close(param.grad.norm(dim=1), torch.minimum(limit, grad.norm(dim=1)))
    torch.testing.assert_close(param.grad.angle(), grad.angle(), rtol=1e-5, atol=1e-5)
