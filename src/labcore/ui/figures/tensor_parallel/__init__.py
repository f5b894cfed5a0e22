"""Figures for the chapter `tensor_parallel`."""

from labcore.ui.figures.tensor_parallel.cost import SIZES, all_reduce_curves, fit_view
from labcore.ui.figures.tensor_parallel.sketch import (
    ALGORITHMS,
    Message,
    messages,
    split_picture,
    steps_view,
)
from labcore.ui.figures.tensor_parallel.timelines import BATCHES, share_by_batch, timeline_view

__all__ = [
    "ALGORITHMS",
    "BATCHES",
    "SIZES",
    "Message",
    "all_reduce_curves",
    "fit_view",
    "messages",
    "share_by_batch",
    "split_picture",
    "steps_view",
    "timeline_view",
]
