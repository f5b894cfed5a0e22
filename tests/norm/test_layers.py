"""Ghost batch normalization equals BatchNorm under accumulation over the same ghosts."""

import copy
import pickle

import pytest
import torch
from pytorch_tabnet.tab_network import GBN
from torch import nn

from labcore.norm import GhostBatchNorm1d, GhostBatchNorm2d, ghost_sizes, normalize
from tests.norm.cases import CASES, GHOST, PLAIN, affine, agree, draw, loop, passed


def pair(case, generator, **settings):
    """Ours and torch's with the same state."""
    dims, shape, ghost = case
    settings = {"dtype": torch.float64} | settings
    ours = affine(GHOST[dims](shape[1], ghost_size=ghost, **settings), generator)
    theirs = PLAIN[dims](shape[1], **settings)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("affine_too", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_equals_batch_norm_over_the_same_ghosts(case, affine_too, momentum, generator) -> None:
    _, shape, ghost = case
    ours, theirs = pair(case, generator, affine=affine_too, momentum=momentum)
    for _ in range(2):
        x, above = draw(shape, generator), torch.randn(shape, generator=generator).double()
        agree(
            passed(ours, ours, x, above),
            passed(lambda x: loop(theirs, x, ghost), theirs, x, above),
        )


@pytest.mark.parametrize("pieces", [1, 40, 1 << 18])
def test_the_size_of_the_pieces_changes_nothing(pieces, generator, monkeypatch) -> None:
    monkeypatch.setattr(normalize, "PIECE", pieces)
    for case in CASES:
        ours, theirs = pair(case, generator)
        x, above = draw(case[1], generator), torch.randn(case[1], generator=generator).double()
        looped = passed(lambda x, t=theirs, c=case: loop(t, x, c[2]), theirs, x, above)
        agree(passed(ours, ours, x, above), looped)


@pytest.mark.parametrize("case", [case for case in CASES if case[2] > 1])
def test_a_large_batch_equals_accumulation_over_its_ghosts(case, generator) -> None:
    """The law of the original implementation: backward once, or ghost by ghost."""
    _, shape, ghost = case
    ours, theirs = pair(case, generator)
    x, target = draw(shape, generator), draw(shape, generator)
    (ours(x) - target).square().sum().backward()
    sizes = ghost_sizes(len(x), ghost)
    for part, aim in zip(x.split(sizes), target.split(sizes), strict=True):
        (theirs(part) - aim).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("offset", [0.0, 30.0, 3000.0])
@pytest.mark.parametrize("shape", [(96, 40), (64, 8, 5, 3)])
def test_float32_is_as_near_to_float64_as_torch(offset, shape, generator) -> None:
    dims = 1 if len(shape) == 2 else 2
    single, ghost = (offset + torch.randn(shape, generator=generator)), 16
    above = 0.5 + torch.randn(shape, generator=generator)
    exact = PLAIN[dims](shape[1], dtype=torch.float64)
    truth = passed(lambda x: loop(exact, x, ghost), exact, single.double(), above.double())
    ours = GHOST[dims](shape[1], ghost_size=ghost)
    found = passed(ours, ours, single, above)
    # A mean of n values near offset is known to a few of its own rounding steps, and the outputs
    # move with it; the weight's gradient sums n such errors of one sign.
    step = 2**-23 * (1 + offset)
    n = single.numel() / shape[1] / (len(single) / ghost)
    for name, scale in {"output": 8, "input": 8, "weight": 8 * n**0.5, "bias": 8}.items():
        error = (found[name] - truth[name]).norm() / truth[name].norm()
        assert error < scale * step, name


@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"bias": False}])
@pytest.mark.parametrize("case", [(1, (5, 2), 3), (1, (4, 2, 2), 2), (2, (3, 2, 2, 1), 2)])
def test_gradients_to_second_order(case, settings, generator) -> None:
    dims, shape, ghost = case
    layer = affine(
        GHOST[dims](shape[1], dtype=torch.float64, ghost_size=ghost, **settings), generator
    )
    weights = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]
    buffers = dict(layer.named_buffers())

    def run(x, *values):
        frozen = {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(
            layer, {**dict(zip(names, values, strict=True)), **frozen}, x
        )

    inputs = (draw(shape, generator).requires_grad_(), *weights)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_inputs_that_need_no_gradient(generator) -> None:
    layer = GhostBatchNorm1d(3, ghost_size=4)
    x = draw((8, 3), generator, torch.float32)
    layer(x).sum().backward()  # A sum's gradient has strides of zero.
    assert layer.weight.grad is not None and layer.bias.grad is not None
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("momentum", [0.01, 0.3])
def test_parity_with_tabnet_where_ghosts_divide_the_batch(momentum, generator) -> None:
    ours = GhostBatchNorm1d(6, ghost_size=8, momentum=momentum, dtype=torch.float64)
    theirs = GBN(6, virtual_batch_size=8, momentum=momentum).double()
    for batch in (32, 8, 24):
        x = draw((batch, 6), generator)
        above = torch.randn((batch, 6), generator=generator).double()
        peer = passed(theirs, theirs, x, above)
        agree(passed(ours, ours, x, above), {n.removeprefix("bn."): t for n, t in peer.items()})


def test_a_tail_of_one_row_that_breaks_tabnets_layer(generator) -> None:
    x = draw((9, 6), generator, torch.float32)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        # torch.chunk cuts 9 rows for 5 ghosts of 2 into 2, 2, 2, 2, 1.
        GBN(6, virtual_batch_size=2)(x)
    assert GhostBatchNorm1d(6, ghost_size=2)(x).isfinite().all()


def test_divided_is_a_loop_with_the_momentum_over_the_chunks(generator) -> None:
    """Composer's convention: each chunk's update has momentum / number of chunks."""
    ours = GhostBatchNorm2d(3, ghost_size=4, running="divided", dtype=torch.float64)
    theirs = nn.BatchNorm2d(3, momentum=0.1 / 5, dtype=torch.float64)
    x, above = draw((20, 3, 2, 2), generator), draw((20, 3, 2, 2), generator)
    agree(passed(ours, ours, x, above), passed(lambda x: loop(theirs, x, 4), theirs, x, above))


def test_evaluation_takes_any_batch_and_is_torchs(generator) -> None:
    for case in CASES:
        ours, theirs = pair(case, generator)
        ours.eval(), theirs.eval()
        for batch in (1, 2, 37):
            x = draw((batch, *case[1][1:]), generator)
            assert torch.equal(ours(x), theirs(x))


def test_without_running_statistics_evaluation_is_training(generator) -> None:
    layer = GhostBatchNorm1d(4, ghost_size=5, track_running_stats=False)
    x = draw((20, 4), generator, torch.float32)
    trained = layer(x)
    assert torch.equal(layer.eval()(x), trained)
    assert list(layer.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("shape", [(12, 5, 4, 3), (13, 5, 4, 3), (12, 5, 1, 1), (12, 1, 4, 3)])
def test_channels_last_stays_and_its_gradients_are_right(shape, generator) -> None:
    ours, theirs = pair((2, shape, 4), generator)
    x, above = draw(shape, generator), torch.randn(shape, generator=generator).double()
    last = x.to(memory_format=torch.channels_last)
    for upper in (above, above.to(memory_format=torch.channels_last)):
        found = passed(ours, ours, last, upper)
        assert found["output"].is_contiguous(memory_format=torch.channels_last)
        agree(found, passed(lambda x: loop(theirs, x, 4), theirs, x, above))


def test_inputs_that_are_not_contiguous(generator) -> None:
    ours, theirs = pair((1, (12, 5, 6), 4), generator)
    base = draw((12, 6, 10), generator)
    views = [base[..., ::2].transpose(1, 2), base.transpose(1, 2)[:, :5], base[:, :5, 2:8]]
    views.append(base[:, :, :5].contiguous().transpose(1, 2))
    for x in views:
        above = torch.randn(x.shape, generator=generator).double()
        agree(passed(ours, ours, x, above), passed(lambda x: loop(theirs, x, 4), theirs, x, above))


def test_the_interface_is_torchs() -> None:
    ours = GhostBatchNorm2d(3, 1e-3, None, False, True, "cpu", torch.float64, ghost_size=4)
    assert isinstance(ours, nn.BatchNorm2d) and ours.running_var.dtype == torch.float64
    assert (ours.eps, ours.momentum, ours.affine) == (1e-3, None, False)
    assert repr(ours).endswith("ghost_size=4, running='sequential')")
    assert repr(ours).startswith("GhostBatchNorm2d(3, eps=0.001, momentum=None, affine=False")
    assert GhostBatchNorm1d(3, device="meta", ghost_size=2).weight.is_meta


def test_state_dicts_travel_both_ways(generator) -> None:
    ours, theirs = GhostBatchNorm1d(3, ghost_size=4), nn.BatchNorm1d(3)
    affine(ours, generator)
    theirs.load_state_dict(ours.state_dict())
    back = GhostBatchNorm1d(3, ghost_size=2, running="mean")
    back.load_state_dict(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(back.buffers(), ours.buffers(), strict=True))


def test_copies_and_pickles_compute_the_same(generator) -> None:
    layer = affine(GhostBatchNorm1d(3, ghost_size=4, running="pooled"), generator)
    x = draw((14, 3), generator, torch.float32)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    out = layer(x)
    for twin in twins:
        assert torch.equal(twin(x), out) and repr(twin) == repr(layer)
        assert torch.equal(twin.running_var, layer.running_var)


def test_an_empty_batch_is_torchs() -> None:
    ours, theirs = GhostBatchNorm2d(3, ghost_size=4), nn.BatchNorm2d(3)
    x = torch.zeros(0, 3, 2, 2)
    assert ours(x).shape == theirs(x).shape == x.shape
    assert torch.equal(ours.running_var, theirs.running_var)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="ghost_size must be at least 1, got 0"):
        GhostBatchNorm1d(3, ghost_size=0)
    with pytest.raises(TypeError, match="ghost_size must be a whole number"):
        GhostBatchNorm1d(3, ghost_size=2.0)
    with pytest.raises(ValueError, match="did you mean 'pooled'"):
        GhostBatchNorm1d(3, ghost_size=4, running="pool")
    layer = GhostBatchNorm1d(3, ghost_size=4)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        layer(torch.zeros(8, 3, 2, 2))
    with pytest.raises(RuntimeError, match=r"num_features=3 channels in dimension 1, got 5"):
        layer(torch.zeros(8, 5))
    with pytest.raises(TypeError, match="floating point"):
        layer(torch.zeros(8, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="a ghost must hold more than one value per channel"):
        GhostBatchNorm1d(3, ghost_size=1)(torch.zeros(8, 3))
