"""Steps inside the backward: the same weights, with one gradient at a time."""

import functools

import pytest
import torch

from labcore.memory import Meter, estimate
from labcore.memory.in_backward import step_in_backward
from labcore.memory.model import CONFIG, batches, fresh
from labcore.models import Llama, LlamaConfig, next_token_loss
from labcore.optim import Lion

TIED = LlamaConfig(
    vocab_size=256, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=3, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("make", [torch.optim.AdamW, Lion], ids=lambda make: make.__name__)
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["plain", "tied"])
def test_the_weights_are_those_of_the_usual_loop(make, config, seed) -> None:
    usual, inside = (Llama(config, generator=torch.Generator().manual_seed(seed)) for _ in range(2))
    optimizer = make(usual.parameters(), lr=1e-2)
    step_in_backward(inside, functools.partial(make, lr=1e-2))
    draw = batches(seed, batch=2, length=9)
    for number in range(3):
        for model in (usual, inside):
            next_token_loss(model, *draw(number))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in inside.parameters())
    for one, other in zip(usual.parameters(), inside.parameters(), strict=True):
        assert torch.equal(one, other)


def test_at_most_one_gradient_is_held() -> None:
    model, draw = fresh(1), batches(1, batch=2, length=32)
    optimizers, _ = step_in_backward(model, functools.partial(torch.optim.AdamW, lr=1e-3))
    with Meter(model, *optimizers) as meter:
        for number in range(2):
            next_token_loss(model, *draw(number))[0].backward()
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert 0 < meter.most.gradients <= largest
    usual = estimate(CONFIG, batch=2, length=32, moment="step")
    assert usual.gradients == sum(p.nbytes for p in model.parameters()) > 5 * largest


def test_a_removed_hook_leaves_gradients_and_a_frozen_model_is_refused() -> None:
    model = fresh(2)
    _, hooks = step_in_backward(model, functools.partial(torch.optim.SGD, lr=1.0))
    for hook in hooks:
        hook.remove()
    before = [parameter.clone() for parameter in model.parameters()]
    next_token_loss(model, *batches(2, batch=1, length=5)(0))[0].backward()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="needs a model with trainable parameters"):
        step_in_backward(model.requires_grad_(False), torch.optim.SGD)
