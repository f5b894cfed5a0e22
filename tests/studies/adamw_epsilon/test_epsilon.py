"""Epsilon's laws against runs of the rule, and the naive optimizer against torch's."""

import functools
import math

import pytest
import torch

from labcore.optim import AdamW, rules
from labcore.studies.adamw_epsilon import epsilon
from labcore.studies.lion import traps
from tests.optim.lists import awkward

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PLACES = (
    {"eps_mode": "outside"},
    {"eps_mode": "outside", "eps_root": 3e-9},
    {"eps_mode": "inside"},
    {"eps_mode": "atan2"},
)


def magnitudes(count: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Sizes [count], fp64, log-uniform between 10**low and 10**high."""
    return 10 ** (low + (high - low) * torch.rand(count, generator=generator, dtype=FP64))


def signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return 2.0 * torch.randint(0, 2, (count,), generator=generator, dtype=FP64) - 1


# The law of attenuation ---------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 41])
@pytest.mark.parametrize("place", PLACES)
def test_a_constant_gradient_is_attenuated_as_predicted(
    place: dict, steps: int, generator: torch.Generator
) -> None:
    sizes = magnitudes(37, -12, 3, generator)
    gradients = sizes * signs(37, generator)
    for eps in (0.0, 1e-15, 1e-8, 0.3):
        measured = epsilon.update_sizes(gradients, eps=eps, dtype=FP64, steps=steps, **place)
        predicted = epsilon.predict_attenuation(sizes, eps, **place)
        torch.testing.assert_close(measured, predicted, rtol=1e-9, atol=0)


def test_float32_follows_the_law_while_second_moments_are_normal(
    generator: torch.Generator,
) -> None:
    sizes = magnitudes(53, -15, 3, generator)
    measured = epsilon.update_sizes(sizes, eps=1e-8, dtype=FP32, steps=7)
    torch.testing.assert_close(
        measured, epsilon.predict_attenuation(sizes, 1e-8), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("place", PLACES[:3])
def test_attenuation_falls_with_eps_and_grows_with_the_gradient(
    place: dict, generator: torch.Generator
) -> None:
    # Neighbors differ by a factor: fp64 could not tell closer ones apart near 1.
    sizes = torch.logspace(-9, 1, 29, dtype=FP64) * magnitudes(1, -0.3, 0, generator)
    curves = torch.stack(
        [epsilon.predict_attenuation(sizes, 10.0**power, **place) for power in range(-12, 2)]
    )
    assert (curves.diff(dim=0) < 0).all() and (curves.diff(dim=1) > 0).all()
    assert (curves > 0).all() and (curves < 1).all()


@pytest.mark.parametrize("place", PLACES[:3])
def test_only_eps_over_the_gradient_counts(place: dict, generator: torch.Generator) -> None:
    sizes = magnitudes(19, -3, 0, generator)
    scale, power = 2.0**-13, 2 if place["eps_mode"] == "inside" else 1
    smaller = {**place, "eps_root": place.get("eps_root", 0.0) * scale**2}
    first = epsilon.update_sizes(sizes, eps=1e-4, dtype=FP64, steps=3, **place)
    second = epsilon.update_sizes(
        scale * sizes, eps=1e-4 * scale**power, dtype=FP64, steps=3, **smaller
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("signal", [0.0, 0.7, 3.0])
def test_under_noise_the_law_holds_for_the_ratio_to_no_eps(signal: float, seed: int) -> None:
    rms = math.hypot(signal, 1.0)
    for eps in (0.03, 1.0, 30.0):
        measured = epsilon.measured_attenuation(eps, signal=signal, seed=seed)
        assert measured == pytest.approx(epsilon.predict_attenuation(rms, eps), rel=0.02)


def test_atan2_steps_are_a_quarter_of_pi_and_adams_size_in_noise(
    seed: int,
) -> None:
    clear = epsilon.measured_attenuation(0.0, signal=1e4, eps_mode="atan2", seed=seed)
    assert clear == pytest.approx(math.pi / 4, rel=1e-6)
    noisy = epsilon.measured_attenuation(0.0, eps_mode="atan2", seed=seed)
    assert 0.93 < noisy < 0.98


def test_a_gradient_of_zero_and_the_types_of_answers() -> None:
    assert epsilon.predict_attenuation(0.0, 1e-8) == 0.0
    assert math.isnan(epsilon.predict_attenuation(0.0, 0.0))
    assert epsilon.predict_attenuation(0.0, 0.0, eps_mode="atan2") == 0.0
    assert isinstance(epsilon.predict_attenuation(1.0, 1.0), float)
    both = epsilon.predict_attenuation(torch.tensor([[0.0], [1e-200]]), 1e-200)
    assert both.shape == (2, 1) and both.dtype == FP64
    # The square of 1e-200 is 0 in float64.
    tiny = torch.tensor(1e-200, dtype=FP64)
    assert epsilon.predict_attenuation(tiny, 1e-200).item() == pytest.approx(0.5)


def test_epsilon_hat_is_another_eps_on_every_step(generator: torch.Generator) -> None:
    beta1, beta2, eps_hat = 0.9, 0.999, 1e-3
    zero, state = torch.zeros(23, dtype=FP64), {}
    for step in range(1, 40):
        grad = 1e-3 * torch.randn(23, generator=generator, dtype=FP64)
        eps = epsilon.equivalent_eps(eps_hat, step=step, beta2=beta2)
        moved, state = rules.adamw(zero, grad, state, lr=1.0, eps=eps, weight_decay=0.0)
        rate = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        folded = -rate * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps_hat)
        torch.testing.assert_close(moved, folded, rtol=1e-12, atol=0)
    assert epsilon.equivalent_eps(eps_hat, step=1) == pytest.approx(eps_hat * math.sqrt(1000))
    assert epsilon.equivalent_eps(eps_hat, step=10**6) == eps_hat


# Rounding -----------------------------------------------------------------


def test_eps_vanishes_in_float16_and_stays_in_bfloat16() -> None:
    assert epsilon.rounded_eps(1e-8, FP16) == 0.0
    assert epsilon.rounded_eps(2**-25, FP16) == 0.0 < epsilon.rounded_eps(2**-25 * 1.001, FP16)
    assert epsilon.rounded_eps(1e-8, BF16) == pytest.approx(1e-8, rel=2**-8)
    assert epsilon.rounded_eps(1e-8, FP64) == 1e-8


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("dtype", epsilon.DTYPES)
def test_below_the_smallest_gradient_the_second_moment_is_zero(
    dtype: torch.dtype, beta2: float
) -> None:
    edge = epsilon.smallest_gradient(dtype, beta2)
    around = torch.tensor([[edge * 0.98, edge * 1.02]], dtype=FP64)
    below, above = epsilon.second_moment_path(dtype, around, beta2=beta2)[-1].tolist()
    assert below == 0.0 < above


def test_float16_gives_nan_then_infinity_then_the_right_step(generator: torch.Generator) -> None:
    edge = epsilon.smallest_gradient(FP16)
    small = torch.linspace(1e-6, 0.98 * edge, 31)
    large = magnitudes(31, math.log10(1.02 * edge), 2, generator)
    for steps in (1, 5):
        sizes = functools.partial(epsilon.update_sizes, dtype=FP16, steps=steps)
        assert sizes(torch.zeros(3), eps=1e-8).isnan().all()
        assert sizes(small, eps=1e-8).isinf().all()
        # One spacing of a moment among the subnormal numbers is worth up to a factor of √2.
        assert sizes(large, eps=1e-8).log2().abs().max() < 0.6
    assert epsilon.update_sizes(small, eps=1e-8, dtype=BF16).sub(1).abs().max() < 0.02


def test_each_gradient_has_one_outcome_and_only_fp16_is_wrong(generator: torch.Generator) -> None:
    gradients = 10 ** (-9 * torch.rand(301, generator=generator, dtype=torch.float64))
    for dtype in epsilon.DTYPES:
        shares = epsilon.outcomes(gradients, eps=1e-8, dtype=dtype)
        assert tuple(shares) == epsilon.OUTCOMES
        assert sum(shares.values()) == pytest.approx(1)
        assert (shares["right"] == 1) == (dtype != torch.float16), dtype
    lost = gradients < 0.9 * epsilon.smallest_gradient(torch.float16)
    shares = epsilon.outcomes(gradients[lost], eps=1e-6, dtype=torch.float16)
    assert shares["too long"] + shares["too short"] > 0.5 and shares["not finite"] == 0


@pytest.mark.parametrize(
    ("gradient", "eps", "dtype", "expected"),
    [
        (0.0, 1e-8, torch.float16, "not finite"),
        (0.0, 1e-8, torch.float32, "right"),
        (0.0, 0.0, torch.float32, "not finite"),
        (-1e-3, 1e-8, torch.float16, "not finite"),
        (-1e-3, 1e-6, torch.float16, "too long"),
        (1e-8, 1e-6, torch.float16, "too short"),
        (1e-10, 1e-4, torch.float32, "right"),  # short, and as short as it should be
    ],
)
def test_an_outcome_is_judged_by_exact_arithmetic(
    gradient: float, eps: float, dtype: torch.dtype, expected: str
) -> None:
    shares = epsilon.outcomes(torch.tensor([gradient]).double(), eps=eps, dtype=dtype)
    assert shares[expected] == 1


def test_a_larger_eps_throws_the_weight_instead() -> None:
    assert epsilon.weight_after(1e-3, eps=1e-6, dtype=FP16) == pytest.approx(0.013, abs=1e-3)
    naive = epsilon.weight_after(5e-3, eps=1e-6, dtype=FP16)
    assert naive < -3
    for foreach in (False, True):
        loop = epsilon.weight_after(
            5e-3, eps=1e-6, dtype=FP16, optimizer=torch.optim.AdamW, foreach=foreach
        )
        assert abs(loop - naive) <= 2 * 2**-9  # two spacings at 4


def test_bfloat16_moment_never_falls_and_ends_too_high_in_noise(
    generator: torch.Generator,
) -> None:
    noise = torch.randn(3000, 200, generator=generator, dtype=FP64)
    stuck = epsilon.second_moment_path(BF16, noise)
    assert (stuck.diff(dim=0) >= 0).all()
    right = epsilon.second_moment_path(FP32, noise)[-1].mean().item()
    assert right == pytest.approx(1 - 0.999**3000, abs=0.02)  # ten standard deviations
    assert stuck[-1].mean().item() > 1.5 * right


@pytest.mark.parametrize("beta2", [0.9985, 0.999, 0.9999])
def test_climb_under_a_constant_gradient_ends_where_predicted(
    beta2: float, generator: torch.Generator
) -> None:
    gradients = magnitudes(41, -6, 6, generator)
    path = epsilon.second_moment_path(BF16, gradients.expand(1500, 41), beta2=beta2)
    predicted = [
        epsilon.predict_ceiling(size, dtype=BF16, beta2=beta2) for size in gradients.tolist()
    ]
    assert path[-1].tolist() == predicted
    assert epsilon.predict_ceiling(0.0, dtype=BF16, beta2=beta2) == 0.0


def test_a_pulse_sticks_in_bfloat16_and_decays_in_float32() -> None:
    path = {dtype: epsilon.second_moment_path(dtype, epsilon.pulse()) for dtype in (FP32, BF16)}
    loud = 1 - 0.999**500
    assert path[FP32][[500, 1000]].tolist() == pytest.approx([loud, loud * 0.999**500], rel=1e-4)
    assert path[BF16][[500, 1000]].tolist() == [0.5, 0.5]


# The naive optimizer ------------------------------------------------------


def spacing(x: torch.Tensor) -> torch.Tensor:
    """The distance between neighbors of x's dtype at x, fp64."""
    info = torch.finfo(x.dtype)
    exponent = torch.frexp(x.double()).exponent - 1
    return torch.ldexp(torch.full_like(x, info.eps, dtype=FP64), exponent).clamp_min(
        info.smallest_normal * info.eps
    )


@pytest.mark.parametrize("foreach", [False, True])
def test_on_float16_the_naive_optimizer_takes_torchs_first_step(
    foreach: bool, generator: torch.Generator
) -> None:
    edge = epsilon.smallest_gradient(FP16)
    sizes = magnitudes(4001, -7.5, 3, generator)
    # Within one percent of the edge the two round (1 − beta2) g² to different sides of zero.
    sizes = sizes[(sizes / edge - 1).abs() > 0.02]
    grad = (sizes * signs(len(sizes), generator)).to(FP16)
    grad[:40] = 0
    start = (1 + torch.rand(len(grad), generator=generator)).to(FP16)
    results = []
    for make in (epsilon.NaiveAdamW, functools.partial(torch.optim.AdamW, foreach=foreach)):
        weight = torch.nn.Parameter(start.clone())
        optimizer = make([weight])
        weight.grad = grad.clone()
        optimizer.step()
        results.append((weight.detach(), optimizer.state[weight]))
    (ours, kept), (theirs, torchs) = results
    assert ours[:40].isnan().all() and (ours == math.inf).any() and (ours == -math.inf).any()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[ours.isinf()], theirs[theirs.isinf()])
    fine = ours.isfinite()
    assert torch.equal(fine, theirs.isfinite()) and fine.any()
    assert ((ours - theirs)[fine].double().abs() <= spacing(start)[fine]).all()
    assert torch.equal(kept["exp_avg"], torchs["exp_avg"])
    gap = (kept["exp_avg_sq"].double() - torchs["exp_avg_sq"].double()).abs()
    assert (gap <= spacing(torchs["exp_avg_sq"])).all()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", epsilon.DTYPES)
