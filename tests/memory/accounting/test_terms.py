"""A layer's terms against the meter, and the paper's against a layer of its kind."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labcore.memory import Meter, estimate
from labcore.memory.accounting.states import gpt_layer
from labcore.memory.accounting.terms import gpt_terms, layer_terms
from tests.memory.steps import config, drawn, measured


def kept(meter: Meter) -> int:
    return max(m.held.activations for m in meter.timeline if m.phase == "forward")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", ["grouped", "biased"])
def test_the_terms_are_what_one_more_layer_keeps(name: str, dtype: str) -> None:
    told = {"batch": 3, "length": 41, "dtype": dtype}
    shape = config(name)
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + 1)
    more = kept(measured(deeper, **told)) - kept(measured(shape, **told))
    assert sum(layer_terms(shape, **told).values()) == more


def test_the_terms_are_what_the_estimate_counts(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(20):
        shape = drawn(seed + case)
        told = {
            "batch": chance.randint(1, 5),
            "length": chance.randint(1, 90),
            "dtype": chance.choice(["float32", "float16", "mixed"]),
            "tensor_parallel": chance.randint(1, 2),
            "device": chance.choice(["cpu", "gpu"]),
        }
        deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + 1)
        one, two = (estimate(s, moment="forward", **told).activations for s in (shape, deeper))
        assert sum(layer_terms(shape, **told).values()) == two - one
        assert 0 not in layer_terms(shape, **told).values()


class GptLayer(nn.Module):
    """The layer of the paper: full scores, dropout three times, GeLU, and no causal mask."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        def dropped(y: Tensor) -> Tensor:  # with a mask of one byte, as on a GPU
            return torch.native_dropout(y, 0.1, True)[0]

        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for part in parts
        )
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        mixed = dropped(scores.softmax(-1)) @ v
        x = x + dropped(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + dropped(self.down(F.gelu(self.up(self.norms[1](x)))))


@pytest.mark.parametrize("batch, length, hidden, heads", [(2, 24, 64, 4), (3, 50, 48, 2)])
def test_a_layer_of_the_paper_s_kind_keeps_the_paper_s_bytes(batch, length, hidden, heads) -> None:
    layer = GptLayer(hidden, heads).bfloat16()
    x = torch.randn(batch, length, hidden, dtype=torch.bfloat16, requires_grad=True)
    with Meter(layer) as meter:
        layer(x)
    told = gpt_terms(batch=batch, length=length, hidden=hidden, heads=heads)
    formula = batch * length * hidden * (34 + 5 * heads * length / hidden)
    assert sum(told.values()) == formula
    assert gpt_layer(batch=batch, length=length, hidden=hidden, heads=heads) == formula
    # The paper leaves out each norm's mean and 1/deviation; here they have the inputs' dtype.
    statistics = 2 * 2 * batch * length * 2
    assert kept(meter) == formula + statistics


def test_flash_attention_would_keep_none_of_the_squares() -> None:
    told = {"batch": 1, "hidden": 4096, "heads": 32}
    one, two = (gpt_terms(length=length, **told) for length in (2048, 4096))
    squares = {name for name in one if two[name] == 4 * one[name]}
    assert squares == {
        "softmax of the scores",
        "mask of the scores' dropout",
        "scores after dropout",
    }
    assert math.isclose(sum(one[name] for name in squares), 5 * 32 * 2048**2)
    with pytest.raises(ValueError, match="heads"):
        gpt_terms(batch=1, length=1, hidden=1, heads=0)
