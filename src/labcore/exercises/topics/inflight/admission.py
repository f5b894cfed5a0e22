"""Who of a queue is let in when nobody may be sent out again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.drawing import kept, separating

__all__ = ["ADMIT", "NOBODYS", "SPARES", "some_queue"]

NOBODYS = 2
SPARES = (1, 3, 4, 5)  # blocks that a student's server keeps unpromised
_Waiting = Sequence[tuple[int, int, str]]
_Running = Sequence[tuple[int, int, int, str]]


def admit(
    waiting: _Waiting,
    running: _Running,
    free: int,
    slots: int,
    page: int,
    families: Mapping[str, int] | None,
    *,
    spare: int,
) -> list[int]:
    """The places in `waiting` of those that are admitted before the next step."""
    del families
    room = free
    for prompt, most, held, _ in running:
        room -= -(-(prompt + most - 1) // page) - held
    taken: list[int] = []
    for place, (prompt, most, _) in enumerate(waiting):
        room -= -(-(prompt + most - 1) // page)
        least = spare if running or taken else 0
        if len(running) + len(taken) == slots or room < least:
            break
        taken.append(place)
    return taken


def _blocks(fault: str, prompt: int, most: int, page: int) -> int:
    """Blocks of a request at its longest, in a mistake's opinion."""
    tokens = prompt + most - 1
    if fault == "last token stored":
        tokens += 1
    if fault == "prompt alone":
        tokens = prompt
    return tokens // page if fault == "rounded down" else -(-tokens // page)


def _room(fault: str, running: _Running, free: int, page: int) -> int:
    room = free
    if fault == "promises forgotten":
        return room
    for prompt, most, held, _ in running:
        here = "" if fault == "prompt alone" else fault
        needed = _blocks(here, prompt, most, page)
        room -= needed if fault == "held ones promised again" else needed - held
    return room


def _by_tokens(
    waiting: _Waiting, running: _Running, free: int, slots: int, page: int, spare: int
) -> list[int]:
    """In tokens of the pool, as if a block could be shared out."""
    room = free * page - sum(prompt + most - 1 - held * page for prompt, most, held, _ in running)
    taken: list[int] = []
    for place, (prompt, most, _) in enumerate(waiting):
        room -= prompt + most - 1
        least = spare * page if running or taken else 0
        if len(running) + len(taken) == slots or room < least:
            break
        taken.append(place)
    return taken


def _wrongly(fault: str) -> Callable[..., list[int]]:
    def answer(
        waiting: _Waiting,
        running: _Running,
        free: int,
        slots: int,
        page: int,
        families: Mapping[str, int] | None,
        *,
        spare: int,
    ) -> list[int]:
        del families
        if fault == "tokens added up":
            return _by_tokens(waiting, running, free, slots, page, spare)
        room = _room(fault, running, free, page)
        taken: list[int] = []
        for place, (prompt, most, _) in enumerate(waiting):
            needed = _blocks(fault, prompt, most, page)
            alone = not (running or taken)
            least = 0 if alone and fault != "spare always" else spare
            if fault == "spare forgotten":
                least = 0
            if fault != "slots unseen" and len(running) + len(taken) == slots:
                break
            if room - needed < least:
                if fault == "head passed over":
                    continue
                break
            taken.append(place)
            if fault != "each by itself":
                room -= needed
            if fault == "one a step":
                break
        return taken

    return answer


_HINTS = {
    "rounded down": "You round blocks down. The tokens that are left over need a block as well, "
    "even if it is not filled.",
    "prompt alone": "You look at a waiting request's prompt. It is let in for good, with all that "
    "it may still say.",
    "promises forgotten": "You count what is free. Some of it belongs to requests that run and "
    "have not asked for it yet.",
    "held ones promised again": "You take what the running need from what is free. A part of it "
    "they hold already, and it is not free.",
    "last token stored": "With you a request needs room for one token more than it does: what is "
    "drawn last is read by nobody.",
    "spare forgotten": "You give away the last block. Look for what has to be left.",
    "spare always": "Your first request has to leave spare blocks although nobody runs. A large "
    "one would wait for ever beside an empty pool.",
    "head passed over": "Where the next one does not fit you take a later one. A large request "
    "could then wait for as long as small ones come.",
    "slots unseen": "You admit more requests than there are slots.",
    "each by itself": "Each of your requests fits beside those that run. They also have to fit "
    "beside each other.",
    "one a step": "You stop behind the first one that you admit.",
    "tokens added up": "You add up tokens and divide at the end. Blocks are not shared out: each "
    "request has a last one of its own.",
}
_WRONG = {name: _wrongly(name) for name in _HINTS}


def _lengths(chance: random.Random, page: int) -> tuple[int, int]:
    """Prompt and most output tokens; often just what fills a block, or one more."""
    prompt = chance.randint(1, 5 * page)
    most = chance.randint(1, 5 * page)
    if chance.random() < 0.5:
        most += -(prompt + most - 1) % page + chance.randint(0, 1)
    return prompt, most


def some_queue(
    chance: random.Random, families: Mapping[str, int] | None = None, *, rows: int = 4
) -> dict[str, Any]:
    """Up to `rows` running requests and a longer queue, with a pool that is nearly promised."""
    page = chance.choice((8, 12, 16, 24, 32))
    names = ["", *(families or {})]
    running = []
    for _ in range(chance.randint(0, rows)):
        prompt, most = _lengths(chance, page)
        held = -(-chance.randint(1, prompt + most - 1) // page)
        running.append((prompt, most, held, chance.choice(names)))
    waiting = [
        (*_lengths(chance, page), chance.choice(names)) for _ in range(chance.randint(4, 11))
    ]
    wanted = [-(-(prompt + most - 1) // page) for prompt, most, _ in waiting]
    promised = sum(-(-(prompt + most - 1) // page) - held for prompt, most, held, _ in running)
    fitting = chance.randint(0, len(waiting))
    free = promised + sum(wanted[:fitting]) + chance.randint(0, 6)
    slots = len(running) + chance.choice((1, 3, 12, 12, 12))
    return {
        "waiting": waiting,
        "running": running,
        "free": free,
        "slots": slots,
        "page": page,
        "families": families,
    }


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"spare": spare} for spare in (NOBODYS, *SPARES)]
    return separating(lambda: some_queue(chance), [admit, *_WRONG.values()], variants)


def _own_spare(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"inflight.admit:{student}")
    return {"spare": chance.choice(SPARES) if student else NOBODYS}


ADMIT = Exercise(
    id="inflight.admit",
    reference=admit,
    mistakes=[Mistake(name, _WRONG[name], hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_spare,
    explanation="A request that may never be sent out again has to be let in with room for the "
    "longest it may become, prompt + max_tokens − 1 tokens, since the last token is drawn and "
    "never read. What the running were promised counts in the same way; only what they hold of it "
    "has left the free blocks already. Each request is rounded up by itself, as no block has two "
    "owners. The queue stops at the first that does not fit: it waits for a bounded time, because "
    "the running end, and nobody takes its place. The price is that most promises are never "
    "called in, so blocks stand empty for outputs that end early. This reference shares no "
    "prefixes.",
)
