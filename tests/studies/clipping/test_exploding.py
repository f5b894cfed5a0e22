"""Networks whose gradients explode: the law of their growth, one clipped gradient, and runs."""

import functools
import itertools
import math

import pytest
import torch

from labcore.clipping import clip_by_global_norm, clip_by_local_norm
from labcore.studies.clipping import effects, exploding, networks, population

SMALL = {"RNN": {"width": 12}, "conv": {"depth": 3, "channels": 3}}
EVERY = {**SMALL, "LSTM": {"width": 12}}


def batch(network: str, generator: torch.Generator, rows: int = 5, length: int = 9):
    return networks.draw(network, rows, length=length, generator=generator)


# Networks -----------------------------------------------------------------


@pytest.mark.parametrize("network", SMALL)
def test_a_gradient_at_a_state_is_that_of_the_loss(network: str, seed: int, generator) -> None:
    model = networks.make(network, seed=seed, **SMALL[network]).double()
    inputs, targets = batch(network, generator)
    inputs = inputs.double() if network == "conv" else inputs
    found = networks.growth(model, inputs, targets)
    chain = model.states(inputs)
    assert len(found.rms) == len(chain) == len(found.gains) + 1
    flat = chain[-1] if network == "RNN" else chain[-1].flatten(1)
    logits, wanted = model.head(flat), targets[:, -1] if network == "RNN" else targets
    slope = (logits.softmax(-1) - torch.nn.functional.one_hot(wanted, logits.shape[-1])) / len(flat)
    by_hand = (slope @ model.head.weight).square().mean().sqrt().item()
    assert found.rms[-1] == pytest.approx(by_hand, rel=1e-9)
    assert found.predicted[-1] == found.rms[-1]
    assert found.predicted[0] == pytest.approx(found.rms[-1] * math.prod(found.gains))


