"""SM3 follows the paper's pseudo-code; without momentum its covers are all of its state."""

import itertools
import sys

import pytest
import torch
from torch import Tensor

from labcore.optim import SM3, sm3, tensorwise
from tests.optim.lists import SHAPES, awkward, largest_difference, run, states, train

# As in test_adafactor.py.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 2**-7,
    torch.bfloat16: 2**-4,
}
PATHS = pytest.mark.parametrize("path", [{"foreach": False}, {"foreach": True}], ids=str)
FILLED = tuple(shape for shape in SHAPES if shape != (0,))


def by_the_paper(
    start: Tensor, grads: list[Tensor], *, lr: float, momentum: float
) -> tuple[list[float], dict[tuple[int, int], float]]:
    """SM3-II, one weight i and one slice r at a time, in Python's floats."""
    indices = list(itertools.product(*(range(n) for n in start.shape)))
    covers = {i: [(dim, place) for dim, place in enumerate(i)] or [(0, 0)] for i in indices}
    w = {i: float(start[i]) for i in indices}
    m = dict.fromkeys(indices, 0.0)
    mu = {r: 0.0 for mine in covers.values() for r in mine}
    for grad in grads:
        g = {i: float(grad[i]) for i in indices}
        fresh = dict.fromkeys(mu, 0.0)
        for i in indices:
            nu = min(mu[r] for r in covers[i]) + g[i] ** 2
            u = g[i] / nu**0.5 if nu > 0 else 0.0
            m[i] = momentum * m[i] + (1 - momentum) * u
            w[i] -= lr * m[i]
            for r in covers[i]:
                fresh[r] = max(fresh[r], nu)
        mu = fresh
    return [w[i] for i in indices], mu


@PATHS
@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (4, 1), (2, 3, 4), (2, 2, 3, 2)], ids=str
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_papers_pseudo_code(path, shape, momentum, generator: torch.Generator) -> None:
    draws = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    start, grads = draws[0], list(draws[1:])
    grads[0] = grads[0] * (torch.rand(shape, generator=generator) < 0.5)  # some start with nothing
    weight = torch.nn.Parameter(start.clone())
    optimizer = SM3([weight], lr=0.1, momentum=momentum, **path)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    expected, covers = by_the_paper(start, grads, lr=0.1, momentum=momentum)
    assert (
        weight.detach().view(-1) - torch.tensor(expected, dtype=torch.float64)
    ).abs().max() < 1e-12
    for (dim, place), value in covers.items():
        ours = optimizer.state[weight][f"cover_{dim}"].view(-1)[place]
        assert ours.item() == pytest.approx(value, rel=1e-12, abs=1e-15)


def test_the_rule_is_the_optimizer(generator: torch.Generator) -> None:
    draws = torch.randn(6, 3, 4, 5, generator=generator, dtype=torch.float64)
    param, state = draws[0], {}
    weight = torch.nn.Parameter(param.clone())
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    optimizer = SM3([weight], **settings)
    for grad in draws[1:]:
        param, state = sm3(param, grad, state, **settings)
        weight.grad = grad
        optimizer.step()
    assert (weight - param).abs().max() < 1e-12
    assert state.keys() == optimizer.state[weight].keys()


@PATHS
@pytest.mark.parametrize("shape", [(), (7,), (70_001,)], ids=str)
def test_vectors_are_adagrad(path, shape, seed: int) -> None:
    ours, peers = (awkward(torch.float64, seed, [shape])[:1] for _ in range(2))
    run(ours, lambda p: SM3(p, lr=0.1, **path), seed=seed, steps=20)
    run(peers, lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.0), seed=seed, steps=20)
    assert largest_difference(ours, peers) < 1e-12


@PATHS
def test_the_bound_lies_above_adagrads_sum_and_never_falls(path, seed: int) -> None:
    params = awkward(torch.float64, seed, FILLED)
    optimizer = SM3(params, **path)
    sums = [torch.zeros_like(p) for p in params]
    bounds = [torch.zeros_like(p) for p in params]
    generator = torch.Generator().manual_seed(seed)
    for step in range(6):
        for param, total in zip(params, sums, strict=True):
            scale = 10.0 ** (-step if step % 2 else step)
            param.grad = scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)
            total += param.grad**2
        optimizer.step()
        for i, param in enumerate(params):
            covers = [v for k, v in optimizer.state[param].items() if k.startswith("cover")]
            bound = covers[0].expand(param.shape)
            for cover in covers[1:]:
                bound = torch.minimum(bound, cover)
            assert (bound >= sums[i] * (1 - 1e-12)).all()
            assert (bound >= bounds[i]).all()
            bounds[i] = bound.clone()


