"""Model a server that streams completions: tokens of a few bytes, a stop text, impatient clients.

A step is the unit of time. In each step, every request that has a place gets one token.
"""

from __future__ import annotations

import codecs
import random
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["LONGEST", "STOP", "Request", "Sender", "Server", "judged", "requests"]

STOP = "###"
LONGEST = 40  # tokens of a completion
WORDS = [
    "the",
    "café",
    "model",
    "naïve",
    "東京",
    "reads",
    "☕",
    "text",
    "über",
    "#1",
    "C#",
    "says",
    "🙂",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Hold a request and what the model would write, at most LONGEST tokens of bytes.

    arrival: a step. patience: tokens after which the client leaves.
    """

    arrival: int
    tokens: tuple[bytes, ...]
    patience: int

    @property
    def right(self) -> str:
        """The completion: what is written before the stop text, in whole characters."""
        return b"".join(self.tokens).decode("utf-8", "ignore").partition(STOP)[0]


def requests(count: int, every: int, seed: int) -> list[Request]:
    """Draw requests that arrive every few steps: a third stops, and a quarter of clients leave."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        words = chance.choices(WORDS, k=LONGEST)
        if number % 3 == 0:
            words[chance.randint(4, 12)] += STOP
        elif number % 3 == 1:
            words[chance.randint(8, 12) :] = ["#"]  # the beginning of a stop text that never comes
        left = " ".join(words).encode()
        tokens: list[bytes] = []
        while left and len(tokens) < LONGEST:
            size = chance.randint(1, 4)
            tokens.append(left[:size])
            left = left[size:]
        patience = chance.randint(5, 15) if number % 4 == 2 else LONGEST
        made.append(Request(arrival=number * every, tokens=tuple(tokens), patience=patience))
    return made


@dataclass(kw_only=True, slots=True)
class Sender:
    """Turn a request's tokens into the client's text; the first four fields are faults.

    alone: look for the stop text in one token at a time. eager: hold nothing back for a stop text.
    bytewise: decode each token by itself. forgetful: drop what is held back when the tokens end.
    """

    alone: bool = False
    eager: bool = False
    bytewise: bool = False
    forgetful: bool = False
    sent: str = field(default="", init=False)
    held: str = field(default="", init=False)  # whole characters, for a stop text
    stopped: bool = field(default=False, init=False)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=codecs.getincrementaldecoder("utf-8"), init=False
    )

    @property
    def held_bytes(self) -> int:
        """Return how many bytes came and wait to be sent."""
        return len(self._decoder.getstate()[0]) + len(self.held.encode())

    def take(self, token: bytes) -> None:
        """Send what may be sent after one more token."""
        self.held += self._decoded(token)
        if self.alone:
            before, stop, _ = self.held.partition(STOP)
        else:
            # What was already sent counts for the search, if nothing was held back.
            whole = self.sent[-len(STOP) + 1 :] if self.eager else ""
            before, stop, _ = (whole + self.held).partition(STOP)
            before = before[len(whole) :]
        self.stopped = bool(stop)
        keep = 0 if stop or self.alone or self.eager else _beginning(before)
        self.sent += before[: len(before) - keep]
        self.held = before[len(before) - keep :]

    def end(self) -> None:
        """Send what was held back, after the last token."""
        if not self.forgetful:
            self.sent += self.held
        self.held = ""

    def _decoded(self, token: bytes) -> str:
        if self.bytewise:
            return token.decode("utf-8", "replace")
        return self._decoder.decode(token)


def _beginning(text: str) -> int:
    """Return how many characters at the end of a text may begin a stop text."""
    return next(n for n in range(len(STOP) - 1, -1, -1) if text.endswith(STOP[:n]))


@dataclass(eq=False, slots=True)
class _Row:
    request: Request
    sender: Sender
    come: int = 0
    left: bool = False


@dataclass(kw_only=True, slots=True)
class Server:
    """Run requests in `places` places, first come, first served.

    faults: of the senders. clinging: a client that left keeps its place until its tokens end.
    """

    coming: list[Request]
    places: int
    faults: dict[str, bool] = field(default_factory=dict)
    clinging: bool = False
    now: int = 0
    queue: list[_Row] = field(default_factory=list)
    running: list[_Row] = field(default_factory=list)
    ended: list[_Row] = field(default_factory=list)

    def step(self) -> None:
        """Admit requests, give each one a token, and end those that are finished."""
        while self.coming and self.coming[0].arrival <= self.now:
            self.queue.append(_Row(self.coming.pop(0), Sender(**self.faults)))
        while self.queue and len(self.running) < self.places:
            self.running.append(self.queue.pop(0))
        for row in list(self.running):
            row.left = row.come >= row.request.patience
            if not row.left or self.clinging:
                row.sender.take(row.request.tokens[row.come])
            row.come += 1
            last = row.come == len(row.request.tokens)
            if last and not row.sender.stopped:
                row.sender.end()
            if last or row.sender.stopped or (row.left and not self.clinging):
                self.running.remove(row)
                self.ended.append(row)
        self.now += 1


def judged(row: _Row) -> tuple[int, int]:
    """Return how many characters a client got that don't belong, and how many it never got."""
    came, right = Counter(row.sender.sent), Counter(row.request.right)
    missing = 0 if row.left else (right - came).total()
    return (came - right).total(), missing
