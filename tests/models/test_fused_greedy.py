"""A whole round of drafts in one call is what greedy decoding step by step gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from labcore.decoding import SamplingConfig, generate
from labcore.models import fused
from labcore.models.fused import FusedLlama
from tests.models.shapes import CONFIGS, model_of


def stepwise(decoder: FusedLlama, tokens: list[int], count: int, cache) -> list[int]:
    out = decoder(torch.tensor([tokens]), cache=cache).logits[0, -1]
    found = [int(out.argmax())]
    while len(found) < count and found[-1] not in decoder.eos_token_ids:
        out = decoder(torch.tensor([found[-1:]]), cache=cache).logits[0, -1]
        found.append(int(out.argmax()))
    return found


@pytest.mark.parametrize(("layers", "table"), [(1, 0), (1, fused.TABLE), (3, fused.TABLE)])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_is_greedy_decoding(
    name: str,
    layers: int,
    table: int,
    seed: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds of any length after any rollback; both caches then hold the same keys and values."""
    monkeypatch.setattr(fused, "TABLE", table)
    draw, config = random.Random(seed), replace(CONFIGS[name], num_hidden_layers=layers)
    model = model_of(config, generator).bfloat16().float()
    one = FusedLlama(model)
    rounds, steps = one.new_cache(1, 90), one.new_cache(1, 90)
    for _ in range(20):
        new = [draw.randrange(37) for _ in range(draw.choice([1, 1, 2, 7]))]
        count = draw.randint(1, 5)
        if int(rounds.lengths) + len(new) + count > 90:
            kept = torch.tensor([draw.randrange(20)])
            rounds.truncate(kept)
            steps.truncate(kept)
        assert one.greedy(new, count, rounds) == stepwise(one, new, count, steps)
        assert rounds.lengths.tolist() == steps.lengths.tolist()
        held = int(rounds.lengths)
        for ours, theirs in zip(rounds.layers, steps.layers, strict=True):
            seen = [one.rows[:, :, 0, :held] for one in (ours, theirs)]
            torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-5)
        kept = torch.tensor([held - draw.randrange(min(held, 4))])
        rounds.truncate(kept)
        steps.truncate(kept)


def test_a_draft_ends_after_an_eos(generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    one = FusedLlama(model)
    said = one.greedy([1, 2], 9, one.new_cache(1, 10))
    assert len(said) == 9
    model.config = replace(model.config, eos_token_ids=(said[3],))
    cache = one.new_cache(1, 10)
    ended = said[: said.index(said[3]) + 1]
    assert FusedLlama(model).greedy([1, 2], 9, cache) == ended
    assert cache.lengths.tolist() == [1 + len(ended)]


def test_a_draft_ends_after_an_unlikely_token(seed: int, generator: torch.Generator) -> None:
    draw, model = random.Random(seed), model_of(CONFIGS["tied"], generator)
    one, ends = FusedLlama(model), set()
    for _ in range(6):
        prompt = [draw.randrange(37) for _ in range(draw.randint(1, 6))]
        whole = one.greedy(prompt, 9, one.new_cache(1, 20))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + whole[:-1]])).logits[0, len(prompt) - 1 :]
        chances = logits.softmax(-1).max(-1).values.tolist()
        for least in (0.0, *(chance + 1e-4 for chance in chances)):
            kept = next((i + 1 for i, chance in enumerate(chances) if chance < least), 9)
            cache = one.new_cache(1, 20)
            assert one.greedy(prompt, 9, cache, least) == whole[:kept]
            assert cache.lengths.tolist() == [len(prompt) + kept - 1]
            ends.add(kept)
    assert {1, 9} < ends


def test_rounds_that_do_not_fit_are_refused(generator: torch.Generator) -> None:
    one = FusedLlama(model_of(CONFIGS["tied"], generator))
    for tokens, count, rows in (([], 1, 1), ([1], 0, 1), ([1], 1, 2)):
        with pytest.raises(ValueError, match="greedy needs"):
            one.greedy(tokens, count, one.new_cache(rows, 9))
    with pytest.raises(ValueError, match="at most 9 tokens, got 10"):
        one.greedy([1] * 8, 3, one.new_cache(1, 9))
    assert len(one.greedy([1] * 7, 3, one.new_cache(1, 9))) == 3


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_no_token_is_said_from_logits_that_are_not_finite(
    least: float, generator: torch.Generator
) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    one = FusedLlama(model)
    whole = one.greedy([1, 2], 9, one.new_cache(1, 10))
    place = next(n for n, token in enumerate(whole) if token not in {1, 2, *whole[:n]})
    with torch.no_grad():  # reading it breaks what comes after it
        model.embed_tokens.weight[whole[place]] = torch.nan
    one, cache = FusedLlama(model), FusedLlama(model).new_cache(1, 10)
    said = one.greedy([1, 2], 9, cache, least and 1e-9)
    assert len(said) <= place + 1 and cache.lengths.tolist() == [1 + len(said)]
    with pytest.raises(ValueError, match="finite largest value"):
        generate(model, [[1, 2]], SamplingConfig(max_tokens=9))
