"""How the shipped models are made: the recipes, the corpus, a broken-off training, the export."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from labcore.models import (
    Curve,
    Llama,
    LlamaConfig,
    Tokenizer,
    bits_per_byte,
    from_pretrained,
    held_out,
    next_token_loss,
    recipes,
    shipped_tokenizer,
    shipping,
)
from labcore.models.distilling import OwnWords
from labcore.models.recipes import (
    END_OF_TEXT,
    RECIPES,
    DistillRecipe,
    ModelRecipe,
    corpus,
    learn_tokenizer,
    tokens_of,
)

COMMIT = "0123456789abcdef"
TINY = ModelRecipe(
    config=LlamaConfig(
        vocab_size=2048, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=0, eos_token_ids=(0,),
    ),
    steps=104, long_steps=3, rate=3e-2, batch=6, length=8, long_length=24, warmup=5, seed=11,
)  # fmt: skip
TEXTS = ["def f(x):\n    return x + 1\n" * 40, "Two threads share one counter. " * 40]


@pytest.mark.parametrize("name", RECIPES)
def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth(name: str) -> None:
    recipe = RECIPES[name]
    factors = [recipe.schedule(step) for step in range(recipe.steps)]
    peak = recipe.warmup - 1
    assert factors[: peak + 1] == pytest.approx([n / recipe.warmup for n in range(1, peak + 2)])
    assert factors[peak] == 1.0
    assert all(a >= b for a, b in zip(factors[peak:], factors[peak + 1 :], strict=False))
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_the_last_steps_have_long_rows_and_as_many_tokens(name: str) -> None:
    recipe = RECIPES[name]
    tokens = torch.arange(5000)
    batches = recipe.batches(tokens)
    first_long = recipe.steps - recipe.long_steps
    for n, length in [(0, 256), (first_long - 1, 256), (first_long, 1024), (recipe.steps, 1024)]:
        rows, counts = batches(n)
        assert counts is None
        assert rows.shape == (4096 // length, length + 1)
        assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)  # each a stretch of the text
        assert torch.equal(rows, batches(n)[0])
    assert recipe.config.max_position_embeddings >= recipe.long_length
    assert recipe.tokens == recipe.steps * 4096


@pytest.mark.parametrize(
    ("change", "named"),
    [({"length": 7}, "long_length"), ({"long_steps": 105}, "long_steps"), ({"steps": 0}, "steps")],
)
def test_numbers_that_are_no_recipe_are_refused(change: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (DistillRecipe, {"long_steps": 0}, "long_steps"),
        (DistillRecipe, {"long_rate": 0.0}, "long_rate"),
        (DistillRecipe, {"batch": 1}, "batch must be at least 2"),
        (OwnWords, {"rows": 0}, "rows"),
        (OwnWords, {"temperature": 0.0}, "temperature"),
        (OwnWords, {"prompt": 8, "width": 8}, "width must exceed the 8"),
        (OwnWords, {"rows": 5, "kept": 5}, "kept must be 0 to 4"),
    ],
)
def test_numbers_that_are_no_distillation_are_refused(
    kind: type[DistillRecipe | OwnWords], change: dict[str, float], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**change)


def test_corpus_is_large_and_holds_no_held_out_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All docstrings stand in the sources too, and to find them all takes long: a part will do."""
    few = functools.partial(recipes.python_text, max_bytes=200_000)
    monkeypatch.setattr(recipes, "python_text", few)
    texts = corpus()
    assert len(texts) > 300
    assert all(texts)
    assert len(texts[-1]) > 50_000
    everything = "\n".join(texts).encode()
    assert len(everything) > 8_000_000
    assert END_OF_TEXT.encode() not in everything  # it would end a text in its middle
    for kind in ("code", "prose"):
        lines = [line for line in held_out(kind).splitlines() if line.strip()]
        threes = ("\n".join(lines[i : i + 3]).encode() for i in range(0, len(lines) - 2, 3))
        assert [three for three in threes if len(three) > 60 and three in everything] == []


