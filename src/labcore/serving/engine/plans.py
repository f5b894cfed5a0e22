"""What the scheduler and the engine hand to each other: a plan for a step, and what it brought."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from labcore.checks import one_of

__all__ = ["Chunk", "Decode", "StepPlan", "StepResult"]

_FINISHES = ("", "eos", "stop", "length", "error")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt to read: `count` tokens from `start` on.

    last: whether the request then has no token left to read, so that a new one is drawn.
    """

    id: str
    start: int
    count: int
    last: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """The newest token of an output to read, and `drafted` tokens behind it to verify.

    start: tokens read so far, the place of the newest.
    """

    id: str
    drafted: int = 0
    start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What one step does.

    step: counts from 0. chunks and decodes: what is read, the seniors first. admitted, preempted,
    expired: the ids of those that came in, lost their blocks, or met their deadline before this
    step. idle: finished requests whose slot a static batch keeps until its last one ends.
    blocks: of each request that reads, all its blocks in order; its new tokens go behind `start`.
    tokens: read in all, drafted ones included.
    """

    step: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: int = 0

    @property
    def rests(self) -> int:
        """Rows of ended requests that are computed: a static batch's, beside its decodes."""
        return len(self.idle) if self.decodes else 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought one request.

    tokens: the new tokens that stand: of a decode the accepted drafted ones and the one behind
    them, of a last chunk one, of another chunk none. finish: "" or why it ends: "eos", "stop",
    "length" or "error"; reason: a sentence for the client.
    """

    tokens: tuple[int, ...] = ()
    finish: str = ""
    reason: str = ""


def check_results(
    plan: StepPlan, results: Mapping[str, StepResult], ended: Collection[str]
) -> None:
    """Raise ValueError unless `results` are what `plan` asks for; ended: ids that need none."""
    most = {chunk.id: int(chunk.last) for chunk in plan.chunks}
    most.update({decode.id: decode.drafted + 1 for decode in plan.decodes})
    unknown = sorted(set(results) - set(most))
    if unknown:
        raise ValueError(f"results must be of the plan's requests, got one of {unknown[0]!r}")
    for id, count in most.items():
        if id in ended:
            continue
        result = results.get(id, StepResult())
        one_of("finish", result.finish, _FINISHES)
        few = count > 0 and not result.tokens and not result.finish
        if few or len(result.tokens) > count:
            least = min(count, 1)
            raise ValueError(
                f"the step must bring {id!r} {least} to {count} tokens, got "
                f"{len(result.tokens)}; give a finish where there are none"
            )
