"""Diagnose five faulty servers that stream completions from their curves."""

from __future__ import annotations

import functools

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.capstone.streaming import Server, judged, requests

__all__ = ["CLINIC", "EVERY", "PLACES", "REQUESTS", "STEPS"]

REQUESTS, EVERY, PLACES, STEPS = 48, 4, 6, 250
SEED = 8


def _server(*, clinging: bool = False, **faults: bool) -> Server:
    coming = requests(REQUESTS, EVERY, SEED)
    return Server(coming=coming, places=PLACES, faults=faults, clinging=clinging)


def _curves(server: Server) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = {
        "wrong characters so far": [],
        "missing characters so far": [],
        "bytes held back per request": [],
        "requests in the queue": [],
    }
    wrong = missing = held = running = ended = 0
    for _ in range(STEPS):
        server.step()
        for row in server.ended[ended:]:
            more, lost = judged(row)
            wrong, missing, ended = wrong + more, missing + lost, ended + 1
        held += sum(row.sender.held_bytes for row in server.running)
        running += len(server.running)
        values = (wrong, missing, held / max(running, 1), len(server.queue))
        for curve, value in zip(curves.values(), values, strict=True):
            curve.append(float(value))
    return curves


CLINIC = Clinic(
    id="capstone.clinic",
    points=5,
    healthy=_server,
    faults={
        "the stop text is looked for in each token alone": Fault(
            make=functools.partial(_server, alone=True),
            symptom="clients get many characters that don't belong, and the queue grows: most stop "
            "texts come in two tokens or more, so nobody sees them, and the request goes on to its "
            "longest length. Nothing is missing.",
        ),
        "nothing is held back for a stop text": Fault(
            make=functools.partial(_server, eager=True),
            symptom="clients get a few characters that don't belong, at most two per completion. "
            "Requests still end at their stop text, so the queue is the healthy one. Fewer bytes "
            "are held back, and nothing is missing.",
        ),
        "each token is decoded by itself": Fault(
            make=functools.partial(_server, bytewise=True),
            symptom="characters are wrong and others are missing, in all kinds of completions: a "
            "character of several bytes that is split between two tokens comes as two or more "
            "replacement characters. The queue is the healthy one.",
        ),
        "held text is dropped at the end": Fault(
            make=functools.partial(_server, forgetful=True),
            symptom="a few characters are missing, at most two per completion, and none is wrong. "
            "All the rest is healthy: the text that was held back is lost only if the tokens end "
            "before it turns out to be no stop text.",
        ),
        "a client that left keeps its place": Fault(
            make=functools.partial(_server, clinging=True),
            symptom="the queue grows, though every client that stays gets the right text: some "
            "places are taken by completions that nobody reads.",
        ),
    },
    observe=_curves,
    axis=range(1, STEPS + 1),
    explanation="A server that streams knows less than one that answers at the end: it must decide "
    "about each piece of text before it knows the next one. Bytes wait until they make a "
    "character, and characters wait while they may be the beginning of a stop text. What waits "
    "must be sent when the tokens end. Tests with short English answers find none of these "
    "faults, because there a character is a byte and a stop text often fits into one token. A "
    "queue that grows while all texts are right points to places that are taken by nobody.",
)
