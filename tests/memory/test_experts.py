"""Experts: routing by hand, token by token; a balance that no joining hides; bytes and counts."""

import copy

import pytest
import torch
from torch.nn import functional as F

from labcore.memory import trials
from labcore.memory.experts import (
    Routing,
    SwitchMLP,
    balance_loss,
    capacity_of,
    count_parameters,
    estimate_experts,
    model_balance_loss,
    route_tokens,
    try_experts,
    with_experts,
)
from labcore.memory.model import CONFIG, fresh
from labcore.models import Llama, LlamaConfig, next_token_loss

TINY = LlamaConfig(vocab_size=23, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
                   num_attention_heads=3, initializer_range=0.3)  # fmt: skip


def one_by_one(mlp: SwitchMLP, x: torch.Tensor) -> torch.Tensor:
    """The reference: a Python loop, token by token."""
    capacity = capacity_of(x.shape[0], mlp.experts, mlp.capacity_factor)
    taken, rows = [0] * mlp.experts, []
    for row in x:
        chances = torch.softmax(mlp.router @ row, 0)
        expert = int(chances.argmax())
        taken[expert] += 1
        if taken[expert] > capacity:
            rows.append(torch.zeros_like(row))
            continue
        gate, up, down = (w[expert] for w in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        rows.append(chances[expert] * (down @ (F.silu(gate @ row) * (up @ row))))
    return torch.stack(rows)


@pytest.mark.parametrize(("experts", "factor"), [(1, 1.0), (3, 0.4), (3, 1.0), (5, 1.25), (5, 5.0)])
def test_outputs_and_gradients_are_those_of_a_loop(experts, factor, generator) -> None:
    made = SwitchMLP(TINY, experts=experts, capacity_factor=factor, generator=generator).double()
    x = torch.randn(2, 11, 12, generator=generator, dtype=torch.float64).requires_grad_()
    out = made(x)
    expected = one_by_one(made, x.flatten(0, 1)).view(2, 11, 12)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(2, 11, 12, generator=generator, dtype=torch.float64)
    inputs = [x, *made.parameters()]
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_token_without_room_passes_by(generator) -> None:
    """All rows alike: they all choose one expert, and the first ones get its room."""
    made = SwitchMLP(TINY, experts=4, capacity_factor=1.0, generator=generator)
    x = torch.randn(12, generator=generator).expand(10, 12)
    out = made(x)
    assert made.routing.capacity == 3 and made.routing.kept.tolist() == [True] * 3 + [False] * 7
    assert (out[:3] != 0).all() and (out[3:] == 0).all()
    assert made.routing.dropped.item() == pytest.approx(0.7)


def test_routing_counts_what_it_did(generator) -> None:
    logits = torch.randn(37, 5, generator=generator)
    found = route_tokens(logits, capacity_factor=0.8)
    assert found.capacity == 6 and capacity_of(100, 10, 1.1) == 11
    taken = torch.bincount(found.expert, minlength=5)
    torch.testing.assert_close(found.load, taken / 37)
    for expert in range(5):
        slots = found.slot[found.expert == expert].tolist()
        assert slots == list(range(int(taken[expert])))
    assert int(found.kept.sum()) == int(taken.clamp(max=6).sum())
    torch.testing.assert_close(found.gate, logits.softmax(-1).max(-1).values)


def even(experts: int, each: int) -> Routing:
    """As many tokens to each expert, and even probabilities but for a hair."""
    return route_tokens(1e-6 * torch.eye(experts).repeat(each, 1), capacity_factor=1.0)


def test_balance_is_1_when_even_and_the_expert_count_at_worst() -> None:
    assert balance_loss(even(6, 4)).item() == pytest.approx(1, rel=1e-5)
    collapsed = route_tokens(torch.tensor([[40.0, 0, 0, 0]]).repeat(9, 1), capacity_factor=1.0)
    assert balance_loss(collapsed).item() == pytest.approx(4, rel=1e-6)


def test_its_gradient_lowers_the_busy_expert(generator) -> None:
    """Loads have none: the derivative by the logits is that with fixed loads, in float64."""
    logits = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    logits[:, 1] += 3  # the busiest of 50 tokens, beyond doubt
    logits.requires_grad_()
    (ours,) = torch.autograd.grad(balance_loss(route_tokens(logits, capacity_factor=1.0)), logits)
    load = torch.bincount(logits.argmax(-1), minlength=3).double() / 50
    chances = logits.softmax(-1).detach()
    expected = 3 / 50 * chances * (load - (chances * load).sum(-1, keepdim=True))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)
    assert (ours[:, 1] > 0).all()


