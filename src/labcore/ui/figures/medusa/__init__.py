"""Figures for the chapter `medusa`."""

from labcore.ui.figures.medusa.bill import BACKBONES, training_bill
from labcore.ui.figures.medusa.heads import (
    accuracy_by_distance,
    against_peers,
    heads_learn,
    speed_by_requests,
)
from labcore.ui.figures.medusa.picker import HEAD_SHARE, Guesses, step_cost, tree_picker
from labcore.ui.figures.medusa.speed import TreeSweep, speed_by_tree
from labcore.ui.figures.medusa.tree import tree_view, where_the_heads_sit

__all__ = [
    "BACKBONES",
    "HEAD_SHARE",
    "Guesses",
    "TreeSweep",
    "accuracy_by_distance",
    "against_peers",
    "heads_learn",
    "speed_by_requests",
    "speed_by_tree",
    "step_cost",
    "training_bill",
    "tree_picker",
    "tree_view",
    "where_the_heads_sit",
]