def test_naive_optimizer_stays_within_rounding_of_torchs(
    dtype: torch.dtype, foreach: bool, seed: int
) -> None:
    settings = {"lr": 2e-3, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.3}
    steps, runs = 30, []
    for make in (epsilon.NaiveAdamW, functools.partial(torch.optim.AdamW, foreach=foreach)):
        params = awkward(dtype, seed, shapes=((3, 5), (7001,), (), (0,)))
        optimizer = make(params, **settings)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            for param in params[:-1]:  # the last has no gradient
                noise = torch.randn(param.shape, generator=generator, dtype=FP64)
                # Away from zero no moment underflows.
                param.grad = (noise + 0.1 * noise.sign()).to(dtype)
            optimizer.step()
        runs.append(params)
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        # A step rounds the weight twice and the update, at most 4 lr, a few times.
        unit = torch.finfo(dtype).eps * (theirs.double().abs() + 0.1)
        assert ((ours.double() - theirs.double()).abs() <= 2 * steps * unit).all()


def test_torchs_first_fused_step_survives_float16_and_no_other() -> None:
    fused = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0, fused=True)
    for gradient in (0.0, 1e-6, 1e-3, 1.0):
        once = epsilon.weight_after(gradient, dtype=FP16, optimizer=torch.optim.AdamW, fused=True)
        assert once == pytest.approx(1.0 if gradient == 0.0 else 0.999, abs=2**-11)
    # It computes in float32 and stores exp_avg_sq in float16: 0, while exp_avg lives on.
    path = traps.weight_path(
        fused,
        lambda step, weights: torch.full_like(weights, 1e-3 * (step == 0)),
        start=torch.ones(1, dtype=FP16),
        steps=2,
    )
    assert path[1, 0].item() == pytest.approx(0.999, abs=2**-11)
    assert abs(path[2, 0].item()) > 10
    right = functools.partial(AdamW, lr=1e-3, weight_decay=0.0, state_dtype=FP32)
    path = traps.weight_path(
        right,
        lambda step, weights: torch.full_like(weights, 1e-3 * (step == 0)),
        start=torch.ones(1, dtype=FP16),
        steps=50,
    )
    assert 0.98 < path[-1, 0].item() < 1


