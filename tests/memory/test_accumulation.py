"""Accumulation: one large batch whatever the parts hold; the mean of means is another loss."""

import math

import pytest
import torch
from torch.nn import functional as F

from labcore.memory import trials
from labcore.memory.accumulation import (
    IGNORED,
    accumulate,
    accumulate_means,
    estimate_accumulated,
    split_rows,
    summed_loss,
    try_accumulation,
)
from labcore.memory.model import CONFIG
from labcore.models import Llama, LlamaConfig
from tests.memory.steps import config

TINY = LlamaConfig(vocab_size=13, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
                   num_attention_heads=3, num_key_value_heads=1, head_dim=4)  # fmt: skip


def ragged(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven rows: one whole, one that predicts nothing, prompts and ends of random lengths."""
    inputs = torch.randint(TINY.vocab_size, (7, 9), generator=generator)
    targets = torch.randint(TINY.vocab_size, (7, 9), generator=generator)
    first = torch.randint(0, 5, (7, 1), generator=generator)
    last = torch.randint(5, 10, (7, 1), generator=generator)
    place = torch.arange(9)
    targets = targets.masked_fill((place < first) | (place >= last), IGNORED)
    targets[0] = inputs[0]
    targets[6] = IGNORED
    return inputs, targets


def gradients(model: Llama) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_have_the_gradient_of_the_whole(parts: int, generator: torch.Generator) -> None:
    """The reference is one plain cross entropy with torch's own mean, in float64."""
    model = Llama(TINY, generator=generator, dtype=torch.float64)
    inputs, targets = ragged(generator)
    loss = F.cross_entropy(
        model(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    expected = gradients(model)
    found = accumulate(model, split_rows(inputs, targets, parts))
    assert found == pytest.approx(loss.item(), rel=1e-12)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        # Sums of at most 63 tokens, each of a few thousand roundings of 1e-16.
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_parts_of_different_widths(generator: torch.Generator) -> None:
    model = Llama(TINY, generator=generator, dtype=torch.float64)
    inputs, targets = ragged(generator)
    narrow = [(inputs[:4], targets[:4]), (inputs[4:, :7], targets[4:, :7])]
    found = accumulate(model, narrow)
    ours = gradients(model)
    whole = targets.clone()
    whole[4:, 7:] = IGNORED
    assert accumulate(model, [(inputs, whole)]) == pytest.approx(found, rel=1e-12)
    for one, other in zip(ours, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_gradients_are_added(generator: torch.Generator) -> None:
    model = Llama(TINY, generator=generator, dtype=torch.float64)
    parts = split_rows(*ragged(generator), 2)
    accumulate(model, parts)
    once = [p.grad.clone() for p in model.parameters()]
    accumulate(model, parts)
    for twice, one in zip(gradients(model), once, strict=True):
        torch.testing.assert_close(twice, 2 * one, rtol=1e-12, atol=1e-15)


def test_a_mean_of_means_weighs_tokens_unequally(generator: torch.Generator) -> None:
    """Rows of one token and of nine: the one counts nine times, to the last digit."""
    model = Llama(TINY, generator=generator, dtype=torch.float64)
    inputs, targets = ragged(generator)
    inputs, targets = inputs[:2], inputs[:2].clone()
    targets[1, 1:] = IGNORED
    parts = split_rows(inputs, targets, 2)
    long, short = (summed_loss(model, *part).item() for part in parts)
    assert accumulate(model, parts) == pytest.approx((long + short) / 10, rel=1e-12)
    wrong = accumulate_means(model, parts)
    assert wrong == pytest.approx((long / 9 + short) / 2, rel=1e-12)


def test_part_without_targets_makes_mean_nan_and_steps_short(
    generator: torch.Generator,
) -> None:
    model = Llama(TINY, generator=generator)
    inputs, targets = ragged(generator)
    parts = split_rows(inputs[5:], targets[5:], 2)
    assert math.isnan(accumulate_means(model, parts))
    halved = gradients(model)
    assert math.isfinite(accumulate(model, parts))
    for ours, theirs in zip(gradients(model), halved, strict=True):
        torch.testing.assert_close(theirs, ours / 2, rtol=1e-5, atol=1e-7)


def test_what_cannot_be_is_refused(generator: torch.Generator) -> None:
    model = Llama(TINY, generator=generator)
    inputs, targets = ragged(generator)
    with pytest.raises(ValueError, match=f"the 1 parts .* got only {IGNORED}"):
        accumulate(model, [(inputs, torch.full_like(targets, IGNORED))])
    with pytest.raises(ValueError, match="at most the 7 rows, got 8"):
        split_rows(inputs, targets, 8)
    with pytest.raises(ValueError, match="at most the 7 rows, got 8"):
        estimate_accumulated(CONFIG, batch=7, parts=8, length=4)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        estimate_accumulated(CONFIG, batch=0, parts=1, length=4)
    with pytest.raises(ValueError, match=r"shape \[B, T\], got \(7, 9\) and \(7, 8\)"):
        split_rows(inputs, targets[:, 1:], 2)


@pytest.mark.parametrize("parts", [1, 3])
def test_bytes_are_those_of_one_part_and_all_gradients(parts, seed, monkeypatch) -> None:
    monkeypatch.setattr(trials, "held_out_loss", lambda model: 1.0)
    found = try_accumulation(seed, parts=parts, steps=1, batch=3, length=64)
    predicted = estimate_accumulated(CONFIG, batch=3, parts=parts, length=64)
    assert found.peak.total == pytest.approx(predicted.total, rel=0.05)
    assert found.most.gradients == 4 * 2_016_960
    if parts > 1:  # of one part the peak may come before the last gradient
        assert predicted.gradients == found.most.gradients


def test_more_parts_hold_fewer_activations() -> None:
    shape = config("grouped")
    held = [
        estimate_accumulated(shape, batch=12, parts=parts, length=64).activations
        for parts in (1, 2, 4, 12)
    ]
    assert held == sorted(held, reverse=True) and held[0] > 10 * held[-1]
