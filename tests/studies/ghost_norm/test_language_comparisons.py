"""What is read of the language model's records: paired losses, tokens to a loss, noise."""

import math
from types import SimpleNamespace

import pytest

from labcore import records
from labcore.studies.ghost_norm import language_comparisons as compared

WORTH = {"AdamW": 3.0, "unchanged": 3.5, "square root": 3.25}


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose loss falls from 8 to 4 along a line, over more tokens for larger batches."""

    def find(slug: str, case: str, quantity: str) -> SimpleNamespace:
        assert quantity == "held-out loss"
        batch, rule, *_ = case.removeprefix("language/").split("/")
        seed = int(case[-1]) if case[-1].isdigit() else 0
        steps = 786_432 // int(batch) if batch.isdigit() else 1
        slow = {"2048": 1.0, "8192": 2.0, "32768": 5.0}.get(batch, 1.0)
        details = {
            "setting": {"lr": 0.1, "decay": 0.1},
            "noise": {"0.5": {"signal": 1.0 + seed, "noise": 25.0}},
            "losses": [8 - 6 * step / steps / slow for step in range(steps)],
        }
        return SimpleNamespace(p50=WORTH.get(rule, 2.0) + seed, details=details)

    monkeypatch.setattr(records, "find", find)


def test_losses_are_compared_seed_by_seed() -> None:
    found = compared.differences()
    assert found["32768/unchanged minus tuned"] == [0.5] * 4
    assert found["32768/square root minus tuned"] == [0.25] * 4
    assert found["32768/square root minus unchanged"] == [-0.25] * 4
    assert found["warm-up minus 4096"] == [-1.25] * 4
    assert found["warm-up minus 2048, tuned"] == [-1.0] * 4
    assert found["4096 minus 2048, tuned"] == [0.25] * 4
    tuned = compared.tuned_differences()
    assert tuned == {"8192 minus 2048": [0.0] * 4, "32768 minus 8192": [0.0] * 4}


def test_tokens_to_a_loss_are_over_those_of_the_smallest_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compared, "GOALS", {7.4: (2_048, 8_192, 32_768), 6.5: (2_048, 8_192)})
    found = compared.token_ratios()
    over = "tokens ratio, {} over 2048/to training loss {}"
    assert found[over.format(8192, 7.4)] == pytest.approx([2.0] * 4)
    assert found[over.format(32768, 7.4)] == pytest.approx([5.0] * 4)
    assert found[over.format(8192, 6.5)] == pytest.approx([2.0] * 4)
    assert len(found) == 3


def test_the_critical_batch_is_where_tokens_double() -> None:
    for critical in (500.0, 7_000.0):
        ratio = (1 + 8_192 / critical) / (1 + 2_048 / critical)
        assert compared.critical_batch(ratio, 2_048, 8_192) == pytest.approx(critical)
    assert compared.critical_batch(0.9, 2_048, 8_192) == math.inf
    assert compared.critical_batch(5.0, 2_048, 8_192) == 0.0


def test_signal_and_noise_are_averaged_before_they_are_divided() -> None:
    ((share, (scale, by_seed)),) = compared.noise_scales().items()
    assert share == 0.5 and scale == pytest.approx(25 / 2.5)
    assert by_seed["signal"] == [1.0, 2.0, 3.0, 4.0]
