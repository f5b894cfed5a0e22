"""How common exploding gradients are: networks as libraries make them, new and trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from labcore.checks import one_of
from labcore.studies.clipping import exploding, networks

__all__ = ["DEFAULT", "DEPTH", "EXPLODED", "IN_USE", "LENGTH", "whole_way"]

LENGTH, DEPTH = 128, 50  # characters, convolutions
EXPLODED = 100.0  # from here on, the whole way back has made a gradient explode
DEFAULT = 6**-0.5  # the gain with the variance of torch's default, uniform weights
# Family -> name -> network and arguments of its class. Keras draws recurrent weights orthogonal.
IN_USE: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "recurrent": {
        "ReLU, He": ("RNN", {"gain": 1.0}),
        "ReLU, PyTorch's default": ("RNN", {"gain": DEFAULT}),
        "tanh, PyTorch's default": ("RNN", {"gain": DEFAULT, "activation": "tanh"}),
        "tanh, orthogonal": ("RNN", {"activation": "tanh", "orthogonal": True}),
        "LSTM, PyTorch's default": ("LSTM", {}),
    },
    "convolutional": {
        "He": ("conv", {"depth": DEPTH}),
        "PyTorch's default": ("conv", {"depth": DEPTH, "gain": DEFAULT}),
        "He, batch norm": ("conv", {"depth": DEPTH, "norm": True}),
        "He, batch norm, residuals": ("conv", {"depth": DEPTH, "norm": True, "residual": True}),
    },
}


def whole_way(
    family: str, name: str, seed: int, *, trained: bool, length: int = LENGTH, **settings: Any
) -> float:
    """Return how many times larger the gradient is at the first state than at the last.

    family, name: keys of IN_USE. trained: after a training by AdamW without clipping, else new; the
    batch that measures is another one. length: characters of that batch. settings: as of
    `exploding.run`, in place of the study's.
    Infinite if the gradient is not finite at the first state.
    """
    of_family = IN_USE[one_of("family", family, IN_USE)]
    network, arguments = of_family[one_of("name", name, of_family)]
    training = {key: settings.pop(key) for key in ("steps", "batch") if key in settings}
    arguments = {**arguments, **settings}
    if trained:
        model = exploding.run(network, "none", "AdamW", seed, **arguments, **training).model
    else:
        model = networks.make(network, seed=seed, **arguments)
    generator = torch.Generator().manual_seed(10_000 + seed)
    batch = networks.draw(network, 64, length=length, generator=generator)
    first, *_, last = networks.sizes(model, *batch)
    return first / last if math.isfinite(first) and last > 0 else math.inf
