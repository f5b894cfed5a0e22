"""Five speculative decoders and their logs: four have a fault, and one only seems to."""

from __future__ import annotations

import functools

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.speculative.engine import BLOCKS, REQUESTS, Engine, run

__all__ = ["CLINIC", "audit"]


def _observe(engine: Engine) -> dict[str, list[float]]:
    log = run(engine)
    return {
        "accepted of the drafted": log.accepted.tolist(),
        "tokens delivered a request": log.delivered.tolist(),
        "total variation from the target": log.distance.tolist(),
        "greedy outputs that differ": log.differing.tolist(),
    }


def audit(student: int = 0) -> dict[str, str]:
    """Patient -> a sentence on how its greedy outputs differ from plain greedy decoding."""
    said = {}
    for label, name in CLINIC.diagnoses(student).items():
        log = run(CLINIC.faults[name].make())
        count = round(float(log.differing[-1]) * REQUESTS)
        said[label] = f"none of {REQUESTS} greedy outputs differs from plain decoding."
        if count:
            said[label] = (
                f"{count} of {REQUESTS} greedy outputs differ from plain decoding. At the first "
                "difference the plain target's logits of the two tokens lie at most "
                f"{log.gap:.2g} apart."
            )
    return said


CLINIC = Clinic(
    id="speculative.clinic",
    points=5,
    healthy=Engine,
    faults={
        "the residual goes through a softmax": Fault(
            make=functools.partial(Engine, softmaxed=True),
            symptom="the tokens delivered are not the target's: their total variation stands far "
            "above what chance leaves, from the first block on. Greedy outputs differ too, and by "
            "large gaps: what is left of a sure target is one token with the share 1, and a "
            "softmax makes it one of many.",
        ),
        "the draft's cache lacks a token after a full acceptance": Fault(
            make=functools.partial(Engine, hole=True),
            symptom="the first block is as good as the healthy one; then fewer and fewer drafted "
            "tokens are accepted, as more and more requests have had a block that was accepted as "
            "a whole. The tokens delivered are the target's, and greedy outputs do not differ: the "
            "target judges, and its cache is right.",
        ),
        "temperature for the target alone": Fault(
            make=functools.partial(Engine, unlike=True),
            symptom="fewer drafted tokens are accepted, by about as much in each block from the "
            "first one on. The tokens delivered are the target's: a draft may come from any "
            "distribution as long as it is judged with the one it was drawn from.",
        ),
        "finished requests go on and are counted": Fault(
            make=functools.partial(Engine, past_end=True),
            symptom="the share of accepted tokens rises with every block, above the healthy one, "
            "while fewer tokens are delivered for each request that is computed. Behind the end "
            "both models say the end again, and agree on it.",
        ),
        "no fault, only near ties in bfloat16": Fault(
            make=functools.partial(Engine, narrow=True),
            symptom="acceptance, tokens and their distribution are as in the healthy run; a few "
            "greedy outputs differ, and at the first difference the two tokens' logits lie within "
            "the rounding of bfloat16. A forward over several tokens "
            "adds up in another order than one over one token.",
        ),
    },
    observe=_observe,
    axis=range(1, BLOCKS + 1),
    unit="block",
    noise={"total variation from the target": 0.02},
    explanation="Each number of a log answers one question. Total variation: is it the target's "
    "text? Greedy outputs: is it the target's to the token, and where it is not, was there a "
    "choice? Acceptance: is the draft as good as it was at the start of a request? Tokens "
    "delivered: is it of any use? A fault on the draft's side costs speed and never the "
    "distribution, so tests of the output do not find it; a fault in the verifier need not cost "
    "any speed. And a rate that rises by itself counts something that nobody asked for. In the "
    "table model the draft's lost token shifts its place in the line; in a transformer it is a "
    "slot that nobody wrote, or positions that are off by one (vLLM issues 5765 and 9730; the rate "
    "behind the end: 56101).",
)
