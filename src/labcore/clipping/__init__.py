"""Gradient clipping functions, all returning the norms before clipping and the coefficients."""

from labcore.clipping.adaptive import clip_adaptive
from labcore.clipping.clip import clip_by_global_norm, clip_by_local_norm, clip_by_value
from labcore.clipping.contract import Clipped
from labcore.clipping.history import AutoClip, ZClip

__all__ = [
    "AutoClip",
    "Clipped",
    "ZClip",
    "clip_adaptive",
    "clip_by_global_norm",
    "clip_by_local_norm",
    "clip_by_value",
]
