"""Whether an answer equals the right one, and where it doesn't."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from labcore.exercises.wording import AGREE, describe, dtype_name, inputs_at, pair, rounding, wide

__all__ = ["difference", "finite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A difference in words; place: the index of the largest difference in a result, or None.

    shape: of that result. more: a further sentence, without its full stop.
    """

    text: str
    place: Sequence[int] | None = None
    shape: Sequence[int] = ()
    more: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Terms:
    rtol: float
    atol: float


def difference(
    came: Any,
    wanted: Any,
    *,
    rtol: float,
    atol: float,
    name: str = "the result",
    parts: Sequence[str] = (),
    case: Mapping[str, Any] | None = None,
) -> str | None:
    """Return what is wrong with `came`, in sentences, or None if it equals `wanted`.

    Arrays must match in library, dtype and shape. Numbers are compared in float64 and are equal if
    |came − wanted| ≤ atol + rtol |wanted|. NaN equals NaN, and an infinity equals itself. An int
    may replace a float, and a list a tuple. name: of the whole; parts: of a tuple's or list's
    elements. case: the arguments of the call, described where the results differ most. Each
    sentence is on its own line; the last one has no full stop.
    """
    found = _found(came, wanted, _Terms(rtol=rtol, atol=atol), name, parts)
    if found is None:
        return None
    told = inputs_at(case, found.place, found.shape) if case else ""
    return ".\n".join(sentence for sentence in (found.text, found.more, told) if sentence)


def finite(value: Any) -> bool:
    """Return whether an array has no NaN and no infinity; True for anything but an array."""
    if not isinstance(value, torch.Tensor | np.ndarray):
        return True
    return bool(torch.isfinite(wide(value)).all())


def _found(
    came: Any, wanted: Any, terms: _Terms, name: str, parts: Sequence[str] = ()
) -> _Found | None:
    if came is None and wanted is not None:
        return _Found(text=f"{name} is None; the function may lack its `return`")
    if isinstance(wanted, torch.Tensor | np.ndarray):
        return _array_difference(came, wanted, terms, name)
    if isinstance(wanted, Mapping):
        return _mapping_difference(came, wanted, terms, name)
    if isinstance(wanted, list | tuple):
        names = [f"{name}[{place}]" for place in range(len(wanted))]
        names[: len(parts)] = [f"the returned {part}" for part in parts]
        return _sequence_difference(came, wanted, terms, name, names)
    if isinstance(wanted, float | int) and not isinstance(wanted, bool):
        return _number_difference(came, wanted, terms, name)
    if type(came) is type(wanted) and came == wanted:
        return None
    if type(came) is type(wanted):
        return _Found(text=f"{name} is {describe(came)}, expected {describe(wanted)}")
    return _Found(text=f"{name} must be {describe(wanted)}, got {describe(came)}")


def _array_difference(came: Any, wanted: Any, terms: _Terms, name: str) -> _Found | None:
    tensor = isinstance(wanted, torch.Tensor)
    if not isinstance(came, torch.Tensor if tensor else np.ndarray):
        kind = "a torch.Tensor" if tensor else "a numpy array"
        mixed = isinstance(came, torch.Tensor | np.ndarray)
        hint = "torch.from_numpy(x)" if tensor else "x.numpy()"
        remedy = f"; convert it with {hint}" if mixed else ""
        return _Found(text=f"{name} must be {kind}, got {describe(came)}{remedy}")
    if tuple(came.shape) != tuple(wanted.shape):
        return _Found(text=f"{name} must have shape {tuple(wanted.shape)}, got {tuple(came.shape)}")
    if came.dtype != wanted.dtype:
        return _Found(
            text=f"{name} must have dtype {dtype_name(wanted)}, got {dtype_name(came)}; look for a "
            "number or an operation that changed the dtype"
        )
    dtype = wanted.dtype if tensor else torch.from_numpy(np.array(wanted)).dtype
    return _values_difference(wide(came), wide(wanted), terms, name, dtype)


