"""Exercises on tiled attention: add a tile, merge parts, count and size tiles, and a clinic."""

from labcore.exercises.topics.attention.clinic import CLINIC
from labcore.exercises.topics.attention.merging import MERGE_PARTS
from labcore.exercises.topics.attention.sram import LARGEST_TILE
from labcore.exercises.topics.attention.streaming import ADD_TILE
from labcore.exercises.topics.attention.tiles import COUNT_TILES

__all__ = ["ADD_TILE", "CLINIC", "COUNT_TILES", "EXERCISES", "LARGEST_TILE", "MERGE_PARTS"]

EXERCISES = (ADD_TILE, MERGE_PARTS, COUNT_TILES, LARGEST_TILE, CLINIC)
