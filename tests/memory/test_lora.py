"""LoRA: it starts as the base, trains only the thin matrices, and merges to the same function."""

import pytest
import torch

from labcore.memory import INT4, Meter
from labcore.memory.lora import PROJECTIONS, LoRALinear, add_lora, merge_lora
from labcore.memory.model import CONFIG, batches, fresh
from labcore.memory.quantization.scheme import QuantizedLinear
from labcore.models import next_token_loss


def trained(seed, *, steps=2, **how):
    """Return the model after some steps, and what is trainable."""
    model, draw = fresh(seed), batches(seed, batch=2, length=17)
    weights = add_lora(model, generator=torch.Generator().manual_seed(seed), **how)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        next_token_loss(model, *draw(number))[0].backward()
        optimizer.step()
    return model, weights


def test_it_starts_as_the_base_and_its_merger_computes_the_same(seed) -> None:
    tokens = batches(seed, batch=2, length=11)(9)[0]
    before, (start, _) = fresh(seed), trained(seed, steps=0, rank=3)
    torch.testing.assert_close(start(tokens).logits, before(tokens).logits)
    model, _ = trained(seed, rank=3)
    moved = model(tokens).logits.detach()
    assert (moved - before(tokens).logits).abs().max() > 1e-3
    merge_lora(model)
    assert not any(isinstance(part, LoRALinear) for part in model.modules())
    torch.testing.assert_close(model(tokens).logits, moved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", [None, INT4], ids=["LoRA", "QLoRA"])
def test_only_the_thin_matrices_learn(scheme, seed) -> None:
    rank = 5
    model, weights = trained(seed, rank=rank, scheme=scheme)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in weights}
    wide = CONFIG.hidden_size, CONFIG.intermediate_size
    thin = 4 * 2 * wide[0] + 3 * sum(wide)  # one input and one output per projection
    assert sum(p.numel() for p in weights) == CONFIG.num_hidden_layers * rank * thin
    for name, parameter in fresh(seed).named_parameters():
        kept = dict(model.named_parameters())
        if name in kept:
            assert torch.equal(kept[name], parameter)
            assert kept[name].grad is None


def test_the_frozen_weights_of_qlora_wait_for_no_backward(seed) -> None:
    """A saved dequantized weight would cost more than the codes save."""
    draw = batches(seed, batch=1, length=16)
    peaks = {}
    for scheme in (None, INT4):
        model = fresh(seed)
        optimizer = torch.optim.AdamW(add_lora(model, rank=4, scheme=scheme), lr=1e-3)
        with Meter(model, optimizer) as meter:
            for number in range(2):
                optimizer.zero_grad()
                next_token_loss(model, *draw(number))[0].backward()
                optimizer.step()
        peaks[scheme] = meter.peak
    whole = sum(p.nbytes for p in fresh(seed).parameters())
    assert peaks[None].parameters > whole and peaks[INT4].parameters < whole / 3
    assert peaks[INT4].activations == pytest.approx(peaks[None].activations, rel=0.02)


def test_gradients_through_codes_are_those_of_the_weights_they_stand_for(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(32, 7)
    coded = QuantizedLinear(linear, INT4)
    x = torch.randn(3, 5, 32, generator=generator, requires_grad=True)
    up = torch.randn(3, 5, 7, generator=generator)
    (found,) = torch.autograd.grad(coded(x), x, up)
    torch.testing.assert_close(found, up @ coded.weight)


def test_what_cannot_be_adapted_or_merged_is_refused() -> None:
    with pytest.raises(ValueError, match=r"targets must name linear layers.*'q_proj'"):
        add_lora(fresh(0), targets=("query",))
    with pytest.raises(ValueError, match="rank must be"):
        add_lora(fresh(0), rank=0)
    model = fresh(0)
    add_lora(model, rank=2, targets=PROJECTIONS[:1], scheme=INT4)
    with pytest.raises(ValueError, match="no exact 4-bit codes"):
        merge_lora(model)
