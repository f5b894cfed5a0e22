"""The law of the variance where it is exact, and what the estimates answer."""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

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


def test_the_variance_of_known_gradients(generator: torch.Generator) -> None:
    mean = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    drawn = mean + 2 * torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    assert gradients.gradient_variance(drawn) == pytest.approx(12, rel=0.05)


def test_every_batch_has_its_variance_and_ghosts_are_plain_below_their_size(few: None) -> None:
    rows = [gradients.relative_variance(kind, 1, draws=10) for kind in gradients.KINDS]
    assert {len(row) for row in rows} == {len(gradients.BATCHES)}
    last = [row[-1] / row[2] for row in rows]
    # All 512 rows are one batch: only ghosts still depend on chance.
    assert last[0] < 1e-6 and last[1] < 1e-6 < last[2]
    _, plain, ghosts = rows
    assert ghosts[:3] == pytest.approx(plain[:3], rel=1e-4)


def test_draws_must_be_whole() -> None:
    model = large_batches.network(Regime(batch=32, lr=0.1, source="digits"), [0])[0].member(0)
    data = large_batches.split(0, source="digits")
    with pytest.raises(ValueError, match="draws must be at least 1"):
        gradients.batch_gradients(model, data, 32, draws=0, generator=torch.Generator())
