"""What is read of the language model's recorded curves."""

from types import SimpleNamespace

import pytest

from labcore.studies.language import curves

SLOWER = {"2048": 1.0, "8192": 2.0, "32768": 5.0}
TOKENS = 786_432


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose loss falls from 8 along a line: larger batches more slowly, Lion half as fast."""

    def find(slug: str, case: str, quantity: str) -> SimpleNamespace:
        batch, optimizer, seed = case.split("/")
        steps = TOKENS // int(batch)
        slow = SLOWER[batch] * (2 if optimizer == "Lion" else 1) * (1 + int(seed[-1]))
        return SimpleNamespace(details={"losses": [8 - 6 * n / steps / slow for n in range(steps)]})

    monkeypatch.setattr("labcore.records.find", find)


@pytest.mark.parametrize("batch", [2_048, 8_192, 32_768])
def test_a_loss_is_smoothed_over_as_much_text_for_every_batch(batch: int) -> None:
    tokens, losses = curves.smoothed(batch, "AdamW", 1)
    assert len(tokens) == len(losses) == TOKENS // curves.WINDOW
    # Along a line, a mean lies on it.
    assert losses == pytest.approx(
        [8 - 6 * each / TOKENS / SLOWER[f"{batch}"] / 2 for each in tokens]
    )


def test_tokens_to_a_loss_are_read_off_the_line() -> None:
    assert curves.tokens_to(7.5, 2_048, "AdamW") == pytest.approx(
        [TOKENS / 12 * n for n in (1, 2, 3, 4)]
    )
    with pytest.raises(ValueError, match="x must lie between"):
        curves.tokens_to(1.0, 2_048, "AdamW")


def test_an_optimizer_half_as_fast_needs_twice_the_tokens() -> None:
    for batch in (2_048, 8_192):
        assert curves.token_ratios(batch, "Lion", "AdamW") == pytest.approx([2.0] * 4)
        assert curves.token_ratios(batch, "AdamW", "Lion") == pytest.approx([0.5] * 4)
        assert curves.token_ratios(batch, "AdamW", "AdamW") == pytest.approx([1.0] * 4)