def _values_difference(
    came: torch.Tensor, wanted: torch.Tensor, terms: _Terms, name: str, dtype: torch.dtype
) -> _Found | None:
    if came.dtype in (torch.bool, torch.long):
        same = came == wanted
        gap = (came.double() - wanted.double()).abs()
    else:
        gap = (came - wanted).abs()
        # False if an infinity or NaN is involved.
        near = gap <= terms.atol + terms.rtol * wanted.abs()
        finite = torch.isfinite(came) & torch.isfinite(wanted)
        same = (came == wanted) | (torch.isnan(came) & torch.isnan(wanted)) | (near & finite)
    count = int((~same).sum())
    if not count:
        return None
    worst = torch.where(same, -1.0, torch.where(gap.isnan(), math.inf, gap)).argmax()
    place = [int(index) for index in torch.unravel_index(worst, gap.shape)]
    first = torch.nonzero(~same)[0].tolist()
    at = f" at {place}" if place else ""
    since = f", the first at {first}" if first != place else ""
    one, right = came[tuple(place)].item(), wanted[tuple(place)].item()
    mine, theirs, digit = pair(one, right)
    share = f"all {count}" if count == same.numel() else f"{count} of {same.numel()}"
    text = f"{name}: {share} numbers differ{since}, most of all{at}: "
    if same.numel() == 1:
        text = f"{name} differs{at}: "
    text += f"yours {mine}, expected {theirs}" + _from_digit(digit)
    if surprises := int((torch.isnan(came) & ~torch.isnan(wanted)).sum()):
        text += f"; {surprises} of yours {_is(surprises)} NaN where a number belongs"
    if missed := int((torch.isnan(wanted) & ~torch.isnan(came)).sum()):
        numbers = "a number" if missed == 1 else "numbers"
        text += f"; {missed} of yours {_is(missed)} {numbers} where NaN belongs"
    off = abs(one - right) / abs(right) if digit and right else math.inf
    suspicion = rounding(came, wanted, dtype, off) if math.isfinite(off) else ""
    return _Found(text=text, place=place, shape=tuple(came.shape), more=suspicion)


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _from_digit(digit: int) -> str:
    return f", which first differ in digit {digit}" if digit >= AGREE else ""


def _number_difference(came: Any, wanted: float, terms: _Terms, name: str) -> _Found | None:
    if isinstance(came, torch.Tensor | np.ndarray):
        one = math.prod(came.shape) == 1
        remedy = "convert it with x.item()" if one else "combine its numbers into one"
        return _Found(text=f"{name} must be one Python number, got a {describe(came)}; {remedy}")
    if isinstance(came, bool) or not isinstance(came, int | float):
        return _Found(text=f"{name} must be a number, got {describe(came)}")
    if isinstance(wanted, int) and isinstance(came, float):
        return _Found(text=f"{name} must be a whole number (an int), got {describe(came)}")
    if came == wanted or (math.isnan(came) and math.isnan(wanted)):
        return None
    if not isinstance(wanted, float):
        return _Found(text=f"{name} is {describe(came)}, expected {describe(wanted)}")
    gap = abs(came - wanted)
    if math.isfinite(gap) and gap <= terms.atol + terms.rtol * abs(wanted):
        return None
    mine, theirs, digit = pair(float(came), wanted)
    text = f"{name} is {mine}, expected {theirs}{_from_digit(digit)}"
    if digit > AGREE:
        text += ", as if something was computed in float32 or typed in with fewer digits"
    return _Found(text=text)


def _sequence_difference(
    came: Any, wanted: Sequence[Any], terms: _Terms, name: str, names: Sequence[str]
) -> _Found | None:
    kind = "tuple" if isinstance(wanted, tuple) else "list"
    if not isinstance(came, list | tuple):
        return _Found(text=f"{name} must be a {kind} of length {len(wanted)}, got {describe(came)}")
    if len(came) != len(wanted):
        return _Found(text=f"{name} must have length {len(wanted)}, got {len(came)}")
    for one, right, part in zip(came, wanted, names, strict=True):
        if found := _found(one, right, terms, part):
            return found
    return None


def _mapping_difference(
    came: Any, wanted: Mapping[str, Any], terms: _Terms, name: str
) -> _Found | None:
    if not isinstance(came, Mapping):
        return _Found(
            text=f"{name} must be a dict with the keys {list(wanted)}, got {describe(came)}"
        )
    if came.keys() != wanted.keys():
        return _Found(text=f"{name} must have the keys {list(wanted)}, got {list(came)}")
    for key, right in wanted.items():
        if found := _found(came[key], right, terms, f"{name}[{key!r}]"):
            return found
    return None
