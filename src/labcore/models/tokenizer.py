"""Text to tokens and back: a checkpoint's tokenizer.json, or plain bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

__all__ = ["ByteTokenizer", "Tokenizer", "pad_rows"]


def pad_rows(
    rows: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of tokens as one right-padded tensor: tokens int64 [B, T] and counts int32 [B].

    Padding is token 0; what marks it is the count. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("pad_rows needs at least one row, got none")
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return tokens.to(device), counts.to(device)


class Tokenizer:
    """The tokenizer of a checkpoint, as its `tokenizer.json` describes it.

    vocab_size: tokens that it knows, added ones included; a model's may be larger.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # A file may ask for cutting or padding, which would change tokens in silence.
        inner.no_truncation()
        inner.no_padding()
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json`, or the folder that holds it. Raises FileNotFoundError."""
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist; a tokenizer is read from tokenizer.json "
                "(a checkpoint with tokenizer.model alone must be converted first)"
            )
        return cls(tokenizers.Tokenizer.from_file(str(file)))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text. special: with those that the file puts around a text."""
        return list(self._inner.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens. special: show the special ones too. Raises ValueError for unknown ids."""
        unknown = [token for token in tokens if self._inner.id_to_token(token) is None]
        if unknown:
            raise ValueError(
                f"tokens must be below {self.vocab_size} and known, got {unknown[:8]}; a model's "
                "vocabulary may be padded beyond its tokenizer's"
            )
        return str(self._inner.decode(list(tokens), skip_special_tokens=not special))

    def id_of(self, token: str) -> int:
        """The id of a token as the file spells it. Raises KeyError for an unknown one."""
        found = self._inner.token_to_id(token)
        if found is None:
            raise KeyError(f"the tokenizer has no token {token!r}")
        return int(found)


class ByteTokenizer:
    """Each byte of UTF-8 is a token; 256 ends a text. Any text comes back as it was."""

    vocab_size = 257
    eos = 256

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text. special: with the end of the text."""
        return [*text.encode("utf-8"), *([self.eos] if special else [])]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens; broken UTF-8 becomes U+FFFD. special: show the end as <eos>.

        Raises ValueError for ids outside of 0 to 256.
        """
        if unknown := [token for token in tokens if not 0 <= token <= self.eos]:
            raise ValueError(f"tokens must be 0 to {self.eos}, got {unknown[:8]}")
        end = b"<eos>" if special else b""
        parts = (end if token == self.eos else bytes([token]) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")
