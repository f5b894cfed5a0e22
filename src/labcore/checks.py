"""Argument checks: each returns its value, or raises an error with the rule and a remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

__all__ = [
    "finite",
    "floating",
    "fraction",
    "non_negative",
    "one_of",
    "positive",
    "positive_int",
    "same_shape",
]

T = TypeVar("T")
Number = float | int | torch.Tensor


def _sentence(rule: str, came: object, remedy: str) -> str:
    return f"{rule}, got {came}" + (f"; {remedy}" if remedy else "")


def _number(name: str, value: Number) -> float:
    """Convert a Python number or a one-element tensor to a float."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"{name} must hold one number, got a tensor of shape {shape}")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


def positive(name: str, value: T, remedy: str = "") -> T:
    """Return `value` if it is a finite number above 0 (a Python number or one-element tensor)."""
    number = _number(name, value)  # type: ignore[arg-type]
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(_sentence(f"{name} must be a finite number above 0", number, remedy))
    return value


def non_negative(name: str, value: T, remedy: str = "") -> T:
    """Return `value` if it is a finite number >= 0 (a Python number or one-element tensor)."""
    number = _number(name, value)  # type: ignore[arg-type]
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(_sentence(f"{name} must be a finite number, at least 0", number, remedy))
    return value


def fraction(name: str, value: T, remedy: str = "") -> T:
    """Return `value` if 0 <= value < 1, as the decay rate of a running average must be."""
    number = _number(name, value)  # type: ignore[arg-type]
    if not 0 <= number < 1:
        raise ValueError(_sentence(f"{name} must be at least 0 and below 1", number, remedy))
    return value


def positive_int(name: str, value: int, remedy: str = "") -> int:
    """Return `value` if it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_sentence(f"{name} must be a whole number", repr(value), remedy))
    if value < 1:
        raise ValueError(_sentence(f"{name} must be at least 1", value, remedy))
    return value


def one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """Return `value` if it is in `allowed`; the error lists the choices and names the nearest."""
    choices = list(allowed)
    if value in choices:
        return value
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(repr(choice) for choice in choices)
    raise ValueError(f"{name} must be one of {listed}, got {value!r}{hint}")


def floating(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if it is a floating-point tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} must be floating point, got {tensor.dtype}; convert it with {name}.float()"
        )
    return tensor


def finite(name: str, tensor: torch.Tensor, remedy: str = "") -> torch.Tensor:
    """Return `tensor` if it holds neither NaN nor infinity."""
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        came = f"{bad} of {tensor.numel()} elements that are NaN or infinite"
        raise ValueError(_sentence(f"{name} must be finite", came, remedy))
    return tensor


def same_shape(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless all `tensors` have the same shape."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        came = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        raise ValueError(f"{', '.join(names)} must have the same shape, got {came}")
