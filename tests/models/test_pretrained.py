"""What is shipped beside the code: loading, errors, the tokenizer, texts, bits per byte."""

from __future__ import annotations

import ast
import importlib
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from labcore.models import (
    ByteTokenizer,
    LlamaConfig,
    bits_per_byte,
    card,
    held_out,
    held_out_sha256,
    pretrained,
    prompts,
    shipped_tokenizer,
)
from labcore.models.recipes import RECIPES
from tests.models.shapes import model_of

NAMES = ("target", "draft")
MODULE = importlib.import_module("labcore.models.shipped")  # the face has its function
CONFIG = LlamaConfig(
    vocab_size=257, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=13, bos_token_id=256,
)  # fmt: skip
TOKENIZER = shipped_tokenizer()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_that_of_its_recipe(name: str) -> None:
    model = pretrained(name)
    assert model.config == RECIPES[name].config
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half = pretrained(name, dtype=torch.bfloat16)
    for wide, stored in zip(model.parameters(), half.parameters(), strict=True):
        assert torch.equal(wide, stored.float())


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    folder = MODULE.FILES / name
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", 0)
    for text in (held_out("prose")[:400], prompts("code")[0], "Grüße, 世界 🙂"):
        row = TOKENIZER.encode(text)
        assert theirs(text)["input_ids"] == row
        tokens = torch.tensor([row])
        with torch.inference_mode():
            ours, others = pretrained(name)(tokens).logits, peer(tokens).logits
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-4)


def test_what_is_shipped_is_small_and_has_one_tokenizer() -> None:
    files = MODULE.FILES
    weights = [files / name / "model.safetensors" for name in NAMES]
    assert sum(path.stat().st_size for path in files.rglob("*") if path.is_file()) <= 20_000_000
    assert all(path.is_file() for path in weights)
    tokenizers = [path.read_bytes() for path in files.rglob("tokenizer.json")]
    assert len(tokenizers) == 3
    assert len(set(tokenizers)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_where_a_model_comes_from(name: str) -> None:
    told = card(name)
    recipe = RECIPES[name]
    assert told["name"] == name
    assert told["license"] == "BSD-3-Clause"
    assert len(told["commit"]) == 40
    assert told["parameters"] == sum(p.numel() for p in pretrained(name).parameters())
    assert told["training"]["steps"] == recipe.steps
    assert told["training"]["tokens"] == recipe.tokens
    for kind in ("code", "prose"):
        assert told["held_out"][kind]["sha256"] == held_out_sha256(kind)
    lessons = recipe.distilled
    assert ("distillation" in told) == (lessons is not None)
    if lessons is not None:
        short = lessons.batch * (lessons.words.width - 1)
        long = short // 2 + lessons.long_batch * lessons.long_length
        tokens = lessons.steps * short + lessons.long_steps * long
        assert told["distillation"]["tokens"] == tokens


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (lambda: pretrained("teacher"), NAMES),
        (lambda: card("teacher"), NAMES),
        (lambda: held_out("poetry"), ("code", "prose")),
        (lambda: held_out_sha256("poetry"), ("code", "prose")),
        (lambda: prompts("poetry"), ("code", "long_code", "prose", "copy")),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(call, allowed) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert all(name in str(raised.value) for name in allowed)


@pytest.mark.parametrize("call", [pretrained, card])
def test_missing_weights_are_said_with_the_way_to_make_them(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "FILES", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"labcore\.models\.ship draft --out FOLDER"):
        call("draft")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text
    assert all(0 < token < 2048 for token in tokens)  # 0 ends a text


def test_held_out_texts_are_those_of_their_hashes() -> None:
    """Never edit a held-out text: write another one with the next number in its name."""
    assert held_out_sha256("code") == (
        "fa2d610811b6935d991a0ac4057a44cec0d667a4cb95a2c1ecabca0ed2a6ded4"
    )
    assert held_out_sha256("prose") == (
        "f33cc908467858da18540c6b0ae003197fd7cfe3168212d1939f1df326ca4c17"
    )
    ast.parse(held_out("code"))
    assert len(held_out("code")) > 25_000
    assert len(held_out("prose")) > 12_000
    assert "\r" not in held_out("code") + held_out("prose")


@pytest.mark.parametrize(
    ("kind", "count", "shortest", "longest"),
    [
        ("code", 12, 50, 128),
        ("long_code", 8, 512, 900),
        ("prose", 8, 20, 128),
        ("copy", 8, 128, 400),
    ],
)
def test_prompts_have_their_lengths_and_end_with_a_word(
    kind: str, count: int, shortest: int, longest: int
) -> None:
    """White space at the end would be a token that the models do not expect there."""
    texts = prompts(kind)
    assert len(texts) == len(set(texts)) == count
    assert all(text == text.strip() for text in texts)
    lengths = [len(TOKENIZER.encode(text)) for text in texts]
    assert shortest <= min(lengths) and max(lengths) <= longest


def test_prompts_are_no_held_out_text() -> None:
    for kind in ("code", "long_code", "prose", "copy"):
        for text in prompts(kind):
            assert text[:80] not in held_out("code") + held_out("prose")


@pytest.mark.parametrize("context", [0, 1, 5, 12])
@pytest.mark.parametrize(
    "text", ["a", "twelve bytes", "Grüße, 世界: " * 7], ids=["one", "window", "long"]
)
@torch.no_grad()
def test_bits_are_those_of_each_token_predicted_once(
    context: int, text: str, generator: torch.Generator
) -> None:
    model = model_of(CONFIG, generator).double()
    row = torch.tensor([256, *text.encode()])
    expected, start = 0.0, 0
    for place in range(1, len(row)):
        if place - start > 13:
            start = place - max(context, 1)
        behind = model(row[None, start:place]).logits[0, -1]
        expected -= float(behind.log_softmax(-1)[row[place]])
    found = bits_per_byte(model, text, ByteTokenizer(), context=context)  # type: ignore[arg-type]
    assert found == pytest.approx(expected / math.log(2) / len(text.encode()), rel=1e-6)


def test_ignorant_model_needs_the_bits_of_257_equal_tokens(
    generator: torch.Generator,
) -> None:
    """The 256 bytes and the end of the text."""
    model = model_of(CONFIG, generator)
    torch.nn.init.zeros_(model.lm_head.weight)
    found = bits_per_byte(model, "naïve " * 30, ByteTokenizer(), context=3)  # type: ignore[arg-type]
    assert found == pytest.approx(math.log2(257))


def test_bits_need_a_text_a_beginning_and_room_to_predict(generator: torch.Generator) -> None:
    model = model_of(CONFIG, generator)
    with pytest.raises(ValueError, match="text must not be empty"):
        bits_per_byte(model, "", ByteTokenizer())  # type: ignore[arg-type]
    for context in (-1, 13):
        with pytest.raises(ValueError, match="context must be 0 to 12"):
            bits_per_byte(model, "text", ByteTokenizer(), context=context)  # type: ignore[arg-type]
    shape = json.loads(json.dumps({**CONFIG.to_hugging_face(), "bos_token_id": None}))
    other = model_of(LlamaConfig.from_hugging_face(shape), generator)
    with pytest.raises(ValueError, match="bos token"):
        bits_per_byte(other, "text", ByteTokenizer(), context=3)  # type: ignore[arg-type]