def test_a_bfloat16_weight_stalls_and_a_master_copy_moves_it() -> None:
    pull = functools.partial(epsilon.weight_after, 1.0, dtype=BF16, lr=1e-4, steps=200)
    assert pull() == 1.0
    assert pull(optimizer=AdamW, state_dtype=FP32) == 1.0
    assert pull(optimizer=AdamW, master_weights=True) == pytest.approx(0.98, abs=2**-8)


def test_naive_optimizer_applies_settings_and_keeps_the_dtype() -> None:
    for place in PLACES:
        ours = epsilon.weight_after(0.3, eps=0.1, dtype=FP64, lr=0.01, steps=9, **place)
        right = epsilon.weight_after(
            0.3, eps=0.1, dtype=FP64, lr=0.01, steps=9, optimizer=AdamW, **place
        )
        assert ours == pytest.approx(right, rel=1e-12)
    moved, frozen = (torch.nn.Parameter(torch.ones(2, dtype=BF16)) for _ in range(2))
    groups = [{"params": [moved], "lr": 0.5, "weight_decay": 0.0}, {"params": [frozen]}]
    optimizer = epsilon.NaiveAdamW(groups, lr=0.0)
    moved.grad, frozen.grad = torch.ones_like(moved), torch.ones_like(frozen)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert moved.tolist() == pytest.approx([0.5, 0.5], abs=2**-7) and frozen.tolist() == [1.0, 1.0]
    state = optimizer.state[moved]
    assert state["step"] == 1 and {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {
        BF16
    }


# Errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epsilon.predict_attenuation(1.0, -1e-8), "eps must be a finite number"),
        (lambda: epsilon.predict_attenuation(-1.0, 1e-8), "rms must be at least 0, got -1.0"),
        (lambda: epsilon.predict_attenuation(1.0, 0.0, eps_mode="out"), "did you mean 'outside'"),
        (lambda: epsilon.measured_attenuation(1.0, eps_root=-1.0), "eps_root must be"),
        (
            lambda: epsilon.update_sizes(
                torch.ones(1), eps=0.0, dtype=FP32, eps_mode="inside", eps_root=1.0
            ),
            "eps_root .*, got eps_mode='inside'",
        ),
        (lambda: epsilon.update_sizes(torch.ones(1), eps=0.0, dtype=torch.int8), "dtype must be"),
        (lambda: epsilon.update_sizes(torch.ones(1), eps=0.0, dtype=FP32, steps=0), "steps must"),
        (lambda: epsilon.weight_after(1.0, dtype=torch.int32), "dtype must be one of"),
        (lambda: epsilon.pulse(0), "loud must be at least 1"),
        (lambda: epsilon.predict_ceiling(1.0, dtype=FP32), "stick in torch.float32"),
        (lambda: epsilon.predict_ceiling(1.0, dtype=BF16, beta2=0.99), "got beta2=0.99"),
        (lambda: epsilon.rounded_eps(-1.0, FP16), "eps must be"),
        (lambda: epsilon.smallest_gradient(FP16, 1.0), "beta2 must be"),
        (lambda: epsilon.equivalent_eps(1e-8, step=0), "step must be at least 1"),
        (lambda: epsilon.NaiveAdamW([torch.ones(1)], betas=(0.9, 1.0)), r"betas\[1\] must be"),
        (lambda: epsilon.NaiveAdamW([torch.ones(1)], eps=-1.0), "eps must be"),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="gradients must be floating point"):
        epsilon.update_sizes(torch.ones(2, dtype=torch.int64), eps=0.0, dtype=FP32)
    with pytest.raises(TypeError, match="gradients must be floating point"):
        epsilon.second_moment_path(FP32, torch.ones(2, dtype=torch.int64))
