"""Bad batches, clipped updates, the cliff, and branches of the language model."""

import itertools
import math
import statistics

import optimi
import pytest
import torch

from labcore.models import Llama, LlamaConfig
from labcore.optim import rules
from labcore.studies.clipping import cliff, damage, effects, exploding, language, results
from labcore.studies.clipping.damage import Damage, damaged, excess
from labcore.studies.clipping.updates import (
    UpdateClippedAdamW,
    longest_step,
    update_clipped_adamw,
    update_rms,
)
from labcore.studies.language import bench
from labcore.studies.language.tuning import Setting

SMALL = {"width": 12, "batch": 3, "steps": 26, "at": 21}


def harm(kind: str, **settings) -> Damage[int]:
    return Damage(kind, corrupt=lambda step, _: -step, **{"at": 30, "steps": 2, **settings})


def gradients_of(one: Damage[int]) -> list[torch.Tensor]:
    """The gradients of 35 steps after the damage; before it, each is its step's number plus 1."""
    weight = torch.nn.Parameter(torch.zeros(3))
    found = []
    for step in range(35):
        weight.grad = torch.full((3,), float(step + 1))
        one.gradients(step, [weight, torch.nn.Parameter(torch.zeros(1))])
        found.append(weight.grad.clone())
    return found


@pytest.mark.parametrize(("kind", "factor"), damage.SCALES.items())
def test_gradients_are_scaled_in_the_bad_steps_alone(kind: str, factor: float) -> None:
    for step, grad in enumerate(gradients_of(harm(kind))):
        expected = (step + 1) * (factor if step in (30, 31) else 1.0)
        assert grad.tolist() == [expected] * 3
    assert harm(kind).batch(30, 7) == 7


def test_a_stale_gradient_is_that_of_twenty_steps_before() -> None:
    found = gradients_of(harm("stale"))
    assert [found[step][0].item() for step in (29, 30, 31, 32)] == [30, 11, 12, 33]
    keeper = harm("none", steps=5)
    gradients_of(keeper)
    assert sorted(keeper.kept) == [10, 11, 12, 13, 14]


def test_batches_are_repeated_or_corrupted_in_the_bad_steps_alone() -> None:
    for kind, expected in {
        "repeated": [28, 29, 29, 29, 32],
        "corrupted": [28, 29, -30, -31, 32],
        "reversed": [28, 29, 30, 31, 32],
        "none": [28, 29, 30, 31, 32],
    }.items():
        one = harm(kind)
        assert [one.batch(step, step) for step in range(28, 33)] == expected


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_run_is_the_clean_one_until_the_damage(kind: str, seed: int) -> None:
    clean, run = (damaged("RNN", each, "none", "AdamW", seed, **SMALL) for each in ("none", kind))
    assert run.losses[:21] == clean.losses[:21]
    assert run.losses[22] != clean.losses[22]
    if kind in damage.SCALES:
        assert run.norms[21] == pytest.approx(abs(damage.SCALES[kind]) * clean.norms[21], rel=1e-5)
        assert run.losses[21] == clean.losses[21]


def test_clipping_gives_back_a_large_gradient_and_leaves_a_reversed_one(seed: int) -> None:
    args = {"lr": 1e-3, "steps": 22, "width": 12, "batch": 3, "gain": 0.7, "seed": seed}
    norms = exploding.train("RNN", **args).norms
    limit = 1.01 * max(norms)  # only the damaged step may exceed it
    clip = exploding.METHODS["global"](limit)
    for kind in damage.SCALES:
        one = harm(kind, at=21, steps=1)

        def spoil(step: int, named: effects.Named, one: Damage[int] = one) -> None:
            one.gradients(step, [weight for _, weight in named])

        run = exploding.train("RNN", clip, spoil=spoil, **args)
        assert run.cosines[-1] == pytest.approx(1.0, abs=1e-5)  # to the damaged gradient
        size = abs(damage.SCALES[kind]) * norms[-1]
        assert run.kept[-1] == pytest.approx(min(1.0, limit / size), rel=1e-5)


