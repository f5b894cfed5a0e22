"""Timelines of a server, and the policy that made them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.drawing import kept, separating
from labcore.exercises.topics.inflight.engine import Engine, Job, run

__all__ = ["NAMES", "POLICY", "some_timeline"]

NAMES = ("static", "no evict", "max utilization", "prefill first")
_Timeline = Sequence[tuple[Sequence[str], Mapping[str, int], Sequence[str]]]


def policy_of(timeline: _Timeline, prompts: Mapping[str, int], slots: int, half: bool) -> str:
    """The name of the policy that admitted, read and preempted so."""
    del slots, half
    times = [name for names, _, _ in timeline for name in names]
    if len(times) > len(set(times)):
        return "max utilization"
    running: dict[str, int] = {}
    beside = False
    for admitted, reads, ended in timeline:
        beside = beside or bool(admitted and running)
        running |= dict.fromkeys(admitted, 0)
        for name, read in running.items():
            if read >= prompts[name] and name not in reads:
                return "prefill first"
            running[name] += reads.get(name, 0)
        for name in ended:
            del running[name]
    return "no evict" if beside else "static"


def _stalls(fault: str, timeline: _Timeline, prompts: Mapping[str, int]) -> bool:
    """Whether one that runs, in a mistake's opinion, is left out of a step."""
    running: dict[str, int] = {}
    for admitted, reads, ended in timeline:
        for name in admitted:
            running.setdefault(name, 0)
        for name, read in running.items():
            needed = 0 if fault == "waiting for a chunk" else prompts[name]
            if read >= needed and name not in reads:
                return True
            running[name] += reads.get(name, 0)
        for name in ended:
            running.pop(name, None)
    return False


def _alone(timeline: _Timeline, prompts: Mapping[str, int]) -> bool:
    """Whether a step reads prompts and no output."""
    done = dict.fromkeys(prompts, 0)
    for _, reads, _ in timeline:
        outputs = [name for name in reads if done[name] >= prompts[name]]
        if reads and not outputs:
            return True
        for name, count in reads.items():
            done[name] += count
    return False


def _mixed(timeline: _Timeline, prompts: Mapping[str, int]) -> bool:
    """Whether a step reads a prompt beside an output."""
    done = dict.fromkeys(prompts, 0)
    for _, reads, _ in timeline:
        outputs = sum(done[name] >= prompts[name] for name in reads)
        if 0 < outputs < len(reads):
            return True
        for name, count in reads.items():
            done[name] += count
    return False


def _beside(fault: str, timeline: _Timeline) -> bool:
    """Whether one is admitted while others run, in a mistake's opinion."""
    running: set[str] = set()
    found = []
    late: Sequence[str] = ()
    for admitted, _, ended in timeline:
        if admitted:
            found.append(bool(running))
        running |= set(admitted)
        gone = late if fault == "ended a step later" else ended
        running -= set(gone)
        late = ended
    if fault == "second admission alone":
        return any(found[1:2])
    return any(found)


def _wrongly(fault: str) -> Callable[..., str]:
    def answer(timeline: _Timeline, prompts: Mapping[str, int], slots: int, half: bool) -> str:
        del half
        times = [name for names, _, _ in timeline for name in names]
        again = len(times) > len(set(times))
        stalls = _stalls(fault, timeline, prompts)
        if fault == "prompts alone":
            stalls = _alone(timeline, prompts)
        beside = _beside(fault, timeline)
        sizes = [len(names) for names, _, _ in timeline if names]
        if fault == "several at once":
            beside = max(sizes) == 1
        if fault == "all slots at once":
            beside = max(sizes) < slots
        if fault == "outputs beside prompts":
            beside = _mixed(timeline, prompts)
        if fault == "second time unseen":
            again = False
        if fault == "every gap a preemption":
            again = again or stalls
        if again:
            return "max utilization"
        if stalls:
            return "prefill first"
        return "no evict" if beside else "static"

    return answer


