"""What `estimate` says of the levers against the meter: each on a small model of awkward shape."""

import contextlib
from dataclasses import replace

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
from labcore.memory.quantization.scheme import QuantizedLinear, Scheme
from labcore.models import Llama, LlamaConfig
from tests.memory.steps import Adapted, adapt, config, model, train_step

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


@pytest.mark.parametrize("checkpointing", [None, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grouped", "tied"])
def test_a_coded_base_takes_its_bits_and_one_matrix_of_workspace(name, dtype, checkpointing):
    shape, rank = config(name), 3
    llama = model(shape, dtype)
    adapt(llama, rank)
    for module in llama.modules():
        if isinstance(module, Adapted):  # 4 + 32 / 16 bits
            module.frozen = QuantizedLinear(module.frozen, Scheme(bits=4, group_size=16))
    trained = [p for p in llama.parameters() if p.requires_grad]
    set_checkpointing(llama, checkpointing)
    optimizer = torch.optim.AdamW(trained)
    tokens = torch.randint(8, (3, 302))
    with Meter(llama, optimizer) as meter:
        for _ in range(2):
            train_step(llama, optimizer, tokens)
    told = {"batch": 3, "length": 301, "dtype": dtype, "checkpointing": checkpointing}
    told |= {"rank": rank, "bits": 6.0}
    step = estimate(shape, moment="step", **told)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(step, part) == getattr(meter.most, part), part
    assert estimate(shape, **told).total == pytest.approx(meter.peak.total, rel=0.1)
    whole = estimate(shape, **told | {"bits": 0})
    assert whole.total > estimate(shape, **told).total
    with pytest.raises(ValueError, match="needs a rank above 0"):
        estimate(shape, batch=1, length=1, bits=4)


class Elsewhere:
    """An AdamW in memory that torch doesn't see, which gets each layer's gradients as they come."""

    def __init__(self, llama: Llama) -> None:
        self.steps, self.gradients = 0, {}
        self.state = {p: np.zeros((2, *p.shape), dtype=np.float32) for p in llama.parameters()}
        table, within = llama.embed_tokens.weight, [[*layer.parameters()] for layer in llama.layers]
        head = set(self.state) - {table} - {p for unit in within for p in unit}
        for unit in ([*head], *within, [table]):
            for p in unit:
                p.register_post_accumulate_grad_hook(lambda _, unit=unit: self.take(unit))

    def take(self, unit: list[nn.Parameter]) -> None:
        if all(p.grad is not None for p in unit):
            for p in unit:
                self.gradients[p] = p.grad.numpy().copy()
                p.grad = None

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        self.steps += 1
        for p, (mean, square) in self.state.items():
            gradient, weight = self.gradients[p], p.detach().numpy()
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            size = np.sqrt(square / (1 - 0.999**self.steps)) + 1e-8
            weight -= 1e-3 * mean / (1 - 0.9**self.steps) / size


@pytest.mark.parametrize("checkpointing", [None, 1])
@pytest.mark.parametrize("name", ["tied", *SHAPES])
def test_an_offloaded_step_holds_the_gradients_of_one_layer(name, checkpointing) -> None:
    shape = replace(config(name), vocab_size=701)  # so that a tied head's wait is seen
    llama = model(shape, "float32")
    optimizer = Elsewhere(llama)
    set_checkpointing(llama, checkpointing)
    tokens = torch.randint(8, (1, 6))
    with Meter(llama) as meter:
        for _ in range(3):
            train_step(llama, optimizer, tokens)
    told = {"batch": 1, "length": 5, "offload": True, "checkpointing": checkpointing}
    step = estimate(shape, moment="step", **told)
    assert step.parameters == meter.most.parameters
    assert step.total - step.parameters == tokens.nbytes
    for moment in ("forward", "backward"):
        guess, saw = estimate(shape, moment=moment, **told), meter.phases[moment]
        assert guess.total == pytest.approx(saw.total, rel=0.05), moment


def test_offload_drops_gradients_on_any_number_of_devices() -> None:
    """A 7B's peak, recomputed and without logits, is its weights and little else."""
    llama = LlamaConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32,
    )  # fmt: skip
    told = {"batch": 4, "length": 1024, "dtype": "bfloat16", "checkpointing": 1, "chunk": 1024}
    told |= {"device": "gpu", "offload": True}
    weights = estimate(llama, moment="step", **told).parameters
    for parts, devices, stage in ((1, 1, 0), (4, 1, 0), (1, 8, 0), (4, 8, 1), (4, 8, 2), (1, 8, 3)):
        shared = {"parts": parts, "data_parallel": devices, "zero_stage": stage}
        held = estimate(llama, **told, **shared)
        own = weights / devices if stage >= 2 else weights
        assert held.parameters == pytest.approx(own) and held.gradients < weights / 32
        step = estimate(llama, moment="step", **told, **shared)
        assert step.total - step.parameters < 1e6
    assert estimate(llama, **told).total < 1.2 * weights
