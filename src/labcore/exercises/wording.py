"""Values and differences in words for students, and messages broken into lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "AGREE",
    "LINE",
    "describe",
    "dtype_name",
    "in_lines",
    "inputs_at",
    "pair",
    "rounding",
    "size",
    "wide",
]

LINE = 100  # characters; a page of feedback shows this many without a scroll bar
LISTED = 240  # characters of a list's entries
SHOWN = 8  # a message shows at most so many numbers of an array, else its shape and dtype
KEPT = "\xa0=\xa0"  # no-break spaces
AGREE = 6  # digits that two numbers must share before we suspect rounding
NARROWER = (torch.bfloat16, torch.float16, torch.float32)


def describe(value: Any) -> str:
    """Describe `value` briefly: a small array by its numbers, a large one by shape and dtype."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "numpy array"
        what = f"{dtype_name(value)} {kind} of shape {tuple(value.shape)}"
        size = math.prod(value.shape)
        return f"{what}: {_numbers(value)}" if 0 < size <= SHOWN else what
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    if len(text) <= 80:
        return text
    return _listed(value) if isinstance(value, list | tuple | dict) else f"{text[:77]}..."


def _listed(value: Any) -> str:
    """Describe a long list, tuple or dict by its first entries and their number."""
    shown, length = [], 0
    for at, entry in enumerate(value):
        one = value[entry] if isinstance(value, dict) else entry
        text = describe(one)
        if isinstance(one, torch.Tensor | np.ndarray) and 0 < math.prod(one.shape) <= SHOWN:
            text = _numbers(one)
        text = f"{entry!r}: {text}" if isinstance(value, dict) else text
        length += len(text)
        if at and length > LISTED:
            shown.append(f"... {len(value)} in all")
            break
        shown.append(text)
    left, right = "{}" if isinstance(value, dict) else "()" if isinstance(value, tuple) else "[]"
    return f"{left}{', '.join(shown)}{right}"


def size(value: Any) -> int:
    """Return how many numbers `value` holds, those of its arrays, lists and dicts counted."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return math.prod(value.shape)
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, list | tuple) else 1


def dtype_name(array: Any) -> str:
    """Return the dtype of a tensor or numpy array, without the library's name."""
    return str(array.dtype).removeprefix("torch.")


def wide(array: Any) -> torch.Tensor:
    """Convert an array to float64, complex128, int64 or bool; only large uint64 overflow."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
    tensor = tensor.detach()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.is_floating_point():
        return tensor.double()
    return tensor if tensor.dtype is torch.bool else tensor.long()


def inputs_at(
    case: Mapping[str, Any], place: Sequence[int] | None, shape: Sequence[int] = ()
) -> str:
    """Describe the arguments of a call in a sentence.

    place, shape: where a result of this shape is wrong; tensors of the same shape are described by
    their element there. If place is None, everything is described whole.
    """
    there, whole = [], []
    for name, value in case.items():
        array = isinstance(value, torch.Tensor | np.ndarray)
        if place is not None and array and tuple(value.shape) == tuple(shape):
            there.append(f"{name} = {describe(wide(value)[tuple(place)].item())}")
        else:
            whole.append(f"{name} = {describe(value)}")
    if not there:
        return f"The case: {', '.join(whole)}" if whole else ""
    return f"There {', '.join(there)}" + (f"; {', '.join(whole)}" if whole else "")


def pair(came: Any, wanted: Any) -> tuple[str, str, int]:
    """Return both numbers with enough digits to differ, and the first such digit (0: unknown)."""
    if not (isinstance(came, float) and isinstance(wanted, float)):
        return describe(came), describe(wanted), 0
    for digits in range(1, 18):
        if f"{came:.{digits}g}" != f"{wanted:.{digits}g}":
            shown = max(AGREE, min(17, digits + 1))
            return f"{came:.{shown}g}", f"{wanted:.{shown}g}", digits
    return f"{came:.17g}", f"{wanted:.17g}", 0


def rounding(came: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, gap: float) -> str:
    """Return the suspicion that a dtype is too narrow, or "".

    came, wanted: float64 tensors of one shape, results of `dtype`; gap: |came − wanted|/|wanted|
    where they differ most. Suspicious is an answer that holds only numbers of a narrower dtype and
    is off by about its spacing, or one that agrees to `AGREE` digits.
    """
    for narrow in NARROWER:
        info = torch.finfo(narrow)
        if info.bits >= torch.finfo(dtype).bits or gap > 2 * info.eps:
            continue
        # Ignore NaN and infinity.
        mine, right = came[torch.isfinite(came)], wanted[torch.isfinite(wanted)]
        held = bool((mine.to(narrow).double() == mine).all())
        if held and not bool((right.to(narrow).double() == right).all()):
            name = dtype_name(mine.to(narrow))
            return f"All of yours are {name} numbers, as if something was rounded to that dtype"
    if dtype is torch.float64 and gap < 10.0**-AGREE:
        return "So small a difference looks like rounding, as if something was computed in float32"
    return ""


def in_lines(text: str) -> str:
    """Break `text` at spaces into lines of at most `LINE` characters; indented lines stay indented.

    "name = value" stays on one line.
    """
    lines = []
    for line in text.replace(" = ", KEPT).split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, LINE, subsequent_indent=indent or "  ",
            break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
        ) or [""]  # fmt: skip
    return "\n".join(lines).replace(KEPT, " = ")


def _numbers(array: Any) -> str:
    listed = wide(array).tolist() if isinstance(array, torch.Tensor) else array.tolist()
    return _rounded(listed)


def _rounded(listed: Any) -> str:
    if isinstance(listed, list):
        return "[" + ", ".join(map(_rounded, listed)) + "]"
    return f"{listed:.6g}" if isinstance(listed, float) else str(listed)
