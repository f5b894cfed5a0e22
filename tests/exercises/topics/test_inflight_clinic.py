"""The small server of the clinic and the timelines: as labcore's own, and with a fault each."""

from __future__ import annotations

import random
import re

import pytest

from labcore.decoding import SamplingConfig
from labcore.exercises.topics.inflight import CLINIC, clinic, report
from labcore.exercises.topics.inflight.clinic import (
    BEGINNING,
    BURST,
    REQUESTS,
    STEPS,
    jobs,
    observe,
)
from labcore.exercises.topics.inflight.engine import Engine, Job, alone, run
from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.plan import StepResult
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from tests.exercises.notebook import solved, source

SLUG = "inflight"


def some_jobs(seed: int) -> list[Job]:
    chance = random.Random(seed)
    beginning = tuple(chance.choices(range(99), k=20))
    made = []
    for n in range(30):
        shared = beginning[: chance.choice((0, 8, 20))]
        own = tuple(chance.choices(range(99), k=chance.randint(1, 20)))
        output = chance.randint(1, 20)
        arrival, most = n // 4 * 3, output + chance.randint(0, 9)
        # Arrivals differ in the order of the queue, and not in the step.
        made.append(
            Job(id=f"r{n:02}", arrival=arrival, prompt=shared + own, output=output, most=most)
        )
    return made


@pytest.mark.parametrize("policy", ["static", "no evict", "max utilization"])
@pytest.mark.parametrize("sharing", [False, True])
def test_the_small_server_plans_as_labcore_s_scheduler(
    policy: str, sharing: bool, seed: int
) -> None:
    engine = Engine(policy=policy, slots=5, pages=16, page=8, budget=20, chunk=12, sharing=sharing)
    server, trace = run(engine, some_jobs(seed))
    name = {"no evict": "guaranteed_no_evict"}.get(policy, policy.replace(" ", "_"))
    scheduler = Scheduler(
        BlockPool(16, 8), policy=name, max_num_seqs=5, max_num_batched_tokens=20, chunk=12,
        enable_prefix_caching=sharing,
    )  # fmt: skip
    coming = {job.id: job for job in some_jobs(seed)}
    for at, step in enumerate(trace):
        for n, job in enumerate(coming.values()):
            if job.arrival == at:
                config = SamplingConfig(max_tokens=job.most)
                scheduler.add(Request(job.id, job.prompt, config, arrival=job.arrival + n / 99), at)
        plan = scheduler.schedule(float(at))
        reads = {one.id: one.count for one in plan.chunks} | {one.id: 1 for one in plan.decodes}
        assert (reads, plan.admitted, plan.preempted) == (step.reads, step.admitted, step.preempted)
        drawn = [one.id for one in plan.chunks if one.last] + [one.id for one in plan.decodes]
        results = {}
        for id in drawn:
            job, said = coming[id], scheduler.states[id].emitted
            token = alone(job)[said]
            results[id] = StepResult(tokens=(token,), finish="eos" * (said + 1 == job.output))
        scheduler.commit(plan, results, float(at))
        assert scheduler.pool.available == step.spare
    assert scheduler.idle and server.outputs == {id: alone(job) for id, job in coming.items()}


def test_the_patients_show_what_their_symptoms_say() -> None:
    logs = {name: observe(fault.make()) for name, fault in CLINIC.faults.items()}
    healthy = observe(Engine())
    truth = {job.id: alone(job) for job in jobs()}
    pages = Engine().pages

    def share(log: clinic.Log) -> float:
        outputs = log.server.outputs
        return sum(truth[name] == said for name, said in outputs.items()) / len(outputs)

    def preempted(log: clinic.Log) -> list[int]:
        return [len(step.preempted) for step in log.steps]

    assert len(healthy.server.outputs) == 91 and sum(preempted(healthy)) > 5
    for name, log in {**logs, "healthy": healthy}.items():
        assert len(log.steps) == STEPS
        assert (share(log) < 0.9) == (name == "blocks are shared before they are written")
        last = log.steps[-1]
        if not last.running and not last.waiting:
            assert (last.spare < pages) == (name == "a request leaves a block behind")
    clinging = preempted(logs["a victim keeps its blocks"])
    assert sum(clinging) > 2 * sum(preempted(healthy)) and max(clinging) > max(preempted(healthy))
    batched = [step.running for step in logs["ended requests keep their slots"].steps]
    assert batched.count(1) > 3 * [step.running for step in healthy.steps].count(1)
    leaky = logs["a request leaves a block behind"].steps
    assert not leaky[-1].running and leaky[-1].spare < pages / 4
    first: dict[str, int] = {}
    undated = logs["deadlines are ignored in the queue"]
    for at, step in enumerate(undated.steps):
        for name in step.admitted:
            first.setdefault(name, at)
        assert all(name in first for name in step.expired)
    assert sum(first[job.id] >= job.deadline for job in jobs() if job.id in first) > 10


def test_the_report_says_what_became_of_requests(seed: int) -> None:
    words, names = report(seed), CLINIC.diagnoses(seed)
    assert words.keys() == names.keys()
    for label, name in names.items():
        undated = "ignored" in name
        queued, late = re.findall(r", (\d+) had never .* (\d+) were first", words[label])[0]
        assert (queued == "0") == undated
        assert (int(late) > 10) == undated and (late != "0") == undated


def test_the_text_has_the_clinic_s_numbers() -> None:
    text, engine = source(SLUG).read_text("utf-8"), Engine()
    assert f"a server of {engine.slots} slots and {engine.pages} blocks of {engine.page}" in text
    assert f"{REQUESTS} requests come in bursts of {BURST}" in text
    assert f"the same {BEGINNING} tokens" in text and f"each of {STEPS} steps" in text
    assert f"at most {engine.budget} tokens per step, {engine.chunk} of one prompt" in text
    assert "Of the healthy server's requests, 91" in text


def test_the_notebook_s_diagnosis_reads_the_curves(seed: int) -> None:
    names = dict(solved(SLUG))
    for student in (seed, seed + 1, seed + 2):
        names["patients"] = CLINIC.patients(student)
        code = names["diagnose"].__code__
        found = type(names["diagnose"])(code, names)()
        assert CLINIC.check(found, student=student).passed
