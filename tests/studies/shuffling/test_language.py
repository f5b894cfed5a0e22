"""The language model's orders, damage and cures: the same windows, and branches that are exact."""

import functools
import random

import pytest
import torch

from labcore.models import Llama, LlamaConfig, causal_attention
from labcore.models.llama import apply_rotary
from labcore.models.training import next_token_loss, train, windows
from labcore.studies.language import bench
from labcore.studies.language.tuning import Setting
from labcore.studies.shuffling import language_orders as orders
from labcore.studies.shuffling import language_results as results
from labcore.studies.shuffling import language_spikes as spikes
from labcore.studies.shuffling.language_spikes import Plan

PLAN = Plan(trunk=2, after=3, bad=1, batch=2_048)
SETTING = Setting(lr=4e-3, decay=0.1)


def tiny(**options) -> Llama:
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return Llama(config, **options)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, seed: int) -> spikes.Stream:
    made = torch.Generator().manual_seed(seed)
    text = torch.randint(bench.CONFIG.vocab_size, (5_003,), generator=made)
    monkeypatch.setattr(bench, "text", lambda *_, **__: text)
    return spikes.stream(PLAN, seed)


@pytest.mark.parametrize("order", list(orders.ORDERS))
def test_an_order_has_the_windows_of_the_random_run(order: str, seed: int) -> None:
    text = torch.randint(50, (4_001,), generator=torch.Generator().manual_seed(seed))
    starts = orders.places(len(text), 48, seed)
    random_run = windows(text, batch=16, length=bench.LENGTH, seed=seed)
    as_run = orders.cut(text, starts)
    assert all(torch.equal(as_run(n)[0], random_run(n)[0]) for n in range(3))
    arranged = orders.ORDERS[order](starts, text, seed)
    assert torch.equal(arranged.sort().values, starts.sort().values)
    rows = orders.cut(text, arranged)
    distinct = [len(set(row)) for n in range(3) for row in rows(n)[0].tolist()]
    if order == "file order":
        assert bool((arranged.diff() >= 0).all())
    elif order == "batches shuffled":
        stored = {tuple(one.tolist()) for one in starts.sort().values.split(16)}
        assert {tuple(one.tolist()) for one in arranged.split(16)} == stored
    elif order == "sorted":
        assert distinct == sorted(distinct)


def test_shuffled_batches_keep_their_design_effect_and_lose_their_drift(seed: int) -> None:
    # Every file repeats one token, so that neighboring windows are alike.
    text = torch.arange(10).repeat_interleave(4_000)
    starts = orders.places(len(text), 640, seed)
    found = {
        order: [
            orders.design_effect(text, orders.ORDERS[order](starts, text, seed), pooled=pooled)
            for pooled in (1, 4)
        ]
        for order in ("file order", "batches shuffled")
    }
    (one, four), (same, mixed) = found.values()
    assert one == pytest.approx(same) and four > 2 * one and mixed < 2 * one
    assert orders.design_effect(text, starts) < 2


def test_a_rise_is_above_the_median_before(seed: int) -> None:
    dice = random.Random(seed)
    losses = [dice.random() for _ in range(40)]
    losses[25] = 7.0
    found = results.heights(losses, window=9)
    assert len(found) == 31 and max(found) == found[25 - 9]
    assert found[16] == pytest.approx(7.0 - sorted(losses[16:25])[4])


def brute(row: list[int], longest: int, times: int) -> bool:
    """The rule by its words: some n-gram stands `times` times without a gap."""
    return any(
        row[at : at + n * times] == row[at : at + n] * times
        for n in range(1, longest + 1)
        for at in range(len(row) - n * times + 1)
    )


def test_repeats_are_found_by_the_rule(seed: int) -> None:
    dice = random.Random(seed)
    rows = [[dice.randrange(2) for _ in range(23)] for _ in range(40)]
    for row in rows[:20]:
        n, at = dice.randrange(1, 6), dice.randrange(8)
        row[at:] = (row[at : at + n] * 23)[: 23 - at]
    for longest, times in ((1, 5), (3, 4), (5, 3), (13, 2)):
        found = spikes.repeats(torch.tensor(rows), longest=longest, times=times).tolist()
        assert found == [brute(row, longest, times) for row in rows]
    assert not spikes.repeats(torch.zeros(2, 31, dtype=torch.int64)).any()  # 31 tokens: too few


def test_the_z_loss_adds_its_gradient_and_leaves_the_value(generator: torch.Generator) -> None:
    tokens = torch.randint(37, (3, 9), generator=generator)
    counts = torch.tensor([9, 4, 1])
    model = tiny(generator=generator).double()
    value, predicted = spikes.z_loss(model, tokens, counts, weight=0.3)
    plain, expected = next_token_loss(model, tokens, counts)
    assert predicted == expected == 8 + 3
    # Both compute in fp32.
    assert value.item() == pytest.approx(plain.item(), rel=1e-5)
    model.zero_grad()
    value.backward()
    found = model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    log_z = model(tokens[:, :-1]).logits.logsumexp(-1)
    penalty = 0.3 * (log_z[0].square().sum() + log_z[1, :3].square().sum())
    (next_token_loss(model, tokens, counts)[0] + penalty).backward()
    assert torch.allclose(found, model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-5)


