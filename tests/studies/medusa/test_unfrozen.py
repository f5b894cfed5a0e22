"""Training backbone and heads together, against the frozen form on the same batches."""

import pytest
import torch

from labcore.decoding.medusa import HiddenStates, MedusaHeads, hidden_states
from labcore.models import Llama, LlamaConfig
from labcore.studies.medusa import train_both


@pytest.fixture
def given(generator: torch.Generator) -> tuple[Llama, MedusaHeads, HiddenStates]:
    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    backbone = Llama(config).eval()
    text = torch.randint(29, (100,), generator=generator).tolist()
    return backbone, MedusaHeads(backbone, heads=2), hidden_states(backbone, text, length=8)


def test_a_frozen_backbone_stays_and_an_unfrozen_one_moves(given) -> None:
    backbone, heads, states = given
    before = {name: weight.clone() for name, weight in backbone.state_dict().items()}
    ways = {
        slower: train_both(backbone, heads, states, steps=4, batch=3, rate=1e-2, slower=slower)
        for slower in (None, 0.25)
    }
    for name, weight in before.items():
        assert torch.equal(backbone.state_dict()[name], weight)  # the given ones are copied
        assert torch.equal(ways[None].backbone.state_dict()[name], weight)
    moved = ways[0.25].backbone.state_dict()
    assert any(not torch.equal(moved[name], weight) for name, weight in before.items())
    for way in ways.values():
        assert not torch.equal(way.heads.projections[1].weight, heads.projections[1].weight)
        assert len(way.losses) == 4


def test_the_backbones_rate_is_a_share_of_the_heads(given) -> None:
    backbone, heads, states = given
    slow = train_both(backbone, heads, states, steps=1, batch=2, rate=1e-2, slower=1e-3)
    moved = (slow.backbone.embed_tokens.weight - backbone.embed_tokens.weight).abs().max()
    # AdamW's first step moves a weight by at most its learning rate.
    assert 0 < moved <= 1.01e-5


def test_the_losses_fall_together_and_the_same_seed_repeats(given) -> None:
    backbone, heads, states = given
    runs = [
        train_both(backbone, heads, states, steps=40, batch=8, rate=1e-2, slower=1.0)
        for _ in range(2)
    ]
    assert runs[0].losses == runs[1].losses
    assert sum(runs[0].losses[-5:]) < sum(runs[0].losses[:5])
