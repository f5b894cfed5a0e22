"""AdamW's epsilon: its laws, runs where it matters, and remedies against torchao and optimi."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from optimi import AdamW as OptimiAdamW
from optimi import StableAdamW
from torch import Tensor, nn

from benchmarks.lion import parameters, quarter_gpt2
from benchmarks.runner import Measurement, case, exact, ratios, seen
from labcore.data import digits
from labcore.models import train
from labcore.optim import AdamW
from labcore.studies.adamw_epsilon import epsilon, gradient_scale, low_precision
from labcore.studies.adamw_epsilon.low_precision import Failure
from labcore.studies.digits_runs import TrainConfig, train_digits
from labcore.timing import Comparison, paired

Make = Callable[..., torch.optim.Optimizer]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    law_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    seeds: tuple[int, ...] = low_precision.SEEDS  # of the runs on digits
    scales: tuple[float, ...] = low_precision.SCALES
    failure_steps: int | None = None  # None for each failure's own
    llama_seeds: tuple[int, ...] = gradient_scale.SEEDS
    llama_steps: int = gradient_scale.STEPS
    widths: tuple[int, ...] = gradient_scale.WIDTHS
    eps_widths: tuple[int, ...] = gradient_scale.EPS_WIDTHS
    epsilons: tuple[float, ...] = gradient_scale.EPSILONS
    divergence_width: int = 64
    divergence_steps: int = 60
    divergence_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    peer_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rounded: int = 1 << 20  # weights in the case on stochastic rounding
    shapes: Sequence[tuple[int, ...]] = field(default_factory=quarter_gpt2)  # of a timed step
    repetitions: int = 6
    rounds: int = 5


FULL = Sizes()
SMALL = Sizes(
    law_seeds=(0, 1),
    seeds=(0, 1),
    scales=(1e-8,),
    failure_steps=4,
    llama_seeds=(0, 1),
    llama_steps=2,
    widths=(16, 32),
    eps_widths=(16, 32),
    epsilons=(1e-8, 1e-3),
    divergence_width=16,
    divergence_steps=3,
    divergence_seeds=(0, 1),
    peer_seeds=(0, 1),
    rounded=1 << 16,
    shapes=[(3, 5), (7,)],
    repetitions=2,
    rounds=1,
)


# Laws on hand-made gradients ---------------------------------------------------------------------
OVER_EPS = tuple(10.0**k for k in range(-3, 4))  # gradients over eps


@case("attenuation/law", minutes=0.1)
def attenuation_law(sizes: Sizes = FULL) -> list[Measurement]:
    """Predicted attenuation, compared with constant gradients and with pure noise."""
    gradients = torch.tensor(OVER_EPS, dtype=torch.float64)
    forms = {"outside": 1.0, "inside": 1.0, "atan2": 0.0}
    gaps = {}
    for mode, eps in forms.items():
        found = epsilon.update_sizes(
            gradients, eps=eps, dtype=torch.float64, eps_mode=mode, steps=3
        )
        predicted = epsilon.predict_attenuation(gradients, eps, eps_mode=mode)
        gaps[mode] = float((found / predicted - 1).abs().max())
    details: dict[str, Any] = {"gradient over eps": OVER_EPS, "by form": gaps}
    largest = exact("largest relative gap/constant gradient", "", max(gaps.values()), **details)
    return [largest] + [
        seen(
            f"attenuation/noise of {ratio:g} eps",
            "",
            [epsilon.measured_attenuation(1 / ratio, seed=seed) for seed in sizes.law_seeds],
            peers={"predicted": [epsilon.predict_attenuation(1.0, 1 / ratio)]},
            seeds=sizes.law_seeds,
        )
        for ratio in OVER_EPS
    ]


# From below the smallest gradient that float16 can represent up to 1, ten per decade.
GRADIENTS = tuple(10 ** (tenths / 10) for tenths in range(-80, 1))
GRID_EPSILONS = (1e-15, 1e-8, 1e-6, 1e-4)
OUTCOMES = ("non-finite", "thrown", "frozen", "right")


def outcome(size: float) -> str:
    """Classify an update of `size` learning rates; in exact arithmetic the size is 1."""
    if not math.isfinite(size):
        return "non-finite"
    return "thrown" if size > 10 else "frozen" if size < 0.1 else "right"


@case("rounding/outcomes", minutes=0.1)
def rounding_outcomes() -> list[Measurement]:
    """Share of the gradients from 1e-8 to 1 whose first update is not near the learning rate."""
    found = []
    for (dtype, name), eps in itertools.product(NAMES.items(), GRID_EPSILONS):
        sizes = epsilon.update_sizes(torch.tensor(GRADIENTS), eps=eps, dtype=dtype).tolist()
        outcomes = [outcome(size) for size in sizes]
        shares = {each: outcomes.count(each) / len(outcomes) for each in OUTCOMES}
        zero = epsilon.update_sizes(torch.zeros(1), eps=eps, dtype=dtype).item()
        details: dict[str, Any] = {
            "shares": shares,
            "outcomes": outcomes,
            "gradients": GRADIENTS,
            "eps as stored": epsilon.rounded_eps(eps, dtype),
            "zero gradient": outcome(zero),
        }
        quantity = f"wrong first update/{name}, eps {eps:g}"
        found.append(exact(quantity, "share", 1 - shares["right"], **details))
    return found


@case("rounding/second-moment", minutes=0.1)
def second_moment() -> list[Measurement]:
    """exp_avg_sq after 500 gradients of 1 and 500 of 0, relative to float64."""
    right = epsilon.second_moment_path(torch.float64, epsilon.pulse())[-1].item()
    found = []
    for dtype, name in NAMES.items():
        path = epsilon.second_moment_path(dtype, epsilon.pulse())
        found.append(
            exact(
                f"second moment after a pulse/{name}",
                "over fp64",
                path[-1].item() / right,
                exp_avg_sq=path[::50].tolist(),
                fp64=right,
            )
        )
    return found


# Digits ------------------------------------------------------------------------------------------
def accuracy(make: Make, failure: Failure, seed: int) -> float:
    """Return the test accuracy of a run of make(parameters, lr=…) under a failure of the study."""
    config = TrainConfig(
        steps=failure.steps,
        dtype=failure.dtype,
        schedule=failure.schedule,
        seed=seed,
        check_every=failure.steps,
    )
    factory = low_precision.scaled(functools.partial(make, lr=failure.lr), failure.scale)
    return train_digits(factory, config, digits()).accuracy


def _atan2(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return low_precision.REMEDIES["atan2"](parameters, lr, 0)


@case("digits/loss-scale", minutes=0.5)
def loss_scale(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy by eps and by the factor on the loss, in fp32, compared with atan2."""
    found, seeds = [], sizes.seeds
    for scale in sizes.scales:
        measured = {
            f"eps {eps:g}": [low_precision.accuracy_at(scale, eps, seed) for seed in seeds]
            for eps in low_precision.EPSILONS
        }
        measured["atan2"] = [accuracy(_atan2, Failure(scale=scale), seed) for seed in seeds]
        rms = low_precision.gradient_rms(scale)
        attenuation = {
            f"eps {eps:g}": {
                "measured": low_precision.digits_attenuation(eps, scale),
                "predicted": epsilon.predict_attenuation(rms, eps),
            }
            for eps in low_precision.EPSILONS
        }
        details: dict[str, Any] = {
            "seeds": seeds,
            "gradient rms": rms,
            "attenuation": attenuation,
        }
        ours = measured.pop("eps 1e-08")
        found.append(seen(f"accuracy/loss times {scale:g}", "", ours, peers=measured, **details))
    return found


