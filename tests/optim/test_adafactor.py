"""Adafactor follows torch.optim.Adafactor and the paper, and avoids the traps of both."""

import copy
import sys

import pytest
import torch
from torch import Tensor

from labcore.optim import Adafactor, adafactor, tensorwise
from labcore.optim.chunked import CHUNK
from tests.optim.lists import SHAPES, awkward, largest_difference, run, states, train

# Weights below 8 round by 2.4e-7 in float32, two or three times a step; in half precision a step
# apart in the last place (2^-8 or 2^-5) happens, twice in one weight hardly ever.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 2**-7,
    torch.bfloat16: 2**-4,
}
PATHS = pytest.mark.parametrize("path", [{"foreach": False}, {"foreach": True}], ids=str)
# torch divides by the number of elements: it cannot take an empty parameter.
FILLED = (*(shape for shape in SHAPES if shape != (0,)), (3, 40, 31), (129, 130, 2))
SETTINGS = {"lr": 3e-2, "weight_decay": 0.1}


def items_of(optimizer: Adafactor, params: list[Tensor]) -> list:
    group = optimizer.param_groups[0]
    for param in params:
        if not optimizer.state[param]:
            optimizer.state[param].update(optimizer._new_state(group, param))
    return [(p, p.grad, optimizer.state[p]) for p in params]


@PATHS
@pytest.mark.parametrize(
    "choice",
    [{}, {"weight_decay": 0.1, "maximize": True}, {"beta2_decay": -0.5, "d": 2.0, "lr": 0.3}],
    ids=str,
)
def test_parity_with_torch_over_10_steps_in_float64(path, choice, seed: int) -> None:
    ours, peers = (awkward(torch.float64, seed, FILLED) for _ in range(2))
    mine = run(ours, lambda p: Adafactor(p, **choice, **path), seed=seed, steps=10)
    theirs = run(peers, lambda p: torch.optim.Adafactor(p, **choice), seed=seed, steps=10)
    assert largest_difference(ours, peers) < 1e-12
    assert largest_difference(states(mine), states(theirs)) < 1e-11  # g² up to 30


@PATHS
def test_parity_with_torch_over_50_steps_in_float32(path, seed: int) -> None:
    shapes = [(4001,), (13, 7), (300, 1001)]
    ours, peers = awkward(torch.float32, seed, shapes), awkward(torch.float32, seed, shapes)
    run(ours, lambda p: Adafactor(p, **SETTINGS, **path), seed=seed)
    run(peers, lambda p: torch.optim.Adafactor(p, **SETTINGS), seed=seed)
    # Weights below 8 round by 2.4e-7 twice or thrice a step, updates (at most 0.03 · 6) by 1e-6 of
    # themselves: over 50 steps 3e-6 is a standard deviation at the very largest weights.
    assert largest_difference(ours, peers) < 2e-5


def by_the_paper(param: Tensor, grads: list[Tensor], *, lr: float) -> Tensor:
    """Algorithms 4 and 5 of the paper, sums and all, in float64; eps1 is added to g²."""
    eps1, eps2, d = 1e-30, 1e-3, 1.0
    x, row, col, second = param.clone(), 0.0, 0.0, 0.0
    for t, g in enumerate(grads, 1):
        beta = 1 - t**-0.8
        rho = min(lr, 1 / t**0.5)
        alpha = max(eps2, float((x**2).mean()) ** 0.5) * rho
        square = g**2 + eps1
        if x.dim() == 2:
            row = beta * row + (1 - beta) * square.sum(1)
            col = beta * col + (1 - beta) * square.sum(0)
            second = torch.outer(row, col) / row.sum()
        else:
            second = beta * second + (1 - beta) * square
        u = g / second.sqrt()
        u = u / max(1.0, float((u**2).mean()) ** 0.5 / d)
        x = x - alpha * u
    return x


