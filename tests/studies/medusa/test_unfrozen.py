"""Training backbone and heads together, against the frozen form on the same batches."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from labcore.decoding.medusa import HiddenStates, MedusaHeads, hidden_states, medusa_loss, training
from labcore.models import Llama, LlamaConfig
from labcore.models.recipes import RECIPES
from labcore.studies.medusa import train_both, train_new, unfrozen


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


def test_joint_and_separate_training_start_alike_and_read_the_same(given, monkeypatch) -> None:
    backbone, _, states = given
    seen = []

    def watched(logits, tokens, *, decay):
        every = list(logits)
        seen.append((tokens, len(every), every[0].detach()))
        total, each = medusa_loss(every, tokens, decay=decay)
        assert total.item() == pytest.approx(each.sum().item())  # equal weights
        return total, each

    for module in (unfrozen, training):
        monkeypatch.setattr(module, "medusa_loss", watched)
    recipe = replace(
        RECIPES["draft"], config=backbone.config, steps=4, warmup=1, batch=3, length=8,
        long_steps=0, long_length=8,
    )  # fmt: skip
    rows = states.tokens[:, :11]
    joint, alone = (train_new(rows, recipe, heads=2, joint=way, seed=3) for way in (True, False))
    together, apart, after = seen[:4], seen[4:8], seen[8:]
    assert [count for _, count, _ in seen] == [3] * 4 + [1] * 4 + [2] * 4
    for (both, *_), (one, *_), (heads, *_) in zip(together, apart, after, strict=True):
        assert torch.equal(both, one) and torch.equal(both[:, 1:], heads)
    assert torch.equal(together[0][2], apart[0][2])
    assert joint.losses[0] > alone.losses[0]  # a sum of more losses
    first = cross_entropy(apart[0][2].flatten(0, 1), after[0][0][:, 1:9].flatten())
    assert alone.losses[0] == pytest.approx(first.item())  # of the next tokens
    # The later heads start as the trained model's own predictions, of states in bf16.
    assert torch.allclose(after[0][2], alone.backbone(after[0][0][:, :8]).logits, atol=0.03)
