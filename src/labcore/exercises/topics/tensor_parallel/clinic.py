"""Diagnose six faulty tensor-parallel decoders by their steps and by where they hang."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from labcore.exercises.clinic import Clinic, Fault
from labcore.exercises.topics.tensor_parallel.engine import STEPS, Call, Engine, run

__all__ = ["CLINIC", "recorder"]


def _observe(engine: Engine) -> dict[str, list[float]]:
    log = run(engine)
    return {
        "outputs as in one process": log.right,
        "collectives that finished": log.finished,
        "fewest launches of a rank": log.fewest,
        "most launches of a rank": log.most,
    }


def _listed(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    if not most:
        return f"rank {last} waits"
    return f"ranks {', '.join(most)} and {last} wait"


def _words(call: Call | None) -> str:
    if call is None:
        return "at the end of the step"
    rows, width = call.numbers.shape
    return f"in an {call.kind} of {rows} x {width} numbers"


def recorder(student: int = 0) -> dict[str, str]:
    """Return a sentence per patient that tells where its ranks stand at the end.

    Like a flight recorder, it knows kinds and shapes but not whether a graph made a call.
    """
    said = {}
    for label, name in CLINIC.diagnoses(student).items():
        log = run(CLINIC.faults[name].make())
        said[label] = f"came to its end after {log.total} collectives."
        if any(log.waiting):
            places = [_words(call) for call in log.waiting]
            parts = [
                f"{_listed([rank for rank, one in enumerate(places) if one == place])} {place}"
                for place in dict.fromkeys(places)
            ]
            said[label] = f"stands still after {log.total} collectives: {'; '.join(parts)}."
    return said


CLINIC = Clinic(
    id="tensor_parallel.clinic",
    points=6,
    healthy=Engine,
    faults={
        "one rank's graph lacks an all-reduce": Fault(
            make=functools.partial(Engine, shorter=True),
            symptom="all is right until the first replay of one size. In that step a collective "
            "still finishes, and then one rank waits in the all-gather while the others wait in an "
            "all-reduce: its graph goes on where theirs do not. Launches are as in the healthy "
            "engine, as each rank replays one graph.",
        ),
        "one rank launches op by op": Fault(
            make=functools.partial(Engine, ungraphed=True),
            symptom="all is right until the first step of one size, in which no collective "
            "finishes although all ranks wait in the same one, of the same shape. One rank has "
            "made many launches in that step and the others few.",
        ),
        "one rank pads to another size": Fault(
            make=functools.partial(Engine, wider=True),
            symptom="all is right until the first step of one size, in which no collective "
            "finishes: one rank waits in an all-reduce of more rows than the others. Launches are "
            "as in the healthy engine.",
        ),
        "one rank's tokens are not filled in": Fault(
            make=functools.partial(Engine, unfilled=True),
            symptom="outputs are wrong from the first steps on, and nobody hangs: all collectives "
            "happen, and what one rank brings to them is of other tokens. That rank makes one "
            "launch less in each step.",
        ),
        "the all-reduce is not in the graphs": Fault(
            make=functools.partial(Engine, unreduced=True),
            symptom="outputs are wrong from the first steps on, and nobody hangs, as all ranks "
            "lack the same: one collective finishes in each step, the all-gather of the logits. "
            "Launches are as in the healthy engine.",
        ),
        "each rank draws for itself": Fault(
            make=functools.partial(Engine, own_draws=True),
            symptom="outputs are wrong from the first steps on, with all their collectives. Then "
            "the ranks hang: requests end on one rank and not on another, and some step has "
            "different numbers of rows. Launches are as in the healthy engine.",
        ),
    },
    observe=_observe,
    axis=range(STEPS),
    explanation="Three questions lead to the fault. Does it hang? Ranks hang where their sequences "
    "of collectives differ, in number, kind, size, or in whether a graph replays them; a fault "
    "that is the same on all ranks never hangs, however wrong it is. When? A step of a size that "
    "was not used before points to what was captured for it; a hang after wrong outputs points to "
    "ranks that have decided differently. And are outputs wrong before? A graph that was captured "
    "otherwise does no harm until it is replayed, while stale input and missing sums spoil every "
    "step. The remedies are to capture from one program on all ranks and compare the sequences "
    "before the first replay, to decide sizes in one place, and to draw on one rank or from one "
    "seed.",
)
