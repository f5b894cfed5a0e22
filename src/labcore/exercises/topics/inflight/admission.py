"""Decide which queued requests a server admits when it never preempts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.drawing import kept, separating

__all__ = ["ADMIT", "NOBODYS", "SPARES", "some_queue"]

NOBODYS = 2
SPARES = (1, 3, 4, 5)  # unpromised blocks, for numbered students
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
    """Return the places in `waiting` of the requests that enter before the next step."""
    del families

    def longest(prompt: int, most: int) -> int:
        return -(-(prompt + most - 1) // page)

    room = free - sum(longest(prompt, most) - held for prompt, most, held, _ in running)
    taken: list[int] = []
    for place, (prompt, most, _) in enumerate(waiting):
        room -= longest(prompt, most)
        least = spare if running or taken else 0
        if len(running) + len(taken) == slots or room < least:
            break
        taken.append(place)
    return taken


def _lengths(chance: random.Random, page: int) -> tuple[int, int]:
    """Draw a prompt length and an output limit that often just fill a block, or need one more."""
    prompt = chance.randint(1, 5 * page)
    most = chance.randint(1, 5 * page)
    if chance.random() < 0.5:
        most += -(prompt + most - 1) % page + chance.randint(0, 1)
    return prompt, most


def some_queue(
    chance: random.Random, families: Mapping[str, int] | None = None, *, rows: int = 4
) -> dict[str, Any]:
    """Draw up to `rows` running requests, a longer queue, and a pool that is nearly promised."""
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
    wrong = (function for function, _ in ADMIT.wrong.values())
    return separating(lambda: some_queue(chance), [admit, *wrong], variants)


def _own_spare(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"inflight.admit:{student}")
    return {"spare": chance.choice(SPARES) if student else NOBODYS}


ADMIT = Exercise(
    id="inflight.admit",
    points=5,
    beyond=2,
    reference=admit,
    mistakes=[
        Mistake(
            "rounded down",
            ("-(-(prompt + most - 1) // page)", "(prompt + most - 1) // page"),
            "You round blocks down. The tokens that are left over need a block as well, even if it "
            "is not filled.",
        ),
        Mistake(
            "prompt alone",
            ("room -= longest(prompt, most)", "room -= longest(prompt, 1)"),
            "You look at a waiting request's prompt. It is let in for good, with all that it may "
            "still say.",
        ),
        Mistake(
            "promises forgotten",
            ("in running)", "in ())"),
            "You count what is free. Some of it belongs to requests that run and have not asked "
            "for it yet.",
        ),
        Mistake(
            "held ones promised again",
            (" - held", ""),
            "You take what the running need from what is free. A part of it they hold already, and "
            "it is not free.",
        ),
        Mistake(
            "last token stored",
            ("prompt + most - 1", "prompt + most"),
            "With you a request needs room for one token more than it does: what is drawn last is "
            "read by nobody.",
        ),
        Mistake(
            "spare forgotten",
            ("spare if running or taken else 0", "0"),
            "You give away the last block. Look for what has to be left.",
        ),
        Mistake(
            "spare always",
            (" if running or taken else 0", ""),
            "Your first request has to leave spare blocks although nobody runs. A large one would "
            "wait forever beside an empty pool.",
        ),
        Mistake(
            "first batch spares none",
            (" or taken", ""),
            "On an idle server you let all newcomers take the spare blocks. Only the first one "
            "may. Once it is admitted, the server is no longer idle.",
        ),
        Mistake(
            "head passed over",
            (
                "            break",
                "            room += longest(prompt, most)\n            continue",
            ),
            "Where the next one does not fit you take a later one. A large request could then wait "
            "for as long as small ones come.",
        ),
        Mistake(
            "slots unseen",
            ("len(running) + len(taken) == slots or ", ""),
            "You admit more requests than there are slots.",
        ),
        Mistake(
            "each by itself",
            ("taken.append(place)", "taken.append(place)\n        room += longest(prompt, most)"),
            "Each of your requests fits beside those that run. They also have to fit beside each "
            "other.",
        ),
        Mistake(
            "one a step",
            ("return taken", "return taken[:1]"),
            "You stop behind the first one that you admit.",
        ),
        Mistake(
            "tokens added up",
            [
                ("-(-(prompt + most - 1) // page)", "prompt + most - 1"),
                ("room = free - ", "room = free * page - "),
                (" - held", " - held * page"),
                ("spare if", "spare * page if"),
            ],
            "You add up tokens and divide at the end. Blocks are not shared out: each request has "
            "a last one of its own.",
        ),
    ],
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
    hints=(
        "In the example, how many blocks are neither held nor promised before anybody is "
        "admitted? Then work it again with nobody running: how many blocks must the first request "
        "leave, and how many the second?",
        "Each request needs `prompt + max_tokens − 1` tokens, rounded up to blocks by itself. "
        "Start from the free blocks and subtract what the running requests need beyond what they "
        "hold. Subtract the need of each waiting request in turn, and stop at the first for which "
        "no slot is left or after which fewer than `spare` blocks remain. The first request on an "
        "idle server may leave none.",
        "`room = free - sum(-(-(prompt + most - 1) // page) - held for prompt, most, held, _ in "
        "running)` is the number of blocks that nobody holds or was promised, where `most` is "
        "`max_tokens`. An admission must leave `spare if running or taken else 0` of them, where "
        "`taken` lists the places admitted so far.",
    ),
)
