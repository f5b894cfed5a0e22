"""What the shipped head must be able to do, so that the chapter can use it."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from labcore.decoding import SamplingConfig, generate, near_tie_audit
from labcore.decoding.eagle import Eagle, eagle_accuracies, eagle_card, pretrained_eagle, shipped
from labcore.decoding.medusa import hidden_states
from labcore.models import held_out, held_out_sha256, pretrained, shipped_tokenizer

TOKENIZER = shipped_tokenizer()


@pytest.fixture(scope="module")
def target():
    return pretrained("target")


@pytest.fixture(scope="module")
def head(target):
    return pretrained_eagle(target)


def test_the_files_are_small_and_the_card_is_theirs(head) -> None:
    card = eagle_card()
    assert (shipped.FILES / "model.safetensors").stat().st_size <= 2_000_000
    assert card["parameters"] == sum(p.numel() for p in head.parameters())
    assert card["sharpness"] == head.sharpness
    assert card["held_out_sha256"] == {kind: held_out_sha256(kind) for kind in ("code", "prose")}
    assert (shipped.FILES / "README.md").read_text("utf-8").startswith("---\nlicense:")
    assert card["recipe"] == {name: getattr(shipped.RECIPE, name) for name in card["recipe"]}
    weights = shipped.FILES.parents[2] / "models" / "files" / "target" / "model.safetensors"
    assert card["target_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_the_cards_accuracies_are_those_of_the_stored_head(target, head) -> None:
    states = hidden_states(target, TOKENIZER.encode(held_out("code")))
    told = eagle_card()["accuracies"]["code"]
    # A near tie between two tokens may fall the other way on another processor.
    assert eagle_accuracies(head, states) == pytest.approx(told, abs=2e-3)


def test_the_head_yields_what_the_course_needs_on_unseen_code(target, head) -> None:
    """At least 2 tokens per step, and greedy output is the target's own."""
    tokens = TOKENIZER.encode(held_out("code"))
    step = (len(tokens) - 64) // 15
    given = [tokens[start : start + 64] for start in range(0, len(tokens) - 63, step)]
    told = generate(target, given, SamplingConfig(max_tokens=96), proposer=Eagle(head))
    assert told.statistics.tokens_per_step >= 2
    for prompt, output in zip(given, told.tokens, strict=True):
        assert near_tie_audit(target, prompt, output, gap=1e-3).passed


def test_own_features_are_nearly_as_good_as_the_targets_states() -> None:
    """What training-time test is for: accuracy hardly falls from step to step."""
    for name in ("own words, greedy", "own words, temperature 0.7"):
        shares = eagle_card()["accuracies"][name]
        assert min(shares) > 0.97 * shares[0]


def test_a_missing_head_says_how_to_make_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shipped, "FILES", tmp_path)
    with pytest.raises(FileNotFoundError, match="decoding.eagle.train --out FOLDER"):
        pretrained_eagle()


def test_training_by_a_recipe_writes_what_is_shipped(tmp_path, monkeypatch, generator) -> None:
    words = torch.randint(2048, (20, shipped.WORDS.length + shipped.WORDS.ahead))
    monkeypatch.setattr(shipped, "own_words", lambda *_, **__: words)
    monkeypatch.setattr(shipped, "corpus", lambda: "")
    monkeypatch.setattr(shipped, "tokens_of", lambda *_: None)
    recipe = shipped.EagleRecipe(batch=2, steps=2, unroll=2, unrolled_steps=1, calibration=4)
    head, curves, kept = shipped.trained_eagle(tmp_path, recipe, progress=False)
    assert [len(curve.losses) for curve in curves] == [2, 1] and len(kept) == 4
    again, _, _ = shipped.trained_eagle(tmp_path, recipe, progress=False)  # resumes at the end
    for one, two in zip(head.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    place = tmp_path / "head"
    shipped.export_eagle(head, curves, kept, place, commit="0123456", recipe=recipe)
    card, told = json.loads((place / "card.json").read_text("utf-8")), eagle_card()
    assert [*card] == [*told] and card["accuracies"].keys() == told["accuracies"].keys()
    assert card["tokens"] == [2 * 2 * shipped.WORDS.length, 2 * shipped.WORDS.length]
    assert (card["commit"], card["target_sha256"]) == ("0123456", told["target_sha256"])
    mine, theirs = (
        [line for line in (one / "README.md").read_text("utf-8").splitlines() if line[:1] != "|"]
        for one in (place, shipped.FILES)
    )
    assert mine == theirs  # all but the tables
