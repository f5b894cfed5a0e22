"""Optimizers: update rules as pure functions, and five `torch.optim.Optimizer` classes.

`rules` follows their history: gradient_descent, momentum, adagrad, rmsprop, adam, adamw, lion.
`Lion` and `AdamW` are fast; `Adafactor`, `SM3` and `AdamW8bit` keep less state.
"""

from labcore.optim.adafactor_optimizer import Adafactor, adafactor
from labcore.optim.adamw8bit_optimizer import AdamW8bit, dequantize_blocks, quantize_blocks
from labcore.optim.adamw_optimizer import AdamW
from labcore.optim.lion_optimizer import Lion
from labcore.optim.map_8bit import dynamic_map, largest_error
from labcore.optim.rules import (
    adagrad,
    adam,
    adamw,
    gradient_descent,
    lion,
    momentum,
    rmsprop,
)
from labcore.optim.sm3_optimizer import SM3, sm3

__all__ = [
    "SM3",
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "dequantize_blocks",
    "dynamic_map",
    "gradient_descent",
    "largest_error",
    "lion",
    "momentum",
    "quantize_blocks",
    "rmsprop",
    "sm3",
]
