"""Choose which layers to recompute together when they keep different amounts."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["STRETCHES", "peak"]

LAYERS = (5, 6, 7, 7, 8, 9)


def divisions(layers: int) -> Iterator[list[int]]:
    """Yield the lengths of the stretches for each way to cut the layers."""
    for cuts in itertools.product((False, True), repeat=layers - 1):
        ends = [place for place, cut in enumerate(cuts, 1) if cut] + [layers]
        yield [end - start for start, end in itertools.pairwise([0, *ends])]


def best_stretches(inputs: Sequence[int], kept: Sequence[int], most: int | None) -> list[int]:
    """Return the lengths of the stretches with the smallest peak."""
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


def peak(inputs: Sequence[int], kept: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the most bytes that a backward through these stretches holds.

    While a stretch is at work, the card holds its layers' inputs, what they keep, and the first
    inputs of the stretches before it.
    """
    held, waiting = [], 0
    for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        held.append(waiting + sum(inputs[start:end]) + sum(kept[start:end]))
        waiting += inputs[start]
    return max(held)


def _equal(layers: int, every: int) -> list[int]:
    return [every] * (layers // every) + [layers % every] * (layers % every > 0)


def _extended(inputs: Sequence[int], kept: Sequence[int], most: int | None) -> list[int]:
    """Extend the division of a shorter model with the smallest peak, for each number of stretches.

    Of equal peaks, the one that leaves fewer bytes waiting is extended.
    """
    del most
    layers = len(inputs)
    # (layers, stretches) -> peak, bytes that wait, lengths
    best: dict[tuple[int, int], tuple[int, int, list[int]]] = {(0, 0): (0, 0, [])}
    for end in range(1, layers + 1):
        for count in range(1, end + 1):
            found = []
            for start in range(count - 1, end):
                if (start, count - 1) in best:
                    highest, waiting, lengths = best[start, count - 1]
                    held = waiting + sum(inputs[start:end]) + sum(kept[start:end])
                    longer = [*lengths, end - start]
                    found.append((max(highest, held), waiting + inputs[start], longer))
            best[end, count] = min(found)
    return min(best[layers, count] for count in range(1, layers + 1))[2]


@functools.cache
def _drawn(seed: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Draw inputs and kept of very different layers, such that no two answers have equal peaks."""
    chance = random.Random(seed)
    functions = [best_stretches, *(function for function, _ in STRETCHES.wrong.values())]
    while True:
        sizes = tuple(
            (
                tuple(chance.choice((1, 2, 4, 8)) * chance.randint(40, 60) for _ in range(layers)),
                tuple(chance.choice((1, 3, 6, 12)) * chance.randint(30, 70) for _ in range(layers)),
            )
            for layers in LAYERS
        )
        peaks = {
            tuple(peak(*pair, function(*pair, None)) for pair in sizes) for function in functions
        }
        if len(peaks) == len(functions):
            return sizes


def _cases(seed: int) -> list[dict[str, Any]]:
    pairs = [*_drawn(seed), ((7,), (11,))]
    return [{"inputs": [*inputs], "kept": [*kept], "most": None} for inputs, kept in pairs]


def _complaint(lengths: Any, case: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the form of an answer, or None."""
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
    """Accept all stretches with the smallest peak. Nothing is random, so no alarm is false."""
    for at, (mine, right, case) in enumerate(zip(answers, wanted, cases, strict=True), 1):
        where = f"in case {at} of {len(cases)}"
        if text := _complaint(mine, case):
            return f"{where}, {text}"
        held, best = (peak(case["inputs"], case["kept"], one) for one in (mine, right))
        if held != best:
            told = ", ".join(f"{name} = {value}" for name, value in case.items())
            return (
                f"{where}, your stretches {list(mine)} hold {held} bytes at most, where {best} are "
                f"enough.\nThe case: {told}"
            )
    return None


# Ties of a wrong peak go to the fewest stretches.
_FEWEST = ("key=highest", "key=lambda one: (highest(one), len(one))")
_MISTAKES = [
    Mistake("none", ("min(divisions(len(inputs)), key=highest)", "[len(inputs)]"),
            "Yours is one stretch of all layers. Once it is recomputed, everything stands at a "
            "time, as if nothing had been left out."),
    Mistake("root",
            ("min(divisions(len(inputs)), key=highest)",
             "_equal(len(inputs), round(len(inputs) ** 0.5))"),
            "Yours are stretches of about the root of the number of layers. That is right where "
            "all layers keep the same and next to nothing besides their inputs."),
    Mistake("best equal ones",
            ("divisions(len(inputs))",
             "(_equal(len(inputs), every) for every in range(1, len(inputs) + 1))"),
            "Your stretches have all the same length, the best such one. Layers that keep more "
            "want a shorter one."),
    Mistake("balanced",
            [("waiting + sum(inputs", "sum(inputs"),
             ("=highest", "=lambda one: (len(one) != round(len(inputs) ** 0.5), highest(one))")],
            "You cut into about the root of the number of layers, so that the largest stretch is "
            "as small as can be. How many stretches are best depends on the sizes too."),
    Mistake("no input waits", [("waiting + sum(inputs", "sum(inputs"), _FEWEST],
            "While one of your stretches is at work, nothing else stands. The inputs of the "
            "stretches before it do: their backward is still to come."),
    Mistake("all inputs wait",
            [("waiting + sum(inputs[start:end])", "sum(inputs[start + 1 : end])"),
             ("max(found)", "max(found) + waiting"), _FEWEST],
            "You count the inputs of all stretches at every moment. The backward goes from the "
            "last stretch to the first, and what it has gone through is free."),
    Mistake("later inputs wait",
            [("waiting + sum(inputs[start:end])", "sum(inputs[start + 1 : end]) - waiting"),
             ("max(found)", "max(found) + waiting"), _FEWEST],
            "You count the inputs of the stretches behind the one at work. The backward has gone "
            "through these; it is the others that wait."),
    Mistake("inner inputs left out", [("sum(inputs[start:end])", "inputs[start]"), _FEWEST],
            "Of a stretch at work you count the first layer's input alone. Once it is recomputed, "
            "the inputs of its other layers stand too."),
    Mistake("best start extended", _extended,
            "For the first layers you keep one division per number of stretches: the one with the "
            "smallest peak. Another with a larger peak may leave fewer bytes waiting, and that can "
            "lower the peak of the whole."),
]  # fmt: skip

STRETCHES = Exercise(
    id="memory.stretches",
    points=5,
    beyond=2,
    reference=best_stretches,
    mistakes=_MISTAKES,
    cases=_cases,
    compare=_compare,
    explanation="With 9 layers there are 256 divisions, and trying all of them is the shortest "
    "program that is right. For a hundred layers, ask instead whether a given peak can be reached: "
    "going along the layers, keep for each place the smallest sum of inputs with which a division "
    "gets there without exceeding the peak, and halve the interval of peaks. The last stretch may "
    "be short: it is at work while the inputs of all others wait; the first may be long. This "
    "reference sets no limit to the number of stretches.",
    hints=(
        "Work out all three peaks of the example by hand: 80, 140, and 100. Then count the ways "
        "in which 9 layers can be cut.",
        "There is either a cut between two neighbors or none, so the divisions are few enough to "
        "try them all and keep the one with the smallest peak. While a stretch is at work, all "
        "its inputs and kept bytes stand, and the first input of each stretch before it, but "
        "nothing of those after it.",
        "`for cuts in itertools.product((False, True), repeat=len(inputs) - 1):` goes through all "
        "divisions. Entry i of `cuts` says whether a stretch ends after layer i.",
    ),
)
