"""The parts of a pass are measured, and the hollow model has the operators of the whole one."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labcore import models
from labcore.models.config import LlamaConfig
from labcore.studies.speculative import passes

TINY = LlamaConfig(
    vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2,
)  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A tiny matrix isn't packed, and its product is another operator.
        self.names.append(str(func).replace("quantized.linear_dynamic_fp16", "aten.linear"))
        return func(*args, **(kwargs or {}))


def operators(model) -> list[str]:
    run = passes._forward(model)
    run()
    with Operators() as seen:
        run()
    return seen.names


def test_a_hollow_model_calls_the_same_operators_on_next_to_nothing() -> None:
    model = models.pretrained("target")
    hollow = passes._hollow(model)
    assert operators(hollow) == operators(model)
    sizes = [sum(w.numel() for w in one.parameters()) for one in (hollow, model)]
    assert 100 * sizes[0] < sizes[1]


def test_every_part_has_a_time_and_bytes_are_those_of_the_weights() -> None:
    model = models.Llama(TINY).eval()
    found = passes.pass_times(model, bytes_per_weight=4, rounds=1)
    assert min(found.warm, found.evicted, found.reading, found.hollow) > 0
    assert found.weight_bytes == sum(weight.nbytes for weight in model.parameters())


def test_costs_begin_at_one_and_never_fall() -> None:
    model = models.Llama(TINY).eval()
    found = passes.forward_costs(model, (1, 2, 5, 9), rounds=3)
    assert list(found) == [1, 2, 5, 9] and found[1] == 1
    assert list(found.values()) == sorted(found.values())


def test_a_forward_starts_where_the_one_before_it_started() -> None:
    model = models.Llama(TINY).eval()
    run = passes._forward(model, 3)
    with torch.no_grad():
        for _ in range(4):  # would overflow the cache otherwise
            run()
