"""`fused=True` on a CPU: compiled passes compute what BatchNorm over the ghosts does."""

import pytest
import torch
from torch import nn

from labcore.norm import GhostBatchNorm1d, GhostBatchNorm2d, convert_ghost_batchnorm
from labcore.norm import normalize as source
from tests.norm.cases import GHOST, PLAIN, affine, agree, draw, loop, passed
from tests.optim.lists import needs_compiler


@pytest.fixture(autouse=True)
def compiler() -> None:
    """See `needs_compiler`."""
    needs_compiler()


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """For each layer's forward pass, whether it was the compiled one."""
    seen: list[bool] = []
    original = source.compiled.passes

    def noted(*arguments):
        found = original(*arguments)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(source.compiled, "passes", noted)
    return seen


@pytest.mark.parametrize(
    ("shape", "ghost", "settings", "compiled"),
    [
        ((12, 5), 4, {}, [True]),
        ((12, 5), 4, {"affine": False}, [True]),
        ((21, 7, 3), 3, {"bias": False}, [True]),
        ((12, 5, 6), 4, {}, [True]),
        ((13, 5), 4, {}, []),  # ghosts of two sizes
        ((12, 1), 4, {}, [False]),
        ((12, 5, 1, 1), 4, {}, [True]),
        ((14, 3, 4, 5), 2, {}, [True]),
        ((10, 2, 3, 7), 5, {"running": "pooled"}, [True]),
        ((10, 2, 3, 7), 5, {"running": "mean"}, [True]),
        ((12, 5, 6), 4, {"running": "divided", "momentum": 0.3}, [True]),
        ((12, 5, 6), 4, {"running": "mean", "momentum": None}, [True]),
        ((12, 5), 4, {"track_running_stats": False}, [True]),
    ],
    ids=str,
)
def test_it_is_batch_norm_over_the_ghosts(
    shape, ghost, settings, compiled, generator, taken
) -> None:
    dims = 2 if len(shape) == 4 else 1
    make = {"dtype": torch.float64, "momentum": 0.1} | settings
    running = make.pop("running", "sequential")
    ours = GHOST[dims](shape[1], ghost_size=ghost, running=running, fused=True, **make)
    affine(ours, generator)
    theirs = GHOST[dims](shape[1], ghost_size=ghost, running=running, **make)
    theirs.load_state_dict(ours.state_dict())
    plain = PLAIN[dims](shape[1], **make)
    plain.load_state_dict(ours.state_dict())
    x, above = draw(shape, generator), torch.randn(shape, generator=generator).double()
    for memory_format in [torch.contiguous_format, torch.channels_last][: 1 + (dims == 2)]:
        x = x.contiguous(memory_format=memory_format)
        taken.clear()
        found = passed(ours, ours, x, above)
        assert taken == compiled
        assert found["output"].is_contiguous(memory_format=memory_format)
        agree(found, passed(theirs, theirs, x, above))
        if running == "sequential":
            agree(found, passed(lambda x: loop(plain, x, ghost), plain, x, above))


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("shape", [(4096, 10), (64, 3, 40, 41)])
def test_float32_is_near_to_float64(offset, shape, generator, taken) -> None:
    single = offset + torch.randn(shape, generator=generator)
    above = 0.5 + torch.randn(shape, generator=generator)
    dims, ghost = (1, 1024) if len(shape) == 2 else (2, 16)
    exact = PLAIN[dims](shape[1], dtype=torch.float64)
    truth = passed(lambda x: loop(exact, x, ghost), exact, single.double(), above.double())
    ours = GHOST[dims](shape[1], ghost_size=ghost, fused=True)
    found = passed(ours, ours, single, above)
    assert taken == [True]
    # The bounds of test_layers, for the form that isn't compiled.
    step = 2**-23 * (1 + offset)
    n = single.numel() / shape[1] / (len(single) / ghost)
    for name, scale in {"output": 8, "input": 8, "weight": 8 * n**0.5, "bias": 8}.items():
        error = (found[name] - truth[name]).norm() / truth[name].norm()
        assert error < scale * step, name


