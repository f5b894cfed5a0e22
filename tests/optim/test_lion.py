"""Lion follows lion-pytorch, and each of Lion's traps is shown and guarded."""

import pytest
import torch
from lion_pytorch.foreach import Lion as PeerForeach
from lion_pytorch.lion_pytorch import Lion as PeerLoop

from labcore.optim import Lion
from labcore.optim.rules import lion
from tests.optim.lists import COMPILED, TRITON, awkward, largest_difference, run

PATHS = [{"foreach": False}, {"foreach": True}]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_parity_with_lion_pytorch_over_50_steps_in_float64(path, decay: float, seed: int) -> None:
    ours, peers = awkward(torch.float64, seed), awkward(torch.float64, seed)
    run(ours, lambda p: Lion(p, lr=1e-2, weight_decay=decay, **path), seed=seed)
    run(peers, lambda p: PeerForeach(p, lr=1e-2, weight_decay=decay), seed=seed)
    assert largest_difference(ours, peers) < 1e-12


@pytest.mark.parametrize("path", [*PATHS, COMPILED, TRITON])
def test_parity_in_float32_except_where_the_sign_is_in_doubt(path, seed: int) -> None:
    shapes = [(4001,), (13, 7)]
    ours, peers = awkward(torch.float32, seed, shapes), awkward(torch.float32, seed, shapes)
    exact = [p.detach().double() for p in peers]
    make = {"ours": Lion(ours, **SETTINGS, **path), "peer": PeerLoop(peers, **SETTINGS)}
    generator = torch.Generator().manual_seed(seed)
    moments = [torch.zeros_like(p) for p in exact]
    doubtful = [torch.zeros(p.shape, dtype=torch.bool) for p in exact]
    for _ in range(50):
        for i, param in enumerate(exact):
            grad = torch.randn(param.shape, generator=generator)
            ours[i].grad, peers[i].grad = grad, grad.clone()
            blended = 0.9 * moments[i] + 0.1 * grad.double()
            doubtful[i] |= blended.abs() < 1e-7
            moments[i] = 0.99 * moments[i] + 0.01 * grad.double()
        for optimizer in make.values():
            optimizer.step()
    for a, b, skip in zip(ours, peers, doubtful, strict=True):
        # Two roundings a step on each side, each of at most 2^-24 of the weight, add up over 50
        # steps where all go one way. A wrong sign would show as 2 lr.
        bar = 200 * 2**-24 * b.detach().abs().clamp(min=1)
        assert ((a - b).abs() <= bar)[~skip].all()
    # |u| < 1e-7 where the density of u at 0 is at most 4 (one part is 0.1 g): 4e-5 of all elements
    # are expected over 50 steps, that is 0.2 of the 4,437; more than 6 with probability 1e-9.
    assert sum(int(skip.sum()) for skip in doubtful) <= 6


@pytest.mark.parametrize("path", [*PATHS, COMPILED, TRITON])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [5, 70_000])
def test_a_gradient_that_is_not_finite_shows_in_its_weight_alone(path, bad, size: int) -> None:
    weight = torch.nn.Parameter(torch.ones(size))
    optimizer = Lion([weight], lr=1e-2, **path)
    weight.grad = torch.ones(size)
    weight.grad[-2] = bad
    optimizer.step()
    assert weight.isnan().sum() == 1 and weight[-2].isnan()
    weight.grad = torch.ones(size)
    optimizer.step()
    assert weight.isnan().sum() == 1  # and it stays visible


def test_the_check_for_nan_changes_no_finite_weight(seed: int) -> None:
    # The sum over these momenta overflows: a false alarm, which must do no harm.
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(70_000, generator=generator).abs() * 1e37 + 1e37
    weights = [torch.nn.Parameter(torch.ones(70_000)) for _ in range(2)]
    for weight, foreach in zip(weights, (True, False), strict=True):
        weight.grad = grad
        optimizer = Lion([weight], lr=1e-2, foreach=foreach, betas=(0.9, 0.0))
        optimizer.step()
    assert weights[0].isfinite().all() and torch.equal(weights[0], weights[1])


def test_drift_after_the_gradient_vanishes() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Lion([weight], lr=1e-2)
    for step in range(401):
        weight.grad = torch.full((1,), 1.0 if step == 0 else 0.0)
        optimizer.step()
    assert weight.item() == pytest.approx(1 - 401 * 1e-2, abs=1e-3)


@pytest.mark.parametrize("path", PATHS)
def test_complex_weights_take_the_sign_of_each_component(path, seed: int) -> None:
    shapes = [(70_003,), (3, 4)]
    generator = torch.Generator().manual_seed(seed)
    starts = [torch.randn(s, generator=generator, dtype=torch.complex128) for s in shapes]
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = run(weights, lambda p: Lion(p, **SETTINGS, **path), seed=seed, steps=4)
    generator = torch.Generator().manual_seed(seed)
    expected, moments = [torch.view_as_real(s) for s in starts], [{}, {}]
    for _ in range(4):
        for i, shape in enumerate(shapes):
            grad = torch.randn(shape, generator=generator, dtype=torch.complex128)
            expected[i], moments[i] = lion(
                expected[i], torch.view_as_real(grad), moments[i], **SETTINGS
            )
    assert largest_difference([torch.view_as_real(w) for w in weights], expected) < 1e-12
    assert optimizer.state[weights[1]]["exp_avg"].dtype == torch.complex128


def test_state_is_one_moment_in_the_dtype_asked_for() -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    sizes = {}
    for dtype in (None, torch.bfloat16):
        optimizer = Lion([weight], state_dtype=dtype)
        optimizer.step()
        sizes[dtype] = {k: v.numel() * v.element_size() for k, v in optimizer.state[weight].items()}
    assert sizes == {None: {"exp_avg": 4000}, torch.bfloat16: {"exp_avg": 2000}}
