"""AdamW follows torch.optim.AdamW; its choices about epsilon are the formulas on every path."""

import pytest
import torch

from labcore.optim import AdamW
from labcore.optim.rules import adamw
from tests.optim.lists import (
    COMPILED,
    SHAPES,
    TRITON,
    awkward,
    largest_difference,
    run,
    states,
    train,
)

PATHS = [{"foreach": False}, {"foreach": True}]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_parity_with_torch_over_50_steps_in_float64(path, maximize, decay, seed: int) -> None:
    ours, peers = awkward(torch.float64, seed), awkward(torch.float64, seed)
    settings = {"lr": 1e-2, "weight_decay": decay, "maximize": maximize}
    run(ours, lambda p: AdamW(p, **settings, **path), seed=seed)
    run(peers, lambda p: torch.optim.AdamW(p, **settings), seed=seed)
    assert largest_difference(ours, peers) < 1e-12


@pytest.mark.parametrize("path", [*PATHS, COMPILED, TRITON])
def test_parity_with_torch_over_50_steps_in_float32(path, seed: int) -> None:
    shapes = [(4001,), (13, 7)]
    ours, peers = awkward(torch.float32, seed, shapes), awkward(torch.float32, seed, shapes)
    run(ours, lambda p: AdamW(p, **SETTINGS, **path), seed=seed)
    run(peers, lambda p: torch.optim.AdamW(p, **SETTINGS), seed=seed)
    # No sign decides anything here, so no element is left out. 50 steps of 1e-2, errors of 1e-7.
    assert largest_difference(ours, peers) < 5e-6


@pytest.mark.parametrize("path", PATHS)
def test_complex_parity_with_torch(path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts = [
        torch.randn(s, generator=generator, dtype=torch.complex128) for s in ((70_003,), (5,))
    ]
    ours = [torch.nn.Parameter(s.clone()) for s in starts]
    peers = [torch.nn.Parameter(s.clone()) for s in starts]
    run(ours, lambda p: AdamW(p, **SETTINGS, **path), seed=seed, steps=5)
    run(peers, lambda p: torch.optim.AdamW(p, **SETTINGS), seed=seed, steps=5)
    assert largest_difference(ours, peers) < 1e-12


CHOICES = [
    {"eps_mode": "inside", "eps": 1e-3},
    {"eps_mode": "outside", "eps": 1e-2, "eps_root": 1e-3},
    {"eps_mode": "atan2"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("path", [*PATHS, COMPILED, TRITON])
def test_every_epsilon_choice_is_its_rule(choice, path, seed: int) -> None:
    dtype = torch.float32 if "fused" in path else torch.float64
    tolerance = 5e-6 if "fused" in path else 1e-12
    ours = awkward(dtype, seed, [(4001,), (3, 2)])
    expected, entries = [p.detach().double().clone() for p in ours], [{} for _ in ours]
    if "fused" in path and choice["eps_mode"] == "atan2":
        with pytest.raises(ValueError, match="fused .*eps_mode='atan2'.*use foreach=True"):
            AdamW(ours, **choice, **path)
        return
    run(ours, lambda p: AdamW(p, **SETTINGS, **choice, **path), seed=seed, steps=7)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(7):
        for i, param in enumerate(expected):
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            grad = grad.to(dtype).double()
            expected[i], entries[i] = adamw(param, grad, entries[i], **SETTINGS, **choice)
    assert largest_difference(ours, expected) < tolerance


@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}])
def test_torchs_state_dict_loads_and_training_goes_on_alike(path, seed: int) -> None:
    # torch's fused form on a CPU is wrong where gradient and parameter differ in strides.
    count = len(SHAPES) if "fused" in path else None
    ours, peers = awkward(torch.float64, seed)[:count], awkward(torch.float64, seed)[:count]
    peer = run(peers, lambda p: torch.optim.AdamW(p, **SETTINGS, **path), seed=seed, steps=10)
    for mine, theirs in zip(ours, peers, strict=True):
        mine.data.copy_(theirs)
    optimizer = AdamW(ours, lr=0.5, eps_mode="outside", nonfinite="raise")
    optimizer.load_state_dict(peer.state_dict())
    group = optimizer.param_groups[0]
    assert group["lr"] == 1e-2 and group["weight_decay"] == 0.1  # torch's settings came along
    assert group["nonfinite"] == "raise"  # and what torch does not know was kept
    assert group["fused"] is None  # how it runs is this optimizer's choice
    assert {int(optimizer.state[p]["step"]) for p in ours} == {10}
    train(ours, optimizer, seed=seed + 1, steps=5)
    train(peers, peer, seed=seed + 1, steps=5)
    assert largest_difference(ours, peers) < 1e-12


def test_our_state_dict_loads_into_torch(seed: int) -> None:
    ours, peers = awkward(torch.float64, seed), awkward(torch.float64, seed)
    optimizer = run(ours, lambda p: AdamW(p, **SETTINGS), seed=seed, steps=10)
    for mine, theirs in zip(ours, peers, strict=True):
        theirs.data.copy_(mine)
    peer = torch.optim.AdamW(peers)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group |= {"amsgrad": False, "differentiable": False, "decoupled_weight_decay": True}
    peer.load_state_dict(saved)
    train(peers, peer, seed=seed + 1, steps=3)
    assert {int(peer.state[p]["step"]) for p in peers} == {13}


def test_amsgrad_state_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    peer = torch.optim.AdamW([weight], amsgrad=True)
    weight.grad = torch.ones(2)
    peer.step()
    with pytest.raises(ValueError, match="amsgrad=True; load it into"):
        AdamW([weight]).load_state_dict(peer.state_dict())


def test_eps_root_belongs_to_outside() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="eps_root needs eps_mode='outside', got"):
        AdamW([weight], eps_mode="inside", eps_root=1e-3)
    with pytest.raises(ValueError, match="eps must be .*at least 0, got -1"):
        AdamW([weight], eps=-1.0)


def test_a_loaded_count_of_steps_goes_on(seed: int) -> None:
    params = awkward(torch.float32, seed, [(3,), (70_000,)])
    optimizer = run(
        params, lambda p: AdamW(p), seed=seed, steps=3, missing=lambda s, i: i == 1 and s
    )
    steps = [int(optimizer.state[p]["step"]) for p in params]
    assert steps == [3, 1, 3, 3, 3, 3]
    assert len(states(optimizer)) == 3 * len(params)