def test_gradients_to_second_order(generator, taken) -> None:
    layer = affine(GhostBatchNorm1d(2, dtype=torch.float64, ghost_size=3, fused=True), generator)
    x = draw((6, 2, 2), generator).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))
    assert set(taken) == {True}


def test_only_what_is_asked_for_has_a_gradient(generator, taken) -> None:
    layer = GhostBatchNorm1d(3, ghost_size=4, fused=True)
    x = draw((8, 3), generator, torch.float32)
    layer(x).sum().backward()  # A sum's gradient has strides of zero.
    assert layer.weight.grad is not None and layer.bias.grad is not None and x.grad is None
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None and taken == [True, True]


def test_half_precision_and_any_number_of_threads(generator, taken) -> None:
    x = draw((32, 24, 9, 8), generator, torch.float32).bfloat16()
    ends, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            layer = GhostBatchNorm2d(24, ghost_size=8, fused=True)
            ends.append(passed(layer, layer, x, torch.ones_like(x)))
    finally:
        torch.set_num_threads(threads)
    assert ends[0]["output"].dtype == torch.bfloat16 and taken == [True] * 4
    for end in ends[1:]:
        assert all(torch.equal(value, end[name]) for name, value in ends[0].items())


@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 3), (12, 5, 3, 2)])
def test_its_output_may_be_changed_in_place(shape, generator, taken) -> None:
    layer = GHOST[max(1, len(shape) - 2)](5, ghost_size=4, fused=True)
    for memory_format in [torch.contiguous_format, torch.channels_last][: len(shape) // 2]:
        x = draw(shape, generator, torch.float32).contiguous(memory_format=memory_format)
        x.requires_grad_()
        (layer(x).relu_() + 1).sum().backward()
        assert x.grad is not None
    assert set(taken) == {True}


def test_exported_it_takes_any_number_of_ghosts(generator, taken) -> None:
    layer = GhostBatchNorm1d(5, ghost_size=4, fused=True)
    batch = 4 * torch.export.Dim("ghosts", min=3, max=1000)
    example = (torch.randn(16, 5, generator=generator),)
    program = torch.export.export(layer, example, dynamic_shapes=({0: batch},)).module()
    x = torch.randn(24, 5, generator=generator)
    torch.testing.assert_close(program(x), layer(x))
    assert taken == [True]  # of the layer itself


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_what_compiled_code_would_misread_is_left_to_the_other_form(
    name: str, generator, taken
) -> None:
    settings = {"ghost_size": 4, "dtype": torch.float64}
    ours = affine(GhostBatchNorm1d(5, fused=True, **settings), generator)
    theirs = GhostBatchNorm1d(5, **settings)
    theirs.load_state_dict(ours.state_dict())
    strided = torch.stack([getattr(ours, name).detach()] * 2, dim=1)[:, 0]
    made = nn.Parameter(strided) if name in ("weight", "bias") else strided
    setattr(ours, name, made)
    x, above = draw((12, 5), generator), torch.randn((12, 5), generator=generator).double()
    agree(passed(ours, ours, x, above), passed(theirs, theirs, x, above))
    assert taken == [False] and not getattr(ours, name).is_contiguous()


def test_a_converted_model_and_older_layers(generator, taken) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    convert_ghost_batchnorm(model, 4, fused=True)
    assert repr(model[1]).endswith("ghost_size=4, running='sequential', fused=True)")
    model(torch.randn(8, 4, generator=generator)).sum().backward()
    assert taken == [True]
    older = GhostBatchNorm1d(6, ghost_size=4)
    del older.__dict__["fused"]  # as unpickled from an earlier version
    older(torch.randn(8, 6, generator=generator))
    assert taken == [True]
