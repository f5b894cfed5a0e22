"""Tokenizers: one from a checkpoint's tokenizer.json, and one for plain bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

__all__ = ["ByteTokenizer", "Tokenizer", "pad_rows"]


def pad_rows(
    rows: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Right-pad rows of tokens into one tensor; return tokens int64 [B, T] and counts int32 [B].

    Padding is token 0, so only the counts tell it apart from real tokens. Raises ValueError if
    there are no rows.
    """
    if not rows:
        raise ValueError("rows must have at least one row, got none")
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return tokens.to(device), counts.to(device)


class Tokenizer:
    """A checkpoint's tokenizer, defined by its `tokenizer.json`.

    vocab_size: the number of known tokens, including added ones. A model's may be larger.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # A file may turn on truncation or padding, which would change tokens silently.
        inner.no_truncation()
        inner.no_padding()
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`, given its path or its folder. Raises FileNotFoundError."""
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist; pass the path or folder of a tokenizer.json (convert a "
                "checkpoint that has only tokenizer.model first)"
            )
        return cls(tokenizers.Tokenizer.from_file(str(file)))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Convert text to tokens. special: add the special tokens that the file defines."""
        return list(self._inner.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert tokens to text. Raises ValueError for unknown ids.

        special: show special tokens.
        """
        unknown = [token for token in tokens if self._inner.id_to_token(token) is None]
        if unknown:
            raise ValueError(
                f"tokens must be below {self.vocab_size} and known, got {unknown[:8]}; a model's "
                "vocabulary may be padded beyond its tokenizer's"
            )
        return str(self._inner.decode(list(tokens), skip_special_tokens=not special))

    def save(self, folder: str | Path, *, end: str, length: int) -> None:
        """Write tokenizer.json, and tokenizer_config.json as transformers reads it.

        end: the token that ends a text, and begins and pads one. length: of the model's context.
        """
        self._inner.save(str(Path(folder) / "tokenizer.json"))
        told = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": end for role in ("bos", "eos", "pad")},
            "clean_up_tokenization_spaces": False,
            "model_max_length": length,
        }
        text = json.dumps(told, indent=2) + "\n"
        (Path(folder) / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def id_of(self, token: str) -> int:
        """Return a token's id, given its spelling in the file. Raises KeyError if it's unknown."""
        found = self._inner.token_to_id(token)
        if found is None:
            raise KeyError(f"the tokenizer has no token {token!r}")
        return int(found)


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte; token 256 ends a text. Decoding is lossless."""

    vocab_size = 257
    eos = 256

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Convert text to tokens. special: add the end-of-text token."""
        return [*text.encode("utf-8"), *([self.eos] if special else [])]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert tokens to text; invalid UTF-8 becomes U+FFFD. special: show end of text as <eos>.

        Raises ValueError for ids outside 0 to 256.
        """
        if unknown := [token for token in tokens if not 0 <= token <= self.eos]:
            raise ValueError(f"tokens must be 0 to {self.eos}, got {unknown[:8]}")
        end = b"<eos>" if special else b""
        parts = (end if token == self.eos else bytes([token]) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")
