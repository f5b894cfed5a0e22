"""Checkpointing: the same gradients to the bit, the bytes that the stretches say."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from labcore.memory import Meter, checkpointing, estimate, trials
from labcore.memory.checkpointing import (
    best_every,
    run_blocks,
    set_checkpointing,
    stretch_bytes,
    stretch_length,
    try_checkpointing,
)
from labcore.memory.model import CONFIG
from labcore.models import Llama, LlamaConfig, next_token_loss
from tests.memory.steps import config

DEEP = LlamaConfig(vocab_size=11, hidden_size=24, intermediate_size=40, num_hidden_layers=7,
                   num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
WAYS = [1, 2, 3, 7, 9, "sqrt", "selective"]


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention that drops attention weights and outputs."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
    return F.dropout(mixed, 0.3)


def gradients(how: int | str | None, seed: int) -> dict[str, torch.Tensor]:
    model = Llama(DEEP, attention=dropped, generator=torch.Generator().manual_seed(seed))
    set_checkpointing(model, how)
    torch.manual_seed(seed)
    tokens = torch.randint(DEEP.vocab_size, (3, 10))
    loss, _ = next_token_loss(model, tokens)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradients_under_dropout_are_the_same_to_the_bit(seed: int) -> None:
    """Of the Llama with dropout inside its attention; names of parameters too."""
    plain = gradients(None, seed)
    other = gradients(None, seed + 1)
    assert not torch.equal(plain["embed_tokens.weight"], other["embed_tokens.weight"])
    for how in WAYS:
        found = gradients(how, seed)
        assert found.keys() == plain.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, plain[name]), (how, name)


def test_gradients_of_blocks_with_dropout_are_bitwise_the_same(seed: int) -> None:
    plain = run_blocks(None, seed, depth=9, width=10, rows=5)
    for how in (1, 4, "sqrt", "selective"):
        found = run_blocks(how, seed, depth=9, width=10, rows=5)
        pairs = zip(found.gradients, plain.gradients, strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), how


def test_dropout_does_drop_and_torchs_generator_is_put_back(seed: int) -> None:
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    with_dropout = run_blocks(None, seed, depth=3, width=8, rows=4)
    without = run_blocks(None, seed, depth=3, width=8, rows=4, dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(with_dropout.gradients[0], without.gradients[0])


def test_keeping_a_random_result_changes_gradients(seed, monkeypatch) -> None:
    """Why KEPT holds none that do: the numbers of what is kept go to what is recomputed."""

    class Two(nn.Module):
        def forward(self, x):
            return torch.sin(x * torch.rand_like(x)) * torch.rand_like(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Two()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def found(how) -> torch.Tensor:
        model = Model()
        set_checkpointing(model, how)
        torch.manual_seed(seed)
        x = torch.linspace(1, 2, 500).requires_grad_()
        model(x).sum().backward()
        return x.grad

    assert torch.equal(found("selective"), found(None))
    draws = {False: 0, True: 0}  # of the forward and of the recomputation

    def keep_first_draw(context, operation, *_, **__):
        keep = False
        if operation is torch.ops.aten.rand_like.default:
            keep = draws[context.is_recompute] == 0
            draws[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr(checkpointing, "_policy", keep_first_draw)
    assert not torch.equal(found("selective"), found(None))


@pytest.mark.parametrize("how", [1, 2, 3, 7, "selective"])
def test_the_meter_sees_what_the_estimate_says(how: int | str, seed: int) -> None:
    model = Llama(DEEP, generator=torch.Generator().manual_seed(seed))
    set_checkpointing(model, how)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(DEEP.vocab_size, (5, 65))
    with Meter(model, optimizer) as meter:
        for _ in range(2):
            optimizer.zero_grad()
            next_token_loss(model, tokens)[0].backward()
            optimizer.step()
    predicted = estimate(DEEP, batch=5, length=64, checkpointing=how)
    assert meter.peak.total == pytest.approx(predicted.total, rel=0.05)


@pytest.mark.parametrize("depth", [5, 12])
def test_blocks_hold_what_their_stretches_say(depth: int, seed: int) -> None:
    rows, width = 40, 33
    shape = {"depth": depth, "width": width, "rows": rows}
    boundary = rows * width * 4
    one = run_blocks(None, seed, depth=1, width=width, rows=rows).activations
    two = run_blocks(None, seed, depth=2, width=width, rows=rows).activations
    outside = 2 * one - two  # the loss and the output
    for every in range(1, depth + 1):
        found = run_blocks(every, seed, **shape).activations
        predicted = stretch_bytes(depth, every, layer=two - one, boundary=boundary)
        # Which of the loss's tensors are gone by then is not the stretches' affair.
        assert abs(found - predicted) <= abs(outside) + 2 * boundary, every


def test_the_least_bytes_lie_where_the_bytes_of_a_layer_say() -> None:
    """Near √N where a layer keeps its input alone, at shorter stretches where it keeps more."""

    def held(every: int, layer: int) -> int:
        return stretch_bytes(64, every, layer=layer, boundary=100)

    for times in (1, 2, 4, 9):
        least = min(held(every, 100 * times) for every in range(1, 65))
        assert held(round(math.sqrt(64 / times)), 100 * times) <= 1.03 * least
        assert least < held(1, 100 * times) / 1.3 and least < held(64, 100 * times) / 3


def test_best_every_is_the_least_estimate() -> None:
    shape = {"batch": 16, "length": 128}
    found = best_every(DEEP, **shape)
    totals = [estimate(DEEP, checkpointing=k, **shape).total for k in range(1, 8)]
    assert totals[found - 1] == min(totals) < estimate(DEEP, **shape).total


def test_names_indices_and_plain_layers_come_back(seed: int) -> None:
    model = Llama(config("biased"), generator=torch.Generator().manual_seed(seed))
    before = list(model.state_dict())
    first = model.layers[0]
    set_checkpointing(model, 2)
    assert list(model.state_dict()) == before and model.layers[0] is first
    assert len(model.layers) == 3 and len(list(model.layers)) == 2
    set_checkpointing(model, "sqrt")  # from checkpointed to checkpointed
    assert len(model.layers) == 3 and model.layers[0] is first
    set_checkpointing(model, None)
    assert type(model.layers) is nn.ModuleList and next(iter(model.layers)) is first


def test_lengths_of_stretches() -> None:
    assert [stretch_length("sqrt", n) for n in (1, 4, 7, 32, 64)] == [1, 2, 3, 6, 8]
    assert stretch_length("selective", 9) == 1 and stretch_length(5, 3) == 5


def test_what_cannot_be_is_refused() -> None:
    model = Llama(DEEP)
    with pytest.raises(ValueError, match="'sqrt' or 'selective', got 'root'"):
        set_checkpointing(model, "root")
    with pytest.raises(ValueError, match="checkpointing must be at least 1, got 0"):
        set_checkpointing(model, 0)
    with pytest.raises(TypeError, match="a whole number, got 2.0"):
        set_checkpointing(model, 2.0)
    with pytest.raises(ValueError, match="layer must be a finite number above 0"):
        stretch_bytes(4, 2, layer=-1, boundary=1)
    with pytest.raises(ValueError, match="boundary must be a finite number, at least 0"):
        stretch_bytes(4, 2, layer=1, boundary=-1)
    assert type(model.layers) is nn.ModuleList
    model.layers = nn.Sequential()
    with pytest.raises(TypeError, match="must be a ModuleList, got Sequential"):
        set_checkpointing(model, 1)


def test_training_goes_the_same_way_and_holds_less(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(trials, "held_out_loss", lambda model: model.lm_head.weight.sum().item())
    run = functools.partial(try_checkpointing, seed, steps=2, batch=2, length=48)
    plain, every = run(None), run(2)
    assert every.loss == plain.loss
    assert every.most.activations < plain.most.activations
    predicted = estimate(CONFIG, batch=2, length=48, checkpointing=2)
    assert every.peak.total == pytest.approx(predicted.total, rel=0.05)
