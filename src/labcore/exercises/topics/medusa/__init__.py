"""Exercises on Medusa: labels, the tree's mask, its choice, compaction, and a clinic."""

from labcore.exercises.topics.medusa.clinic import CLINIC, audit
from labcore.exercises.topics.medusa.compaction import COMPACT
from labcore.exercises.topics.medusa.labels import SHIFTED_LABELS
from labcore.exercises.topics.medusa.masks import TREE_MASK
from labcore.exercises.topics.medusa.trees import SPARSE_TREE

__all__ = [
    "CLINIC",
    "COMPACT",
    "EXERCISES",
    "SHIFTED_LABELS",
    "SPARSE_TREE",
    "TREE_MASK",
    "audit",
]

EXERCISES = (SHIFTED_LABELS, TREE_MASK, SPARSE_TREE, COMPACT, CLINIC)