def test_layers_uneven_in_opposite_ways_are_not_balanced() -> None:
    """Joining the layers' tokens first would say 1: a bug of libraries (transformers 28255)."""
    model = with_experts(Llama(TINY), 2)
    ways = [torch.tensor([[9.0, 0.0]]).repeat(5, 1), torch.tensor([[0.0, 9.0]]).repeat(5, 1)]
    for layer, logits in zip(model.layers, ways, strict=True):
        layer.mlp.routing = route_tokens(logits, capacity_factor=1.0)
    joined = route_tokens(torch.cat(ways), capacity_factor=1.0)
    assert balance_loss(joined).item() == pytest.approx(1, rel=1e-6)
    assert model_balance_loss(model).item() == pytest.approx(2, rel=1e-3)


def test_the_balance_counts_those_who_found_no_room() -> None:
    """Counted after the drop the load would look even just where it is most uneven."""
    logits = torch.tensor([[5.0, 0.0]] * 6 + [[0.0, 5.0]] * 2)
    found = route_tokens(logits, capacity_factor=0.5)
    assert found.kept.tolist() == [True, True, *[False] * 4, True, True]
    assert found.load.tolist() == [0.75, 0.25]


def test_the_auxiliary_loss_reaches_the_router(generator) -> None:
    model = with_experts(Llama(TINY, generator=generator), 3)
    next_token_loss(model, torch.randint(23, (4, 9), generator=generator))
    model_balance_loss(model).backward()
    for layer in model.layers:
        assert layer.mlp.router.grad.abs().sum() > 0
    assert model.layers[1].mlp.gate_proj.grad is None


def test_the_router_stays_in_float32_under_autocast(generator) -> None:
    made = SwitchMLP(TINY, experts=3, generator=generator)
    x = torch.randn(9, 12, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made(x)
    torch.testing.assert_close(made.routing.probabilities, F.linear(x, made.router).softmax(-1))
    model = with_experts(Llama(TINY, generator=generator), 3)
    tokens = torch.randint(23, (4, 9), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = next_token_loss(model, tokens)
    loss.backward()
    assert model.layers[0].mlp.routing.probabilities.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_active_parameters_are_the_dense_models_and_the_routers() -> None:
    dense = sum(p.numel() for p in fresh(0).parameters())
    found = count_parameters(with_experts(fresh(0), 4))
    routers = 4 * 4 * CONFIG.hidden_size
    assert found.active == dense + routers
    assert found.total == found.active + 4 * 3 * 3 * CONFIG.hidden_size * CONFIG.intermediate_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_drawn_from_their_seed_in_the_models_dtype(dtype, seed: int) -> None:
    one, same = (with_experts(Llama(TINY).to(dtype), 3, seed=seed) for _ in range(2))
    other = with_experts(Llama(TINY).to(dtype), 3, seed=seed + 1)
    weights = [model.layers[1].mlp.down_proj for model in (one, same, other)]
    assert weights[0].dtype == dtype and torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one(torch.tensor([[1, 2, 3]])).logits.dtype == dtype
    assert copy.deepcopy(one).layers[0].mlp.routing is None
    assert one.layers[0].mlp.routing is not None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits must be .*\[N, E\], got .*float32 \(3,\)"):
        route_tokens(torch.zeros(3), capacity_factor=1.0)
    with pytest.raises(ValueError, match="capacity factor must be a finite number above 0"):
        route_tokens(torch.zeros(3, 2), capacity_factor=0)
    with pytest.raises(ValueError, match="experts must be at least 1"):
        with_experts(Llama(TINY), 0)
    with pytest.raises(ValueError, match="must have experts .* got no routing"):
        model_balance_loss(Llama(TINY))


@pytest.mark.parametrize(("experts", "batch"), [(3, 1), (2, 4)])
def test_bytes_are_those_of_the_estimate(experts: int, batch: int, seed, monkeypatch) -> None:
    monkeypatch.setattr(trials, "held_out_loss", lambda model: 1.0)
    found = try_experts(seed, experts, steps=1, batch=batch, length=40)
    predicted = estimate_experts(CONFIG, experts=experts, batch=batch, length=40)
    assert found.trial.peak.total == pytest.approx(predicted.total, rel=0.05)
    assert found.trial.most.parameters == predicted.parameters
    assert found.trial.most.optimizer == pytest.approx(predicted.optimizer, rel=1e-4)
    assert len(found.busiest) == 4 and 1 / experts <= min(found.busiest) <= 1
    assert 0 <= found.dropped < 1