@pytest.mark.parametrize(
    "shape", [(60, 101), (33, 10, 21), (2, 5001), (1, 151), (5000, 1), (3, 2, 11, 13)], ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_blocks_are_the_loop(
    shape, dtype, momentum: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[SM3.__module__], "CHUNK", 4096)
    monkeypatch.setattr(tensorwise, "SMALL", 100)
    ends, kept = [], []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer = SM3([weight], momentum=momentum, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            weight.grad = torch.randn(shape, generator=generator).to(dtype)
            optimizer.step()
        ends.append([weight])
        kept.append(states(optimizer))
    tolerance = TOLERANCE[dtype]
    assert largest_difference(*ends) <= tolerance
    assert largest_difference(*kept) <= (1e-13 if dtype == torch.float64 else 5e-5)


@pytest.mark.parametrize(
    "choice", [{}, {"momentum": 0.9}, {"maximize": True, "weight_decay": 0.1}], ids=str
)
def test_torchs_foreach_form_is_the_loop(choice, seed: int) -> None:
    # What a GPU runs, here on CPU tensors.
    loop, ours = (awkward(torch.float64, seed, FILLED) for _ in range(2))
    one = run(loop, lambda p: SM3(p, foreach=False, **choice), seed=seed, steps=3)
    two = SM3(ours, **choice)
    group = two.param_groups[0]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(3):
            items = []
            for param in ours:
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                if not two.state[param]:
                    two.state[param].update(two._new_state(group, param))
                items.append((param, grad, two.state[param]))
            assert two._foreach(group, items)
    assert largest_difference(loop, ours) < 1e-12
    assert largest_difference(states(one), states(two)) < 1e-12
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert not two._foreach(group, [(half, half, two._new_state(group, half))])


@PATHS
@pytest.mark.parametrize("shape", [(3, 4), (300, 200)], ids=str)
def test_zero_gradients_make_no_step_and_tiny_ones_do_no_harm(path, shape) -> None:
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer = SM3([weight], lr=0.1, **path)
    weight.grad = torch.zeros(shape)
    weight.grad[0, 0] = 1e-25  # its square is 0 in float32
    optimizer.step()
    assert (weight - 1).abs().max() < 1e-6 and (weight.view(-1)[1:] == 1).all()
    weight.grad[0, 0] = 1e-18
    optimizer.step()
    assert weight[0, 0].item() == pytest.approx(0.9, abs=1e-3)
    assert weight.isfinite().all() and (weight[1:] == 1).all()


@PATHS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_its_weight(path, bad: float) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 5))
    optimizer = SM3([weight], **path)
    weight.grad = torch.ones(4, 5)
    weight.grad[1, 2] = bad
    optimizer.step()
    assert weight.isnan().sum() == 1 and weight[1, 2].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_is_its_covers_as_predicted(dtype, momentum: float, seed: int) -> None:
    params = awkward(dtype, seed)
    optimizer = run(params, lambda p: SM3(p, momentum=momentum), seed=seed, steps=1)
    width = 8 if dtype == torch.float64 else 4
    for param in params:
        names = {f"cover_{i}" for i in range(max(1, param.dim()))}
        assert optimizer.state[param].keys() == names | ({"momentum_buffer"} if momentum else set())
        actual = sum(v.numel() * v.element_size() for v in optimizer.state[param].values())
        assert actual == SM3.state_bytes(param.shape, dtype, momentum=momentum)
        covers = sum(param.shape) if param.dim() else 1
        assert actual == width * (covers + (param.numel() if momentum else 0))
    assert SM3.state_bytes((4096, 11_008)) == 4 * (4096 + 11_008)


@PATHS
def test_momentum_that_comes_later_starts_from_zero(path, generator: torch.Generator) -> None:
    draws = torch.randn(4, 3, 4, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(draws[0].clone())
    optimizer = SM3([weight], lr=0.1, **path)
    expected, state = draws[0], {}
    for grad, momentum in zip(draws[1:], (0.0, 0.9, 0.0), strict=True):
        optimizer.param_groups[0]["momentum"] = momentum
        weight.grad = grad
        optimizer.step()
        expected, state = sm3(expected, grad, state, lr=0.1, momentum=momentum)
    assert (weight - expected).abs().max() < 1e-12


@PATHS
@pytest.mark.parametrize("late_first", [False, True])
def test_weight_that_joins_without_momentum_has_no_buffer(
    path, late_first: bool, generator: torch.Generator
) -> None:
    draws = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64)
    weights = [torch.nn.Parameter(mine[0].clone()) for mine in draws]
    optimizer = SM3(weights[::-1] if late_first else weights, lr=0.1, **path)
    expected, kept = [mine[0] for mine in draws], [{}, {}]
    for step, momentum in enumerate((0.9, 0.0, 0.0, 0.9), 1):
        optimizer.param_groups[0]["momentum"] = momentum
        for i in range(2 if step > 1 else 1):
            weights[i].grad = draws[i, step]
            expected[i], kept[i] = sm3(expected[i], draws[i, step], kept[i], lr=0.1,
                                       momentum=momentum)  # fmt: skip
        optimizer.step()
        for i, weight in enumerate(weights):
            assert optimizer.state[weight].keys() == kept[i].keys()
    assert largest_difference(weights, expected) < 1e-12


@PATHS
@pytest.mark.parametrize(("first", "then"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_state_loads_though_the_momentum_has_changed(path, first, then, seed: int) -> None:
    ours = awkward(torch.float64, seed, FILLED)
    optimizer = run(ours, lambda p: SM3(p, momentum=first, **path), seed=seed, steps=2)
    optimizer.param_groups[0]["momentum"] = then
    again = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    loaded = SM3(again, **path)
    loaded.load_state_dict(optimizer.state_dict())
    for momentum in (then, 0.5):
        for params, each in ((ours, optimizer), (again, loaded)):
            each.param_groups[0]["momentum"] = momentum
            train(params, each, seed=seed + 1, steps=2)
    assert largest_difference(ours, again) < 1e-13


def test_state_of_other_settings_is_refused(seed: int) -> None:
    params = awkward(torch.float32, seed, [(3, 4)])
    saved = run(params, lambda p: SM3(p), seed=seed, steps=1).state_dict()
    fresh = SM3(params, lr=0.7)
    fresh.load_state_dict(saved)
    train(params, fresh, seed=seed, steps=1)
    saved["state"][0]["momentum_buffer"] = saved["state"][0].pop("cover_1")
    with pytest.raises(ValueError, match="SM3 keeps .*got a state with"):
        SM3(params).load_state_dict(saved)
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1, got 1.0"):
        SM3(params, momentum=1.0)
