"""What a step does and what it brought: a scheduler plans it, an engine returns the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from labcore.checks import one_of

__all__ = ["Chunk", "Decode", "StepPlan", "StepResult"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens to read from `start` on, of a prompt or again after a preemption.

    last: whether no token is left to read after them, so that a new one is drawn.
    """

    id: str
    start: int
    count: int
    last: bool
    drafted: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Decode:
    """The newest token of an output to read, and `drafted` tokens after it to verify.

    start: tokens read so far, which is the position of the newest.
    """

    id: str
    drafted: int = 0
    start: int = 0
    count: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought one request.

    tokens: the new tokens: for a decode, the accepted drafted ones and the one after them; for a
    last chunk one; for another chunk none. finish: "" or why the request ends: "eos", "stop",
    "length" or "error". reason: a sentence for the client.
    """

    tokens: tuple[int, ...] = ()
    finish: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What one step does.

    step: counts from 0. chunks and decodes: what is read, the seniors first. admitted, preempted,
    expired: the ids of requests that were admitted, lost their blocks, or were cut off by their
    deadline. idle: finished requests whose slot a static batch keeps until its last one ends.
    blocks: all blocks of each request that reads, in order.
    """

    step: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """All tokens that the step reads, including drafted ones."""
        return sum(one.count for one in self.chunks) + sum(1 + d.drafted for d in self.decodes)

    @property
    def rests(self) -> int:
        """Rows of ended requests that a static batch computes beside its decodes."""
        return len(self.idle) if self.decodes else 0

    def check(self, results: Mapping[str, StepResult], running: Iterable[str]) -> None:
        """Raise ValueError unless the results bring what the plan asks for.

        running: the plan's requests that haven't ended since; the others' results don't matter.
        """
        draws = {chunk.id: int(chunk.last) for chunk in self.chunks}
        draws |= {decode.id: 1 + decode.drafted for decode in self.decodes}
        if unknown := sorted(results.keys() - draws):
            raise ValueError(f"results must be of the plan's requests, got one of {unknown[0]!r}")
        for id in running:
            most, result = draws[id], results.get(id, StepResult())
            one_of("finish", result.finish, ("", "eos", "stop", "length", "error"))
            least = 0 if result.finish else min(most, 1)
            if not least <= len(result.tokens) <= most:
                raise ValueError(
                    f"the step must bring {id!r} {least} to {most} tokens, got "
                    f"{len(result.tokens)}; give a finish where there are none"
                )
