"""Diagnose five faulty servers with in-flight batching from their curves."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.inflight.engine import Engine, Job, Server, Step, alone

__all__ = ["CLINIC", "REQUESTS", "STEPS", "Log", "jobs", "observe", "report"]

REQUESTS, STEPS = 120, 180
BURST, EVERY = 24, 33  # requests per burst, and steps between bursts
BEGINNING = 40  # tokens of the prefix that the requests of a burst share
LONGEST = 36  # output tokens
PATIENCE = (12, 50, 50)  # steps from arrival to deadline
SEED = 76


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Hold what a server did in STEPS steps."""

    server: Server
    steps: list[Step]


@functools.cache
def jobs() -> tuple[Job, ...]:
    """Return REQUESTS requests in bursts; the requests of a burst share a prefix."""
    chance = random.Random(SEED)
    made = []
    beginning: tuple[int, ...] = ()
    for number in range(REQUESTS):
        if number % BURST == 0:
            beginning = tuple(chance.choices(range(500), k=BEGINNING))
        arrival = number // BURST * EVERY + chance.choice((0, 0, 1, 2, 3, 9))
        own = tuple(chance.choices(range(500), k=chance.randint(2, 14)))
        made.append(
            Job(
                id=f"r{number}",
                arrival=arrival,
                prompt=(*beginning, *own),
                output=min(2 + int(chance.expovariate(1 / 10)), LONGEST),
                most=LONGEST,
                deadline=arrival + chance.choice(PATIENCE),
            )
        )
    return tuple(made)


@functools.cache
def observe(engine: Engine) -> Log:
    """Run a server for STEPS steps."""
    server = Server(engine, jobs())
    return Log(server=server, steps=[server.step() for _ in range(STEPS)])


def _curves(engine: Engine) -> dict[str, list[float]]:
    log = observe(engine)
    curves: dict[str, list[float]] = {
        "free blocks": [],
        "running requests": [],
        "preemptions so far": [],
        "correct outputs": [],
    }
    right = ended = preempted = 0
    truth = {job.id: alone(job) for job in jobs()}
    for step in log.steps:
        preempted += len(step.preempted)
        ended += len(step.ended)
        right += sum(log.server.outputs[name] == truth[name] for name in step.ended)
        share = right / ended if ended else 1.0
        values = (step.spare, step.running, preempted, share)
        for curve, value in zip(curves.values(), values, strict=True):
            curve.append(float(value))
    return curves


def report(student: int = 0) -> dict[str, str]:
    """Patient -> a sentence on how its requests ended."""
    sentences = {}
    deadlines = {job.id: job.deadline for job in jobs()}
    for label, name in CLINIC.diagnoses(student).items():
        log = observe(CLINIC.faults[name].make())
        first: dict[str, int] = {}
        for at, step in enumerate(log.steps):
            for one in step.admitted:
                first.setdefault(one, at)
        expired = [one for step in log.steps for one in step.expired]
        queued = sum(one not in first for one in expired)
        late = sum(first[one] >= deadlines[one] for one in expired if one in first)
        sentences[label] = (
            f"{len(log.server.outputs)} requests finished, and {len(expired)} were cut off by "
            f"their deadline. Of these {len(expired)}, {queued} had never been admitted, and "
            f"{late} were first admitted after their deadline."
        )
    return sentences


CLINIC = Clinic(
    id="inflight.clinic",
    points=5,
    healthy=Engine,
    faults={
        "a request leaves a block behind": Fault(
            make=functools.partial(Engine, leaky=True),
            symptom="the number of free blocks falls from burst to burst, until too few are left "
            "for anyone and requests reach their deadlines in the queue. When all requests are "
            "gone, blocks are missing. The outputs that finish are right.",
        ),
        "blocks are shared before they are written": Fault(
            make=functools.partial(Engine, early=True),
            symptom="some outputs are wrong, from the first burst on, and nothing else is worse "
            "than in the healthy server. Requests that arrive together share a prefix that one of "
            "them is still reading, so the others read the blocks' old contents.",
        ),
        "a victim keeps its blocks": Fault(
            make=functools.partial(Engine, clinging=True),
            symptom="preemptions come several at a time and far more often than in the healthy "
            "server, and each time most of the running requests are gone: a victim's blocks stay "
            "taken, so the next request must go too. When all requests have ended, all blocks are "
            "free.",
        ),
        "ended requests keep their slots": Fault(
            make=functools.partial(Engine, batched=True),
            symptom="running requests fall one by one, often down to a single one, and only then "
            "rise again all at once. Few are preempted, and many reach their deadlines in the "
            "queue while slots are idle.",
        ),
        "deadlines are ignored in the queue": Fault(
            make=functools.partial(Engine, undated=True),
            symptom="the curves are nearly those of the healthy server. But no request ends in the "
            "queue: those whose deadline has passed are admitted, read a chunk for nobody, and end "
            "in their next step.",
        ),
    },
    observe=_curves,
    axis=range(STEPS),
    explanation="Counting blocks is the quickest test of a pool: when nothing runs, every block is "
    "free or cached. A leak of one block per request shows there long before anybody notices it. "
    "Compare outputs with those of the request alone, because a server that shares unwritten "
    "blocks is as fast as a sound one and never fails. Count preemptions together with what they "
    "freed: a victim that frees nothing loses its work and forces the next preemption. The number "
    "of running requests separates iteration-level scheduling from a static batch at a glance. And "
    "check deadlines wherever a request may wait; otherwise, the server works hardest, in its "
    "worst hour, for clients that have left.",
)