@pytest.mark.parametrize("activation", networks.ACTIVATIONS)
def test_one_step_back_is_the_product_with_the_jacobian(activation: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = networks.make("RNN", width=8, activation=activation, seed=seed).double()
    ids, _ = batch("RNN", generator, rows=1, length=6)
    chain = model.states(ids)
    function, slope = networks.ACTIVATIONS[activation]
    x = torch.randn(50, dtype=torch.float64, generator=generator, requires_grad=True)
    (derivative,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.allclose(slope(function(x)), derivative)
    later, earlier = torch.autograd.grad(chain[-1].sum(), [chain[-1], chain[-2]])
    assert torch.allclose(earlier, (later * slope(chain[-1])) @ model.recurrent.weight)


def test_the_law_holds_for_wide_random_networks(seed: int, generator) -> None:
    for network, settings in {"RNN": {"width": 256}, "conv": {"depth": 9, "channels": 24}}.items():
        for gain in (0.8, 1.3):
            model = networks.make(network, seed=seed, gain=gain, **settings)
            found = networks.growth(model, *batch(network, generator, rows=32))
            steps = len(found.gains)
            measured = (found.rms[0] / found.rms[-1]) ** (1 / steps)
            predicted = (found.predicted[0] / found.predicted[-1]) ** (1 / steps)
            assert predicted == pytest.approx(measured, rel=0.12)
            # About gain · sqrt(share of taps that see a pixel), with half of the units on.
            about = gain * (networks.SEEN**0.5 if network == "conv" else 1.0)
            assert measured == pytest.approx(about, rel=0.35)


def test_a_border_of_zeros_hides_its_share_of_the_taps() -> None:
    ones = torch.ones(1, 1, networks.SIDE, networks.SIDE)
    seen = torch.nn.functional.conv2d(ones, torch.ones(1, 1, 3, 3), padding=1).mean() / 9
    assert seen.item() == pytest.approx(networks.SEEN)


def test_weights_times_their_gradient_is_the_same_in_every_layer(seed: int, generator) -> None:
    model = networks.make("conv", depth=5, channels=4, gain=1.5, seed=seed).double()
    images, classes = batch("conv", generator, rows=16)
    networks.loss(model, images.double(), classes).backward()
    products = [(weight * weight.grad).sum().item() for weight in model.parameters()]
    assert products == pytest.approx([products[0]] * len(products), rel=1e-9, abs=1e-12)


def test_a_character_is_followed_by_its_target(generator) -> None:
    ids, targets = batch("RNN", generator, rows=7, length=11)
    assert ids.shape == targets.shape == (7, 11)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert int(ids.max()) < networks.VOCABULARY
    images, classes = batch("conv", generator, rows=7)
    assert images.shape == (7, 64) and classes.shape == (7,)


@pytest.mark.parametrize("network", EVERY)
def test_what_is_read_of_the_last_state_is_the_prediction(network: str, generator) -> None:
    model = networks.make(network, **EVERY[network])
    inputs, _ = batch(network, generator)
    last = model(inputs) if network == "conv" else model(inputs)[:, -1]
    assert torch.allclose(model.read(model.states(inputs)[-1]), last, atol=1e-6)


def test_an_lstm_is_torchs(seed: int, generator) -> None:
    model = networks.make("LSTM", width=10, seed=seed)
    ids, _ = batch("LSTM", generator, rows=3, length=7)
    theirs = torch.nn.LSTM(5, 10, batch_first=True)
    with torch.no_grad():
        for name, weight in model.cell.named_parameters():
            getattr(theirs, f"{name}_l0").copy_(weight)
        outputs, _ = theirs(model.embedding(ids))
    assert torch.allclose(model.head(outputs), model(ids), atol=1e-6)
    assert max(weight.abs().max() for weight in model.cell.parameters()) <= 10**-0.5


def test_a_residual_adds_the_input_and_a_norm_makes_the_scale_of_weights_moot(generator) -> None:
    inputs, _ = batch("conv", generator, rows=6)
    model = networks.make("conv", depth=4, channels=3, residual=True)
    with torch.no_grad():
        for layer in list(model.layers)[1:]:
            layer.weight.zero_()
    chain = model.states(inputs)
    assert all(torch.equal(chain[0], state) for state in chain)
    one, other = (
        networks.make("conv", depth=4, channels=3, norm=True, gain=gain, seed=3).states(inputs)[-1]
        for gain in (1.0, 9.0)
    )
    assert torch.allclose(one, other, atol=1e-3)


def test_orthogonal_weights_keep_the_norm_of_what_they_multiply(generator) -> None:
    weight = networks.make("RNN", width=12, orthogonal=True, gain=1.5).recurrent.weight
    x = torch.randn(12, generator=generator)
    assert (weight @ x).norm().item() == pytest.approx(1.5 * x.norm().item(), rel=1e-5)


def test_the_whole_way_is_the_ratio_of_the_ends(seed: int) -> None:
    small = {"length": 9, "width": 12}
    way = population.whole_way("recurrent", "ReLU, He", seed, trained=False, **small)
    model = networks.make("RNN", width=12, gain=1.0, seed=seed)
    generator = torch.Generator().manual_seed(10_000 + seed)
    found = networks.growth(model, *networks.draw("RNN", 64, length=9, generator=generator))
    assert way == pytest.approx(found.rms[0] / found.rms[-1], rel=1e-5)
    small |= {"steps": 2, "batch": 3}
    trained = population.whole_way("recurrent", "ReLU, He", seed, trained=True, **small)
    assert math.isfinite(trained) and trained != way


def test_weights_that_are_nan_are_right_by_chance_at_most() -> None:
    for network, settings in EVERY.items():
        model = networks.make(network, **settings)
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(math.nan)
        assert networks.accuracy(model) < 0.13


# One gradient, clipped ----------------------------------------------------


@pytest.mark.parametrize("network", SMALL)
def test_effects_are_what_the_clipping_says(network: str, seed: int) -> None:
    taken = effects.snapshot(network, seed=seed, batch=5, **SMALL[network])
    norm = effects.flat(taken.gradients).norm().item()
    whole = effects.effect(taken, functools.partial(clip_by_global_norm, max_norm=norm / 4))
    assert whole.kept == pytest.approx(0.25, rel=1e-5)
    assert whole.cosine == pytest.approx(1, abs=1e-6)
    assert [a / b for a, b in zip(whole.after, whole.before, strict=True) if b] == pytest.approx(
        [0.25] * sum(b > 0 for b in whole.before), rel=1e-5
    )
    local = effects.effect(taken, functools.partial(clip_by_local_norm, max_norm=norm / 20))
    assert max(local.after) <= norm / 20 * (1 + 1e-5)
    for cosine, norm in zip(local.cosines, local.before, strict=True):
        assert cosine == pytest.approx(1 if norm else 0, abs=1e-6)
    assert local.cosine < 1 - 1e-4
    assert whole.before == local.before  # the snapshot kept its own


def test_a_gradient_that_becomes_zero_has_no_direction() -> None:
    taken = effects.snapshot("RNN", batch=3, **SMALL["RNN"])

    def erase(named: effects.Named) -> None:
        for _, weight in named:
            weight.grad.zero_()

    found = effects.effect(taken, erase)
    assert found.cosine == found.kept == 0 and set(found.after) == {0.0}


@pytest.mark.parametrize("name", exploding.COMPARABLE)
def test_comparable_thresholds_leave_about_max_norm(name: str, seed: int) -> None:
    taken = effects.snapshot("conv", seed=seed, batch=9, gain=1.5, **SMALL["conv"])
    norm = effects.flat(taken.gradients).norm().item()
    found = effects.effect(taken, exploding.comparable(name, taken, norm / 50))
    parts = len(taken.names) if name.startswith("local") else 1
    limit = 1.0 if name == "none" else parts**0.5 / 50
    assert 0 < found.kept <= limit * (1 + 1e-4)


# Runs ---------------------------------------------------------------------


def brief(network: str, clip=None, **settings) -> exploding.ClippedRun:
    settings = {"lr": 1e-2, "steps": 6, **SMALL[network], **settings}
    return exploding.train(network, clip, **settings)


@pytest.mark.parametrize(
    ("network", "optimizer"), [*itertools.product(SMALL, exploding.OPTIMIZERS)]
)
def test_a_run_measures_its_own_steps(network: str, optimizer: str, seed: int) -> None:
    limit = 1e-2
    clip = functools.partial(clip_by_global_norm, max_norm=limit)
    run = brief(network, clip, optimizer=optimizer, seed=seed)
    assert {len(run.losses), len(run.norms), len(run.kept), len(run.moves)} == {6}
    clipped = [kept * norm for kept, norm in zip(run.kept, run.norms, strict=True)]
    assert clipped == pytest.approx([min(limit, norm) for norm in run.norms], rel=1e-4)
    assert run.cosines == pytest.approx([1] * 6, abs=1e-5)
    assert run.finite and 0 <= run.accuracy <= 1
    again = brief(network, clip, optimizer=optimizer, seed=seed)
    assert again.losses == run.losses and again.accuracy == run.accuracy


def test_a_run_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    brief("RNN")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loud_layer_is_loud_always(seed: int) -> None:
    loud = brief("conv", seed=seed, spoil=exploding.loud_layer("layers.1.", 10.0))
    taken = effects.snapshot("conv", seed=seed, batch=exploding.BATCH["conv"], **SMALL["conv"])
    norms = [float(gradient.double().norm()) for gradient in taken.gradients]
    place = taken.names.index("layers.1.weight")
    expected = math.hypot(*norms[:place], 10 * norms[place], *norms[place + 1 :])
    assert loud.norms[0] == pytest.approx(expected, rel=1e-5)
    assert len(loud.losses) == 6


def test_a_run_ends_where_its_loss_does() -> None:
    run = brief("conv", lr=1e30, steps=50)
    assert len(run.losses) < 50 and not math.isfinite(run.losses[-1]) and not run.finite


@pytest.mark.parametrize("network", SMALL)
@pytest.mark.parametrize("name", ["none", *exploding.METHODS, exploding.UPDATES])
def test_every_method_runs_in_the_study(name: str, network: str) -> None:
    brief = {"steps": 4, **SMALL[network]}
    layer = {"RNN": "recurrent.", "conv": "layers.1."}[network]
    runs = [
        exploding.run(network, name, "AdamW", 3, **brief),
        exploding.loud_run(network, name, "AdamW", 3, layer=layer, **brief),
    ]
    assert all(len(run.losses) == 4 and run.finite for run in runs)


def test_seeds_that_choose_are_not_seeds_that_report() -> None:
    assert not set(exploding.TUNING_SEEDS) & set(exploding.SEEDS)
    for thresholds in exploding.THRESHOLDS.values():
        assert set(thresholds) == set(exploding.METHODS)


# What the chapter says, on a fresh seed -----------------------------------


def test_the_global_norm_alone_starves_healthy_layers(seed: int) -> None:
    layer = "layers.1."
    quiet = effects.snapshot("conv", seed=seed, **SMALL["conv"])
    loud = effects.snapshot("conv", seed=seed, spoil=exploding.loud_layer(layer), **SMALL["conv"])
    norm = effects.flat(quiet.gradients).norm().item()
    for clip, low, high in (
        (functools.partial(clip_by_global_norm, max_norm=norm), 0.0, 0.2),
        (functools.partial(clip_by_local_norm, max_norm=norm), 1.0, 1.0),
    ):
        before, after = (effects.effect(one, clip).after for one in (quiet, loud))
        assert low <= after[0] / before[0] <= high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: networks.make("cnn"), "network must be one of"),
        (lambda: networks.make("RNN", activation="gelu"), "activation must be one of"),
        (lambda: networks.make("conv", gain=0.0), "gain must be"),
        (lambda: networks.make("conv", depth=0), "depth must be"),
        (lambda: exploding.loud_layer("head.", math.inf), "factor must be"),
        (lambda: brief("conv", spoil=exploding.loud_layer("layers.9.")), "layer .*got 'layers.9.'"),
        (lambda: brief("RNN", optimizer="Adam"), "optimizer must be one of"),
        (lambda: exploding.method("locall", "RNN"), "method must be one of"),  # codespell:ignore
        (lambda: exploding.method("global", "cnn"), "network must be one of"),
        (lambda: exploding.run("cnn", "none", "SGD", 0), "network must be one of"),
        (lambda: exploding.run("RNN", "none", "Adam", 0), "optimizer must be one of"),
        (lambda: population.whole_way("recurrent", "GRU", 0, trained=False), "name must be one of"),
        (
            lambda: exploding.comparable("AutoClip", effects.snapshot("conv"), 1.0),
            "name must be one",
        ),
        (lambda: exploding.comparable("global", effects.snapshot("conv"), 0.0), "max_norm must be"),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
