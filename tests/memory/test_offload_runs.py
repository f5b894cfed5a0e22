"""The bytes above are those predicted, and the experiment measures the topic's model."""

import pytest
import torch

from labcore.memory import Disk, Host, Offload, offloaded
from labcore.memory.model import CONFIG, held_out_rows
from labcore.memory.offload_runs import offload_run
from labcore.models import Llama, LlamaConfig, next_token_loss
from tests.memory.steps import AWKWARD, OPTIMIZERS


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adafactor", "sm3", "adamw8bit"])
@pytest.mark.parametrize("layers", [1, 4])
def test_the_prediction_is_exact_for(optimizer: str, layers: int) -> None:
    shape = LlamaConfig(**{**AWKWARD["biased"], "num_hidden_layers": layers})
    model = Llama(shape)
    tokens = torch.randint(700, (1, 5))
    with Offload(model, model.layers, OPTIMIZERS[optimizer], Host()) as offload:
        for _ in range(2):
            offload.zero_grad()
            model(tokens).logits.square().mean().backward()
            offload.step()
    assert offload.peak == offloaded(shape, optimizer=optimizer)


def test_the_experiment_measures_the_topic_s_model(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_row(model: Llama) -> float:
        return next_token_loss(model, held_out_rows(1))[0].item()

    monkeypatch.setattr("labcore.memory.offload_runs.held_out_loss", one_row)
    plain, below = (
        offload_run(seed, steps=2, batch=1, length=8, tier=tier) for tier in (None, Disk())
    )
    assert plain.losses == below.losses and plain.held_out == below.held_out
    assert below.peak == offloaded(CONFIG)
    assert plain.peak.parameters == 2_016_960 * 4 and plain.traffic.read == 0
    assert below.peak.total < 0.7 * plain.peak.total
