"""What `estimate` says of the levers against the meter: each on a small model of awkward shape."""

import contextlib
import io

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


class Streamed:
    """AdamW whose state lies in a buffer of bytes between steps, a parameter's at a time."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizers = [torch.optim.AdamW([p], fused=True) for p in parameters]
        self.kept = [b""] * len(self.optimizers)

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def _fetch(self, number: int) -> None:
        if self.kept[number]:
            loaded = torch.load(io.BytesIO(self.kept[number]))
            state = next(iter(self.optimizers[number].param_groups[0]["params"]))
            self.optimizers[number].state[state] = {k: loaded.pop(k).clone() for k in list(loaded)}

    def step(self) -> None:
        self._fetch(0)
        for number, one in enumerate(self.optimizers):
            if number + 1 < len(self.optimizers):
                self._fetch(number + 1)
            one.step()
            (state,) = one.state.values()
            buffer = io.BytesIO()
            torch.save(state, buffer)
            self.kept[number] = buffer.getvalue()
            one.state.clear()
            del state


def test_state_that_waits_elsewhere_is_here_for_two_parameters() -> None:
    shape = config("tied")
    llama = model(shape, "float32")
    optimizer = Streamed(list(llama.parameters()))
    tokens = torch.randint(8, (1, 6))
    with Meter(llama) as meter:
        for _ in range(3):
            train_step(llama, optimizer, tokens)
    told = estimate(shape, batch=1, length=5, fused=True, offload=True)
    assert told.optimizer == 0
    assert told.total == pytest.approx(meter.peak.total, rel=0.05)
