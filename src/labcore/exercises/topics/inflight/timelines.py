"""Name the policy that made a timeline of a server."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.engine import Engine, Job, run

__all__ = ["NAMES", "POLICY", "some_timeline"]

NAMES = ("static", "no evict", "max utilization", "prefill first")
_Timeline = Sequence[tuple[Sequence[str], Mapping[str, int], Sequence[str]]]


def policy_of(timeline: _Timeline, prompts: Mapping[str, int], slots: int, half: bool) -> str:
    """Return the name of the policy that made this timeline."""
    del slots, half
    times = [name for names, _, _ in timeline for name in names]
    if len(times) > len(set(times)):
        return "max utilization"
    beside: list[bool] = []
    running: dict[str, int] = {}
    for admitted, reads, ended in timeline:
        if admitted:
            beside.append(bool(running))
        running |= dict.fromkeys(admitted, 0)
        for name, read in running.items():
            if read >= prompts[name] and name not in reads:
                return "prefill first"
            running[name] += reads.get(name, 0)
        for name in ended:
            del running[name]
    return "no evict" if any(beside) else "static"


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
    """Run a small server under `policy`; `slots=0` draws the number of slots."""
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
    """Draw a timeline that identifies its policy."""
    policy = chance.choice(NAMES)
    while True:
        case = some_timeline(chance, policy)
        if policy_of(**case) == policy:
            return case


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    wrong = (function for function, _ in POLICY.wrong.values())
    return separating(lambda: _one(chance), [policy_of, *wrong], least=8)


POLICY = Exercise(
    id="inflight.policy",
    points=5,
    beyond=2,
    reference=policy_of,
    mistakes=[
        Mistake(
            "waiting for a chunk",
            ("read >= prompts[name] and ", ""),
            "You mistake a prompt that is not fully read for a stalled output. When the budget "
            "is used up, a prompt's next chunk waits for a step under every policy.",
        ),
        Mistake(
            "prompts alone",
            (
                "read >= prompts[name] and name not in reads",
                "reads and all(running[one] < prompts[one] for one in reads)",
            ),
            "You look for steps that read only prompts. If no output has started yet, such a "
            "step stalls nobody.",
        ),
        Mistake(
            "ended a step later",
            [
                ("bool(running)", "bool(running or late)"),
                ("    running: dict[str, int] = {}", "    running, late = {}, []"),
                ("        for name in ended:", "        late = ended\n        for name in ended:"),
            ],
            "You count a request as running in the step after its last one. Its slot is free by "
            "then, and an admission is not beside it.",
        ),
        Mistake(
            "second admission alone",
            ("any(beside)", "any(beside[1:2])"),
            "You look at the second admission only. The server may be idle then, whatever the "
            "policy is.",
        ),
        Mistake(
            "several at once",
            ("any(beside)", "max(len(names) for names, _, _ in timeline) == 1"),
            "You take requests that are admitted together for a static batch. A burst of "
            "arrivals looks the same.",
        ),
        Mistake(
            "all slots at once",
            [
                ("del slots, half", "del half"),
                ("any(beside)", "max(len(names) for names, _, _ in timeline) < slots"),
            ],
            "You recognize a static batch by its size. Its last batch need not be full, and "
            "under any policy an idle server can fill its slots in one step.",
        ),
        Mistake(
            "outputs beside prompts",
            (
                "if admitted:\n            beside.append(bool(running))",
                "outputs = [name for name in reads if running.get(name, 0) >= prompts[name]]\n"
                "        beside.append(0 < len(outputs) < len(reads))",
            ),
            "You take steps that read prompts alongside outputs for admissions. In a static "
            "batch, too, one prompt may be finished before another.",
        ),
        Mistake(
            "second time unseen",
            [
                ("len(times) > len(set(times))", "False"),
                (
                    "running |= dict.fromkeys(admitted, 0)",
                    "running = dict.fromkeys(admitted, 0) | running",
                ),
            ],
            "You see a stalled output where a request was preempted. Look at how it comes back.",
        ),
        Mistake(
            "every gap a preemption",
            ("prefill first", "max utilization"),
            "You see a preemption where a request only stalls. It keeps its slot and continues "
            "where it stopped.",
        ),
    ],
    cases=_cases,
    explanation="Look for moments that a policy never has, because one such moment rules it out. A "
    "request that is admitted twice has lost its blocks in between, and only preemption does that. "
    "A request that has started its output, keeps its slot, and reads nothing was passed over for "
    "a prompt; under the other policies outputs come first, and only prompts wait. A static batch "
    "never has an admission beside a running request. The absence of such a moment proves nothing: "
    "in a quiet hour, every policy shows no preemption, no stall, and only admissions to an empty "
    "server. The timelines here are long enough to show what they must. This reference handles "
    "four policies.",
    hints=(
        "For each pair of policies, write down a moment that separates the two. Two things look "
        "alike but differ: a prompt that waits for its next chunk, and an output that stalls.",
        "A request that is admitted twice means max utilization, so look for this first. Then go "
        "through the steps with the running requests and what each has read. One that has read "
        "its whole prompt and reads nothing in a step means prefill first. If there is neither, "
        "an admission while others run means no evict, and its absence means static.",
        "`read >= prompts[name] and name not in reads` finds a stalled output, where `read` is "
        "what a running request has read before this step. See who runs before you add "
        "`admitted`, and remove `ended` at the end of the step.",
    ),
)
