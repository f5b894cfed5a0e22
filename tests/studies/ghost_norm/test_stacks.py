"""Networks in a stack share nothing: each computes and learns what it would alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labcore.norm import GhostBatchNorm1d
from labcore.studies.ghost_norm.stacks import Stack

KINDS = [("batch", None), ("batch", 3), ("layer", None), ("none", None)]


def stack(norm: str, ghost: int | None, seeds: list[int]) -> Stack:
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    return Stack(generators, inputs=5, hidden=7, norm=norm, ghost=ghost).double()


def steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Three steps of SGD with momentum; the loss before each, summed over networks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(x)
        each = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
        losses.append(each.view(y.shape).mean(-1))
        losses[-1].sum().backward()
        optimizer.step()
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize(("norm", "ghost"), KINDS)
def test_a_stack_learns_as_its_members_would_alone(
    norm: str, ghost: int | None, generator: torch.Generator
) -> None:
    seeds = [3, 8, 11]
    together = stack(norm, ghost, seeds)
    alone = [together.member(n).double() for n in range(3)]  # the first weights are fp32
    x = torch.randn(3, 11, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (3, 11), generator=generator)
    losses = steps(together, x, y)
    for n, model in enumerate(alone):
        for mine, theirs in zip(losses, steps(model, x[n], y[n]), strict=True):
            torch.testing.assert_close(mine[n], theirs)
        model.eval()
        after = together.eval().member(n)
        assert [type(layer) for layer in after] == [type(layer) for layer in model]
        for name, value in model.state_dict().items():
            mine = after.state_dict()[name]
            torch.testing.assert_close(mine, value, check_dtype=False, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after.double()(x[n]), together(x)[n], rtol=1e-4, atol=1e-5)


def test_first_weights_depend_on_the_generator_alone() -> None:
    stacks = [stack(norm, ghost, [5, 6]) for norm, ghost in KINDS]
    other = stack("batch", None, [6])
    for each in stacks:
        for layer in range(3):
            assert torch.equal(each.weights[layer], stacks[0].weights[layer])
            assert torch.equal(each.weights[layer][1], other.weights[layer][0])
    assert len(stacks[0].biases) == 1 and len(stacks[3].biases) == 3
    member = stacks[1].member(0)
    norms = [layer for layer in member if isinstance(layer, GhostBatchNorm1d)]
    assert [layer.ghost_size for layer in norms] == [3, 3]


def test_whole_takes_the_statistics_of_all_rows_and_keeps_the_running_ones(
    generator: torch.Generator,
) -> None:
    ghostly, plain = stack("batch", 3, [1]), stack("batch", None, [1])
    x = torch.randn(1, 12, 5, generator=generator, dtype=torch.float64)
    before = {name: value.clone() for name, value in ghostly.state_dict().items()}
    found = ghostly(x, whole=True)
    assert all(torch.equal(v, before[name]) for name, v in ghostly.state_dict().items())
    torch.testing.assert_close(found, plain(x))
    assert not torch.allclose(ghostly(x), found)
    torch.testing.assert_close(ghostly.eval()(x, whole=True), found)