def test_a_learned_tokenizer_gives_any_text_back(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    learn_tokenizer(TEXTS).save(str(file))
    tokenizer = Tokenizer.from_pretrained(file)
    texts = [*TEXTS, "", "Grüße, 世界 🙂\0\r\n\t"]
    row = tokens_of(texts, tokenizer)
    assert row.dtype == torch.int64
    assert tokenizer.decode(row.tolist()) == "".join(texts)
    assert int((row == 0).sum()) == len(texts)
    assert tokenizer.decode(row.tolist(), special=True) == "".join(t + END_OF_TEXT for t in texts)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of seconds on a corpus of two texts."""
    monkeypatch.setitem(RECIPES, "draft", TINY)
    monkeypatch.setattr(shipping, "corpus", lambda: TEXTS)
    monkeypatch.setattr(shipping, "held_out", lambda kind: held_out(kind)[:500])


def test_a_broken_off_training_goes_on_and_is_exported_when_done(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, curve = shipping.trained("draft", tmp_path / "whole", progress=False)
    broken = tmp_path / "broken"
    clip, calls = shipping.clip_by_global_norm, iter(range(102))

    def failing(*told, **options):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return clip(*told, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shipping, "clip_by_global_norm", failing)
        shipping.trained("draft", broken, progress=False)
    with pytest.raises(ValueError, match=r"all of its 104 steps, draft\.pt has 100"):
        shipping.export("draft", broken, commit=COMMIT)
    assert not (broken / "draft").exists()
    again, resumed = shipping.trained("draft", broken, progress=False)
    assert resumed == curve
    assert curve.losses[-1] < 0.5 * curve.losses[0]
    for mine, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)

    place = shipping.export("draft", broken, commit=COMMIT)
    ours, text = from_pretrained(place), TEXTS[0]
    assert all(p.dtype == torch.bfloat16 for p in ours.parameters())
    ours = ours.float()
    for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other.bfloat16().float())
    card = json.loads((place / "card.json").read_text("utf-8"))
    assert card["commit"] == COMMIT
    assert card["training"]["tokens"] == 104 * 48
    assert card["data"]["source_files"] == 1
    tokenizer = Tokenizer.from_pretrained(place)
    for kind, told in card["held_out"].items():
        found = bits_per_byte(ours, held_out(kind)[:500], tokenizer)
        assert told["bits_per_byte"] == pytest.approx(found, abs=1e-3)
        assert told["sha256"] in (place / "README.md").read_text("utf-8")
    loads_in_transformers(place, text, tokenizer)


def test_a_distilled_model_learns_twice_and_its_card_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: None
) -> None:
    words = OwnWords(rows=66, prompt=4, width=20, kept=2)
    lessons = DistillRecipe(
        words=words, steps=9, batch=4, warmup=2, long_steps=5, long_batch=2, long_length=40
    )
    recipe = dataclasses.replace(TINY, steps=20, distilled=lessons)
    target = Llama(TINY.config, generator=torch.Generator().manual_seed(1))
    monkeypatch.setitem(RECIPES, "draft", recipe)
    monkeypatch.setattr(shipping, "pretrained", lambda name: target)
    monkeypatch.setattr(shipping, "PROMPTS", ["code"])
    model, curve = shipping.trained("draft", tmp_path, progress=False)
    assert curve.tokens == [2 * 19 + 2 * 40] * 5
    short = Curve(**torch.load(tmp_path / "draft_short.pt", weights_only=True)["curve"])
    assert short.tokens == [4 * 19] * 9
    place = shipping.export("draft", tmp_path, commit=COMMIT)
    for mine, other in zip(from_pretrained(place).parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other.bfloat16())
    told = json.loads((place / "card.json").read_text("utf-8"))
    assert told["training"]["tokens"] == 20 * 48
    assert told["distillation"]["tokens"] == 9 * 76 + 5 * 118
    shares = told["distillation"]["acceptance"]
    assert {"prompts, code", "held-out code", "held-out prose"} < set(shares)
    assert all(0 <= share <= 1 for share in shares.values())
    assert "### Acceptance" in (place / "README.md").read_text("utf-8")
    (tmp_path / "draft_long.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no draft_long\.pt"):
        shipping.export("draft", tmp_path, commit=COMMIT)


def loads_in_transformers(place: Path, text: str, tokenizer: Tokenizer) -> None:
    """The automatic classes give the same tokens and the same logits, and know the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
        peer = transformers.AutoModelForCausalLM.from_pretrained(
            place, local_files_only=True, dtype=torch.float32
        ).eval()
    assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_TEXT, 0)
    assert peer.generation_config.eos_token_id == 0
    for one in (text[:100], " a  b\n\n", "Grüße 世界"):
        assert theirs(one)["input_ids"] == tokenizer.encode(one)
        assert theirs.decode(tokenizer.encode(one)) == one
    tokens = torch.tensor([tokenizer.encode(text[:100])])
    ours = from_pretrained(place, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(tokens).logits, peer(tokens).logits, rtol=1e-4, atol=1e-4)


def test_every_step_computes_with_the_weights_of_that_step(tiny: None, tmp_path: Path) -> None:
    """A cast that is remembered would train on the rounded weights of the first step."""
    model, curve = shipping.trained("draft", tmp_path, progress=False)
    tokens = tokens_of(TEXTS, Tokenizer.from_pretrained(tmp_path))
    with torch.no_grad():
        loss, count = next_token_loss(model, *TINY.batches(tokens)(TINY.steps - 1))
    assert float(loss) / count == pytest.approx(curve.losses[-1], abs=0.1)


@pytest.mark.parametrize("commit", ["", "main", "abc", "0123456789ABCDEF", "0" * 41, "012345 "])
def test_what_is_no_commit_is_refused(commit: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="commit must be 7 to 40 hexadecimal digits"):
        shipping.export("draft", tmp_path, commit=commit)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "labcore.models.ship",
        "target",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "--export-only", "--commit", COMMIT], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "holds no target.pt" in done.stderr
    assert "Warning" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_tokenizer_is_that_of_the_recipes() -> None:
    tokenizer = shipped_tokenizer()
    assert {recipe.config.vocab_size for recipe in RECIPES.values()} == {tokenizer.vocab_size}
    for recipe in RECIPES.values():
        assert recipe.config.eos_token_ids == (tokenizer.id_of(END_OF_TEXT),)
