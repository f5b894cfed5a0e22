"""What an optimizer keeps and what its step takes for a moment, from the parameters' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from labcore.memory.accounting.shapes import Shape
from labcore.optim import SM3, Adafactor, AdamW8bit, chunked, tensorwise
from labcore.optim.chunked import CHUNK

__all__ = ["STATE", "buffer_bytes", "step_bytes"]

FLOAT = 4  # bytes of a float32
# Float32 arrays at a time in our optimizers' CPU steps, each for a piece of a parameter. Float32
# parameters come first, then half-precision ones, which are widened.
TEMPORARIES = {"lion": (0, 3), "adafactor": (1, 3), "sm3": (1, 3), "adamw8bit": (11, 13)}

# Copies of all weights that the foreach implementations, the default on a GPU, hold at a time.
FOREACH = {"adamw": 1, "lion": 2, "adafactor": 1, "sm3": 1}

# Bytes of one parameter's state. AdamW and Lion keep moments in its dtype, as torch does.
STATE: dict[str, Callable[[Shape, torch.dtype], int]] = {
    "adamw": lambda shape, dtype: 2 * math.prod(shape) * dtype.itemsize + FLOAT,  # the step counter
    "sgd": lambda *_: 0,
    "lion": lambda shape, dtype: math.prod(shape) * dtype.itemsize,
    "adafactor": Adafactor.state_bytes,
    "sm3": SM3.state_bytes,
    "adamw8bit": AdamW8bit.state_bytes,
}


def _below(sizes: Sequence[int], size: int) -> int:
    """Return the elements of parameters under `size`, which our optimizers step together."""
    return sum(one for one in sizes if one < size)


def buffer_bytes(optimizer: str, sizes: Sequence[int], width: int, *, gpu: bool) -> int:
    """Return the workspace that the optimizer keeps between steps: only Lion's, on a CPU.

    sizes: elements of each parameter. width: bytes of an element.
    """
    if optimizer != "lion" or gpu:
        return 0
    line = _below(sizes, chunked.SMALL)
    return 2 * FLOAT * min(CHUNK, sum(sizes)) + 2 * line * width


def step_bytes(optimizer: str, sizes: Sequence[int], width: int, *, gpu: bool) -> int:
    """Return the workspace of a step on parameters of these sizes, in the order of the model."""
    if gpu and optimizer in FOREACH and (width == FLOAT or optimizer == "adamw"):
        return FOREACH[optimizer] * sum(sizes) * width
    if optimizer == "adamw":  # two temporaries per parameter, plus one of the previous one's
        return width * max(2 * now + before for before, now in pairwise([0, *sizes]))
    if optimizer == "sgd":
        return 0
    arrays, line = TEMPORARIES[optimizer][width < FLOAT], max(sizes)
    if optimizer == "lion":  # two pieces' moments overlap
        line = max(line, _below(sizes, chunked.SMALL))
        arrays += width < FLOAT and line >= 2 * CHUNK
    elif optimizer != "adamw8bit" and width == FLOAT:
        line = max(line, _below(sizes, tensorwise.SMALL + 1))
    return arrays * FLOAT * min(CHUNK, line)
