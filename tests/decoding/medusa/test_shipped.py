"""What the shipped heads must be able to do, so that the chapter can use them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from labcore.decoding import SamplingConfig, generate, medusa, near_tie_audit
from labcore.decoding.medusa import shipped
from labcore.models import held_out, held_out_sha256, pretrained, shipped_tokenizer
from labcore.models.fused import FusedLlama

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
    tree = medusa.sparse_tree(medusa.heads_card()["accuracies"]["own words, greedy"], 4)
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
    for name in ("own words, greedy", "own words, temperature 0.7"):
        table = torch.tensor(medusa.heads_card()["accuracies"][name])
        assert table.shape == (heads.heads, 10)
        assert (table[:-1, 0] > table[1:, 0]).all()
        assert (table[:, 0] > 2 * table[:, 1]).all()


def test_missing_files_are_told_with_the_command(monkeypatch, tmp_path, target) -> None:
    monkeypatch.setattr(shipped, "FILES", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"labcore\.decoding\.medusa\.train"):
        medusa.pretrained_heads(target)


def test_the_target_is_the_one_the_heads_were_made_for(target) -> None:
    """Heads of another target would load and guess badly: the weights are the shipped ones."""
    file = shipped.FILES.parents[2] / "models" / "files" / "target" / "model.safetensors"
    assert medusa.heads_card()["target_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
