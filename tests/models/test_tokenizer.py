"""Tokens to text and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from labcore.models import ByteTokenizer, Tokenizer, pad_rows

TEXTS = ["def f(x):\n    return x + 1\n", "Grüße, 世界 — naïve 🙂", "  two  spaces ", ""]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with one special token and a post-processor, as Llama 3's."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<begin>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(TEXTS * 3, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 0)]
    )
    inner.enable_truncation(3)
    inner.enable_padding(length=5)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


@pytest.mark.parametrize("special", [False, True])
def test_tokens_are_those_of_transformers_and_come_back(file: Path, special: bool) -> None:
    ours, theirs = Tokenizer.from_pretrained(file.parent), PreTrainedTokenizerFast(
        tokenizer_file=str(file)
    )  # fmt: skip
    for text in TEXTS:
        tokens = ours.encode(text, special=special)
        assert tokens == theirs.encode(text, add_special_tokens=special)
        assert tokens[:1] == [ours.id_of("<begin>")] or not special
        assert ours.decode(tokens) == text
    assert ours.decode([0], special=True) == "<begin>"
    assert ours.vocab_size == theirs.vocab_size == 300


def test_what_a_file_does_not_hold_is_told(file: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(file)
    with pytest.raises(ValueError, match="below"):
        tokenizer.decode([1, tokenizer.vocab_size])
    with pytest.raises(KeyError, match="<end>"):
        tokenizer.id_of("<end>")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_pretrained(tmp_path)


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text, special=True)
    assert tokens[-1] == tokenizer.eos < tokenizer.vocab_size
    assert tokens[:-1] == tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, special=True) == text + "<eos>"


def test_broken_bytes_are_shown_and_others_refused() -> None:
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"
    with pytest.raises(ValueError, match=r"0 to 256, got \[257\]"):
        ByteTokenizer().decode([3, 257])


def test_rows_are_padded_on_the_right() -> None:
    tokens, counts = pad_rows([[5, 6, 7], [], [8]])
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert counts.tolist() == [3, 0, 1]
    assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)
    with pytest.raises(ValueError, match="at least one row"):
        pad_rows([])