@PATHS
@pytest.mark.parametrize("shape", [(5, 7), (11,), (1, 9), (9, 1), (280, 1000)], ids=str)
@pytest.mark.parametrize("lr", [1e-2, 0.9])
def test_the_papers_algorithm(path, shape, lr: float, generator: torch.Generator) -> None:
    draws = torch.randn(7, *shape, generator=generator, dtype=torch.float64)
    start, grads = draws[0], list(draws[1:])
    grads[3] = grads[3] * 100  # one outlier, which the clip has to meet
    weight = torch.nn.Parameter(start.clone())
    optimizer = Adafactor([weight], lr=lr, eps=(1e-15, 1e-3), **path)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    assert (weight - by_the_paper(start, grads, lr=lr)).abs().max() < 1e-12


@PATHS
@pytest.mark.parametrize("d", [1.0, 3.0])
def test_clip_shrinks_large_updates_and_never_grows_small_ones(
    path, d: float, generator: torch.Generator
) -> None:
    weight = torch.nn.Parameter(torch.ones(70, 90, dtype=torch.float64))
    optimizer = Adafactor([weight], lr=1e-2, d=d, **path)
    lengths = []
    for scale in (1.0, 1e3, 1e-3):
        before = weight.detach().clone()
        weight.grad = scale * torch.randn(70, 90, generator=generator, dtype=torch.float64)
        optimizer.step()
        size = 1e-2 * before.square().mean().sqrt()
        lengths.append(((weight.detach() - before).square().mean().sqrt() / size).item())
    second = 2**-0.8  # the share of the second step in the second moment
    assert lengths[1] == pytest.approx(min(d, second**-0.5), rel=0.1)
    assert lengths[1] <= d * (1 + 1e-9)
    # The third gradient is a millionth of what the moment remembers, and the update stays so small.
    assert lengths[2] < 1e-5


@PATHS
def test_step_leaves_learning_rate_and_other_weights_alone(path, seed: int) -> None:
    together, alone = (awkward(torch.float64, seed, FILLED) for _ in range(2))
    optimizer = run(together, lambda p: Adafactor(p, lr=0.5, **path), seed=seed, steps=3)
    assert optimizer.param_groups[0]["lr"] == 0.5
    single = [Adafactor([p], lr=0.5, **path) for p in alone]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for param, each in zip(alone, single, strict=True):
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            each.step()
    assert largest_difference(together, alone) == 0


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_groups_dtypes_keep_their_own_epsilon(path, dtype, seed: int) -> None:
    def weights() -> list[Tensor]:
        return [torch.nn.Parameter(torch.ones(6, 5, dtype=d)) for d in (dtype, torch.float64)]

    together, alone = weights(), weights()
    generator = torch.Generator().manual_seed(seed)
    grads = [1e-9 * torch.rand(6, 5, generator=generator).to(p.dtype) for p in together]
    for params in (together, [alone[0]], [alone[1]]):
        for param in params:
            param.grad = grads[param.dtype == torch.float64]
        Adafactor(params, **path).step()
    assert largest_difference(together, alone) == 0
    moved = (
        (together[1].detach() - 1).square().mean().sqrt()
    )  # float64: 1e-9 is far above its epsilon
    assert moved.item() > 5e-3  # with float32's it would be 1e-4


@PATHS
def test_tiny_bfloat16_gradients_still_give_whole_steps(path, seed: int) -> None:
    ends = []
    for scale in (1.0, 2.0**-12):
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        generator = torch.Generator().manual_seed(seed)
        optimizer = Adafactor([weight], lr=0.1, **path)
        for _ in range(3):
            weight.grad = (scale * torch.randn(64, 64, generator=generator)).to(torch.bfloat16)
            optimizer.step()
        ends.append(weight.detach().float())
    # A power of two changes no rounding, and eps1 is float32's: the two runs are the same.
    assert (ends[0] - ends[1]).abs().max() <= 2**-6
    assert (ends[1] - 1).abs().mean() > 0.05


