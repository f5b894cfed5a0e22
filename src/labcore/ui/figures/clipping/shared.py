"""What the figures of the chapter `clipping` share."""

from __future__ import annotations

from labcore.ui.theme import PALETTE

__all__ = ["COLORS", "POWERS", "ROWS", "short_number"]

POWERS = {"type": "log", "dtick": 1, "exponentformat": "power"}
COLORS = tuple(PALETTE.values())
ROWS = {"showgrid": False, "zeroline": False}


def short_number(value: float) -> str:
    """Format a norm for a title: 3 digits, 1e5 rather than 1e+05."""
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
