"""Plotly figures as small JSON: arrays decoded, numbers rounded, repeated parts stored once."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from typing import Any

import numpy as np

__all__ = ["DIGITS", "dumps", "plain", "pool"]

DIGITS = 4
_REF = "$"  # {"$": 3} refers to part 3 of the pool; no plotly property has this name
_SHORTEST = 32  # characters; a shorter part isn't worth a reference


def dumps(value: Any) -> str:
    """Return compact JSON; equal values give equal text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _decimals(values: np.ndarray) -> np.ndarray:
    """Return the decimal places that keep DIGITS significant digits of each value and of the range.

    The first matters on log axes, the second for a curve that moves between 1000 and 1001.
    """
    size = np.abs(values)
    size[size == 0] = 1
    places = DIGITS - 1 - np.floor(np.log10(size))
    span = float(values.max() - values.min())
    if span > 0:
        places = np.maximum(places, DIGITS - 1 - math.floor(math.log10(span)))
    return np.clip(places, -300, 300).astype(int)


def _number(value: float, places: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = round(value, places)
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _array(values: np.ndarray) -> Any:
    """Convert a numeric array to nested lists of rounded numbers; non-finite ones become None."""
    if values.dtype.kind in "biu":
        return values.tolist()
    if values.dtype.kind != "f":
        return [plain(item) for item in values.tolist()]
    flat = values.astype(float).ravel()
    finite = np.isfinite(flat)
    places = np.zeros(flat.shape, int)
    if finite.any():
        places[finite] = _decimals(flat[finite])
    numbers = [_number(v, p) for v, p in zip(flat.tolist(), places.tolist(), strict=True)]
    for width in reversed(values.shape[1:]):
        numbers = [numbers[i : i + width] for i in range(0, len(numbers), width)]  # type: ignore[misc]
    return numbers


def _decode(packed: dict[str, Any]) -> np.ndarray:
    """Return the array in plotly's {"dtype", "bdata", "shape"}."""
    values = np.frombuffer(base64.b64decode(packed["bdata"]), dtype=np.dtype(packed["dtype"]))
    shape = packed.get("shape")
    return values if shape is None else values.reshape([int(n) for n in str(shape).split(",")])


def plain(value: Any) -> Any:
    """Convert `value` to JSON values, with floats rounded to DIGITS significant digits.

    A list of numbers keeps more digits if its range needs them. Integers stay exact.
    """
    if isinstance(value, dict):
        if "bdata" in value and "dtype" in value:
            return _array(_decode(value))
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, float) or type(v) is int for v in value):
            return (
                _array(np.asarray(value))
                if any(isinstance(v, float) for v in value)
                else list(value)
            )
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return _array(np.asarray([value]))[0]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def pool(value: Any) -> tuple[Any, list[Any]]:
    """Replace each part that occurs more than once by {"$": index}; return value and parts.

    A part may refer to parts before it. Arrays that frames share (an axis, a surface) are stored
    only once this way.
    """
    seen: Counter[str] = Counter()

    def count(item: Any) -> None:
        if not isinstance(item, (dict, list)):
            return
        text = dumps(item)
        if len(text) < _SHORTEST:
            return
        seen[text] += 1
        if seen[text] == 1:  # count the inside of a repeated part only once
            for inner in item.values() if isinstance(item, dict) else item:
                count(inner)

    parts: list[Any] = []
    places: dict[str, int] = {}

    def refer(item: Any) -> Any:
        if not isinstance(item, (dict, list)):
            return item
        text = dumps(item)
        if text in places:
            return {_REF: places[text]}
        if isinstance(item, dict):
            short: Any = {key: refer(inner) for key, inner in item.items()}
        else:
            short = [refer(inner) for inner in item]
        if seen[text] < 2:
            return short
        parts.append(short)
        places[text] = len(parts) - 1
        return {_REF: places[text]}

    count(value)
    return refer(value), parts
