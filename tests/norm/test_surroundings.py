"""The layers under autocast, torch.compile, torch.func and DistributedDataParallel."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labcore.norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    convert_ghost_batchnorm,
    ghost_sizes,
)
from labcore.processes import rank_and_world, run
from tests.norm.cases import affine, agree, draw, passed


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_autocast_computes_half_inputs_in_float32(dtype, offset, generator) -> None:
    model = nn.Sequential(nn.Linear(7, 9), GhostBatchNorm1d(9, ghost_size=4))
    affine(model, generator)
    x = offset + draw((14, 7), generator, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        inner = model[0](x)
        assert inner.dtype == dtype
        exact = copy.deepcopy(model[1]).double()
        out = model[1](inner)
        out.float().square().sum().backward()  # Backward too with autocast on.
    assert out.dtype == dtype and model[1].running_var.dtype == torch.float32
    truth = exact(inner.detach().double())
    torch.testing.assert_close(out.double(), truth, rtol=2**-7, atol=2**-7)
    # The statistics never saw the low precision: they are those of float64 to float32's.
    torch.testing.assert_close(
        model[1].running_var.double(), exact.running_var, rtol=1e-5, atol=1e-6
    )
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_layer_in_bfloat16_rounds_once(generator) -> None:
    x = draw((14, 5), generator, torch.bfloat16)
    layer = affine(GhostBatchNorm1d(5, ghost_size=4, dtype=torch.bfloat16), generator)
    exact = copy.deepcopy(layer).double()
    out = layer(x.requires_grad_())
    out.sum().backward()
    assert out.dtype == x.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
    wide = x.detach().double()
    truth = exact(wide)
    # Once to bfloat16; before that to float32, by a few of whose units the ghost's largest value
    # may be off: less than one of them in 3,000 seeds.
    largest = [
        (ghost.abs().amax(0) * (ghost.var(0, correction=0) + layer.eps).rsqrt()).expand_as(ghost)
        for ghost in wide.split(ghost_sizes(14, 4))
    ]
    scale = torch.cat(largest) * exact.weight + exact.bias
    assert ((out - truth).abs() <= 2**-8 * truth.abs() + 2**-22 * scale).all()


@pytest.mark.parametrize(("policy", "momentum"), [("sequential", 0.1), ("pooled", None)])
def test_compiled_whole_for_every_batch_size(policy, momentum, generator, fresh_compiler) -> None:
    eager = GhostBatchNorm1d(6, ghost_size=8, running=policy, momentum=momentum).double()
    twin = copy.deepcopy(eager)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=backend)
    for batch in (64, 40, 37, 99):
        x = draw((batch, 6), generator)
        above = torch.randn((batch, 6), generator=generator).double()
        agree(passed(eager, eager, x, above), passed(compiled, twin, x, above))
    assert len(graphs) <= 3  # even, ragged, and one that the guards may cost


def test_compiled_backward_in_channels_last(generator, fresh_compiler) -> None:
    eager = GhostBatchNorm2d(3, ghost_size=4).double()
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x, above = draw((10, 3, 4, 2), generator), draw((10, 3, 4, 2), generator)
    for layout in (torch.contiguous_format, torch.channels_last):
        into = x.to(memory_format=layout)
        found = passed(compiled, twin, into, above)
        assert found["output"].is_contiguous(memory_format=layout)
        agree(passed(eager, eager, into, above), found)


def test_torch_func_sees_through_the_layer(generator) -> None:
    layer = GhostBatchNorm1d(4, ghost_size=3, track_running_stats=False, dtype=torch.float64)
    affine(layer, generator)
    x = draw((8, 4), generator)

    def loss(weights):
        return torch.func.functional_call(layer, weights, x).pow(3).sum()

    weights = {name: p.detach() for name, p in layer.named_parameters()}
    found = torch.func.grad(loss)(weights)
    layer(x).pow(3).sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad)
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(weights)["weight"]["weight"]
    by_autograd = torch.autograd.functional.hessian(
        lambda w: loss({**weights, "weight": w}), weights["weight"]
    )
    torch.testing.assert_close(hessian, by_autograd)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
    return convert_ghost_batchnorm(model, 4)


def _train_in_parts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    rank, world = rank_and_world()
    model = DistributedDataParallel(_model())
    found = {}
    for _ in range(2):  # The second pass begins with rank 0's buffers everywhere.
        model.zero_grad()
        loss = model(x.chunk(world)[rank]).square().mean()
        loss.backward()
        found = {name: p.grad for name, p in model.module.named_parameters()}
        found["loss"] = loss.detach()
    return found | dict(model.module.named_buffers())


def test_two_processes_have_the_gradients_of_one(generator) -> None:
    x = draw((24, 5), generator)
    ranks = run(_train_in_parts, 2, x)
    alone = _model()
    # Each process normalizes three ghosts of 4 rows, one process six, the same ones.
    loss = alone(x).square().mean()
    loss.backward()
    for name, p in alone.named_parameters():
        torch.testing.assert_close(ranks[0][name], p.grad)
        assert torch.equal(ranks[0][name], ranks[1][name])
    torch.testing.assert_close((ranks[0]["loss"] + ranks[1]["loss"]) / 2, loss.detach())
    first = _model()
    for _ in range(2):
        first(x[:12])
    for name, buffer in first.named_buffers():
        torch.testing.assert_close(ranks[0][name], buffer)