_HINTS = {
    "waiting for a chunk": "You take for a stalled output what is a prompt that has not been read: "
    "where the budget is spent its next chunk waits a step, whatever the policy is.",
    "prompts alone": "You look for steps that read prompts alone. Where nobody has said anything "
    "yet, such a step holds nobody up.",
    "ended a step later": "With you a request still runs in the step behind its last one. Its slot "
    "is free then, and an admission is beside nobody.",
    "second admission alone": "You look at two admissions. An idle server has nobody to admit "
    "beside, whatever the policy is.",
    "several at once": "You take requests that come in together for a static batch. A burst of "
    "arrivals does the same.",
    "all slots at once": "You recognize a static batch by its size. The last one need not be "
    "full, and a server that was idle fills its slots in one step.",
    "outputs beside prompts": "You take steps that read prompts beside outputs for admissions. In "
    "a static batch, too, one prompt may be read before another.",
    "second time unseen": "You see a request stand still that had lost its place. Look how it "
    "comes back.",
    "every gap a preemption": "You see a preemption where a request only stands still. It keeps "
    "its place, and goes on where it was.",
}
_WRONG = {name: _wrongly(name) for name in _HINTS}


def _jobs(chance: random.Random, count: int, page: int) -> list[Job]:
    arrival, jobs = 0, []
    for number in range(count):
        output = chance.randint(1, 14)
        prompt = tuple(chance.choices(range(100), k=chance.randint(2, 5 * page)))
        most = output + chance.choice((0, 0, chance.randint(1, 12)))
        job = Job(id=f"r{number}", arrival=arrival, prompt=prompt, output=output, most=most)
        jobs.append(job)
        arrival += chance.choice((0, 0, 0, 1, 2, chance.choice((4, 25))))
    return jobs


def some_timeline(chance: random.Random, policy: str, *, slots: int = 0) -> dict[str, Any]:
    """A run of a small server under `policy`; slots: of the server, 0 for a number drawn."""
    page = chance.choice((4, 8))
    jobs = _jobs(chance, chance.randint(9, 16), page)
    longest = max(len(job.prompt) + job.most for job in jobs)
    engine = Engine(
        policy=policy,
        slots=slots or chance.randint(2, 5),
        page=page,
        pages=-(-longest // page) + chance.randint(1, 9),
        budget=chance.randint(8, 40),
        chunk=chance.choice((8, 16, 40)),
        sharing=False,
    )
    _, steps = run(engine, jobs)
    timeline = [(list(one.admitted), one.reads, list(one.ended)) for one in steps]
    prompts = {job.id: len(job.prompt) for job in jobs}
    return {"timeline": timeline, "prompts": prompts, "slots": engine.slots, "half": False}


def _one(chance: random.Random) -> dict[str, Any]:
    """A timeline that shows what its policy is known by."""
    policy = chance.choice(NAMES)
    while True:
        case = some_timeline(chance, policy)
        if policy_of(**case) == policy:
            return case


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return separating(lambda: _one(chance), [policy_of, *_WRONG.values()], least=8)


POLICY = Exercise(
    id="inflight.policy",
    reference=policy_of,
    mistakes=[Mistake(name, _WRONG[name], hint) for name, hint in _HINTS.items()],
    cases=_cases,
    explanation="Each policy is known by what another one never does, and it takes one such moment "
    "to rule the others out. A request that is admitted twice has lost its blocks between: only "
    "preemption does that. One that has begun its output, keeps its slot and reads nothing was "
    "passed over for a prompt; under one token budget outputs come first, and only prompts wait. "
    "An admission beside a running request is what a static batch never has. The converse of each "
    "proves nothing: a quiet hour shows no preemption, no stall, and admissions to an empty server "
    "only, under every policy. The timelines here are long enough to show what they must. This "
    "reference knows four policies.",
)
