"""Controls of an explorer: what a reader can change, and through which values.

A control has an ordered list of positions. Both the live widget and the precomputed frames of the
static page use it, so the two displays agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from labcore.checks import one_of

__all__ = ["Choice", "Control", "IntSlider", "LogSlider", "Nodes", "Slider", "Toggle"]

_MOST_POSITIONS = 100_000  # with more, a slider has no visible steps


@runtime_checkable
class Control(Protocol):
    """What an explorer needs from a control: `default`, `label`, `unit`, and the methods below."""

    @property
    def default(self) -> Any:
        """The initial value."""

    @property
    def label(self) -> str | None:
        """The text beside the control; None uses the argument's name."""

    @property
    def unit(self) -> str:
        """The unit shown after the value."""

    def positions(self) -> tuple[Any, ...]:
        """Return every value that the control can take, in order."""

    def check(self, name: str, value: Any) -> Any:
        """Return `value`, or raise ValueError or TypeError with what the control allows."""

    def text(self, value: Any) -> str:
        """Return `value` as a reader sees it, with the unit."""


def _number(control: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{control}: {name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{control}: {name} must be finite, got {value}")
    return float(value)


def _ordered(control: str, low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"{control}: low must be below high, got low={low:g} and high={high:g}")


def _in_range(name: str, value: Any, low: float, high: float) -> Any:
    _number(name, "value", value)
    slack = 1e-9 * (high - low)
    if not low - slack <= value <= high + slack:
        raise ValueError(
            f"{name} must be between {low:g} and {high:g}, got {value:g}; "
            "choose a value inside the slider's range or widen low and high"
        )
    return value


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Slider:
    """A number on a linear scale from `low` to `high`.

    `step` defaults to a twentieth of the range; `unit` is shown after the value. Raises ValueError
    if low isn't below high, step doesn't fit, or default is out of range.
    """

    low: float
    high: float
    default: float
    step: float | None = None
    label: str | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        for name in ("low", "high", "default"):
            _number("Slider", name, getattr(self, name))
        _ordered("Slider", self.low, self.high)
        _in_range("Slider: default", self.default, self.low, self.high)
        step = (self.high - self.low) / 20 if self.step is None else self.step
        _number("Slider", "step", step)
        if not 0 < step <= self.high - self.low:
            raise ValueError(
                f"Slider: step must be above 0 and at most high - low = {self.high - self.low:g}, "
                f"got {step:g}"
            )
        if (self.high - self.low) / step > _MOST_POSITIONS:
            raise ValueError(
                f"Slider: step {step:g} makes more than {_MOST_POSITIONS} positions; use a larger "
                "step"
            )
        object.__setattr__(self, "step", step)

    def positions(self) -> tuple[float, ...]:
        """Return the values from low up, in steps; the last is at most high."""
        step = self.step or 1.0
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        # 12 digits hide only the rounding error of low + i * step.
        return tuple(float(f"{self.low + i * step:.12g}") for i in range(count))

    def check(self, name: str, value: Any) -> float:
        """Return `value`; raise ValueError if it's outside low..high."""
        return float(_in_range(name, value, self.low, self.high))

    def text(self, value: Any) -> str:
        """Return four significant digits and the unit."""
        return _with_unit(f"{value:.4g}", self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class IntSlider:
    """A whole number from `low` to `high` in steps of `step`. Errors as for `Slider`."""

    low: int
    high: int
    default: int
    step: int = 1
    label: str | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        for name in ("low", "high", "default", "step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"IntSlider: {name} must be a whole number, got {value!r}")
        _ordered("IntSlider", self.low, self.high)
        _in_range("IntSlider: default", self.default, self.low, self.high)
        if not 0 < self.step <= self.high - self.low:
            raise ValueError(
                f"IntSlider: step must be between 1 and high - low = {self.high - self.low}, "
                f"got {self.step}"
            )
        if (self.high - self.low) / self.step > _MOST_POSITIONS:
            raise ValueError(
                f"IntSlider: step {self.step} makes more than {_MOST_POSITIONS} positions; "
                "use a larger step"
            )

    def positions(self) -> tuple[int, ...]:
        """Return the values from low up, in steps; the last is at most high."""
        return tuple(range(self.low, self.high + 1, self.step))

    def check(self, name: str, value: Any) -> int:
        """Return `value`; TypeError if it isn't an int, ValueError if it's outside low..high."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        return int(_in_range(name, value, self.low, self.high))

    def text(self, value: Any) -> str:
        """Return all digits and the unit."""
        return _with_unit(f"{value:,}", self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSlider:
    """A positive number on a logarithmic scale, with `points` positions from `low` to `high`.

    Raises ValueError if low isn't positive or not below high, points is less than 2, or default is
    out of range.
    """

    low: float
    high: float
    default: float
    points: int = 21
    label: str | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        for name in ("low", "high", "default"):
            _number("LogSlider", name, getattr(self, name))
        if self.low <= 0:
            raise ValueError(
                f"LogSlider: low must be above 0, got {self.low:g}; use Slider for a range with 0"
            )
        _ordered("LogSlider", self.low, self.high)
        _in_range("LogSlider: default", self.default, self.low, self.high)
        if isinstance(self.points, bool) or not isinstance(self.points, int) or self.points < 2:
            raise ValueError(
                f"LogSlider: points must be a whole number of at least 2, got {self.points!r}"
            )

    def positions(self) -> tuple[float, ...]:
        """Return the values from low to high, with a constant factor between them."""
        first = math.log10(self.low)
        step = (math.log10(self.high) - first) / (self.points - 1)
        inner = (10 ** (first + i * step) for i in range(1, self.points - 1))
        return (float(self.low), *(float(f"{v:.12g}") for v in inner), float(self.high))

    def check(self, name: str, value: Any) -> float:
        """Return `value`, clamped to low..high; raise ValueError if it's outside."""
        _in_range(name, value, self.low, self.high)
        return float(min(max(value, self.low), self.high))

    def text(self, value: Any) -> str:
        """Return a number of thousands in full, others with three significant digits; the unit."""
        thousands = 999.5 <= value < 1e6
        return _with_unit(f"{value:,.0f}" if thousands else f"{value:.3g}", self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of several options; if `default` is None, the first.

    A mapping gives each option the words that a reader sees for it. Raises ValueError for fewer
    than two options, a repeated one, or a default that isn't an option.
    """

    options: Sequence[Any] | Mapping[Any, str]
    default: Any = None
    label: str | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.options, str):
            raise TypeError(
                f"Choice: options must be a sequence of values, got the string {self.options!r}"
            )
        options = tuple(self.options)
        if len(options) < 2:
            raise ValueError(f"Choice: needs at least two options, got {options!r}")
        if len({self.text(option) for option in options}) != len(options):
            raise ValueError(f"Choice: options must differ, got {options!r}")
        if self.default is None:
            object.__setattr__(self, "default", options[0])
        else:
            one_of("Choice: default", self.default, options)

    def positions(self) -> tuple[Any, ...]:
        """Return the options in order."""
        return tuple(self.options)

    def check(self, name: str, value: Any) -> Any:
        """Return `value`; raise ValueError if it isn't an option."""
        return one_of(name, value, self.options)

    def text(self, value: Any) -> str:
        """Return the option, in words if it has them, and the unit."""
        if isinstance(self.options, Mapping):
            return _with_unit(self.options[value], self.unit)
        return _with_unit(f"{value:g}" if isinstance(value, float) else str(value), self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Toggle:
    """Off or on."""

    default: bool = False
    label: str | None = None
    unit: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.default, bool):
            raise TypeError(f"Toggle: default must be True or False, got {self.default!r}")

    def positions(self) -> tuple[bool, ...]:
        """Return False, then True."""
        return (False, True)

    def check(self, name: str, value: Any) -> bool:
        """Return `value`; raise TypeError if it isn't a bool."""
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        return value

    def text(self, value: Any) -> str:
        """Return "on" or "off"."""
        return "on" if value else "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Some nodes of a tree, each with its parent. A reader clicks nodes into and out of it.

    parents: each node's parent, an earlier node, or -1. default: the nodes chosen at first. names:
    what a reader sees of each node; None uses numbers. In the figure, the nodes are the points of
    the trace whose `meta` is the argument's name; their `customdata` are their numbers, and
    negative numbers are not nodes. The static page needs a formula.
    Raises ValueError for no nodes, a parent that isn't earlier, and other numbers of names.
    """

    parents: Sequence[int]
    default: Sequence[int] = ()
    names: Sequence[str] | None = None
    label: str | None = None
    unit: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if not self.parents or any(not -1 <= up < node for node, up in enumerate(self.parents)):
            raise ValueError(
                "Nodes: parents must hold -1 or an earlier node for each node, got "
                f"{list(self.parents)}"
            )
        if self.names is not None and len(self.names) != len(self.parents):
            raise ValueError(
                f"Nodes: names must have one entry for each of the {len(self.parents)} nodes, got "
                f"{len(self.names)}"
            )
        object.__setattr__(self, "default", self.check("Nodes: default", self.default))

    def positions(self) -> tuple[tuple[int, ...], ...]:
        """Return the first n nodes for each n from 0 up; other trees can be chosen too."""
        return tuple(tuple(range(count)) for count in range(len(self.parents) + 1))

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        """Return the nodes of `value` and all their ancestors; ValueError for another number."""
        found: set[int] = set()
        for node in value:
            if node not in range(len(self.parents)):
                raise ValueError(
                    f"{name} must hold nodes from 0 to {len(self.parents) - 1}, got {node!r}"
                )
            at = int(node)
            while at >= 0 and at not in found:
                found.add(at)
                at = self.parents[at]
        return tuple(sorted(found))

    def toggled(self, value: Sequence[int], node: int) -> tuple[int, ...]:
        """Return `value` with `node` and its ancestors, or without it and all nodes below it."""
        if node not in value:
            return self.check("node", (*value, node))
        gone = {node}
        gone |= {at for at in value if self._below(at, node)}
        return tuple(at for at in value if at not in gone)

    def _below(self, node: int, above: int) -> bool:
        while node > above:
            node = self.parents[node]
        return node == above

    def text(self, value: Any) -> str:
        """Return how many nodes are chosen."""
        return f"{len(value)} of {len(self.parents)}"
