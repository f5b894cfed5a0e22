"""Stop texts: where an output of tokens ends because of what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["StopMatch", "StopTexts", "TextDecoder"]

_BROKEN = "\ufffd"  # what stands for the first bytes of a character


class TextDecoder(Protocol):
    """What stop texts ask of a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class StopMatch(NamedTuple):
    """read: how many tokens it took to complete the stop. kept: how many of them begin before it.
    characters: the length of the text before it.
    """

    read: int
    kept: int
    characters: int


@dataclass(frozen=True, slots=True)
class StopTexts:
    """The stop texts of one request; they may span tokens and begin or end inside one.

    Characters of which only the first bytes are there do not count yet, so that the text of a
    longer output begins with that of a shorter one, and a block of tokens ends where its tokens
    one by one would have ended.
    """

    texts: tuple[str, ...]
    tokenizer: TextDecoder

    def match(self, tokens: Sequence[int], fresh: int) -> StopMatch | None:
        """The first stop in an output whose last `fresh` tokens are new; None without one.

        Of several that the same token completes it is the one that begins first.
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
        """How many tokens of an output without a stop no later stop can take back."""
        text = self._text(tokens)
        begin = len(text)
        for stop in self.texts:
            sizes = range(min(len(stop) - 1, len(text)), 0, -1)
            partial = next((size for size in sizes if text.endswith(stop[:size])), 0)
            begin = min(begin, len(text) - partial)
        return self._cover(tokens, text[:begin])

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens).rstrip(_BROKEN)

    def _first(self, text: str) -> int:
        found = (text.find(stop) for stop in self.texts)
        return min((begin for begin in found if begin >= 0), default=-1)

    def _cover(self, tokens: Sequence[int], text: str) -> int:
        """The fewest first tokens whose text begins with `text`."""
        kept = len(tokens)
        while kept and self.tokenizer.decode(tokens[: kept - 1]).startswith(text):
            kept -= 1
        return kept
