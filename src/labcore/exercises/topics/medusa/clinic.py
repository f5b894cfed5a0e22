"""Diagnose six training runs of Medusa heads, and their decoders, from the curves."""

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
        "tokens per request and step": log.tokens.tolist(),
        "greedy outputs that differ": log.differing.tolist(),
    }


def audit(student: int = 0) -> dict[str, str]:
    """Patient -> a sentence on how its last outputs differ from plain decoding."""
    sentences = {}
    for label, name in CLINIC.diagnoses(student).items():
        log = run(CLINIC.faults[name].make())
        first, now, longer = (
            round(float(column[-1]) * REQUESTS)
            for column in (log.differing, log.drifted, log.longer)
        )
        sentences[label] = f"none of {REQUESTS} outputs differs from plain decoding."
        if first:
            sentences[label] = (
                f"{first} of {REQUESTS} outputs differ from plain decoding by the backbone before "
                f"training, and {now or 'none'} from plain decoding by its current weights."
            )
        if longer:
            sentences[label] += f" {longer} of them are the plain output followed by more tokens."
    return sentences


CLINIC = Clinic(
    id="medusa.clinic",
    points=6,
    healthy=Engine,
    faults={
        "all heads are one module": Fault(
            make=functools.partial(Engine, shared=True),
            symptom="the first head hits somewhat less often than the healthy one, and the last "
            "head gets worse where the healthy one gets better: one set of weights can make only "
            "one prediction, and the first head's loss has the largest weight. Tokens per step "
            "rise less. The outputs are the backbone's.",
        ),
        "labels one position early": Fault(
            make=functools.partial(Engine, early=True),
            symptom="in the log, every head hits more often than the healthy one, the first from "
            "step 0 on: it learns what the backbone's own head predicts. Hardly any node is "
            "accepted, because each draft token belongs one position earlier. The outputs are the "
            "backbone's.",
        ),
        "the backbone is trained too": Fault(
            make=functools.partial(Engine, thawed=True),
            symptom="nearly all outputs differ as soon as training begins, yet they match plain "
            "decoding by the current weights: verifier and plain decoder have drifted together. "
            "The heads hit at least as often as the healthy ones.",
        ),
        "heads read the state one token back": Fault(
            make=functools.partial(Engine, stale=True),
            symptom="the training log matches the healthy one to the last digit, but hardly any "
            "node is accepted: the fault is in decoding alone. The outputs are the backbone's.",
        ),
        "siblings see each other": Fault(
            make=functools.partial(Engine, siblings=True),
            symptom="the training log matches the healthy one. Most outputs differ, even from "
            "plain decoding by the current weights, and there are fewer tokens per step: the "
            "verifier attends to tokens of other paths.",
        ),
        "outputs not cut at their end": Fault(
            make=functools.partial(Engine, uncut=True),
            symptom="the training log matches the healthy one, there are slightly more tokens per "
            "step, and some outputs differ: each of these is the plain output followed by more "
            "tokens. This happens only if the end token was drafted, because nothing follows the "
            "verifier's own token in a block.",
        ),
    },
    observe=_observe,
    axis=range(0, CHECKPOINTS * EVERY, EVERY),
    explanation="Three things can go wrong. The training log shows only whether heads learn what "
    "they are given: labels that are easier than they should be make it look better. Tokens per "
    "step show whether the drafts are useful. A fault in the heads or their input costs only "
    "these, because the backbone verifies every token, and no test of the output finds it. Outputs "
    "show whether the verifier is sound: the mask, the cut, and the weights themselves. Compare "
    "with the backbone as it was, because two programs that use the same drifted weights agree.",
)
