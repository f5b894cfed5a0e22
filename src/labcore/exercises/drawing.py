"""Draw cases that distinguish every two answers."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labcore.exercises.matching import difference

__all__ = ["kept", "separating"]

TRIES = 20_000


def kept(
    draw: Callable[[int], list[dict[str, Any]]],
) -> Callable[[int], list[dict[str, Any]]]:
    """Cache what `draw` makes for the most recent seeds, and return copies of it."""
    made = functools.lru_cache(maxsize=32)(draw)

    @functools.wraps(draw)
    def cases(seed: int) -> list[dict[str, Any]]:
        return copy.deepcopy(made(seed))

    return cases


def separating(
    draw: Callable[[], dict[str, Any]],
    answers: Sequence[Callable[..., Any]],
    variants: Sequence[Mapping[str, Any]] = ({},),
    *,
    least: int = 5,
) -> list[dict[str, Any]]:
    """Return the first `least` cases of `draw`, and the later ones that are needed.

    No two of `answers` agree in all returned cases, whichever of `variants` (more keyword
    arguments) is used. So bad luck never makes a mistake look like the right answer or like
    another mistake. Raises RuntimeError if two answers agree in all cases drawn.
    """
    pairs = itertools.combinations(range(len(answers)), 2)
    alike = {(*pair, number) for pair in pairs for number in range(len(variants))}
    cases: list[dict[str, Any]] = []
    for _ in range(TRIES):
        if not alike and len(cases) >= least:
            return cases
        case = draw()
        separated = _separated(case, answers, variants, alike)
        if separated or len(cases) < least:
            cases.append(case)
        alike -= separated
    raise RuntimeError(f"cases must distinguish all answers, but {sorted(alike)[:3]} agree")


def _separated(
    case: Mapping[str, Any],
    answers: Sequence[Callable[..., Any]],
    variants: Sequence[Mapping[str, Any]],
    alike: set[tuple[int, int, int]],
) -> set[tuple[int, int, int]]:
    """Return the triples (answer, answer, variant) of `alike` that this case separates."""
    given: dict[tuple[int, int], Any] = {}
    for one, other, number in alike:
        for answer in (one, other):
            if (answer, number) not in given:
                arguments = copy.deepcopy({**case, **variants[number]})
                given[answer, number] = answers[answer](**arguments)
    return {
        (one, other, number)
        for one, other, number in alike
        if difference(given[one, number], given[other, number], rtol=1e-5, atol=1e-9)
    }
