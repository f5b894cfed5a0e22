"""What all wrong answers of a function have in common: sign, factor, summand, order, edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from labcore.exercises.wording import wide

__all__ = ["law"]

NUMBERS = (bool, int, float, torch.Tensor, np.ndarray)
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # came and wanted, of one shape


def law(answers: Sequence[Any], wanted: Sequence[Any], parts: Sequence[str] = ()) -> str:
    """Return what the wrong answers have in common, as a sentence without its full stop, or "".

    answers, wanted: one of each for a case: numbers, arrays, or tuples or lists of them. Cases with
    a NaN or an infinity in the right answer don't count.
    parts: names of a tuple's or list's elements; only the first element that differs is told of.
    """
    if not all(isinstance(one, tuple | list) for one in (*answers, *wanted)):
        return _common(_pairs(answers, wanted), "The result")
    if len({len(one) for one in (*answers, *wanted)}) != 1:
        return ""
    elements = zip(zip(*answers, strict=True), zip(*wanted, strict=True), strict=True)
    for place, (came, right) in enumerate(elements):
        pairs = _pairs(came, right)
        if not all(_equal(*pair) for pair in pairs):
            named = f"The returned {parts[place]}" if place < len(parts) else f"Result {place + 1}"
            return _common(pairs, named)
    return ""


def _pairs(answers: Sequence[Any], wanted: Sequence[Any]) -> Pairs:
    """The answers beside the right ones in float64; none if any has another form."""
    if not all(isinstance(one, NUMBERS) for one in (*answers, *wanted)):
        return []
    every = [(_real(came), _real(right)) for came, right in zip(answers, wanted, strict=True)]
    usual = [(came, right) for came, right in every if torch.isfinite(right).all()]
    same = all(came.shape == right.shape and torch.isfinite(came).all() for came, right in usual)
    return usual if same else []


def _real(value: Any) -> torch.Tensor:
    numbers = wide(value if isinstance(value, torch.Tensor | np.ndarray) else np.array(value))
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers.double()


def _equal(came: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether they are equal up to float32's rounding."""
    if not wanted.numel():
        return True
    size = wanted.abs()
    return bool(((came - wanted).abs() <= 1e-5 * size + 1e-7 * size.max()).all())


def _common(pairs: Pairs, name: str) -> str:
    if all(_equal(*pair) for pair in pairs):
        return ""
    came, wanted = (
        torch.cat([one.reshape(-1) for one in side]) for side in zip(*pairs, strict=True)
    )
    told = _arithmetic(came, wanted) or _order(pairs) or _edge(pairs)
    return told and f"{name} {told}"


def _arithmetic(came: torch.Tensor, wanted: torch.Tensor) -> str:
    if len(wanted.unique()) < 3:  # with fewer, a factor may fit by chance
        return ""
    if _equal(came, -wanted):
        return "has the opposite sign in every case"
    largest = wanted.abs().argmax()
    factor = (came[largest] / wanted[largest]).item()
    if factor and _equal(came, factor * wanted):
        return f"is {factor:.6g} times what it must be, in every case"
    summand = (came[0] - wanted[0]).item()
    if _equal(came, wanted + summand):
        return f"is too {'large' if summand > 0 else 'small'} by {abs(summand):.6g} in every case"
    return ""


def _order(pairs: Pairs) -> str:
    if not all(_equal(a.reshape(-1).sort()[0], b.reshape(-1).sort()[0]) for a, b in pairs):
        return ""
    reverse = all(a.ndim and _equal(a.flip(0), b) for a, b in pairs)
    return f"has the right numbers in {'reverse' if reverse else 'another'} order"


def _edge(pairs: Pairs) -> str:
    if all(b.ndim and len(b) > 2 for _, b in pairs):
        if all(_equal(a[1:], b[1:]) for a, b in pairs):
            return "is wrong only at index 0"
        if all(_equal(a[:-1], b[:-1]) for a, b in pairs):
            return "is wrong only at its last index"
    return ""
