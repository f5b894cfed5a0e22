"""Optimizers: the rules as pure functions, and Lion and AdamW as `torch.optim.Optimizer`s.

The line of descent stands in `rules`: gradient_descent, momentum, adagrad, rmsprop, adam, adamw,
lion.
"""

from labcore.optim.adamw import AdamW
from labcore.optim.lion import Lion
from labcore.optim.rules import (
    adagrad,
    adam,
    adamw,
    gradient_descent,
    lion,
    momentum,
    rmsprop,
)

__all__ = [
    "AdamW",
    "Lion",
    "adagrad",
    "adam",
    "adamw",
    "gradient_descent",
    "lion",
    "momentum",
    "rmsprop",
]