@PATHS
@pytest.mark.parametrize("shape", [(6, 9), (9,), (300, 1001)], ids=str)
def test_a_row_that_never_had_a_gradient_stays_where_it_is(path, shape, seed: int) -> None:
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer = Adafactor([weight], eps=(1e-30, 1e-3), **path)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        weight.grad[1] = 0.0
        optimizer.step()
    assert weight.isfinite().all() and (weight[1] == 1).all()
    assert (weight[2:] - 1).abs().mean() > 1e-3


@PATHS
@pytest.mark.parametrize("exponent", [40, -40])
def test_the_scale_of_the_gradient_does_not_matter(path, exponent: int, seed: int) -> None:
    # r c alone, the fourth power of the gradient, would be 2^160 or 2^-160: no float32.
    ends = []
    for scale in (1.0, 2.0**exponent):
        weight = torch.nn.Parameter(torch.ones(30, 40))
        optimizer = Adafactor([weight], eps=(1e-30, 1e-3), **path)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            weight.grad = scale * torch.randn(30, 40, generator=generator)
            optimizer.step()
        ends.append(weight.detach())
    assert (ends[0] - ends[1]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "shape", [(60, 101), (33, 10, 21), (2, 60, 101), (2, 5001), (2, 3, 11, 13), (141,)], ids=str
)
@pytest.mark.parametrize("eps1", [None, 0.05, 0.7])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_blocks_are_the_loop_above_and_below_the_floor(
    shape, eps1, dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Adafactor.__module__], "CHUNK", 4096)
    monkeypatch.setattr(tensorwise, "SMALL", 100)
    ends, kept = [], []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer = Adafactor([weight], eps=(eps1, 1e-3), weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            grad = torch.randn(shape, generator=generator)
            grad *= torch.linspace(0.01, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
            weight.grad = grad.to(dtype)
            optimizer.step()
        ends.append(weight)
        kept.append(states(optimizer))
    tolerance = TOLERANCE[dtype]
    assert largest_difference(*[[end] for end in ends]) <= tolerance
    assert largest_difference(*kept) <= (1e-13 if dtype == torch.float64 else 1e-5)


def test_no_temporary_has_the_size_of_the_weight(seed: int) -> None:
    weight = torch.nn.Parameter(torch.ones(1200, 1100))
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    optimizer = Adafactor([weight], weight_decay=0.1)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                seen.append(out)
            return out

    with Watch():
        optimizer.step()
    held = {weight.untyped_storage().data_ptr(), weight.grad.untyped_storage().data_ptr()}
    own = [t for t in seen if t.untyped_storage().data_ptr() not in held]
    assert len(own) > 20 and max(t.numel() for t in own) <= CHUNK


@pytest.mark.parametrize("choice", [{}, {"maximize": True, "weight_decay": 0.1}], ids=str)
def test_torchs_foreach_form_is_the_loop(choice, seed: int) -> None:
    # What a GPU runs, here on CPU tensors.
    loop, ours = (awkward(torch.float64, seed, FILLED) for _ in range(2))
    one = run(loop, lambda p: Adafactor(p, foreach=False, **choice), seed=seed, steps=3)
    two = Adafactor(ours, **choice)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(3):
            for param in ours:
                param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            assert two._foreach(two.param_groups[0], items_of(two, ours))
    assert largest_difference(loop, ours) < 1e-12
    assert largest_difference(states(one), states(two)) < 1e-12


def test_foreach_form_shows_nan_and_leaves_bfloat16_to_the_loop() -> None:
    params = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    for param, value in zip(params, (float("nan"), 1.0), strict=True):
        param.grad = torch.ones(4, 3)
        param.grad[0, 0] = value
    optimizer = Adafactor(params)
    with torch.no_grad():
        assert optimizer._foreach(optimizer.param_groups[0], items_of(optimizer, params))
    assert params[0].isnan().all() and params[1].isfinite().all()
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    optimizer = Adafactor([half])
    assert not optimizer._foreach(optimizer.param_groups[0], items_of(optimizer, [half]))


@PATHS
@pytest.mark.parametrize("shape", [(7, 5), (300, 1001), (4,), (40_001,)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_its_whole_tensor(path, shape, bad: float) -> None:
    params = [torch.nn.Parameter(torch.ones(shape)) for _ in range(2)]
    optimizer = Adafactor(params, **path)
    for value in (bad, 1.0):
        for param in params:
            param.grad = torch.ones(shape)
        params[0].grad.view(-1)[1] = value
        optimizer.step()
        assert params[0].isnan().all()
    assert params[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_state_is_rows_and_columns_as_predicted(dtype, seed: int) -> None:
    params = awkward(dtype, seed)
    optimizer = run(params, lambda p: Adafactor(p), seed=seed, steps=1)
    width = 8 if dtype == torch.float64 else 4
    for param in params:
        actual = sum(v.numel() * v.element_size() for v in optimizer.state[param].values())
        assert actual == Adafactor.state_bytes(param.shape, dtype)
        n = param.numel()
        if param.dim() > 1:
            n = n // max(1, param.shape[-1]) + n // max(1, param.shape[-2])
        assert actual == width * n + 4
    assert Adafactor.state_bytes((4096, 11_008)) == 4 * (4096 + 11_008) + 4


@PATHS
def test_torchs_state_dict_loads_and_ours_loads_into_torch(path, seed: int) -> None:
    ours, peers = (awkward(torch.float64, seed, FILLED) for _ in range(2))
    peer = run(peers, lambda p: torch.optim.Adafactor(p, **SETTINGS), seed=seed, steps=4)
    for mine, theirs in zip(ours, peers, strict=True):
        mine.data.copy_(theirs)
    optimizer = Adafactor(ours, lr=0.7, nonfinite="raise", **path)
    optimizer.load_state_dict(peer.state_dict())
    group = optimizer.param_groups[0]
    assert group["lr"] == SETTINGS["lr"] and group["nonfinite"] == "raise"
    train(ours, optimizer, seed=seed + 1, steps=3)
    train(peers, peer, seed=seed + 1, steps=3)
    assert largest_difference(ours, peers) < 1e-12
    again = torch.optim.Adafactor(peers)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors
    train(ours, optimizer, seed=seed + 2, steps=3)
    train(peers, again, seed=seed + 2, steps=3)
    assert largest_difference(ours, peers) < 1e-12


def test_state_of_other_shapes_is_refused() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(s)) for s in ((4, 3), (3, 4)))
    weight.grad = torch.ones_like(weight)
    optimizer = Adafactor([weight])
    optimizer.step()
    with pytest.raises(ValueError, match=r"Adafactor keeps .* \(3, 4\), got a state with"):
        Adafactor([other]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta2_decay": 0.8}, "beta2_decay must be at most 0, got 0.8"),
        ({"eps": (1e-3,)}, r"eps must be \(eps1, eps2\), got 1 numbers"),
        ({"eps": (-1.0, 1e-3)}, r"eps\[0\] must be"),
        ({"eps": (None, -1e-3)}, r"eps\[1\] must be"),
        ({"d": 0.5}, "d must be at least 1, got 0.5"),
        ({"d": float("nan")}, "d must be"),
    ],
)
def test_a_bad_setting_is_refused_with_the_way_out(settings, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Adafactor([torch.nn.Parameter(torch.ones(2))], **settings)


def test_rule_and_loop_take_the_learning_rate_from_a_tensor() -> None:
    param, grad = torch.ones(2, 3), torch.ones(2, 3)
    plain, _ = adafactor(param, grad, {}, lr=0.01)
    tensor, _ = adafactor(param, grad, {}, lr=torch.tensor(0.01))
    assert torch.equal(plain, tensor)
    weight = torch.nn.Parameter(param.clone())
    weight.grad, lr = grad, torch.tensor(0.0)
    optimizer = Adafactor([weight], lr=lr)
    optimizer.step()
    assert torch.equal(weight, param)
    lr.fill_(0.01)
    optimizer.step()
    assert (weight - plain).abs().max() < 1e-6
