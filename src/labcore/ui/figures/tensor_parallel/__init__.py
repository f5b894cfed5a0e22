"""Figures for the chapter `tensor_parallel`."""

from labcore.ui.figures.tensor_parallel.cost import fit_view, protocol_curves
from labcore.ui.figures.tensor_parallel.published import residuals_view, tokens_by_gpus
from labcore.ui.figures.tensor_parallel.ranges import added_view, gain_view
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
    "Message",
    "added_view",
    "fit_view",
    "gain_view",
    "messages",
    "protocol_curves",
    "residuals_view",
    "share_by_batch",
    "split_picture",
    "steps_view",
    "timeline_view",
    "tokens_by_gpus",
]
