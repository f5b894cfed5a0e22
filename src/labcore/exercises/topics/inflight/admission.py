"""Decide which queued requests a server admits when it never preempts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

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
    """Return the indices in `waiting` of the requests admitted before the next step."""
    del families

    def longest(prompt: int, most: int) -> int:
        return -(-(prompt + most - 1) // page)

    room = free - sum(longest(prompt, most) - held for prompt, most, held, _ in running)
    taken: list[int] = []
    for index, (prompt, most, _) in enumerate(waiting):
        room -= longest(prompt, most)
        least = spare if running or taken else 0
        if len(running) + len(taken) == slots or room < least:
            break
        taken.append(index)
    return taken


def _lengths(chance: random.Random, page: int) -> tuple[int, int]:
    """Draw a prompt length and an output limit that often just fill a block or just overflow it."""
    prompt = chance.randint(1, 5 * page)
    most = chance.randint(1, 5 * page)
    if chance.random() < 0.5:
        most += -(prompt + most - 1) % page + chance.randint(0, 1)
    return prompt, most


def some_queue(
    chance: random.Random, families: Mapping[str, int] | None = None, *, rows: int = 4
) -> dict[str, Any]:
    """Draw up to `rows` running requests, a longer queue, and an almost fully promised pool."""
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
            "You round the number of blocks down. The remaining tokens need a block too, even if "
            "they don't fill it.",
        ),
        Mistake(
            "prompt alone",
            ("room -= longest(prompt, most)", "room -= longest(prompt, 1)"),
            "You count only a waiting request's prompt. The server never preempts it, so it "
            "needs room for everything it may still generate.",
        ),
        Mistake(
            "promises forgotten",
            ("in running)", "in ())"),
            "You count all free blocks. Some of them are promised to running requests that have "
            "not needed them yet.",
        ),
        Mistake(
            "held ones promised again",
            (" - held", ""),
            "You subtract the total need of the running requests from the free blocks. They "
            "already hold part of it, and that part is not free.",
        ),
        Mistake(
            "last token stored",
            ("prompt + most - 1", "prompt + most"),
            "You reserve room for one token too many: the last token is drawn but never read.",
        ),
        Mistake(
            "spare forgotten",
            ("spare if running or taken else 0", "0"),
            "You give away the last block. An admission must leave some blocks.",
        ),
        Mistake(
            "spare always",
            (" if running or taken else 0", ""),
            "Your first request must leave spare blocks even if nothing runs. A large request "
            "would wait forever next to an empty pool.",
        ),
        Mistake(
            "first batch spares none",
            (" or taken", ""),
            "On an idle server, you let all new requests take the spare blocks. Only the first "
            "one may. Once it is admitted, the server is no longer idle.",
        ),
        Mistake(
            "head passed over",
            (
                "            break",
                "            room += longest(prompt, most)\n            continue",
            ),
            "If the next request doesn't fit, you admit a later one. A large request could then "
            "wait as long as small ones keep coming.",
        ),
        Mistake(
            "slots unseen",
            ("len(running) + len(taken) == slots or ", ""),
            "You admit more requests than there are slots.",
        ),
        Mistake(
            "each by itself",
            ("taken.append(index)", "taken.append(index)\n        room += longest(prompt, most)"),
            "Each of your requests fits beside the running ones. The admitted requests must also "
            "fit together.",
        ),
        Mistake(
            "one per step",
            ("return taken", "return taken[:1]"),
            "You stop after the first request that you admit.",
        ),
        Mistake(
            "tokens added up",
            [
                ("-(-(prompt + most - 1) // page)", "prompt + most - 1"),
                ("room = free - ", "room = free * page - "),
                (" - held", " - held * page"),
                ("spare if", "spare * page if"),
            ],
            "You add up tokens and divide at the end. Requests don't share blocks here, so each "
            "one rounds up separately.",
        ),
    ],
    cases=_cases,
    variant=_own_spare,
    explanation="A request that is never preempted must be admitted with room for the longest that "
    "it may become: prompt + max_tokens − 1 tokens, because the last token is drawn but never "
    "read. What the running requests were promised is counted the same way, except that the blocks "
    "that they hold have already left the free ones. Each request is rounded up separately, "
    "because no block has two owners. The queue stops at the first request that doesn't fit. Its "
    "wait is bounded, because the running requests end and nobody overtakes it. The price is that "
    "most promises are never used, so blocks stay empty for outputs that end early. This reference "
    "shares no prefixes.",
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
        "`taken` lists the indices admitted so far.",
    ),
)
