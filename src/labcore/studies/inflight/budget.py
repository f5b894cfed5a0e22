"""How long a step takes by its number of tokens, and the largest budget within a limit.

Times are lower bounds from a roofline: products read all weights once and compute per token, and
each request that decodes reads its own keys and values. The attention of a prompt's chunk is left
out.
"""

from __future__ import annotations

from bisect import bisect_right

from labcore.checks import positive
from labcore.decoding.theory.speedup import Roofline

__all__ = ["MOST", "budget", "ridge", "step_seconds"]

MOST = 1 << 16
"""The most tokens that a step is asked for here."""


def step_seconds(roof: Roofline, tokens: int, *, rows: int = 0, context: int = 0) -> float:
    """Return the seconds of a step that reads `tokens`, of which `rows` decode over `context` each.

    Raises ValueError for fewer than one token.
    """
    seconds = roof.seconds(1, batch=tokens)
    if rows:
        seconds += roof.seconds(1, batch=rows, context=context) - roof.seconds(1, batch=rows)
    return seconds


def ridge(roof: Roofline) -> float:
    """Return the number of tokens at which computing takes as long as reading the weights."""
    return roof.seconds(1) * roof.flops / (2 * roof.weights)


def budget(roof: Roofline, limit: float, *, rows: int = 0, context: int = 0) -> int:
    """Return the most tokens of a step that takes at most `limit` seconds; 0 if none does.

    rows, context: as in `step_seconds`. At most MOST. A budget below `rows` can't serve them all.
    """
    positive("limit", limit, "pass seconds")
    return bisect_right(
        range(1, MOST + 1), limit, key=lambda n: step_seconds(roof, n, rows=rows, context=context)
    )
