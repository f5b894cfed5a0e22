"""What leaves one step in closed form, against the sum over all drafted tokens."""

import pytest
import torch

from labcore.decoding.theory import overlap


def rows(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = torch.randn(2, size, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return p, q


def after(p: torch.Tensor, q: torch.Tensor, rule: str) -> torch.Tensor:
    left = (p - q).clamp(min=0)
    if rule == "residual":
        return left / left.sum()
    return left.softmax(-1) if rule == "softmaxed residual" else p


@pytest.mark.parametrize("rule", overlap.RULES)
@pytest.mark.parametrize("size", [2, 7, 65])
def test_what_leaves_is_summed_over_every_drafted_token(size, rule, generator) -> None:
    p, q = rows(size, generator)
    out = torch.zeros_like(p)
    for token in range(size):
        accept = min(1.0, float(p[token] / q[token]))
        out[token] += q[token] * accept
        out += q[token] * (1 - accept) * after(p, q, rule)
    found = overlap.one_token(p, q, rule)
    torch.testing.assert_close(found.out, out)
    assert found.acceptance == pytest.approx(1 - float((p - q).abs().sum() / 2))


def test_only_the_normalised_residual_is_exact(generator) -> None:
    p, q = rows(9, generator)
    assert overlap.one_token(p, q).distance(p) < 1e-12
    for rule in overlap.RULES[1:]:
        assert overlap.one_token(p, q, rule).distance(p) > 1e-3
        # Where the draft is the target, nothing is rejected and no rule can be wrong.
        same = overlap.one_token(p, p, rule)
        assert same.distance(p) < 1e-12 and same.acceptance == pytest.approx(1)


def test_a_draft_without_a_common_token_is_never_accepted() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    found = overlap.one_token(p, q)
    assert found.acceptance == 0 and found.distance(p) == 0


def test_toward_ends_at_the_target(generator) -> None:
    p, q = rows(5, generator)
    torch.testing.assert_close(overlap.toward(p, q, 0.0), q)
    torch.testing.assert_close(overlap.toward(p, q, 1.0), p)
    rates = [overlap.one_token(p, overlap.toward(p, q, s)).acceptance for s in (0, 0.3, 0.8, 1)]
    assert rates == sorted(rates)


def test_rows_that_are_no_distributions_are_refused() -> None:
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="q must be one row .* sum to 1"):
        overlap.one_token(p, torch.tensor([0.5, 0.6]))
    with pytest.raises(ValueError, match="p and q must .* got 2 and 3"):
        overlap.one_token(p, torch.tensor([0.5, 0.25, 0.25]))
    with pytest.raises(ValueError, match="rule must be one of"):
        overlap.one_token(p, p, "none")
    with pytest.raises(ValueError, match="share must be from 0"):
        overlap.toward(p, p, 1.5)
