"""What an engine reports of a request: tokens and text, once nothing can take them back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from labcore.checks import positive_int
from labcore.decoding.contract import SamplingConfig
from labcore.decoding.requests import Request as Row
from labcore.decoding.stops import TextDecoder
from labcore.serving.engine.request import Request, State

__all__ = ["Detokenizer", "Entry", "Output", "check_request"]

_BROKEN = "\ufffd"  # replaces the first bytes of a character
# Drafts are drawn from a generator of their own, so the output doesn't depend on their number.
_DRAFTING = 0x9E3779B97F4A7C15
# Each token is searched for every stop text, in the thread that serves all requests.
_MOST_STOPS, _LONGEST_STOP = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What is new in the output of one request.

    id: the request's. tokens, text: the new ones; without a tokenizer, the text is "". What may be
    the beginning of a stop text, or of a character, is held back until that's known. So all outputs
    of a request add up to what `labcore.decoding.generate` returns for it alone.
    guessed: of each of the tokens, whether a draft had guessed it.
    finish: in the last output "eos", "stop", "length", "cancelled", "deadline" or "error"; "" in
    all others. reason: a sentence if the finish needs one.
    """

    id: str
    tokens: tuple[int, ...] = ()
    guessed: tuple[bool, ...] = ()
    text: str = ""
    finish: str = ""
    reason: str = ""


class Detokenizer:
    """Decodes a growing output; every text is what `tokenizer.decode` returns for all its tokens.

    It remembers places in the output where the text ended in a whole character, and decodes only
    from the second last place on. If the tokens between the last two places then don't have the
    text that they had on their own, it decodes everything: the tokenizer looks further back.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self.tokenizer = tokenizer
        self._forget()

    def _forget(self) -> None:
        self._tokens: list[int] = []  # up to the last place
        self._text = ""
        # For each place: how many tokens and characters come before it, and the text that the
        # tokens since the place before have on their own. A tokenizer may drop a leading space.
        self._places = [(0, 0, "")]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an output so far, or of its beginning."""
        given = list(tokens)
        last = len(self._places) - 1
        while self._places[last][0] > len(given):
            last -= 1
        end, length, alone = self._places[last]
        text = self.tokenizer.decode(given[self._places[max(last - 1, 0)][0] :])
        if given[:end] != self._tokens[:end] or not text.startswith(alone):
            self._forget()
            return self.decode(given)
        text = self._text[:length] + text[len(alone) :]
        newest = last == len(self._places) - 1
        if newest and len(text) > length and not text.endswith(_BROKEN):
            alone = self.tokenizer.decode(given[end:])
            if alone:  # otherwise it couldn't be compared
                self._tokens, self._text = given, text
                self._places.append((len(given), len(text), alone))
        return text


def check_request(
    sampling: SamplingConfig, ends_after: int | None, tokenizer: TextDecoder | None
) -> None:
    """Raise ValueError or TypeError for what no engine can serve.

    That is: stop texts without a tokenizer, too many or too long stop texts, a seed that no
    generator takes, and an imposed length that max_tokens doesn't allow.
    """
    stops, seed = sampling.stop, sampling.seed
    if stops and tokenizer is None:
        raise ValueError(
            "stop texts need a tokenizer, because tokens must become text; make the engine with "
            "tokenizer=…"
        )
    if len(stops) > _MOST_STOPS or max(map(len, stops), default=0) > _LONGEST_STOP:
        raise ValueError(
            f"stop must be at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters, got "
            f"{len(stops)}, the longest of {max(map(len, stops))}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be at least -2**63 and below 2**64, got {seed}")
    if ends_after is not None and positive_int("ends_after", ends_after) > sampling.max_tokens:
        raise ValueError(
            f"ends_after must be at most max_tokens = {sampling.max_tokens}, got {ends_after}; "
            "raise max_tokens"
        )


class Entry:
    """A request in an engine.

    state: what the scheduler knows, set when the scheduler has taken the request. row: its context,
    generator and stop texts, as decoding keeps them. guessed: as in `Output`, of all tokens so far.
    drafting: the generator of its drafts. slot: its last row at the proposer, or None. ends_after:
    as in `labcore.decoding.requests.Request`.
    """

    state: State

    def __init__(
        self, request: Request, tokenizer: TextDecoder | None, ends_after: int | None = None
    ) -> None:
        self.request, self._ends_after = request, ends_after
        self.tokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.row = self._row()
        self.guessed: list[bool] = []
        seed = (request.sampling.seed ^ _DRAFTING) & (2**64 - 1)
        self.drafting = torch.Generator().manual_seed(seed)
        self.slot: int | None = None
        self._tokens = self._characters = 0  # reported so far

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    def _row(self) -> Row:
        row = Row(self.request.prompt, self.request.sampling, self.tokenizer)
        row.ends_after = self._ends_after
        return row

    def reset(self) -> None:
        """Go back to the tokens that the scheduler has, for a request that ends with an error."""
        self.row = self._row()
        self.row.context = list(self.state.tokens)

    def news(self) -> Output | None:
        """Return what has become certain since the last report, or None if nothing has.

        This is for a request that goes on.
        """
        tokens, stops, text = self.row.output(), self.row.stops, ""
        ready = len(tokens) if stops is None else stops.settled(tokens)
        if self.tokenizer is not None:
            text = self.row.text(self.tokenizer).rstrip(_BROKEN)
            text = text if stops is None else stops.certain(text)
        fresh, added = slice(self._tokens, ready), text[self._characters :]
        if not (tokens[fresh] or added):
            return None
        self._tokens = max(self._tokens, ready)
        self._characters = max(self._characters, len(text))
        guessed = tuple(self.guessed[fresh])
        return Output(id=self.id, tokens=tuple(tokens[fresh]), guessed=guessed, text=added)

    def last_news(self) -> Output:
        """Return what is new in the output of a request that ended."""
        return self._ended(self._tokens, self._characters)

    def whole(self) -> Output:
        """Return the whole output of a request that ended."""
        return self._ended(0, 0)

    def _ended(self, tokens: int, characters: int) -> Output:
        text = ""
        if self.tokenizer is not None:
            with suppress(Exception):  # a token without a text may be what ended the request
                text = self.row.text(self.tokenizer)
        output = self.row.output()
        return Output(
            id=self.id,
            tokens=tuple(output[tokens:]),
            guessed=tuple(self.guessed[tokens : len(output)]),
            text=text[characters:],
            finish=self.state.finish,
            reason=self.state.reason,
        )
