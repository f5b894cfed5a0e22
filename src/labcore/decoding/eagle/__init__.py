"""An EAGLE-like head: one layer that is autoregressive over features, and dynamic draft trees."""

from labcore.decoding.eagle.fused import FusedEagle
from labcore.decoding.eagle.head import EagleHead, load_eagle, save_eagle
from labcore.decoding.eagle.proposer import Eagle
from labcore.decoding.eagle.shipped import eagle_card, pretrained_eagle
from labcore.decoding.eagle.training import (
    eagle_accuracies,
    eagle_loss,
    fitted_sharpness,
    train_eagle,
)
from labcore.decoding.eagle.trees import Costs, Grown

__all__ = [
    "Costs",
    "Eagle",
    "EagleHead",
    "FusedEagle",
    "Grown",
    "eagle_accuracies",
    "eagle_card",
    "eagle_loss",
    "fitted_sharpness",
    "load_eagle",
    "pretrained_eagle",
    "save_eagle",
    "train_eagle",
]
