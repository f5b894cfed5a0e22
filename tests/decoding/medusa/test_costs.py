"""Costs by formula are those of real modules, and keep the laws of the three ways to train."""

import random

import pytest

from labcore.decoding.medusa import PROJECTIONS, MedusaHeads, costs
from labcore.models import Llama, LlamaConfig


def shape(seed: int, *, tied: bool = False) -> LlamaConfig:
    chance = random.Random(seed)
    return LlamaConfig(
        vocab_size=chance.randrange(30, 90),
        hidden_size=8 * chance.randrange(1, 4),
        intermediate_size=chance.randrange(9, 40),
        num_hidden_layers=chance.randrange(1, 4),
        num_attention_heads=4,
        num_key_value_heads=chance.choice((1, 2, 4)),
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_parameters_are_counted_as_modules_have_them(tied: bool, projection: str, seed) -> None:
    config = shape(seed, tied=tied)
    backbone = Llama(config)
    assert costs.parameters(config) == sum(p.numel() for p in backbone.parameters())
    heads = MedusaHeads(backbone, heads=3, projection=projection, rank=5)
    counted = costs.head_parameters(config, 3, projection=projection, rank=5)
    assert counted == sum(p.numel() for p in heads.parameters())


def test_a_frozen_backbone_has_no_gradients_and_stored_states_no_backbone(seed) -> None:
    config = shape(seed)
    both, frozen, stored = (costs.training_cost(config, 2, way) for way in costs.WAYS)
    trained = costs.head_parameters(config, 2)
    everything = costs.parameters(config) + trained
    assert both.weights + both.gradients + both.moments == costs.TRAINED_BYTES * everything
    assert frozen.gradients == stored.gradients == 2 * trained
    assert frozen.weights - stored.weights == costs.FROZEN_BYTES * costs.parameters(config)
    assert stored.stored == 2 * config.hidden_size and not both.stored and not frozen.stored
    assert both.flops > frozen.flops == stored.flops  # read once, storing saves no operation
    again = costs.training_cost(config, 2, costs.WAYS[2], readings=4)
    assert again.flops < stored.flops
    unstored = costs.training_cost(config, 2, costs.WAYS[1], readings=4)
    assert unstored.flops == frozen.flops  # per reading: nothing is saved by reading more often
    # After many readings only the heads' own work is left.
    endless = costs.training_cost(config, 2, costs.WAYS[2], readings=10**9)
    assert endless.flops == pytest.approx(6 * trained, rel=1e-5)


def test_heads_run_once_and_a_second_model_for_each_token(seed) -> None:
    config, draft = shape(seed), shape(seed + 1)
    short, long = (costs.guessers(config, ahead, draft=draft) for ahead in (2, 6))
    for name in ("a second model", "an EAGLE layer"):
        assert long[name].read == 3 * short[name].read and long[name].held == short[name].held
    heads = long["heads"]
    assert heads.held == heads.read == 2 * costs.head_parameters(config, 6)
    shared = long["heads that share the projection"]
    assert shared.read - shared.held == 2 * config.vocab_size * config.hidden_size


def test_what_is_unknown_is_refused(seed) -> None:
    with pytest.raises(ValueError, match="way"):
        costs.training_cost(shape(seed), 2, "heads")
    with pytest.raises(ValueError, match="readings"):
        costs.training_cost(shape(seed), 2, costs.WAYS[0], readings=0)
    with pytest.raises(ValueError, match="projection"):
        costs.head_parameters(shape(seed), 2, projection="own")
