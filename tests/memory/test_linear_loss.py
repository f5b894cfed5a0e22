"""The fused loss and its gradients are those of logits and cross entropy, without the logits."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labcore.memory import Meter, linear_cross_entropy


def drawn(seed, *, rows, width, vocabulary, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_loss_and_both_gradients_are_those_of_the_logits(chunk, seed) -> None:
    dice = random.Random(seed)
    sizes = {"rows": dice.randint(1, 40), "width": dice.randint(1, 9)}
    hidden, weight, targets = drawn(seed, vocabulary=dice.randint(2, 50), **sizes)
    factor = dice.uniform(-3, 3)
    expected = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    wanted = torch.autograd.grad(factor * expected, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    found = torch.autograd.grad(factor * loss, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_in_16_bits_it_is_as_near_to_float64_as_the_usual_loss(seed) -> None:
    hidden, weight, targets = drawn(seed, rows=90, width=33, vocabulary=301, dtype=torch.bfloat16)
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum").backward()
    linear_cross_entropy(hidden, weight, targets, chunk=32).backward()
    ours = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum").backward()
    for mine, usual, right in zip(ours, (hidden.grad, weight.grad), exact, strict=True):
        assert mine.dtype == torch.bfloat16
        far, usual_far = ((one.double() - right.grad).norm() for one in (mine, usual))
        assert far <= 1.2 * usual_far


@pytest.mark.parametrize("rows", [96, 250])
def test_what_it_holds_is_a_chunk_and_the_gradients(rows) -> None:
    width, vocabulary, chunk = 40, 3000, 16
    head = nn.Linear(width, vocabulary, bias=False)
    targets = torch.arange(rows)
    with Meter(head) as meter:
        hidden = torch.randn(rows, width, requires_grad=True)
        linear_cross_entropy(hidden, head.weight, targets, chunk=chunk).backward()
    predicted = 4 * (2 * vocabulary * width + 2 * rows * width + 2 * chunk * vocabulary)
    assert meter.peak.total == pytest.approx(predicted, rel=0.02)
    assert meter.peak.total < 4 * rows * vocabulary + 2 * head.weight.nbytes  # logits alone


def test_without_gradients_it_is_only_the_loss(seed) -> None:
    hidden, weight, targets = drawn(seed, rows=9, width=3, vocabulary=5)
    loss = linear_cross_entropy(hidden.detach(), weight.detach(), targets)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert linear_cross_entropy(hidden[:0], weight, targets[:0]).item() == 0


def test_a_second_backward_and_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, targets = drawn(0, rows=6, width=3, vocabulary=5)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="allows one backward"):
        loss.backward()
    with pytest.raises(ValueError, match=r"hidden must be \[N, C\]"):
        linear_cross_entropy(hidden[:, :2], weight, targets)
    with pytest.raises(ValueError, match="targets must be"):
        linear_cross_entropy(hidden, weight, targets[:4])
    with pytest.raises(ValueError, match="chunk must be"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)
