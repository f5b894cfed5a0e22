"""Numbers of many students, and what a function answers to their cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from labcore.exercises import Exercise, student_seed


def draws(seed: int, count: int) -> list[tuple[int, int]]:
    """`count` pairs of a seed for the cases and a student's number, the first nobody's."""
    chance = random.Random(seed)
    return [(chance.randrange(2**31), n and chance.randrange(2**31)) for n in range(count)]


def answers(exercise: Exercise, function: Callable[..., Any], seed: int, student: int) -> list[Any]:
    return [function(**case) for case in exercise.numbered_cases(seed, student)]


def check_variants(exercise: Exercise, kinds: int, seed: int) -> None:
    """Many students have `kinds` sets of numbers in all, each the same every time; nobody's own
    is none of them."""
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(60)]
    assert exercise.variant(numbers[0]) == exercise.variant(numbers[0])
    drawn = {tuple(exercise.variant(number).values()) for number in numbers}
    assert len(drawn) == kinds
    assert tuple(exercise.variant(0).values()) not in drawn
