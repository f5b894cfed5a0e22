"""The map of 8-bit codes."""

import pytest

from labcore.optim import dynamic_map


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_256_values_dense_near_zero(signed: bool) -> None:
    values = dynamic_map(signed=signed)
    assert values.shape == (256,) and (values.diff() > 0).all()
    assert values[-1] == 1 and (values == 0).sum() == 1
    assert (values < 0).sum() == (127 if signed else 0)
    # Each decade below 0.1 has half the values of the one above it.
    counts = [int(((values > 10.0**-k) & (values < 10.0 ** (1 - k))).sum()) for k in range(1, 8)]
    assert counts == [2 ** ((6 if signed else 7) - k) for k in range(7)]
