"""What the shipped heads must be able to do, so that the chapter can use them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from labcore.decoding import SamplingConfig, generate, medusa, near_tie_audit
from labcore.decoding.medusa import shipped
from labcore.models import distilling, held_out, held_out_sha256, pretrained, shipped_tokenizer
from labcore.models.fused import FusedLlama
from tests.decoding.medusa.test_heads import backbone_of

TOKENIZER = shipped_tokenizer()


@pytest.fixture(scope="module")
def target():
    return pretrained("target")


@pytest.fixture(scope="module")
def heads(target):
    return medusa.pretrained_heads(target)


def test_the_files_are_small_and_the_card_is_theirs(heads) -> None:
    card = medusa.heads_card()
    weights = shipped.FILES / "medusa_lm_head.safetensors"
    assert weights.stat().st_size <= 8_000_000
    assert card["parameters"] == sum(p.numel() for p in heads.parameters())
    assert card["held_out_sha256"] == {kind: held_out_sha256(kind) for kind in ("code", "prose")}
    assert (shipped.FILES / "README.md").read_text("utf-8").startswith("---\nlicense:")
    recipe = {name: getattr(shipped.RECIPE, name) for name in card["recipe"]}
    assert card["recipe"] == recipe


def test_the_cards_accuracies_are_those_of_the_stored_heads(target, heads) -> None:
    tokens = TOKENIZER.encode(held_out("code"))
    states = medusa.hidden_states(target, tokens)
    found = medusa.head_accuracies(heads, states)
    told = torch.tensor(medusa.heads_card()["accuracies"]["code"], dtype=torch.float64)
    # A near tie between two tokens may fall the other way on another processor.
    torch.testing.assert_close(found, told, atol=2e-3, rtol=0)


def test_four_nodes_yield_what_the_course_needs_on_unseen_code(target, heads) -> None:
    """At least 1.6 tokens a step, and greedy output is the target's own."""
    tree = medusa.sparse_tree(medusa.heads_card()["accuracies"][shipped.OWN_WORDS[0]], 4)
    tokens = TOKENIZER.encode(held_out("code"))
    step = (len(tokens) - 64) // 31  # outputs differ much: many beginnings, all over the text
    given = [tokens[start : start + 64] for start in range(0, len(tokens) - 63, step)]
    assert len(given) >= 32
    asked, fast = SamplingConfig(max_tokens=96), FusedLlama(target)
    proposer = medusa.Medusa(medusa.FusedHeads(heads), tree)
    told = generate(fast, given, asked, proposer=proposer)
    assert told.statistics.tokens_per_step >= 1.6
    for prompt, output in zip(given, told.tokens, strict=True):
        assert near_tie_audit(target, prompt, output, gap=1e-3).passed


def test_accuracy_falls_with_distance_and_rank(heads) -> None:
    for name in shipped.OWN_WORDS:
        table = torch.tensor(medusa.heads_card()["accuracies"][name])
        assert table.shape == (heads.heads, 10)
        assert (table[:-1, 0] > table[1:, 0]).all()
        assert (table[:, 0] > 2 * table[:, 1]).all()


def test_own_words_are_the_backbones_and_are_made_once(generator, tmp_path, monkeypatch) -> None:
    backbone = backbone_of(generator, num_attention_heads=4, num_key_value_heads=2, hidden_size=24)
    recipe = shipped.HeadsRecipe(rows=5, prompt=3, length=9, ahead=4)
    monkeypatch.setattr(distilling, "_AT_ONCE", 3)
    corpus = torch.randint(37, (50,), generator=generator)
    file = tmp_path / "words" / "own.safetensors"
    found = shipped.own_words(backbone, corpus, file, recipe, progress=False)
    assert found.shape == (5, 13)
    windows = corpus.unfold(0, 3, 1).tolist()
    assert all(row[:3].tolist() in windows for row in found)
    asked = SamplingConfig(max_tokens=10)
    for row in (0, 2, 3):  # of each batch every other row is greedy, from its first on
        said = found[row].tolist()
        assert near_tie_audit(backbone, said[:3], said[3:], gap=1e-4).passed
        assert len(generate(backbone, [said[:3]], asked).tokens[0]) == 10
    again = shipped.own_words(backbone, corpus.flip(0), file, recipe, progress=False)
    assert torch.equal(found, again)


def test_missing_files_are_told_with_the_command(monkeypatch, tmp_path, target) -> None:
    monkeypatch.setattr(shipped, "FILES", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"labcore\.decoding\.medusa\.train"):
        medusa.pretrained_heads(target)


def test_the_target_is_the_one_the_heads_were_made_for(target) -> None:
    """Heads of another target would load and guess badly: the weights are the shipped ones."""
    file = shipped.FILES.parents[2] / "models" / "files" / "target" / "model.safetensors"
    assert medusa.heads_card()["target_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
