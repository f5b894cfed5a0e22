"""What `estimate` says of the levers against the meter: each on a small model of awkward shape."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from labcore.memory import (
    Meter,
    accumulate,
    estimate,
    linear_cross_entropy,
    set_checkpointing,
)
from labcore.memory.accumulation import split_rows
from labcore.models import Llama
from tests.memory.steps import adapt, config, model, train_step

SHAPES = ["grouped", "biased"]


def autocast(dtype: str):
    mixed = dtype == "mixed"
    return torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext()


@pytest.mark.parametrize("name", SHAPES)
def test_a_fused_step_takes_no_workspace(name: str) -> None:
    llama = model(config(name), "bfloat16")
    optimizer = torch.optim.AdamW(llama.parameters(), fused=True)
    tokens = torch.randint(96, (1, 10))
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            train_step(llama, optimizer, tokens)
    told = {"batch": 1, "length": 9, "dtype": "bfloat16", "fused": True}
    for moment in ("step", "peak"):
        saw = meter.phases["step"] if moment == "step" else meter.peak
        guess = estimate(config(name), moment=moment, **told)
        assert guess.total == pytest.approx(saw.total, rel=0.05)
    assert estimate(config(name), moment="step", **told).workspace == 0


@pytest.mark.parametrize("checkpointing", [None, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_a_batch_hold_all_gradients(name: str, checkpointing: int | None) -> None:
    llama = Llama(config(name))
    set_checkpointing(llama, checkpointing)
    optimizer = torch.optim.AdamW(llama.parameters())
    tokens = torch.randint(96, (6, 34))
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            optimizer.zero_grad()
            accumulate(llama, split_rows(tokens[:, :-1], tokens[:, 1:], 2))
            optimizer.step()
    told = {"batch": 6, "parts": 2, "length": 33, "checkpointing": checkpointing}
    guess = estimate(config(name), **told)
    assert guess.total == pytest.approx(meter.peak.total, rel=0.08)
    with pytest.raises(ValueError, match="parts must be at most the 6 rows, got 7"):
        estimate(config(name), **{**told, "parts": 7})


def without_logits(llama: Llama, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """The model's own forward, without the product with the head, and the loss in chunks."""
    weight = (llama.lm_head or llama.embed_tokens).weight
    llama.head = lambda hidden: hidden
    hidden = llama(tokens[:, :-1]).hidden.flatten(0, 1)
    return linear_cross_entropy(hidden, weight, tokens[:, 1:].flatten(), chunk=chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [None, 1])
def test_a_loss_in_chunks_holds_no_logits(dtype: str, checkpointing: int | None) -> None:
    shape = config("biased")  # its vocabulary is the widest
    llama = model(shape, dtype)
    set_checkpointing(llama, checkpointing)
    optimizer = torch.optim.SGD(llama.parameters())
    tokens = torch.randint(96, (3, 42))
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            optimizer.zero_grad()
            (without_logits(llama, tokens, 16) / 123).backward()
            optimizer.step()
    told = {"batch": 3, "length": 41, "dtype": dtype, "checkpointing": checkpointing}
    for moment in ("forward", "backward", "peak"):
        saw = meter.peak if moment == "peak" else meter.phases[moment]
        guess = estimate(shape, moment=moment, optimizer="sgd", chunk=16, **told)
        assert guess.total == pytest.approx(saw.total, rel=0.05), moment
    plain = estimate(shape, optimizer="sgd", **told)
    assert meter.peak.total < plain.total


@pytest.mark.parametrize("checkpointing", [None, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_adapters_alone_have_gradients_and_state(name, dtype, checkpointing) -> None:
    shape, rank = config(name), 3
    llama = model(shape, dtype)
    adapt(llama, rank)
    set_checkpointing(llama, checkpointing)
    trained = [p for p in llama.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    tokens = torch.randint(96, (3, 42))
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            train_step(llama, optimizer, tokens, mixed=dtype == "mixed")
    told = {"batch": 3, "length": 41, "dtype": dtype, "checkpointing": checkpointing, "rank": rank}
    step = estimate(shape, moment="step", **told)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(step, part) == getattr(meter.most, part), part
    for moment in ("forward", "backward", "step", "peak"):
        saw = meter.peak if moment == "peak" else meter.phases[moment]
        guess = estimate(shape, moment=moment, **told)
        assert guess.total == pytest.approx(saw.total, rel=0.1), moment


class Elsewhere:
    """An AdamW whose state and step torch doesn't see, as if they were on another device."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.steps = parameters, 0
        self.state = [np.zeros((2, *p.shape), dtype=np.float32) for p in parameters]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        self.steps += 1
        for p, (mean, square) in zip(self.parameters, self.state, strict=True):
            gradient, weight = p.grad.numpy(), p.detach().numpy()
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            size = np.sqrt(square / (1 - 0.999**self.steps)) + 1e-8
            weight -= 1e-3 * mean / (1 - 0.9**self.steps) / size


def test_an_offloaded_step_holds_weights_and_gradients_alone() -> None:
    shape = config("tied")
    llama = model(shape, "float32")
    optimizer = Elsewhere(list(llama.parameters()))
    tokens = torch.randint(8, (1, 6))
    with Meter(llama) as meter:
        for _ in range(3):
            train_step(llama, optimizer, tokens)
    step = estimate(shape, batch=1, length=5, offload=True, moment="step")
    most = meter.most
    assert (step.parameters, step.gradients) == (most.parameters, most.gradients)
    assert step.optimizer == 0 and step.total - step.parameters - step.gradients < 100  # the tokens
    told = estimate(shape, batch=1, length=5, offload=True)
    assert told.total == pytest.approx(meter.peak.total, rel=0.05)
