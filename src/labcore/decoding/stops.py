"""Stop texts, which end an output of tokens because of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["StopMatch", "StopTexts", "TextDecoder"]

_BROKEN = "\ufffd"  # replaces the first bytes of a character


class TextDecoder(Protocol):
    """What stop texts need from a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""


class StopMatch(NamedTuple):
    """Where a stop text was found.

    read: how many tokens complete the stop text. kept: how many of them begin before it.
    characters: the length of the text before it.
    """

    read: int
    kept: int
    characters: int


@dataclass(frozen=True, slots=True)
class StopTexts:
    """The stop texts of one request; they may span tokens and begin or end inside one.

    A character whose bytes are still incomplete doesn't count yet. So the text of a longer output
    starts with that of a shorter one, and a block of tokens ends exactly where its tokens would
    have ended one by one.
    """

    texts: tuple[str, ...]
    tokenizer: TextDecoder

    def match(self, tokens: Sequence[int], fresh: int) -> StopMatch | None:
        """Return the first stop text in an output whose last `fresh` tokens are new, or None.

        If one token completes several, it's the one that begins first.
        """
        if self._first(self._text(tokens)) < 0:
            return None
        for read in range(len(tokens) - fresh + 1, len(tokens) + 1):
            text = self._text(tokens[:read])
            begin = self._first(text)
            if begin >= 0:
                return StopMatch(read, self._cover(tokens[:read], text[:begin]), begin)
        return None

    def settled(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of an output without a stop text no later one can take back."""
        return self._cover(tokens, self.certain(self._text(tokens)))

    def certain(self, text: str) -> str:
        """Return a text without the end that may be the beginning of a stop text."""
        stops = self.texts
        sizes = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return text[: len(text) - max(sizes, default=0)]

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens).rstrip(_BROKEN)

    def _first(self, text: str) -> int:
        found = (text.find(stop) for stop in self.texts)
        return min((begin for begin in found if begin >= 0), default=-1)

    def _cover(self, tokens: Sequence[int], text: str) -> int:
        """Return the fewest first tokens whose text starts with `text`."""
        kept = len(tokens)
        while kept and self.tokenizer.decode(tokens[: kept - 1]).startswith(text):
            kept -= 1
        return kept
