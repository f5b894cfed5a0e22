"""Figures for the chapter `inflight`."""

from labcore.ui.figures.inflight.batches import two_batches
from labcore.ui.figures.inflight.budget import step_times
from labcore.ui.figures.inflight.goodput import goodput_curves
from labcore.ui.figures.inflight.packed import LAYOUTS, packed_mask, prefix_tree
from labcore.ui.figures.inflight.rivals import POLICIES, RIVALS_FORMULA, two_policies
from labcore.ui.figures.inflight.slack import unused_rows

__all__ = [
    "LAYOUTS",
    "POLICIES",
    "RIVALS_FORMULA",
    "goodput_curves",
    "packed_mask",
    "prefix_tree",
    "step_times",
    "two_batches",
    "two_policies",
    "unused_rows",
]
