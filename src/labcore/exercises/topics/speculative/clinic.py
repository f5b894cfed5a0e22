"""Five speculative decoders and their logs: four have a fault, and one only seems to."""

from __future__ import annotations

import functools

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.speculative.engine import BLOCKS, REQUESTS, Engine, run

__all__ = ["CLINIC", "audit"]


def _observe(engine: Engine) -> dict[str, list[float]]:
    log = run(engine)
    return {
        "acceptance rate": log.accepted.tolist(),
        "tokens delivered per request": log.delivered.tolist(),
        "total variation from the target": log.distance.tolist(),
        "greedy outputs that differ": log.differing.tolist(),
    }


def audit(student: int = 0) -> dict[str, str]:
    """Patient -> a sentence on how its greedy outputs differ from plain greedy decoding."""
    sentences = {}
    for label, name in CLINIC.diagnoses(student).items():
        log = run(CLINIC.faults[name].make())
        count = round(float(log.differing[-1]) * REQUESTS)
        sentences[label] = f"none of {REQUESTS} greedy outputs differs from plain decoding."
        if count:
            sentences[label] = (
                f"{count} of {REQUESTS} greedy outputs differ from plain decoding. At the first "
                "difference, the plain target's logits of the two tokens are at most "
                f"{log.gap:.2g} apart."
            )
    return sentences


CLINIC = Clinic(
    id="speculative.clinic",
    points=5,
    healthy=Engine,
    faults={
        "the residual goes through a softmax": Fault(
            make=functools.partial(Engine, softmaxed=True),
            symptom="the delivered tokens don't follow the target: from the first block on, their "
            "total variation is far above what chance explains. Greedy outputs differ too, and by "
            "large gaps: a sure target's residual is a single token with probability 1, and the "
            "softmax spreads it over all tokens.",
        ),
        "the draft's cache lacks a token after a full acceptance": Fault(
            make=functools.partial(Engine, hole=True),
            symptom="the first block is as good as the healthy one. Then fewer and fewer drafted "
            "tokens are accepted, as more and more requests have had a fully accepted block. The "
            "delivered tokens still follow the target, and greedy outputs don't differ: the "
            "target judges every token, and its cache is right.",
        ),
        "temperature applied to the target only": Fault(
            make=functools.partial(Engine, unlike=True),
            symptom="fewer drafted tokens are accepted, by about the same amount in every block, "
            "from the first one on. The delivered tokens still follow the target: a draft may "
            "come from any distribution, as long as it is judged by the one it was drawn from.",
        ),
        "finished requests keep running and are counted": Fault(
            make=functools.partial(Engine, past_end=True),
            symptom="the acceptance rate rises with every block, above the healthy one, while "
            "fewer tokens are delivered per computed request. After the end token, both models "
            "predict the end token again, so they always agree.",
        ),
        "no fault, only near ties in bfloat16": Fault(
            make=functools.partial(Engine, narrow=True),
            symptom="acceptance, tokens, and their distribution are as in the healthy run. A few "
            "greedy outputs differ, and at the first difference the two tokens' logits are within "
            "bfloat16 rounding of each other. A forward over several tokens sums in a different "
            "order than a forward over one token.",
        ),
    },
    observe=_observe,
    axis=range(1, BLOCKS + 1),
    unit="block",
    noise={"total variation from the target": 0.02},
    explanation="Each column of a log answers one question. Total variation: does the text follow "
    "the target's distribution? Greedy outputs: is it the target's text token by token, and where "
    "it isn't, was it a near tie? Acceptance: is the draft as good as it was at the start of a "
    "request? Tokens delivered: does the work reach a user? A fault on the draft's side costs "
    "speed but never changes the distribution, so tests of the output don't find it; a fault in "
    "the verifier may cost no speed at all. A rate that rises by itself counts tokens that nobody "
    "asked for. In the table model, the draft model's missing token shifts its position. In a "
    "transformer, it is a slot that was never written, or positions that are off by one (vLLM "
    "issues 5765 and 9730; for the rate after the end token, 56101).",
)