@case("digits/remedies", minutes=2.5)
def remedies(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy of every remedy under every failure, relative to a healthy run."""
    found, seeds, steps = [], sizes.seeds, sizes.failure_steps
    for failure in low_precision.FAILURES:
        healthy = [low_precision.healthy_accuracy(failure, seed, steps=steps) for seed in seeds]
        for remedy in low_precision.remedies_for(failure):
            measured = [
                low_precision.accuracy(remedy, failure, seed, steps=steps) for seed in seeds
            ]
            found.append(
                seen(
                    f"minus healthy/{failure}, {remedy}",
                    "percentage points",
                    [100 * (a - b) for a, b in zip(measured, healthy, strict=True)],
                    seeds=seeds,
                    accuracy=measured,
                    healthy=healthy,
                )
            )
    return found


# Small Llamas ------------------------------------------------------------------------------------
REACHED = (5_120, 16_384)  # ten times the largest width here; the width of Llama 3.1 405B


@case("llama/gradient-rms", minutes=2.5)
def gradient_rms(sizes: Sizes = FULL) -> list[Measurement]:
    """Exponent of the gradient's root mean square as a function of the width, one per seed."""
    found = []
    for init in gradient_scale.INITS:
        tables = gradient_scale.rms_by_width(
            sizes.widths, sizes.llama_seeds, steps=(0, sizes.llama_steps), init=init
        )
        for steps, table in tables.items():
            found.append(
                seen(
                    f"exponent/{init}, after {steps} steps",
                    "",
                    table.exponents(),
                    widths=table.widths,
                    seeds=table.seeds,
                    parameters=table.parameters,
                    # [widths, seeds]
                    rms={name: values.tolist() for name, values in table.rms.items()},
                    exponents={name: table.exponents(name) for name in table.rms},
                    extrapolated={str(width): table.predict(width) for width in REACHED},
                )
            )
    return found


Runs = dict[tuple[int, float], list[gradient_scale.EpsRun]]


@case("llama/eps-by-width", minutes=2)
def eps_by_width(sizes: Sizes = FULL) -> list[Measurement]:
    """Held-out loss by width and eps, and by how much eps shrank the last update."""
    widths, epsilons = sizes.eps_widths, sizes.epsilons
    runs: Runs = {
        (width, eps): [
            gradient_scale.loss_by_eps(width, eps, seed, steps=sizes.llama_steps)
            for seed in sizes.llama_seeds
        ]
        for width, eps in itertools.product(widths, epsilons)
    }
    base, found = epsilons[0], []
    for width in widths:
        losses = {eps: [run.loss for run in runs[width, eps]] for eps in epsilons}
        details: dict[str, Any] = {
            "seeds": sizes.llama_seeds,
            "learning rate": gradient_scale.learning_rate(width),
            **{f"eps {eps:g}": _attenuation(runs[width, eps], eps) for eps in epsilons},
        }
        found.append(
            seen(
                f"loss/width {width}, eps {base:g}",
                "nats a byte",
                losses[base],
                peers={f"eps {eps:g}": losses[eps] for eps in epsilons[1:]},
                **details,
            )
        )
    for eps in epsilons[1:]:
        found += _wide_against_narrow(runs, widths[-1], widths[0], eps, base)
    return found


def _attenuation(runs: Sequence[gradient_scale.EpsRun], eps: float) -> dict[str, Any]:
    """Return means over seeds, by group: RMS, attenuation, and the attenuation the RMS predicts."""
    rms = {name: statistics.fmean(run.rms[name] for run in runs) for name in runs[0].rms}
    measured = {name: statistics.fmean(run.attenuation[name] for run in runs) for name in rms}
    predicted = {name: epsilon.predict_attenuation(size, eps) for name, size in rms.items()}
    return {"rms": rms, "measured": measured, "predicted": predicted}


def _wide_against_narrow(
    runs: Runs, wide: int, narrow: int, eps: float, base: float
) -> list[Measurement]:
    def penalty(width: int) -> list[float]:
        pairs = zip(runs[width, eps], runs[width, base], strict=True)
        return [spoiled.loss - healthy.loss for spoiled, healthy in pairs]

    def attenuation(width: int) -> list[float]:
        return [run.attenuation["all"] for run in runs[width, eps]]

    wide_penalty, narrow_penalty = penalty(wide), penalty(narrow)
    details: dict[str, Any] = {
        "widths": (wide, narrow),
        "penalties": (wide_penalty, narrow_penalty),
    }
    return [
        seen(
            f"attenuation, widest over narrowest/eps {eps:g}",
            "ratio",
            ratios(attenuation(wide), attenuation(narrow)),
            **details,
        ),
        seen(
            f"penalty, widest minus narrowest/eps {eps:g}",
            "nats a byte",
            [a - b for a, b in zip(wide_penalty, narrow_penalty, strict=True)],
            **details,
        ),
    ]


TORCH: dict[str, Make] = {
    "torch AdamW": torch.optim.AdamW,
    "torch AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
}
FP32_STATE: Make = functools.partial(AdamW, state_dtype=torch.float32)
LLAMA_RUNS: dict[torch.dtype, dict[str, Make]] = {
    torch.float32: TORCH,
    torch.bfloat16: {
        **TORCH,
        "fp32 state, stochastic rounding": functools.partial(FP32_STATE, stochastic_rounding=True),
    },
    torch.float16: {
        **TORCH,
        "eps 1e-6": functools.partial(torch.optim.AdamW, eps=1e-6),
        "eps 1e-4": functools.partial(torch.optim.AdamW, eps=1e-4),
        "fp32 master weights": functools.partial(
            AdamW, state_dtype=torch.float16, master_weights=True
        ),
        "fp32 state": FP32_STATE,
        "fp32 state and master weights": functools.partial(FP32_STATE, master_weights=True),
        "atan2": functools.partial(AdamW, state_dtype=torch.float16, eps_mode="atan2"),
    },
}


def first_bad_step(losses: Sequence[float]) -> int | None:
    """Return the step at which a run diverges, or None.

    This is the first step whose loss isn't finite, or after which no loss is below the first one. A
    run that learns has none: its last losses are finite and below the first.
    """
    bad = [not (math.isfinite(loss) and loss < losses[0]) for loss in losses[1:]]
    if any(not math.isfinite(loss) for loss in losses):
        return next(step for step, loss in enumerate(losses) if not math.isfinite(loss))
    if not bad or not bad[-1]:
        return None
    return len(losses) - sum(1 for _ in itertools.takewhile(bool, reversed(bad)))


@case("llama/divergence", minutes=1.5)
def divergence(sizes: Sizes = FULL) -> list[Measurement]:
    """Fraction of the runs that diverge, in pure precisions, at torch's default settings."""
    found = []
    for dtype, runs in LLAMA_RUNS.items():
        for name, make in runs.items():
            curves = []
            for seed in sizes.divergence_seeds:
                model = gradient_scale.make(sizes.divergence_width, seed, init="0.02").to(dtype)
                draw, optimizer = gradient_scale.batches(seed), make(model.parameters())
                run = train(model, draw, optimizer, steps=sizes.divergence_steps, progress=False)
                curves.append(run.losses)
            steps = [first_bad_step(curve) for curve in curves]
            details: dict[str, Any] = {
                "seeds": sizes.divergence_seeds,
                "width": sizes.divergence_width,
                "diverged at step": steps,
                "losses": [_finite(curve) for curve in curves],
            }
            diverged = [float(step is not None) for step in steps]
            found.append(
                seen(f"diverged/{NAMES[dtype]}, {name}", "share of runs", diverged, **details)
            )
    return found


def _finite(values: Sequence[float]) -> list[float | None]:
    """Replace NaN and infinity, which JSON doesn't have, by None."""
    return [round(value, 4) if math.isfinite(value) else None for value in values]


# Peers -------------------------------------------------------------------------------------------
@functools.cache
def torchao_adamw() -> Make:
    """Return torchao's AdamW. Importing it writes a log line; its first step compiles with g++."""
    from torchao.optim import _AdamW

    return _AdamW


def _low(params: list[Tensor]) -> list[Tensor]:
    low: list[Tensor] = [nn.Parameter(param.detach().bfloat16()) for param in params]
    for mine, theirs in zip(low, params, strict=True):
        mine.grad = theirs.grad.bfloat16() if theirs.grad is not None else None
    return low


def rounding_makers() -> dict[str, Make]:
    """Return AdamW with stochastic rounding: ours with both kinds of state, and torchao's."""
    return {
        "AdamW": functools.partial(AdamW, stochastic_rounding=True),
        "AdamW, fp32 state": functools.partial(FP32_STATE, stochastic_rounding=True),
        "torchao AdamW": functools.partial(torchao_adamw(), bf16_stochastic_round=True),
    }


def keeps_tensor_lr(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make the learning rate a tensor before each step of `optimizer`: torchao rejects a float."""

    def convert(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

    optimizer.register_step_pre_hook(convert)
    return optimizer


def _torchao_rounding(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return keeps_tensor_lr(torchao_adamw()(parameters, lr=lr, bf16_stochastic_round=True))


# With their defaults: optimi's eps is 1e-6, its betas (0.9, 0.99), and it uses Kahan summation.
DIGITS_PEERS: dict[str, Make] = {
    "AdamW": AdamW,
    "AdamW, fp32 state and master weights": functools.partial(FP32_STATE, master_weights=True),
    "AdamW, atan2": functools.partial(AdamW, eps_mode="atan2"),
    "torch AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "torch AdamW fused": TORCH["torch AdamW fused"],
    "torchao AdamW, stochastic rounding": _torchao_rounding,
    "optimi AdamW": functools.partial(OptimiAdamW, triton=False),
    "optimi StableAdamW": functools.partial(StableAdamW, triton=False),
}
OURS = "AdamW, fp32 state and master weights"


@case("peers/digits", minutes=2, needs="cpu")
def digits_peers(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy of other packages' remedies under the study's failures, with the same seeds."""
    found = []
    for title in low_precision.FAILURES:
        failure = low_precision.failure_of(title, sizes.failure_steps)
        measured = {}
        for name, make in DIGITS_PEERS.items():
            runs = []
            for seed in sizes.peer_seeds:
                torch.manual_seed(seed)  # torchao rounds with torch's global generator
                runs.append(accuracy(make, failure, seed))
            measured[name] = runs
        details: dict[str, Any] = {"seeds": sizes.peer_seeds, "samples of": OURS}
        ours = measured.pop(OURS)
        found.append(seen(f"accuracy/{title}", "", ours, peers=measured, **details))
    return found


@case("peers/stochastic-rounding", minutes=0.3, needs="cpu")
def stochastic_rounding(sizes: Sizes = FULL) -> list[Measurement]:
    """Mean move of bf16 weights of 1, relative to an update of a hundredth of their spacing.

    The correct value is 1.
    """
    found, seeds = [], sizes.law_seeds
    lr = torch.finfo(torch.bfloat16).eps / 2 / 100  # below 1 the spacing is half of finfo.eps
    for name, make in rounding_makers().items():
        means = []
        for seed in seeds:
            torch.manual_seed(seed)
            weights = nn.Parameter(torch.ones(sizes.rounded, dtype=torch.bfloat16))
            weights.grad = torch.ones_like(weights)
            make([weights], lr=lr, weight_decay=0.0).step()
            means.append((1 - weights.detach().double()).mean().item() / lr)
        found.append(
            seen(f"mean move/{name}", "updates", means, weights=sizes.rounded, seeds=seeds, lr=lr)
        )
    return found


def _agree_or_refuse() -> None:
    """Compare three fp32 steps of the same rule by each package; raise RuntimeError on a gap."""
    makers: dict[str, Make] = {
        "AdamW": AdamW,
        "torchao AdamW": torchao_adamw(),
        "optimi AdamW": functools.partial(OptimiAdamW, triton=False, eps=1e-8),
    }
    ends = {}
    for name, make in makers.items():
        params = parameters([(7, 5), (3,)])
        optimizer = make(params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
        for _ in range(3):
            optimizer.step()
        ends[name] = torch.cat([param.detach().flatten() for param in params])
    for name, end in ends.items():
        gap = float((end - ends["AdamW"]).abs().max())
        if not gap <= 1e-6:
            raise RuntimeError(
                f"AdamW and {name} must agree to 1e-6 before they are timed, got {gap}"
            )


@case("peers/step-time", minutes=2, needs="cpu")
def step_time(sizes: Sizes = FULL) -> list[Measurement]:
    """A step on the quarter-size GPT-2: bf16 with stochastic rounding, and fp32 StableAdamW."""
    _agree_or_refuse()
    stable = functools.partial(StableAdamW, lr=1e-3, triton=False)
    full: dict[str, Make] = {
        "AdamW": AdamW,
        "optimi StableAdamW": stable,
        "torch AdamW fused": TORCH["torch AdamW fused"],
    }
    sets: dict[str, tuple[dict[str, Make], str]] = {
        "bf16": (rounding_makers(), "torchao AdamW"),
        "fp32": (full, "optimi StableAdamW"),
    }
    found = []
    for name, (makers, reference) in sets.items():
        comparisons: list[Comparison] = []
        for seed in range(sizes.repetitions):
            params = parameters(sizes.shapes)
            params = _low(params) if name == "bf16" else params
            steps = {title: make(params, lr=1e-3).step for title, make in makers.items()}
            comparisons.append(paired(steps, rounds=sizes.rounds, warmup=2, seed=seed))
        times = {
            title: [1e3 * one for each in comparisons for one in each.timings[title].samples]
            for title in makers
        }
        peers = {title: each for title, each in times.items() if title != "AdamW"}
        found.append(seen(f"step/{name}, AdamW", "ms", times["AdamW"], peers=peers))
        found += [
            # One median per repetition, because its rounds share their tensors' addresses.
            seen(
                f"{title} over {reference}/{name}",
                "ratio",
                [each.ratio(title, reference) for each in comparisons],
            )
            for title in makers
            if title != reference
        ]
    return found