def test_qk_norm_bounds_the_scores_and_commutes_with_the_rotation(
    generator: torch.Generator,
) -> None:
    q, k, v = (100 * torch.randn(2, 3, 7, 8, generator=generator).double() for _ in range(3))
    angles = torch.randn(2, 1, 7, 4, generator=generator).double()
    turned = [apply_rotary(x, angles.cos(), angles.sin()) for x in (q, k)]
    normed = [x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k)]
    scores = normed[0] @ normed[1].transpose(-1, -2) / 8**0.5
    assert scores.abs().max() <= 8**0.5 + 1e-9
    then = [apply_rotary(x, angles.cos(), angles.sin()) for x in normed]
    found = spikes.qk_norm_attention(*turned, v)
    assert torch.allclose(found, causal_attention(*then, v), atol=1e-9)


def test_damage_has_its_steps_and_no_other(clean: spikes.Stream, seed: int) -> None:
    bad = slice(PLAN.row(PLAN.trunk), PLAN.row(PLAN.trunk + PLAN.bad))
    for kind in spikes.DAMAGES:
        data = spikes.damaged(clean, kind, PLAN, seed)
        changed = (data.rows != clean.rows).any(1) | (data.counts != clean.counts)
        assert changed[bad].all() and changed.sum() == bad.stop - bad.start
    repeated = spikes.damaged(clean, "repeated n-grams", PLAN, seed)
    documents = repeated.rows[bad].unflatten(0, (-1, spikes.DOCUMENT)).flatten(1)
    assert spikes.repeats(documents).all()
    short = spikes.damaged(clean, "short rows", PLAN, seed)
    assert torch.equal(short.rows, clean.rows) and set(short.counts[bad].tolist()) == {17}


def test_mended_streams_lose_what_they_should(clean: spikes.Stream, seed: int) -> None:
    found = spikes.mended(clean, PLAN, seed)
    assert tuple(found) == spikes.MENDED
    first, stop = PLAN.row(PLAN.trunk), PLAN.row(PLAN.trunk + PLAN.bad)
    restart = found["restart without the shard"]
    later = torch.cat([clean.rows[:first], clean.rows[stop:]])
    assert torch.equal(restart.rows, later)
    one_step = PLAN.row(PLAN.trunk + 1)
    stopped, noise = (
        found["random tokens, stopped"],
        spikes.damaged(clean, "random tokens", PLAN, seed),
    )
    assert torch.equal(stopped.rows[:one_step], noise.rows[:one_step])
    assert torch.equal(stopped.rows[one_step:], clean.rows[stop:])
    with pytest.raises(ValueError, match="a row for every step, got .* too many rows"):
        restart.batches()(len(restart.rows) // 16)


def test_a_clean_branch_is_an_uninterrupted_run(
    clean: spikes.Stream, seed: int, few_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "held_out_loss", lambda *_: 0.5)
    noise = spikes.damaged(clean, "random tokens", PLAN, seed)
    found = spikes.branches({"clean": clean, "noise": noise}, SETTING, PLAN, seed=seed)
    model = bench.language_model(seed)
    whole = train(
        model,
        clean.batches(),
        functools.partial(bench.OPTIMIZERS["AdamW"], lr=SETTING.lr, decay=0.1)(model),
        steps=PLAN.steps,
        clip=bench.clip_to(1.0),
        schedule=lambda step: bench.warmup_and_decay(step, PLAN.steps),
        progress=False,
    )
    assert list(found["clean"].losses) == whole.losses
    assert found["noise"].losses[:2] == found["clean"].losses[:2]
    assert found["noise"].losses[2:] != found["clean"].losses[2:]
    assert list(found["clean"].norms) == whole.norms
    assert len(found["noise"].fixed) == PLAN.after + 1
    assert found["noise"].fixed[0] == found["clean"].fixed[0] > found["clean"].fixed[-1]
    streams = {"clean": clean, "fewer": spikes.fewer(clean, PLAN)}
    fewer = spikes.branches(streams, SETTING, PLAN, seed=seed)["fewer"]
    assert len(fewer.losses) == PLAN.steps - PLAN.bad and len(fewer.fixed) == PLAN.after
    plan = Plan(trunk=0, after=3, bad=1, batch=2_048)
    hot = spikes.train_hot(SETTING, plan, seed=seed, cure="QK-norm", factor=2.0)
    assert len(hot.losses) == plan.steps and hot.losses[0] != found["clean"].losses[0]


def test_a_branch_recovers_when_it_stays_below_its_start() -> None:
    assert results.recovery((3.0, 2.9, 2.8)) == 0
    assert results.recovery((3.0, 9.0, 2.9, 3.1, 2.8, 2.7)) == 4
    assert results.recovery((3.0, 9.0, 4.0)) == 2
