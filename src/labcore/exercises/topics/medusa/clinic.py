"""Diagnose six trainings of Medusa heads, and the decoders that use them, by their curves."""

from __future__ import annotations

import functools

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.medusa.engine import CHECKPOINTS, EVERY, REQUESTS, Engine, run

__all__ = ["CLINIC", "audit"]


def _observe(engine: Engine) -> dict[str, list[float]]:
    log = run(engine)
    return {
        "hits of the first head": log.hits[:, 0].tolist(),
        "hits of the last head": log.hits[:, -1].tolist(),
        "tokens a request and step": log.tokens.tolist(),
        "greedy outputs that differ": log.differing.tolist(),
    }


def audit(student: int = 0) -> dict[str, str]:
    """Say how each patient's last outputs differ from plain decoding: patient -> sentence."""
    said = {}
    for label, name in CLINIC.diagnoses(student).items():
        log = run(CLINIC.faults[name].make())
        first, now, longer = (
            round(float(column[-1]) * REQUESTS)
            for column in (log.differing, log.drifted, log.longer)
        )
        said[label] = f"none of {REQUESTS} outputs differs from plain decoding."
        if first:
            said[label] = (
                f"{first} of {REQUESTS} outputs differ from plain decoding by the backbone before "
                f"the training, {now or 'none'} from plain decoding by its weights of now."
            )
        if longer:
            said[label] += f" {longer} of them are the plain output with more behind it."
    return said


CLINIC = Clinic(
    id="medusa.clinic",
    points=6,
    healthy=Engine,
    faults={
        "all heads are one module": Fault(
            make=functools.partial(Engine, shared=True),
            symptom="the first head hits somewhat less than the healthy one, and the last head "
            "gets worse where the healthy one gets better: one set of weights can say one thing, "
            "and the first head's loss weighs most. Tokens a step rise less. The outputs are the "
            "backbone's.",
        ),
        "labels one place early": Fault(
            make=functools.partial(Engine, early=True),
            symptom="in its log every head hits more than the healthy one, the first from the "
            "start on: it learns what the backbone's own head says. Hardly any node is accepted, "
            "as drafts say the token before the one that is asked for. The outputs are the "
            "backbone's.",
        ),
        "the backbone is trained too": Fault(
            make=functools.partial(Engine, thawed=True),
            symptom="nearly all outputs differ as soon as training has begun, while they "
            "are those of plain decoding by the weights of now: judge and plain decoder have "
            "drifted away together. The heads hit at least as well as the healthy ones.",
        ),
        "heads read the state one token back": Fault(
            make=functools.partial(Engine, stale=True),
            symptom="the training's log is the healthy one to the last digit, and hardly any node "
            "is accepted: what is wrong happens in decoding alone. The outputs are the backbone's.",
        ),
        "siblings see each other": Fault(
            make=functools.partial(Engine, siblings=True),
            symptom="the training's log is the healthy one. Most outputs differ, also from plain "
            "decoding by the weights of now, and tokens a step are fewer: the judge has tokens of "
            "other paths in its past.",
        ),
        "outputs not cut at their end": Fault(
            make=functools.partial(Engine, uncut=True),
            symptom="the training's log is the healthy one, tokens a step are a few more, and a "
            "part of the outputs differ: all of these are the plain ones with more behind. Only an "
            "end that was drafted has something behind it in its block.",
        ),
    },
    observe=_observe,
    axis=range(0, CHECKPOINTS * EVERY, EVERY),
    explanation="Three places can be wrong. The training's log tells only whether heads learn what "
    "they are given: labels that are easier than they should be make it look better. Tokens a "
    "step tell whether the drafts are of use; a fault in heads or their input costs these alone, "
    "as the backbone judges, and no test of the output finds it. Outputs tell whether the judge is "
    "sound: the mask, the cut, and the weights themselves. Compare with the backbone as it was, "
    "since two programs that use the same drifted weights agree with each other.",
)
