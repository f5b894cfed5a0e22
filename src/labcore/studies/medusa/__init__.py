"""Whether heads improve predictions: the backbone's, mixed with theirs, and their own."""

from labcore.studies.medusa.mixture import Mixture, mix, predictions
from labcore.studies.medusa.unfrozen import Trained, train_both, train_new

__all__ = ["Mixture", "Trained", "mix", "predictions", "train_both", "train_new"]
