"""Figures for the chapter `tensor_parallel`."""

from labcore.ui.figures.tensor_parallel.cost import SIZES, all_reduce_curves, fit_view
from labcore.ui.figures.tensor_parallel.ranges import gain_view, ranges_view
from labcore.ui.figures.tensor_parallel.sketch import (
    ALGORITHMS,
    Message,
    messages,
    split_picture,
    steps_view,
)
from labcore.ui.figures.tensor_parallel.timelines import timeline_view

__all__ = [
    "ALGORITHMS",
    "SIZES",
    "Message",
    "all_reduce_curves",
    "fit_view",
    "gain_view",
    "messages",
    "ranges_view",
    "split_picture",
    "steps_view",
    "timeline_view",
]