@pytest.mark.parametrize("what", damage.MOMENTS)
def test_moments_are_those_of_before_the_bad_step(what: str, seed: int) -> None:
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer, restore = torch.optim.AdamW(weights), damage.Restore(what, at=2)
    draw, states = torch.Generator().manual_seed(seed), []
    for step in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()
        restore(step, optimizer)
        states.append([{k: v.clone() for k, v in optimizer.state[w].items()} for w in weights])
    for before, at in zip(states[1], states[2], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(before[name], at[name]) == (name in damage.MOMENTS[what])
    assert not torch.equal(states[2][0]["exp_avg"], states[3][0]["exp_avg"])


def test_excess_is_read_after_the_last_bad_batch() -> None:
    clean = [1.0] * 60
    run = [1.0] * 14 + [3.0, 2.5, 2.0, 2.0, 2.0, math.nan] + [1.5] * 20
    assert excess(run, clean, at=10, bad=5) == {1: 1.5, 5: None, 20: 0.5}
    assert excess(run[:16], clean, at=10, bad=5) == {1: 1.5, 5: None, 20: None}


# Clipped updates ----------------------------------------------------------


def test_updates_are_clipped_as_in_optimi(seed: int) -> None:
    """torch-optimi's StableAdamW averages with debiased betas: the same numbers."""
    draw = torch.Generator().manual_seed(seed)
    start = [torch.randn(5, 3, generator=draw), torch.randn(4, generator=draw)]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    settings = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    steppers = [
        UpdateClippedAdamW(ours, eps=1e-6, **settings),
        optimi.StableAdamW(theirs, eps=1e-6, triton=False, foreach=False, **settings),
    ]
    clipped = 0
    for step in range(12):
        scale = 30.0 if step == 7 else 1.0
        for one, other in zip(ours, theirs, strict=True):
            one.grad = scale * torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
            state = dict(steppers[0].state[one])
            clipped += update_rms(one.grad, state, beta2=0.95, eps=1e-6).item() > 1.5
        for stepper in steppers:
            stepper.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert clipped


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_a_gradient_that_dwarfs_all_others_has_the_bound_as_its_rms(steps: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight, state = torch.zeros(7, dtype=torch.float64), {}
    for _ in range(steps - 1):
        grad = torch.randn(7, generator=draw, dtype=torch.float64)
        weight, state = update_clipped_adamw(weight, grad, state, lr=0.1, beta2=0.95)
    huge = 1e9 * torch.ones(7, dtype=torch.float64)
    bound = math.sqrt((1 - 0.95**steps) / (1 - 0.95))
    assert update_rms(huge, state, beta2=0.95, eps=1e-8).item() == pytest.approx(bound, rel=1e-6)
    stepped, _ = rules.adamw(weight, huge, state, lr=0.1, beta2=0.95, weight_decay=0.0)
    longest = longest_step(steps, beta2=0.95)
    assert (weight - stepped).tolist() == pytest.approx([0.1 * longest] * 7, rel=1e-6)


def test_equal_gradients_are_not_clipped() -> None:
    weight, state = torch.ones(4), {}
    moved = 0.0
    for _ in range(5):
        new, state = update_clipped_adamw(
            weight, torch.ones(4), state, lr=0.1, beta2=0.9, weight_decay=0.0
        )
        moved, weight = (weight - new)[0].item(), new
    assert moved == pytest.approx(0.1, rel=1e-4)


# The cliff ----------------------------------------------------------------


def test_the_gradient_on_the_surface_is_autograds(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(5):
        w, b = (torch.rand(2, generator=draw, dtype=torch.float64) * 2 + 1).tolist()
        point = torch.tensor([w, -b], dtype=torch.float64, requires_grad=True)
        state = torch.tensor(cliff.FIRST, dtype=torch.float64)
        for _ in range(cliff.LENGTH):
            state = point[0] * state.sigmoid() + point[1]
        loss = (state.sigmoid() - cliff.TARGET).square()
        loss.backward()
        walk = cliff.descend((w, -b), lr=0.5, steps=2)
        assert walk.losses[0] == pytest.approx(loss.item(), rel=1e-9)
        assert walk.norms[0] == pytest.approx(point.grad.norm().item(), rel=1e-9)
        step = [x - 0.5 * g for x, g in zip((w, -b), point.grad.tolist(), strict=True)]
        assert walk.points[1] == pytest.approx(step, rel=1e-9)


def test_the_surface_has_the_loss_of_its_points() -> None:
    w, b, loss = cliff.surface(cells=5)
    for row, column in itertools.product(range(5), repeat=2):
        walk = cliff.descend((w[column].item(), b[row].item()), lr=1.0, steps=1)
        assert walk.losses[0] == pytest.approx(loss[row, column].item(), rel=1e-9)


@pytest.mark.parametrize("start", cliff.STARTS)
def test_a_clipped_step_is_no_longer_than_the_limit_and_stays_near_the_cliff(start: str) -> None:
    walk = cliff.descend(cliff.STARTS[start], lr=1.0, max_norm=0.1)
    moves = [math.dist(one, other) for one, other in itertools.pairwise(walk.points)]
    assert max(moves) <= 0.1 + 1e-12 and walk.losses[-1] < 0.01
    thrown = cliff.descend(cliff.STARTS[start], lr=1.0)
    assert max(thrown.norms) > 10 and thrown.losses[-1] > 0.05


# Branches of the language model -------------------------------------------

TINY = LlamaConfig(
    vocab_size=bench.CONFIG.vocab_size,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=bench.LENGTH,
    tie_word_embeddings=True,
)


@pytest.fixture
def tiny(monkeypatch) -> None:
    def model(seed: int) -> Llama:
        return Llama(TINY, generator=torch.Generator().manual_seed(seed))

    monkeypatch.setattr(bench, "language_model", model)


def test_branches_start_from_one_run_and_differ_by_their_damage(tiny, seed: int) -> None:
    sizes = {"seed": seed % 1000, "steps": 24, "at": 21, "held_out_rows": 16, "max_files": 4}
    found = {
        kind: language.branches(kind, Setting(lr=1e-2, decay=0.1), **sizes)
        for kind in ("none", "large and reversed")
    }
    clean = found["none"][1, "none"]
    assert len(clean.losses) == len(clean.norms) == 3
    for method in language.METHODS:
        branch = found["large and reversed"][1, method]
        assert branch.losses[0] == clean.losses[0]  # the damage follows the first loss
        assert branch.losses[1] != clean.losses[1]
        assert branch.norms[0] == pytest.approx(1e3 * clean.norms[0], rel=1e-4)
        assert branch.left_out == ()  # 21 steps are too few to judge by
    ends = {found["large and reversed"][1, name].held_out for name in ("none", "updates")}
    assert len(ends) == 2 and clean.held_out not in ends
    one, all_three = (found["none"][n, language.FEWER] for n in damage.LENGTHS)
    assert one.losses[:2] == (clean.losses[0], one.losses[1]) and one.losses[1] != clean.losses[1]
    assert all_three.held_out != one.held_out != clean.held_out


def strange(values: list[float], last: float) -> bool:
    """Whether the rule leaves out a step whose norm is `last`, after norms `values`."""
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), last / 2)
    skip = language.SkipStep([3.0] * len(values), values)
    assert float(skip.clip([weight])) == pytest.approx(last)
    assert skip.left_out == ([0] if weight.grad is None else [])
    if weight.grad is not None:
        assert weight.grad.norm() == pytest.approx(min(1.0, last), rel=1e-5)
    return weight.grad is None


def test_a_step_is_left_out_by_its_distance_from_the_window(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for count in (63, 100, 127, 128, 200):
        values = (2 + 0.1 * torch.randn(count, generator=draw)).tolist()
        window = values[-language.WINDOW :]
        far = language.SIGMAS * statistics.stdev(window)
        mean = statistics.fmean(window)
        assert not strange(values, mean + 0.99 * far) and not strange(values, mean - 0.99 * far)
        assert strange(values, mean + 1.01 * far) and strange(values, mean - 1.01 * far)
    assert not strange([2.0, 2.1] * 31, 1e3)  # with the last, one less than half a window


def test_what_was_left_out_stays_in_the_window(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    before = (0.6 + 0.05 * torch.randn(128, generator=draw)).tolist()
    skip, weight = language.SkipStep([5.0, 5.1] * 64, before), torch.nn.Parameter(torch.zeros(1))
    for _ in range(6):
        weight.grad = torch.full((1,), 600.0)
        skip.clip([weight])
    assert skip.left_out == [0, 1, 2, 3]  # four such norms, and a fifth is usual
    assert weight.grad is not None


def test_a_loss_leaves_out_a_step_too(tiny, seed: int) -> None:
    model = bench.language_model(seed)
    tokens = torch.randint(bench.CONFIG.vocab_size, (2, 9))
    for usual, left_out in ((1.0, [0]), (bench.next_token_loss(model, tokens)[0].item() / 16, [])):
        skip = language.SkipStep([usual, usual + 0.1] * 64, [1.0, 1.1] * 64)
        total, predicted = skip.loss(model, tokens, None)
        assert predicted == 16 and total.requires_grad
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.ones(1)
        skip.clip([weight])
        assert skip.left_out == left_out


def test_shares_count_the_steps_of_a_phase() -> None:
    norms = [5.0] * 2 + [0.5] * 8 + [1.5] * 5 + [0.5] * 5
    shares = {name: language.clipped_share(norms, 1.0, p) for name, p in language.PHASES.items()}
    assert shares == {"warmup": 1.0, "to the middle": 0.0, "second half": 0.5}
    assert language.clipped_share(norms, 1.0) == 0.35


@pytest.mark.parametrize("optimizer", exploding.OPTIMIZERS)
def test_limits_are_shown_as_they_were_recorded(optimizer: str) -> None:
    curves, usual = results.damage_limits(optimizer)
    assert len(curves) == 3 and 0.3 < usual < 1.5
    for curve in curves.values():
        assert list(curve) == list(damage.LIMITS) and {len(each) for each in curve.values()} == {3}
    for network, short in results.LOUD.items():
        best = results.loud_layer(network, optimizer).details["limits"]
        for norm, curve in results.loud_limits(network, optimizer).items():
            name = "local, per layer" if norm == "local norm" else norm.removesuffix(" norm")
            means = {limit: statistics.fmean(each) for limit, each in curve.items()}
            assert list(curve) == list(exploding.LOUD_LIMITS[short])
            assert max(means.values()) == means[best[name]] <= 100


def test_norms_are_those_of_each_optimizer_and_of_the_limits_that_were_asked_for() -> None:
    norms = results.language_norms()
    assert list(norms) == ["AdamW", "Lion", "Muon"]
    assert {len(run) for runs in norms.values() for run in runs} == {bench.TOKENS // 8_192}
    starts = [[run[0] for run in runs] for runs in norms.values()]
    assert starts[0] == starts[1] == starts[2]  # the same weights and the same batch


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: harm("backwards"), "kind must be one of"),
        (lambda: harm("stale", at=0), "at must be"),
        (lambda: damage.Restore("momenta"), "what must be one of"),
        (lambda: harm("stale", steps=0), "steps must be"),
        (lambda: cliff.descend((1.0, 1.0), lr=0.0), "lr must be"),
        (lambda: longest_step(0), "steps must be"),
        (lambda: damaged("cnn", "none", "none", "SGD", 0), "network must be one of"),
        (
            lambda: language.train_limited("0.5", Setting(lr=1e-2, decay=0.1), batch=2048, seed=0),
            "limit must be one of",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
