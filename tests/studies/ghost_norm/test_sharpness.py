"""Hutchinson's estimate against the whole Hessian, and what a random step keeps."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.studies.ghost_norm import sharpness


def small(generator: torch.Generator, *, normalized: bool = True) -> tuple[nn.Sequential, Tensor]:
    """A network of 5 -> 3 -> 2 in fp64 with 17 rows for it."""
    layers = [nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)]
    if not normalized:
        del layers[1]
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model, torch.randn(17, 5, generator=generator, dtype=torch.float64)


def exact_blocks(model: nn.Sequential, x: Tensor, y: Tensor) -> list[float]:
    """The trace of each parameter's block, from the whole matrix of second derivatives."""
    traces = []
    for name, parameter in model.named_parameters():

        def loss(value: Tensor, name: str = name) -> Tensor:
            out = torch.func.functional_call(model, {name: value}, (x,))
            return F.cross_entropy(out, y)

        size = parameter.numel()
        hessian = torch.autograd.functional.hessian(loss, parameter.detach())
        traces.append(hessian.reshape(size, size).trace().item())
    return traces


@pytest.mark.parametrize("normalized", [True, False])
def test_the_estimate_meets_the_exact_trace(generator: torch.Generator, normalized: bool) -> None:
    """Six standard errors are left in one run of 10^8 by chance."""
    model, x = small(generator, normalized=normalized)
    y = torch.randint(2, (17,), generator=generator)
    found = sharpness.hessian_trace(
        lambda: F.cross_entropy(model(x), y),
        list(model.parameters()),
        probes=400,
        generator=generator,
    )
    blocks = exact_blocks(model, x, y)
    assert abs(found.mean - sum(blocks)) < 6 * found.standard_error + 1e-9
    assert sum(found.by_parameter) == pytest.approx(found.mean)
    largest = max(abs(block) for block in blocks)
    for ours, exact in zip(found.by_parameter, blocks, strict=True):
        assert ours == pytest.approx(exact, abs=0.5 * largest + 6 * found.standard_error)


def test_a_diagonal_hessian_needs_one_probe(generator: torch.Generator) -> None:
    scales = torch.tensor([1.0, -3.0, 0.5], dtype=torch.float64)
    w = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    idle = torch.ones(2, dtype=torch.float64, requires_grad=True)
    one = sharpness.hessian_trace(
        lambda: (scales * w.square()).sum() / 2 + idle.sum(),
        [w, idle],
        probes=1,
        generator=generator,
    )
    assert one.mean == pytest.approx(-1.5)
    assert one.by_parameter == pytest.approx((-1.5, 0.0))  # a loss linear in `idle`
    assert one.standard_error == math.inf


def test_rescaling_before_a_norm_divides_sharpness_by_its_square(
    generator: torch.Generator,
) -> None:
    model, x = small(generator)
    model[1].eps = 1e-12
    y = torch.randint(2, (17,), generator=generator)
    before = exact_blocks(model, x, y)
    with torch.no_grad():
        model[0].weight.mul_(4)
    after = exact_blocks(model, x, y)
    assert after[0] == pytest.approx(before[0] / 16)
    assert after[2:] == pytest.approx(before[2:])


def test_random_step_has_its_length_in_each_row_and_is_undone(
    generator: torch.Generator,
) -> None:
    model, _ = small(generator)
    conv = nn.Parameter(torch.randn(4, 2, 3, 3, generator=generator, dtype=torch.float64))
    weights = [*model.parameters(), conv]
    before = [w.detach().clone() for w in weights]
    seen: list[list[Tensor]] = []

    def loss() -> Tensor:
        seen.append([w.detach() - b for w, b in zip(weights, before, strict=True)])
        return torch.tensor(float(len(seen)))

    found = sharpness.perturbed_losses(loss, weights, radius=0.3, directions=3, generator=generator)
    assert found == [1.0, 2.0, 3.0]
    for moves in seen:
        for move, start in zip(moves, before, strict=True):
            if start.dim() == 1:
                assert not move.any()
            else:
                lengths = move.flatten(1).norm(dim=1)
                torch.testing.assert_close(lengths, 0.3 * start.flatten(1).norm(dim=1))
    assert not torch.equal(seen[0][0], seen[1][0])
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))


def test_a_random_step_does_not_see_a_rescaled_row(seed: int) -> None:
    losses = []
    for factor in (1.0, 8.0):
        dice = torch.Generator().manual_seed(seed)
        model, x = small(dice)
        model[1].eps = 1e-12
        y = torch.randint(2, (17,), generator=dice)
        with torch.no_grad():
            model[0].weight.mul_(factor)
            model[0].bias.mul_(factor)
        losses.append(
            sharpness.perturbed_losses(
                lambda model=model, x=x, y=y: F.cross_entropy(model(x), y),
                list(model.parameters()),
                radius=0.2,
                generator=dice,
            )
        )
    assert losses[0] == pytest.approx(losses[1])
