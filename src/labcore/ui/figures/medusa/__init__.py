"""Figures for the chapter `medusa`."""

from labcore.ui.figures.medusa.heads import (
    TreeSweep,
    accuracy_by_distance,
    against_peers,
    heads_learn,
    tokens_by_tree,
)
from labcore.ui.figures.medusa.tree import TreeRun, tree_explorer, tree_view, where_the_heads_sit

__all__ = [
    "TreeRun",
    "TreeSweep",
    "accuracy_by_distance",
    "against_peers",
    "heads_learn",
    "tokens_by_tree",
    "tree_explorer",
    "tree_view",
    "where_the_heads_sit",
]
