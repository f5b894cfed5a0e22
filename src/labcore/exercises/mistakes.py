"""Usual wrong answers, written as edits of the reference."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

__all__ = ["Change", "Mistake"]

Edit: TypeAlias = tuple[str, str]
Change: TypeAlias = Edit | Sequence[Edit] | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A usual wrong answer.

    name: how the mistake is called, unique in its exercise.
    change: (old, new), an edit of the reference's source, or several; or a whole function, where
    edits would not read well. Each old text occurs exactly once in what the edits before it left.
    hint: what the mistake does and where to look, not the right line.
    """

    name: str
    change: Change
    hint: str

    def source(self, reference: Callable[..., Any], *parts: Callable[..., Any]) -> str:
        """The source text of the wrong answer; where it is an edit, `parts` stand before it.

        Raises ValueError for an edit whose old text does not occur exactly once.
        """
        if callable(self.change):
            return textwrap.dedent(inspect.getsource(self.change))
        source = "\n\n".join(textwrap.dedent(inspect.getsource(f)) for f in (*parts, reference))
        single = isinstance(self.change[0], str)
        for old, new in cast("Sequence[Edit]", [self.change] if single else self.change):
            if source.count(old) != 1:
                raise ValueError(
                    f"an edit must match exactly once, {old!r} of the mistake {self.name!r} occurs "
                    f"{source.count(old)} times in {reference.__name__}; lengthen or correct it"
                )
            source = source.replace(old, new)
        return source

    def function(self, reference: Callable[..., Any], *parts: Callable[..., Any]) -> Any:
        """The wrong answer, as a function with the arguments of `reference`.

        parts: helpers of the reference that may be edited too.
        """
        if callable(self.change):
            return self.change
        source = self.source(reference, *parts)
        # A copy: the reference's own module keeps its functions.
        names = dict(reference.__globals__)
        lazy = __future__.annotations.compiler_flag
        exec(compile(source, f"<{self.name}>", "exec", flags=lazy), names)
        return names[reference.__name__]
