"""The law of the variance where it is exact, and what the estimates answer."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from labcore.norm import convert_ghost_batchnorm
from labcore.studies.ghost_norm import gradients, large_batches
from labcore.studies.ghost_norm.large_batches import Regime


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MNIST-1D with 512 rows."""
    small = dataclasses.replace(large_batches.SOURCES["MNIST-1D"], rows=512)
    monkeypatch.setitem(large_batches.SOURCES, "MNIST-1D", small)
    large_batches._mnist1d.cache_clear()
    yield
    large_batches._mnist1d.cache_clear()


def test_a_gradient_is_that_of_the_mean_loss_of_different_rows(seed: int) -> None:
    data = large_batches.split(seed, source="digits")
    data = dataclasses.replace(data, train_x=data.train_x.double())
    regime = Regime(batch=32, lr=0.1, source="digits")
    model = large_batches.network(regime, [seed])[0].member(0).double()
    drawn = gradients.batch_gradients(
        model, data, 512, draws=2, generator=torch.Generator().manual_seed(seed)
    )
    loss = F.cross_entropy(model.train()(data.train_x), data.train_y)
    whole = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
    # A batch of all images is always the same one, up to the order of its sums, which in float32
    # puts some ReLU on the other side of 0 for one seed in 50.
    for row in drawn:
        torch.testing.assert_close(row, whole, rtol=1e-9, atol=1e-12)
    assert gradients.gradient_bias(drawn, whole) < 1e-3


def test_the_law_holds_for_a_mean_over_different_rows(generator: torch.Generator) -> None:
    """Means of B of 12 rows: the variance over all subsets is known without a draw."""
    rows = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    one = rows.var(0, unbiased=False).sum().item()
    for batch in (2, 3, 11):
        subsets = torch.tensor(list(itertools.combinations(range(12), batch)))
        means = rows[subsets].mean(1)
        exact = means.var(0, unbiased=False).sum().item()
        (predicted,) = gradients.predict_gradient_variance(one, 1, [batch], 12)
        assert predicted == pytest.approx(exact)
    assert gradients.predict_gradient_variance(one, 1, [12], 12) == [0.0]
    assert gradients.predict_gradient_variance(1.0, 1, [8], 10**9) == [pytest.approx(1 / 8)]


def test_variance_and_bias_of_known_gradients(generator: torch.Generator) -> None:
    mean = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    drawn = mean + 2 * torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    assert gradients.gradient_variance(drawn) == pytest.approx(12, rel=0.05)
    # Distance 5 of the mean from a full gradient of norm 10.
    full = torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64)
    full *= 10 / full.norm()
    expected = ((mean - full).norm() / 10).item()
    assert gradients.gradient_bias(drawn, full) == pytest.approx(expected, abs=0.02)
    # A mean that is off by chance alone counts as right, most of the time, and never as negative.
    assert gradients.gradient_bias(drawn, mean) < 0.03


def test_ghosts_keep_a_small_batchs_mean_and_lose_its_variance(few: None) -> None:
    data, dice = large_batches.split(3), torch.Generator().manual_seed(3)
    (run,) = large_batches.train(Regime(batch=16, lr=0.3, epochs=1), [3])
    full = gradients.batch_gradients(run.model, data, 512, draws=1, generator=dice)[0]
    small = gradients.batch_gradients(run.model, data, 16, draws=150, generator=dice)
    large = gradients.batch_gradients(run.model, data, 256, draws=150, generator=dice)
    ghostly = convert_ghost_batchnorm(copy.deepcopy(run.model), 16)
    both = gradients.batch_gradients(ghostly, data, 256, draws=150, generator=dice)
    biases = [gradients.gradient_bias(each, full) for each in (small, large, both)]
    assert biases[1] < 0.5 * biases[2]
    assert biases[2] == pytest.approx(biases[0], rel=0.5)
    assert gradients.gradient_variance(both) < 0.2 * gradients.gradient_variance(small)


def test_a_row_has_every_batch_and_ghosts_are_plain_below_their_size(few: None) -> None:
    rows = {kind: gradients.variance_and_bias(kind, 1, draws=10) for kind in gradients.KINDS}
    for row in rows.values():
        assert len(row["variance"]) == len(row["bias"]) == len(gradients.BATCHES)
    last = [row["variance"][-1] / row["variance"][2] for row in rows.values()]
    # All 512 rows are one batch: only ghosts still depend on chance.
    assert last[0] < 1e-6 and last[1] < 1e-6 < last[2]
    plain, ghosts = rows["batch norm"], rows["ghosts of 32"]
    assert ghosts["variance"][:3] == pytest.approx(plain["variance"][:3], rel=1e-4)


def test_draws_must_be_whole() -> None:
    model = large_batches.network(Regime(batch=32, lr=0.1, source="digits"), [0])[0].member(0)
    data = large_batches.split(0, source="digits")
    with pytest.raises(ValueError, match="draws must be at least 1"):
        gradients.batch_gradients(model, data, 32, draws=0, generator=torch.Generator())
