"""What an engine says of a request: tokens and text, once nothing can take them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labcore.checks import positive_int
from labcore.decoding.contract import SamplingConfig
from labcore.decoding.requests import Request as Row
from labcore.decoding.stops import TextDecoder
from labcore.serving.engine.request import State

__all__ = ["Entry", "Output", "check_ends_after", "check_sampling"]

_BROKEN = "\ufffd"  # what stands for the first bytes of a character
# Drafts are drawn with numbers of their own, so that the output does not depend on how many are.
_DRAFTING = 0x9E3779B97F4A7C15
# Every stop text is looked for at each token, in the thread that serves everybody.
_MOST_STOPS, _LONGEST_STOP = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """News of one request.

    id: the request's. tokens: the new ones. text: the new text; "" without a tokenizer. Neither is
    said before it is certain: what may be the beginning of a stop text, or of a character, waits.
    finish: "" while it goes on, in its last output "eos", "stop", "length", "cancelled",
    "deadline" or "error"; reason: a sentence where the finish needs one.
    Put together, the outputs of a request are what `labcore.decoding.generate` says of it alone.
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""
    reason: str = ""


class Following:
    """The texts of one growing output, each as `tokenizer.decode` of all its tokens gives it.

    It decodes anew only what follows a place where all characters were whole, and before it a few
    tokens whose text is known: they show whether the tokenizer spells the end as it would behind
    the beginning. Where they do not come out as before, all is decoded anew.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self.tokenizer = tokenizer
        self._forget()

    def _forget(self) -> None:
        self._tokens: list[int] = []  # up to the last place
        self._text = ""
        # Of each place the tokens and characters before it, and how those since the one before
        # come out alone: a tokenizer may drop a space at the beginning of what it is given.
        self._places = [(0, 0, "")]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of an output so far, or of its beginning."""
        given = list(tokens)
        last = len(self._places) - 1
        while self._places[last][0] > len(given):
            last -= 1
        end, length, shown = self._places[last]
        if given[:end] != self._tokens[:end]:
            return self._anew(given)
        told = self.tokenizer.decode(given[self._places[max(last - 1, 0)][0] :])
        if not told.startswith(shown):
            return self._anew(given)
        text = self._text[:length] + told[len(shown) :]
        if last == len(self._places) - 1:
            self._grow(given, text)
        return text

    def _anew(self, given: list[int]) -> str:
        text = self.tokenizer.decode(given)
        self._forget()
        self._grow(given, text)
        return text

    def _grow(self, given: list[int], text: str) -> None:
        """Make the end of a text a place, if its last character is whole."""
        if len(text) <= len(self._text) or text.endswith(_BROKEN):
            return
        alone = self.tokenizer.decode(given[len(self._tokens) :])
        if alone:  # else it would show nothing
            self._tokens, self._text = given, text
            self._places.append((len(given), len(text), alone))


def check_ends_after(ends_after: int | None, sampling: SamplingConfig) -> None:
    """Raise ValueError or TypeError for an imposed length that max_tokens does not allow."""
    if ends_after is None:
        return
    if positive_int("ends_after", ends_after) > sampling.max_tokens:
        raise ValueError(
            f"ends_after must be at most max_tokens = {sampling.max_tokens}, got {ends_after}; "
            "allow the output as many tokens"
        )


def check_sampling(sampling: SamplingConfig) -> None:
    """Raise ValueError or TypeError for a seed that no generator takes, and too many stop texts."""
    stops = sampling.stop
    if len(stops) > _MOST_STOPS or max(map(len, stops), default=0) > _LONGEST_STOP:
        raise ValueError(
            f"stop must be at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters, got "
            f"{len(stops)}, the longest of {max(map(len, stops))}"
        )
    seed = sampling.seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be at least -2**63 and below 2**64, got {seed}")


class Entry:
    """A request in an engine: how it decodes, and what was said of it so far.

    row: context, generator and stop texts, as decoding keeps them. state: the scheduler's.
    drafting: the generator of its drafts. slot: its row at the proposer, None without one.
    ends_after: as in `labcore.decoding.requests.Request`.
    """

    def __init__(
        self, state: State, tokenizer: TextDecoder | None, ends_after: int | None = None
    ) -> None:
        request = state.request
        self.state = state
        self.tokenizer = None if tokenizer is None else Following(tokenizer)
        self._ends_after = ends_after
        self.reset_to_committed()
        seed = (request.sampling.seed ^ _DRAFTING) & (2**64 - 1)
        self.drafting = torch.Generator().manual_seed(seed)
        self.slot: int | None = None
        self._tokens = 0  # said so far
        self._characters = 0

    @property
    def id(self) -> str:
        """The request's."""
        return self.state.id

    def reset_to_committed(self) -> None:
        """Have the scheduler's tokens and no others, before its first step or behind its last."""
        request = self.state.request
        self.row = Row(request.prompt, request.sampling, self.tokenizer)
        self.row.context = list(self.state.tokens)
        self.row.ends_after = self._ends_after

    def news(self) -> Output | None:
        """What is certain by now and was not said; None without news. For one that goes on."""
        tokens, stops = self.row.output(), self.row.stops
        ready, text = len(tokens), ""
        if stops is not None:
            ready = stops.settled(tokens)
        if self.tokenizer is not None:
            text = self.row.text(self.tokenizer).rstrip(_BROKEN)
            text = _settled(text, () if stops is None else stops.texts)
        fresh, said = tuple(tokens[self._tokens : ready]), text[self._characters :]
        if not (fresh or said):
            return None
        self._tokens = max(self._tokens, ready)
        self._characters = max(self._characters, len(text))
        return Output(id=self.id, tokens=fresh, text=said)

    def last_news(self) -> Output:
        """The news of a request that ended; without text where its tokenizer fails."""
        text, tokens = self._last_text(), tuple(self.row.output())
        return Output(
            id=self.id,
            tokens=tokens[self._tokens :],
            text=text[self._characters :],
            finish=self.state.finish,
            reason=self.state.reason,
        )

    def whole(self) -> Output:
        """All of it in one, for a request that ended."""
        return Output(
            id=self.id,
            tokens=tuple(self.row.output()),
            text=self._last_text(),
            finish=self.state.finish,
            reason=self.state.reason,
        )

    def _last_text(self) -> str:
        if self.tokenizer is None:
            return ""
        try:
            return self.row.text(self.tokenizer)
        except Exception:  # that may be what ended it
            return ""


def _settled(text: str, stops: Sequence[str]) -> str:
    """A text without the end of it that may be the beginning of a stop."""
    begin = len(text)
    for stop in stops:
        sizes = range(min(len(stop) - 1, len(text)), 0, -1)
        partial = next((size for size in sizes if text.endswith(stop[:size])), 0)
        begin = min(begin, len(text) - partial)
    return text[:begin]
