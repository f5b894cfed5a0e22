"""The statistics of batches against definitions, enumerations and data of known correlation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labcore.shuffling import (
    FullShuffle,
    autocorrelation,
    design_effect,
    intraclass_correlation,
    label_entropy,
    per_sample_gradients,
    predicted_design_effect,
)


def entropy(labels) -> float:
    _, counts = np.unique(np.asarray(labels), return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("labels", [[0, 0, 0, 1, 1, 2, 5], [3, 3, 3, 3], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_expected_entropy_is_the_mean_over_all_ways_to_draw(labels, size) -> None:
    draws = [entropy(draw) for draw in itertools.combinations(labels, size)]
    batches = [torch.tensor(labels[:size])] + [torch.tensor(labels[size:])] * bool(labels[size:])
    found = label_entropy(batches)
    rest = len(labels) - size
    others = [entropy(draw) for draw in itertools.combinations(labels, rest)] if rest else []
    means = [np.mean(draws), *([np.mean(others)] if rest else [])]
    assert found.expected == pytest.approx(np.mean(means), abs=1e-12)
    assert found.within == pytest.approx(np.mean([entropy(b) for b in batches]), abs=1e-12)
    assert found.data == pytest.approx(entropy(labels), abs=1e-12)


def test_random_batches_have_expected_entropy_and_sorted_less(generator) -> None:
    labels = torch.randint(0, 10, (6000,), generator=generator)
    shuffled = label_entropy(labels[torch.randperm(6000, generator=generator)].split(32))
    # One batch's entropy varies by less than 0.15 nats: the mean of 188 by 0.011; 6 of those.
    assert abs(shuffled.within - shuffled.expected) < 0.066
    assert shuffled.expected < shuffled.data <= math.log(10)
    sorted_ = label_entropy(labels.sort().values.split(32))
    assert sorted_.within < 0.2 and sorted_.expected == pytest.approx(shuffled.expected)


def test_entropy_of_large_data_stays_exact() -> None:
    # Half the labels of each kind: the exact sum by integers.
    n, b = 400_000, 6
    found = label_entropy(torch.arange(n).remainder(2).reshape(-1, b - 2)[: n // b * b // (b - 2)])
    total = n // b * b // (b - 2) * (b - 2)
    half, size = total // 2, b - 2
    exact = 0.0
    for k in range(1, size):
        share = Fraction(math.comb(half, k) * math.comb(half, size - k), math.comb(total, size))
        exact -= 2 * float(share) * k / size * math.log(k / size)
    assert found.expected == pytest.approx(exact, rel=1e-8)


def by_definition(groups) -> tuple[float, float, float, float]:
    """MSB, MSW, total variance and the corrected size, with plain sums over rows and columns."""
    groups = [np.asarray(group, dtype=np.float64).reshape(len(group), -1) for group in groups]
    rows = np.concatenate(groups)
    n, k = len(rows), len(groups)
    middle = rows.mean(0)
    between = sum(((row_mean - middle) ** 2).sum() * len(g) for g in groups
                  for row_mean in [g.mean(0)]) / (k - 1)  # fmt: skip
    within = sum(((row - g.mean(0)) ** 2).sum() for g in groups for row in g) / (n - k)
    size = (n - sum(len(g) ** 2 for g in groups) / n) / (k - 1)
    return between, within, ((rows - middle) ** 2).sum() / (n - 1), size


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 1, 3, 2), (7, 7, 7, 2), (2, 30)])
@pytest.mark.parametrize("columns", [(), (1,), (3, 2)])
def test_icc_and_design_effect_follow_their_formulas(sizes, columns, generator) -> None:
    batches = [
        torch.randn(n, *columns, generator=generator) + torch.randn(1, generator=generator)
        for n in sizes
    ]
    between, within, total, size = by_definition([batch.numpy() for batch in batches])
    icc = (between - within) / (between + (size - 1) * within)
    assert intraclass_correlation(batches) == pytest.approx(icc, rel=1e-10)
    assert design_effect(batches) == pytest.approx(between / total, rel=1e-10)


@pytest.mark.parametrize("icc", [0.0, 0.05, 0.3, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_known_correlation_is_found_and_predicts_other_sizes(icc, dtype, generator) -> None:
    k, long = 3000, 32
    shared = torch.randn(k, 1, generator=generator).mul(icc**0.5)
    rows = shared + torch.randn(k, long, generator=generator).mul((1 - icc) ** 0.5)
    rows = rows.to(dtype)
    found = intraclass_correlation(rows[:, :8])
    # Fisher's standard error of the estimate, six of them.
    error = (1 - icc) * (1 + 7 * icc) * math.sqrt(2 / (8 * 7 * (k - 1)))
    assert abs(found - icc) < 6 * error
    for size in (2, 16, 32):
        exact = 1 + (size - 1) * icc
        measured = design_effect(rows[:, :size])
        assert measured == pytest.approx(exact, abs=6 * exact * math.sqrt(2 / k) + 0.02)
        predicted = predicted_design_effect(found, size)
        assert predicted == pytest.approx(exact, abs=6 * (size - 1) * error + 1e-12)


def test_design_effect_compares_batch_means_to_independent_rows(
    generator,
) -> None:
    rows = torch.randn(500, 6, generator=generator, dtype=torch.float64).cumsum(0)
    means = rows.mean(1).var()
    assert design_effect(rows) == pytest.approx(float(means / (rows.var() / 6)))


def test_design_effect_averages_one_over_all_orders() -> None:
    rows = torch.tensor([0.3, -1.0, 2.5, 2.5, 7.0, -0.2], dtype=torch.float64)
    orders = [list(order) for order in itertools.permutations(range(6))]
    for cut in ((2, 2, 2), (3, 3), (1, 2, 3), (4, 2)):
        found = [design_effect(rows[order].split(cut)) for order in orders]
        assert np.mean(found) == pytest.approx(1.0, rel=1e-12)


def test_extremes() -> None:
    equal = torch.arange(9.0).reshape(9, 1).expand(9, 5)
    assert intraclass_correlation(equal) == pytest.approx(1.0)
    assert design_effect(equal) == pytest.approx(44 / 8)  # (kb - 1)/(k - 1), about b
    balanced = torch.tensor([[0.0, 1.0, 2.0]]).expand(7, 3)
    assert intraclass_correlation(balanced) == pytest.approx(-1 / 2)
    assert design_effect(balanced) == 0
    assert predicted_design_effect(-1 / 2, 3) == 0 and predicted_design_effect(0.7, 1) == 1
    assert intraclass_correlation([torch.ones(3), torch.zeros(1)]) == pytest.approx(1.0)


def test_one_hot_labels_in_order_and_shuffled(seed: int) -> None:
    labels = torch.arange(10).repeat_interleave(96)
    kinds = F.one_hot(labels).double()
    assert intraclass_correlation(kinds.split(32)) == pytest.approx(1.0)
    shuffled = kinds[list(FullShuffle(960, seed=seed))].split(32)
    assert abs(intraclass_correlation(shuffled)) < 0.03


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: intraclass_correlation(torch.ones(3, 4)), ValueError, "must vary"),
        (lambda: design_effect(torch.ones(3, 4) * 0.1), ValueError, "must vary"),
        (lambda: intraclass_correlation(torch.ones(1, 4)), ValueError, "2 batches, got 1"),
        (lambda: intraclass_correlation(torch.rand(3, 1)), ValueError, "at least 2 rows"),
        (lambda: intraclass_correlation(torch.ones(3, 4).long()), TypeError, "floating"),
        (lambda: intraclass_correlation([torch.rand(2), torch.rand(0)]), ValueError, "one row"),
        (lambda: design_effect(torch.tensor([[1.0, math.nan], [1, 2]])), ValueError, "finite"),
        (lambda: label_entropy([torch.rand(3)]), TypeError, "whole numbers"),
        (lambda: label_entropy([]), ValueError, "at least one batch"),
        (lambda: label_entropy([torch.tensor([], dtype=torch.long)]), ValueError, "one label"),
        (lambda: predicted_design_effect(0.1, 0), ValueError, "batch_size"),
        (lambda: autocorrelation(torch.ones(5), 2), ValueError, "constant"),
        (lambda: autocorrelation(torch.rand(5), 5), ValueError, "series must be .* lags 5"),
        (lambda: autocorrelation(torch.tensor([1.0, math.inf, 2]), 1), ValueError, "finite"),
    ],
)
def test_bad_arguments_say_what_to_do(call, error, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


def test_per_sample_gradients_are_those_of_one_row_at_a_time(generator) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[0].weight.requires_grad_(False)
    model.eval()
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (7,), generator=generator)
    expected = []
    for i in range(7):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        expected.append(torch.cat(grads))
    model.zero_grad()
    for chunk in (None, 3):
        found = per_sample_gradients(model, F.cross_entropy, x, y, chunk_size=chunk)
        assert torch.allclose(found, torch.stack(expected), atol=1e-12, rtol=0)
    assert all(p.grad is None for p in model.parameters())


def test_autocorrelation_by_its_formula_and_of_a_known_process(generator) -> None:
    series = torch.randn(40, generator=generator)
    x = series.double().numpy() - series.double().numpy().mean()
    expected = [(x[: 40 - lag] * x[lag:]).sum() / (x**2).sum() for lag in range(11)]
    assert autocorrelation(series, 10).numpy() == pytest.approx(np.array(expected), abs=1e-12)
    noise = torch.randn(20_000, generator=generator, dtype=torch.float64).tolist()
    path = list(itertools.accumulate(noise, lambda last, shock: 0.7 * last + shock))
    found = autocorrelation(torch.tensor(path, dtype=torch.float64), 3)
    # Bartlett's formula gives standard errors of about 0.005 to 0.01; 6 of them.
    assert found.numpy() == pytest.approx([1, 0.7, 0.49, 0.343], abs=0.06)
