"""Draws, and the distribution that a request asks for: equal to transformers' processors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from labcore.decoding.contract import Draft, SamplingConfig
from labcore.decoding.draws import Draws, draws_of
from labcore.decoding.sampling import probabilities, tree_probabilities


def by_transformers(logits: Tensor, sampling: SamplingConfig, seen: list[int]) -> Tensor:
    import transformers as hf

    scores = logits.float()
    ids = torch.tensor([seen] * len(logits), dtype=torch.int64)
    steps = []
    if sampling.repetition_penalty != 1 and seen:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("V", [1, 7, 301])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_distribution_is_that_of_transformers(
    V: int, top_k: int, top_p: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for temperature, penalty in ((1.0, 1.0), (0.7, 1.3), (3.0, 0.8)):
        logits = 3 * torch.randn(5, V, generator=generator)
        logits[1] = (2 * logits[1]).round() / 2  # ties
        logits[2, 1:][torch.rand(V - 1, generator=generator) < 0.5] = -torch.inf
        logits[3] = 0
        logits = logits.to(dtype)
        before = logits.clone()
        seen = torch.randint(V, (4,), generator=generator).tolist()
        sampling = SamplingConfig(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty
        )
        ours, theirs = (
            probabilities(logits, sampling, seen),
            by_transformers(logits, sampling, seen),
        )
        assert ours.dtype == torch.float32
        close = {"atol": 1e-6, "rtol": 1e-5}
        torch.testing.assert_close(ours.sort(-1).values, theirs.sort(-1).values, **close)
        # Which of the tokens that tie at top-p's border stay is left open by transformers.
        whole = by_transformers(logits, replace(sampling, top_p=1.0), seen)
        border = whole.masked_fill(theirs == 0, 2).amin(-1, keepdim=True)
        sure = ~((whole == border) & (theirs == 0)).any(-1)
        assert torch.equal((ours > 0)[sure], (theirs > 0)[sure])
        torch.testing.assert_close(ours[sure], theirs[sure], **close)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_zero_is_one_hot_at_the_first_largest(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    logits = torch.randint(-3, 3, (2, 17, 9), generator=generator).to(dtype)
    p = probabilities(logits, SamplingConfig())
    assert p.dtype == torch.float32 and p.shape == logits.shape
    assert torch.equal(p.sum(-1), torch.ones(2, 17)) and torch.equal(p.amax(-1), torch.ones(2, 17))
    for row, chosen in zip(logits.flatten(0, 1).tolist(), p.flatten(0, 1).argmax(-1), strict=True):
        assert int(chosen) == row.index(max(row))


def test_a_penalty_turns_the_greedy_choice_whatever_the_sign() -> None:
    sampling = SamplingConfig(repetition_penalty=2.0)
    assert probabilities(torch.tensor([3.0, 2.0]), sampling, [0, 0]).tolist() == [0, 1]
    assert probabilities(torch.tensor([-2.0, -3.0]), sampling, [0]).tolist() == [0, 1]
    assert probabilities(torch.tensor([3.0, 2.0]), sampling).tolist() == [1, 0]


def test_a_temperature_near_zero_does_not_overflow(generator: torch.Generator) -> None:
    logits = 1e4 * torch.randn(3, 11, generator=generator)
    for temperature in (1e-4, 1e-30, 1e-300):
        p = probabilities(logits, SamplingConfig(temperature=temperature, top_p=0.9))
        torch.testing.assert_close(p, probabilities(logits, SamplingConfig()))


@pytest.mark.parametrize("N", [0, 1, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_node_is_penalised_for_its_own_path_alone(
    N: int, temperature: float, generator: torch.Generator
) -> None:
    V, context = 6, [2, 2, 5]
    tokens = torch.randint(V, (N,), generator=generator)
    parents = [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(N)]
    draft = Draft(tokens, torch.tensor(parents, dtype=torch.int32))
    logits = torch.randn(N + 1, V, generator=generator)
    for penalty in (1.0, 1.7):
        sampling = SamplingConfig(temperature=temperature, repetition_penalty=penalty, top_k=4)
        rows = tree_probabilities(logits, draft, context, sampling)
        for node in range(-1, N):
            seen, at = list(context), node
            while at >= 0:
                seen.append(int(tokens[at]))
                at = parents[at]
            torch.testing.assert_close(
                rows[node + 1], probabilities(logits[node + 1], sampling, seen)
            )


def test_errors_of_sampling_say_what_came() -> None:
    warm = SamplingConfig(temperature=1.0, repetition_penalty=1.1)
    with pytest.raises(TypeError, match="floating-point tensor, got torch.int64"):
        probabilities(torch.ones(3, dtype=torch.int64), warm)
    for row in ([torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf] * 2):
        for sampling in (warm, SamplingConfig()):
            with pytest.raises(ValueError, match="finite largest value"):
                probabilities(torch.tensor(row), sampling)
    for seen in ([3], [-1]):
        with pytest.raises(ValueError, match="between 0 and 2"):
            probabilities(torch.zeros(3), warm, seen)
    with pytest.raises(ValueError, match="V above 0"):
        probabilities(torch.zeros(2, 0), warm)
    with pytest.raises(ValueError, match="N \\+ 1 = 3 rows"):
        tree_probabilities(torch.zeros(2, 3), Draft.chain([0, 1]), [], warm)


def test_a_coin_of_0_never_and_of_1_always(generator: torch.Generator) -> None:
    draws = Draws(generator)
    assert not any(draws.coin(0.0) for _ in range(1000))
    assert all(draws.coin(chance) for chance in (1.0, 1.5) for _ in range(1000))
    assert len(draws.log) == 3000 and all(0 <= u < 1 for u in draws.log)


class Fixed(Draws):
    """Draws whose next number is `u`."""

    def __init__(self, u: float) -> None:
        super().__init__()
        self.u = u

    def _uniform(self) -> float:
        return self.u


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.5, 1 - 2**-53])
def test_a_token_of_weight_0_is_never_drawn(u: float, generator: torch.Generator) -> None:
    assert not Fixed(u).coin(0.0)
    for V in (1, 2, 65, 2048):
        for scale in (1e-30, 1.0, 3e30):
            weights = scale * torch.rand(V, generator=generator)
            weights[torch.rand(V, generator=generator) < 0.5] = 0
            weights[V // 2] = scale
            weights[: V // 3] = 0
            weights[-(V // 3) or V :] = 0
            assert weights[Fixed(u).token(weights)] > 0


def test_draws_repeat_with_their_generator_and_refuse_bad_input(seed: int) -> None:
    weights = torch.arange(5.0)
    one, two = (Draws(torch.Generator().manual_seed(seed)) for _ in range(2))
    assert [one.token(weights) for _ in range(20)] == [two.token(weights) for _ in range(20)]
    assert one.log == two.log and draws_of(one) is one and draws_of(None).log == []
    with pytest.raises(TypeError, match="got int"):
        draws_of(3)
    with pytest.raises(ValueError, match="got nan"):
        one.coin(float("nan"))
    for bad in ([0.0, 0.0], [1.0, -0.1], [torch.nan, 1.0], [torch.inf, 1.0]):
        with pytest.raises(ValueError, match="finite sum above 0"):
            one.token(torch.tensor(bad))
    with pytest.raises(ValueError, match="one row"):
        one.token(torch.ones(2, 2))
