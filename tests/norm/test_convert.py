"""Conversion keeps a model's parameters, state, hooks and structure."""

import copy

import pytest
import torch
from torch import nn

from labcore.norm import (
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
    convert_ghost_batchnorm,
)
from tests.norm.cases import affine, draw


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, momentum=None, eps=1e-3),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6, affine=False)),
        nn.BatchNorm1d(6, track_running_stats=False),
    )


def test_every_layer_is_replaced_keeping_parameters_and_buffers(generator) -> None:
    model = affine(network(), generator).double()
    before, state = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    assert convert_ghost_batchnorm(model, 4, running="pooled") is model
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert [type(m) for m in layers] == [GhostBatchNorm2d, GhostBatchNorm1d, GhostBatchNorm1d]
    assert all(m.ghost_size == 4 and m.running == "pooled" for m in layers)
    assert layers[0].momentum is None and layers[0].eps == 1e-3
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is state[name]
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model(draw((12, 2, 4, 4), generator)).dtype == torch.float64


def test_a_model_in_evaluation_stays_there_and_computes_the_same(generator) -> None:
    model = affine(network(), generator).eval()
    model[3].train()
    x = draw((9, 2, 4, 4), generator, torch.float32)
    twin = convert_ghost_batchnorm(copy.deepcopy(model), 64)
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]
    assert torch.equal(twin(x), model(x))


def test_a_batch_norm_at_the_root_gives_a_new_layer() -> None:
    plain = nn.BatchNorm3d(3)
    ghost = convert_ghost_batchnorm(plain, 2)
    assert type(ghost) is GhostBatchNorm3d and type(plain) is nn.BatchNorm3d
    assert ghost.weight is plain.weight and ghost.running_var is plain.running_var
    ghost.weight = nn.Parameter(torch.zeros(3))
    assert not torch.equal(plain.weight, ghost.weight)


def test_a_layer_used_twice_stays_one_layer() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.Linear(3, 3), shared, nn.Sequential(shared))
    convert_ghost_batchnorm(model, 2)
    assert type(model[0]) is GhostBatchNorm1d
    assert model[0] is model[2] is model[3][0]


def test_hooks_and_attributes_come_along() -> None:
    plain = nn.BatchNorm1d(3)
    calls: list[str] = []
    handle = plain.register_forward_hook(lambda *_: calls.append("forward"))
    plain.register_forward_pre_hook(lambda *_: calls.append("before"))
    plain.label = "stem"
    ghost = convert_ghost_batchnorm(plain, 2)
    ghost(torch.randn(4, 3))
    assert calls == ["before", "forward"] and ghost.label == "stem"
    handle.remove()
    ghost(torch.randn(4, 3))
    assert calls == ["before", "forward", "before"]


def test_ghost_layers_get_the_new_settings() -> None:
    model = nn.Sequential(GhostBatchNorm1d(3, ghost_size=8, running="mean"))
    convert_ghost_batchnorm(model, 2)
    assert model[0].ghost_size == 2 and model[0].running == "sequential"


@pytest.mark.parametrize("layer", [nn.SyncBatchNorm(3), nn.LazyBatchNorm1d()])
def test_other_batch_norms_are_refused_and_nothing_changes(layer) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(layer))
    with pytest.raises(TypeError, match=rf"got {type(layer).__name__} at '1.0'"):
        convert_ghost_batchnorm(model, 4)
    assert type(model[0]) is nn.BatchNorm1d


def test_settings_are_checked_in_a_model_without_batch_norm_too() -> None:
    with pytest.raises(ValueError, match="ghost_size must be at least 1"):
        convert_ghost_batchnorm(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="running must be one of"):
        convert_ghost_batchnorm(nn.Linear(2, 2), 4, running="last")
