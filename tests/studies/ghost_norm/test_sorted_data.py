"""Running statistics by policy: predicted from groups, and their effect on a network."""

import pytest
import torch

from labcore.norm.ghosts import POLICIES
from labcore.studies.ghost_norm import large_batches, sorted_data


def groups(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Four groups of 24 rows, sorted, each with its own mean and variance; the variance a row."""
    scales = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    parts, variances = [], []
    for number, scale in enumerate(scales):
        part = 4 * number + scale * torch.randn(24, 7, generator=generator, dtype=torch.float64)
        parts.append(part)
        variances.append(part.var(0).mean().expand(24))
    return torch.cat(parts), torch.cat(variances)


def test_ghosts_of_whole_groups_are_predicted_exactly(generator: torch.Generator) -> None:
    values, variances = groups(generator)
    total = values.var(0).mean().item()
    found = sorted_data.running_variances(values, ghost=24, steps=2, momentum=0.3)
    law = sorted_data.predict_variances(variances, total, ghost=24, steps=2, momentum=0.3)
    assert tuple(found) == tuple(law) == POLICIES
    for policy in POLICIES:
        assert found[policy] == pytest.approx(law[policy]), policy
    # The pooled statistics alone know how far the groups lie apart.
    assert found["pooled"] > 2 * max(found[name] for name in POLICIES if name != "pooled")
    # The last group, the widest, weighs most in a sequence.
    assert found["sequential"] > found["mean"]


def test_the_pooled_statistics_do_not_see_the_order(generator: torch.Generator) -> None:
    values, _ = groups(generator)
    mixed = values[torch.randperm(len(values), generator=generator)]
    a, b = (sorted_data.running_variances(x, ghost=24) for x in (values, mixed))
    assert a["pooled"] == pytest.approx(b["pooled"])
    assert b["sequential"] > 3 * a["sequential"]


def test_sequential_statistics_of_sorted_data_cost_accuracy() -> None:
    regime = large_batches.Regime(batch=32, lr=0.3, epochs=10, source="digits")
    (run,) = large_batches.train(regime, [5])
    data = large_batches.split(5, source="digits")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    order = data.train_y.argsort(stable=True)
    by_order = sorted_data.accuracy_by_policy(run.model, data, order, ghost=32)
    mixed = sorted_data.accuracy_by_policy(run.model, data, torch.arange(512), ghost=32)
    assert by_order["pooled"] == pytest.approx(run.accuracy, abs=0.02)
    assert by_order["sequential"] < by_order["pooled"]
    assert max(mixed.values()) - min(mixed.values()) < 0.02
    after = run.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
