"""1,797 handwritten digits of 8 x 8 pixels, from scikit-learn."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch

from labcore.checks import one_of

__all__ = ["Digits", "digits"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Digits:
    """A fixed split of the digits.

    train_x [N, 64], test_x [M, 64]: pixels in 0..1. train_y [N], test_y [M]: int64 classes 0-9.
    version: the version of scikit-learn, which ships the data.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    version: str

    def to(self, device: torch.device | str) -> Digits:
        """Return the same split on another device."""
        return Digits(
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
            version=self.version,
        )


@functools.cache
def _raw() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # here, because it takes a second to import

    bunch = load_digits()
    pixels = torch.from_numpy(np.ascontiguousarray(bunch.data)) / 16.0
    return pixels, torch.from_numpy(np.ascontiguousarray(bunch.target)).long()


def digits(
    *, dtype: torch.dtype = torch.float32, train_share: float = 0.8, seed: int = 0
) -> Digits:
    """Load the digits, shuffled by `seed` and split. The same arguments give the same split.

    dtype: the pixels' dtype (float16, bfloat16, float32, float64).
    train_share: the fraction of the 1,797 images used for training.
    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998
    (the test part), as shipped with scikit-learn.
    Raises ValueError for another dtype, or a train_share that is not between 0 and 1.
    """
    one_of("dtype", dtype, (torch.float32, torch.float64, torch.float16, torch.bfloat16))
    if not 0 < train_share < 1:
        raise ValueError(
            f"train_share must be between 0 and 1, got {train_share}; 0.8 keeps a fifth for tests"
        )
    pixels, labels = _raw()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pixels, labels = pixels[order].to(dtype), labels[order]
    cut = round(train_share * len(labels))
    return Digits(
        train_x=pixels[:cut].clone(),
        train_y=labels[:cut].clone(),
        test_x=pixels[cut:].clone(),
        test_y=labels[cut:].clone(),
        version=f"scikit-learn {version('scikit-learn')}",
    )
