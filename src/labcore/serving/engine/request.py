"""What a client asks for, and what the scheduler knows about it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from labcore.decoding import SamplingConfig

__all__ = ["Request", "State"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it came.

    id: different from every other request's under way. prompt: its tokens, at least one.
    sampling: how its tokens are drawn, and at most how many. priority: smaller goes first.
    deadline: seconds on the engine's clock at which it ends, done or not; None means never.
    arrival: seconds on the same clock; of equal priorities, the earlier goes first.
    Raises TypeError or ValueError that names the field.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingConfig
    priority: int = 0
    deadline: float | None = None
    arrival: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id must be a text, not empty, got {self.id!r}")
        if isinstance(self.prompt, str | bytes) or not isinstance(self.prompt, Iterable):
            raise TypeError(
                f"prompt must be a row of tokens, got {type(self.prompt).__name__}; encode the "
                "text with a tokenizer"
            )
        object.__setattr__(self, "prompt", tuple(operator.index(token) for token in self.prompt))
        if not self.prompt:
            raise ValueError("prompt must hold at least one token, got none; begin with a BOS")
        if min(self.prompt) < 0:
            raise ValueError(f"tokens must be at least 0, got {min(self.prompt)}")
        if not isinstance(self.sampling, SamplingConfig):
            raise TypeError(
                f"sampling must be a SamplingConfig, got {type(self.sampling).__name__}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority must be a whole number, got {self.priority!r}")
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise ValueError(f"deadline must be finite or None (never), got {self.deadline}")
        if not math.isfinite(self.arrival):
            raise ValueError(f"arrival must be a finite number of seconds, got {self.arrival}")

    @property
    def longest(self) -> int:
        """The most tokens whose keys and values it needs: the last of the output is never read."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def expired(self, now: float) -> bool:
        """Tell whether the deadline has passed at `now` seconds on the engine's clock."""
        return self.deadline is not None and now >= self.deadline


@dataclass(slots=True, eq=False)
class State:
    """What a scheduler knows about one request; only the scheduler changes it.

    order: counts the requests of a scheduler. tokens: prompt and output so far. computed: how many
    of them have their keys and values in `blocks`. digests: of its first full blocks. status:
    "waiting", "running" or "finished". finish: "", or "eos", "stop", "length", "cancelled",
    "deadline", "refused" or "error"; reason: a sentence where the finish needs one.
    preemptions: how often it lost its blocks. recomputed: tokens read again after that. wasted:
    drafted tokens that were read and rejected. matched: tokens found in shared blocks instead of
    being read. peak: the most tokens that were ever computed.
    admitted_at (the first time), first_token_at, finished_at: seconds on the engine's clock, None
    before.
    """

    request: Request
    order: int = 0
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    status: str = "waiting"
    finish: str = ""
    reason: str = ""
    preemptions: int = 0
    recomputed: int = 0
    wasted: int = 0
    matched: int = 0
    peak: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    def advance(self, count: int, drafted: int, tokens: Sequence[int], now: float) -> None:
        """Take in that a step read `count` tokens and `drafted` drafted ones, and its new tokens.

        All but the last of the new tokens are drafted ones that were accepted.
        """
        accepted, before = max(len(tokens) - 1, 0), self.computed
        self.computed += count + accepted
        self.wasted += drafted - accepted
        self.recomputed += max(min(self.computed, self.peak) - before, 0)
        self.peak = max(self.peak, self.computed)
        self.tokens += tokens
        if tokens and self.first_token_at is None:
            self.first_token_at = now

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def emitted(self) -> int:
        """How many tokens are after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def missing(self) -> int:
        """Tokens not read yet: 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether only the newest token of its output is not read yet."""
        return self.missing == 1 and self.emitted > 0

    @property
    def seniority(self) -> tuple[int, float, int]:
        """Who goes first: priority, then arrival, then the order of adding; smaller first."""
        return self.request.priority, self.request.arrival, self.order

    @property
    def place(self) -> tuple[int, bool, float, int]:
        """Its place in the queue: by seniority, but of equal priorities the preempted first."""
        priority, arrival, order = self.seniority
        return priority, not self.preemptions, arrival, order
