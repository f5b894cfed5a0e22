"""Which layers to recompute as one where they keep different amounts."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["STRETCHES", "peak"]

LAYERS = (5, 6, 7, 7, 8, 9)


def divisions(layers: int) -> Iterator[list[int]]:
    """All ways to cut so many layers into stretches: their lengths, in order."""
    for cuts in itertools.product((False, True), repeat=layers - 1):
        ends = [place for place, cut in enumerate(cuts, 1) if cut] + [layers]
        yield [end - start for start, end in itertools.pairwise([0, *ends])]


def best_stretches(inputs: Sequence[int], kept: Sequence[int], most: int | None) -> list[int]:
    """The lengths of the stretches with the smallest peak."""
    del most

    def highest(lengths: Sequence[int]) -> int:
        start, waiting, found = 0, 0, []
        for length in lengths:
            end = start + length
            found.append(waiting + sum(inputs[start:end]) + sum(kept[start:end]))
            waiting += inputs[start]
            start = end
        return max(found)

    return min(divisions(len(inputs)), key=highest)


def peak(
    inputs: Sequence[int], kept: Sequence[int], lengths: Sequence[int], *, fault: str = ""
) -> int:
    """The most bytes that a backward through these stretches holds, or what a mistake makes of it.

    While a stretch is at work, its layers' inputs and what they keep stand, and the inputs of the
    stretches before it.
    """
    edges = [0, *itertools.accumulate(lengths)]
    firsts = [inputs[start] for start in edges[:-1]]
    at_work = [
        sum(kept[start:end])
        + (inputs[start] if fault == "inner inputs left out" else sum(inputs[start:end]))
        for start, end in itertools.pairwise(edges)
    ]
    found = []
    for place, mine in enumerate(at_work):
        waiting = sum(firsts[:place])
        if fault == "later inputs wait":
            waiting = sum(firsts[place + 1 :])
        if fault == "all inputs wait":
            waiting = sum(firsts) - firsts[place]
        if fault == "no input waits":
            waiting = 0
        found.append(waiting + mine)
    return max(found)


MISCOUNTED = ("later inputs wait", "all inputs wait", "no input waits", "inner inputs left out")


def _equal(layers: int, every: int) -> list[int]:
    return [every] * (layers // every) + [layers % every] * (layers % every > 0)


def _wrongly(fault: str) -> Callable[..., list[int]]:
    def stretches(inputs: Sequence[int], kept: Sequence[int], most: int | None) -> list[int]:
        del most
        layers = len(inputs)
        if fault in MISCOUNTED:
            return min(
                divisions(layers),
                key=lambda lengths: (peak(inputs, kept, lengths, fault=fault), len(lengths)),
            )
        if fault == "best equal ones":
            equal = (_equal(layers, every) for every in range(1, layers + 1))
            return min(equal, key=lambda one: peak(inputs, kept, one))
        if fault == "balanced":
            count = round(math.sqrt(layers))
            same = (one for one in divisions(layers) if len(one) == count)
            return min(same, key=lambda one: peak(inputs, kept, one, fault="no input waits"))
        every = {"none": layers, "root": round(math.sqrt(layers))}[fault]
        return _equal(layers, every)

    return stretches


def _answers(inputs: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The peak of the right answer and of each mistake."""
    functions = [best_stretches, *(_wrongly(name) for name in _HINTS)]
    return [peak(inputs, kept, function(inputs, kept, None)) for function in functions]


@functools.cache
def _drawn(seed: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Inputs and kept of layers of very different sizes, until no two answers have equal peaks."""
    chance = random.Random(seed)
    while True:
        sizes = tuple(
            (
                tuple(chance.choice((1, 2, 4, 8)) * chance.randint(40, 60) for _ in range(layers)),
                tuple(chance.choice((1, 3, 6, 12)) * chance.randint(30, 70) for _ in range(layers)),
            )
            for layers in LAYERS
        )
        peaks = [*zip(*(_answers(*pair) for pair in sizes), strict=True)]
        if len(set(peaks)) == len(peaks):
            return sizes


def _cases(seed: int) -> list[dict[str, Any]]:
    pairs = [*_drawn(seed), ((7,), (11,))]
    return [{"inputs": [*inputs], "kept": [*kept], "most": None} for inputs, kept in pairs]


def _complaint(lengths: Any, case: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of an answer."""
    layers = len(case["inputs"])
    if lengths is None:
        return "the result is None; the function may lack its `return`"
    whole = isinstance(lengths, list | tuple) and all(type(one) is int for one in lengths)
    if not whole:
        return f"the result must be a list of whole numbers, the lengths, got {lengths!r}"
    if any(one < 1 for one in lengths) or sum(lengths) != layers:
        return f"the lengths must be above 0 and add up to the {layers} layers, got {lengths}"
    if case["most"] is not None and len(lengths) > case["most"]:
        return f"there may be {case['most']} stretches at most, got {lengths}"
    return None


def _compare(
    answers: Sequence[Any], wanted: Sequence[Any], cases: Sequence[Mapping[str, Any]]
) -> str | None:
    """Other stretches with the same peak are as good. Nothing is random: no false alarms."""
    for at, (mine, right, case) in enumerate(zip(answers, wanted, cases, strict=True), 1):
        where = f"in case {at} of {len(cases)}"
        if text := _complaint(mine, case):
            return f"{where}, {text}"
        came, best = (peak(case["inputs"], case["kept"], one) for one in (mine, right))
        if came != best:
            told = ", ".join(f"{name} = {value}" for name, value in case.items())
            return (
                f"{where}, your stretches {list(mine)} hold {came} bytes at most, where {best} are "
                f"enough.\nThe case: {told}"
            )
    return None


_HINTS = {
    "none": "Yours is one stretch of all layers. Once it is recomputed, everything stands at a "
    "time, as if nothing had been left out.",
    "root": "Yours are stretches of about the root of the number of layers. That is right where "
    "all layers keep the same and next to nothing besides their inputs.",
    "best equal ones": "Your stretches have all the same length, the best such one. Layers that "
    "keep more want a shorter one.",
    "balanced": "You cut into about the root of the number of layers, so that the largest stretch "
    "is as small as can be. How many stretches are best depends on the sizes too.",
    "no input waits": "While one of your stretches is at work, nothing else stands. The inputs of "
    "the stretches before it do: their backward is still to come.",
    "all inputs wait": "You count the inputs of all stretches at every moment. The backward goes "
    "from the last stretch to the first, and what it has gone through is free.",
    "later inputs wait": "You count the inputs of the stretches behind the one at work. The "
    "backward has gone through these; it is the others that wait.",
    "inner inputs left out": "Of a stretch at work you count the first layer's input alone. Once "
    "it is recomputed, the inputs of its other layers stand too.",
}

STRETCHES = Exercise(
    id="memory.stretches",
    reference=best_stretches,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    compare=_compare,
    explanation="With 9 layers there are 256 divisions, and trying all of them is the shortest "
    "program that is right. For a hundred layers, ask instead whether a given peak can be reached: "
    "going along the layers, keep for each place the smallest sum of inputs with which a division "
    "gets there without exceeding the peak, and halve the interval of peaks. The last stretch may "
    "be short: it is at work while the inputs of all others wait; the first may be long. This "
    "reference sets no limit to the number of stretches.",
)
