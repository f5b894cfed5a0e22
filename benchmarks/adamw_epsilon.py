"""AdamW's epsilon: rounding, remedies on digits against other packages, and language models."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from optimi import AdamW as OptimiAdamW
from optimi import StableAdamW

from benchmarks.runner import Measurement, case, ratios, seen
from labcore.models import Llama
from labcore.optim import AdamW
from labcore.studies.adamw_epsilon import (
    divergence,
    epsilon,
    gradient_batches,
    gradient_scale,
    language,
    low_precision,
    results,
)
from labcore.studies.adamw_epsilon.low_precision import Failure, accuracy_with
from labcore.studies.language.bench import TOKENS
from labcore.studies.language.tuning import REPORT_SEEDS

Make = Callable[..., torch.optim.Optimizer]
GRID_EPSILONS = (1e-15, 1e-8, 1e-6, 1e-4)
LARGE_EPS = 1e-3  # at which the widths are compared


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    seeds: tuple[int, ...] = low_precision.SEEDS  # of the runs on digits
    scales: tuple[float, ...] = low_precision.SCALES
    failure_steps: int | None = None  # None for each failure's own
    few_seeds: tuple[int, ...] = gradient_scale.SEEDS  # of the small Llamas and the peers
    llama_steps: int = gradient_scale.STEPS
    widths: tuple[int, ...] = gradient_scale.WIDTHS
    eps_widths: tuple[int, ...] = gradient_scale.EPS_WIDTHS
    epsilons: tuple[float, ...] = gradient_scale.EPSILONS
    divergence_width: int = divergence.WIDTH
    divergence_steps: int = divergence.STEPS
    tokens: int = TOKENS  # that a run on the language model reads, as the bench's own
    measured_tokens: int = 2**17
    batches: tuple[int, ...] = (2_048, 8_192, 32_768, 65_536)
    shape_tokens: int = 3 * 2**15
    shape_measured: int = 2**15
    shape_batches: tuple[int, ...] = (2_048, 8_192, 32_768)
    files: int | None = None  # of the text; None for all
    shape_files: int | None = 150  # enough text for the short runs


FULL = Sizes()
SMALL = Sizes(
    seeds=(0, 1),
    scales=(1e-8,),
    failure_steps=4,
    few_seeds=(0, 1),
    llama_steps=2,
    widths=(16, 32),
    eps_widths=(16, 32),
    epsilons=(1e-8, 1e-3),
    divergence_width=16,
    divergence_steps=3,
    tokens=2 * language.BATCH,
    measured_tokens=4_096,
    batches=(2_048, 4_096),
    shape_tokens=2 * language.SHAPE_BATCH,
    shape_measured=4_096,
    shape_batches=(2_048, 4_096),
    files=8,
    shape_files=8,
)


# Rounding ----------------------------------------------------------------------------------------
@case("rounding/outcomes", minutes=0.1)
def rounding_outcomes(sizes: Sizes = FULL) -> list[Measurement]:
    """Share of a new Llama's weights whose first update rounding changes more than tenfold."""
    found = []
    seeds, width = sizes.few_seeds, sizes.divergence_width
    gradients = [gradient_scale.first_gradient(width, seed) for seed in seeds]
    for (name, dtype), eps in itertools.product(divergence.FORMATS.items(), GRID_EPSILONS):
        outcomes = [epsilon.outcomes(one, eps=eps, dtype=dtype) for one in gradients]
        details: dict[str, Any] = {
            "seeds": seeds,
            "width": width,
            "shares": outcomes,
            "eps as stored": epsilon.rounded_eps(eps, dtype),
            "gradient rms": [one.square().mean().sqrt().item() for one in gradients],
        }
        wrong = [1 - one["right"] for one in outcomes]
        found.append(
            seen(f"wrong first update/{name}, eps {eps:g}", "share of weights", wrong, **details)
        )
    return found


# Digits ------------------------------------------------------------------------------------------
@case("digits/loss-scale", minutes=0.5)
def loss_scale(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy by eps and by the factor on the loss, in fp32, compared with atan2."""
    found, seeds = [], sizes.seeds
    for scale in sizes.scales:
        measured = {
            f"eps {eps:g}": [low_precision.accuracy_at(scale, eps, seed) for seed in seeds]
            for eps in low_precision.EPSILONS
        }
        atan2, failure = low_precision.REMEDIES["atan2"], Failure(scale=scale)
        measured["atan2"] = [accuracy_with(atan2, failure, seed) for seed in seeds]
        ours, rms = measured.pop("eps 1e-08"), low_precision.gradient_rms(scale)
        details: dict[str, Any] = {"seeds": seeds, "gradient rms": rms}
        found.append(seen(f"accuracy/loss times {scale:g}", "", ours, peers=measured, **details))
    return found


@case("digits/remedies", minutes=2.5)
def remedies(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy of every remedy under every failure, relative to a healthy run."""
    found, seeds, steps = [], sizes.seeds, sizes.failure_steps
    for failure in low_precision.FAILURES:
        healthy = [low_precision.healthy_accuracy(failure, seed, steps=steps) for seed in seeds]
        for remedy in low_precision.remedies_for(failure):
            ran = [low_precision.accuracy(remedy, failure, seed, steps=steps) for seed in seeds]
            details: dict[str, Any] = {"seeds": seeds, "accuracy": ran, "healthy": healthy}
            gaps = [100 * gap for gap in _minus(ran, healthy)]
            quantity = f"minus healthy/{failure}, {remedy}"
            found.append(seen(quantity, "percentage points", gaps, **details))
    return found


# Small Llamas ------------------------------------------------------------------------------------
@case("llama/gradient-rms", minutes=2.5)
def gradient_rms(sizes: Sizes = FULL) -> list[Measurement]:
    """Exponent of the gradient's root mean square as a function of the width, one per seed."""
    found = []
    for init in gradient_scale.INITS:
        tables = gradient_scale.rms_by_width(
            sizes.widths, sizes.few_seeds, steps=(0, sizes.llama_steps), init=init
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
                )
            )
    return found


@case("llama/eps-by-width", minutes=2)
def eps_by_width(sizes: Sizes = FULL) -> list[Measurement]:
    """Held-out loss by width and eps, and by how much eps shrank the last update."""
    widths, (base, *others) = sizes.eps_widths, sizes.epsilons
    found, kept, costs = [], [], []
    for width in widths:
        runs = {
            eps: [
                gradient_scale.loss_by_eps(width, eps, seed, steps=sizes.llama_steps)
                for seed in sizes.few_seeds
            ]
            for eps in sizes.epsilons
        }
        losses = {eps: [run.loss for run in each] for eps, each in runs.items()}
        details: dict[str, Any] = {
            "seeds": sizes.few_seeds,
            "learning rate": gradient_scale.learning_rate(width),
            **{f"eps {e:g}": gradient_scale.shares_left(one, e) for e, one in runs.items()},
        }
        peers = {f"eps {eps:g}": losses[eps] for eps in others}
        quantity = f"loss/width {width}, eps {base:g}"
        found.append(seen(quantity, "nats/byte", losses[base], peers=peers, **details))
        kept.append([run.attenuation["all"] for run in runs[LARGE_EPS]])
        costs.append(_minus(losses[LARGE_EPS], losses[base]))
    details = {"widths": (widths[-1], widths[0]), "penalties": (costs[-1], costs[0])}
    smaller, dearer = ratios(kept[-1], kept[0]), _minus(costs[-1], costs[0])
    widest = f"widest over narrowest/eps {LARGE_EPS:g}", f"widest minus narrowest/eps {LARGE_EPS:g}"
    return [
        *found,
        seen(f"attenuation, {widest[0]}", "ratio", smaller, **details),
        seen(f"penalty, {widest[1]}", "nats/byte", dearer, **details),
    ]


def _minus(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]


@case("llama/divergence", minutes=1.5)
def divergence_of_llamas(sizes: Sizes = FULL) -> list[Measurement]:
    """Fraction of the runs that diverge, in pure precisions, at torch's default settings."""
    found, width, seeds = [], sizes.divergence_width, sizes.few_seeds
    for form, runs in divergence.RUNS.items():
        for name in runs:
            curves = [
                divergence.losses(form, name, seed, width=width, steps=sizes.divergence_steps)
                for seed in seeds
            ]
            steps = [divergence.first_bad_step(curve) for curve in curves]
            details: dict[str, Any] = {
                "seeds": seeds,
                "width": width,
                "diverged at step": steps,
                "losses": [_finite(curve) for curve in curves],
            }
            diverged = [float(step is not None) for step in steps]
            found.append(seen(f"diverged/{form}, {name}", "share of runs", diverged, **details))
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
    "AdamW, fp32 state and master weights": functools.partial(
        AdamW, state_dtype=torch.float32, master_weights=True
    ),
    "AdamW, atan2": functools.partial(AdamW, eps_mode="atan2"),
    "torch AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "torch AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "torchao AdamW, stochastic rounding": _torchao_rounding,
    "optimi AdamW": functools.partial(OptimiAdamW, triton=False),
    "optimi StableAdamW": functools.partial(StableAdamW, triton=False),
}
OURS = "AdamW, fp32 state and master weights"


def _peer_accuracy(make: Make, failure: Failure, seed: int) -> float:
    torch.manual_seed(seed)  # torchao rounds with torch's global generator
    return accuracy_with(lambda parameters, lr, _: make(parameters, lr=lr), failure, seed)


@case("peers/digits", minutes=2, needs="cpu")
def digits_peers(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy of other packages' remedies under the study's failures, with the same seeds."""
    found = []
    for title in low_precision.FAILURES:
        failure = low_precision.failure_of(title, sizes.failure_steps)
        measured = {
            name: [_peer_accuracy(make, failure, seed) for seed in sizes.few_seeds]
            for name, make in DIGITS_PEERS.items()
        }
        details: dict[str, Any] = {"seeds": sizes.few_seeds, "samples of": OURS}
        ours = measured.pop(OURS)
        found.append(seen(f"accuracy/{title}", "", ours, peers=measured, **details))
    return found


# The language model ------------------------------------------------------------------------------
def _declare_eps(eps: float, form: str, seed: int) -> None:
    measured = (eps, form) == (results.MEASURED_EPS, "fp32")

    @case(f"language/eps {eps:g}, {form}/seed {seed}", minutes=3.9 if measured else 3.5)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        done = language.train_eps(eps, seed, form=form, tokens=sizes.tokens, max_files=sizes.files)
        roots = language.second_moments(done)
        details: dict[str, Any] = {
            "seed": seed,
            "losses": [round(loss, 4) for loss in done.run.curve.losses],
            "seconds": round(done.run.seconds, 1),
            "second moments": gradient_batches.sizes_of(
                roots if measured else {"all": roots["all"]}
            ),
        }
        found = [seen("held-out loss", "nats/token", [done.run.loss], **details)]
        return found + (_gradients(done.model, seed, sizes) if measured else [])


def _gradients(model: Llama, seed: int, sizes: Sizes) -> list[Measurement]:
    sized = language.gradients(
        model, seed, tokens=sizes.measured_tokens, batches=sizes.batches, max_files=sizes.files
    )
    found = []
    for batch, rms in sized.rms().items():
        roots = {name: squares.sqrt() for name, squares in sized.squares[batch].items()}
        details: dict[str, Any] = {"seed": seed, "batches": sized.batches[batch]}
        details["layers"] = gradient_batches.sizes_of(roots)
        found.append(seen(f"gradient rms/{batch} tokens", "", [rms], **details))
    return found


def _declare_shape(width: int, depth: int, seed: int) -> None:
    minutes = 0.15 + 0.45 * (width / 128) ** 1.5 * depth / 5

    @case(f"language/width {width}, depth {depth}/seed {seed}", minutes=minutes)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        files = sizes.shape_files
        done = language.train_shape(width, depth, seed, tokens=sizes.shape_tokens, max_files=files)
        asked = {"tokens": sizes.shape_measured, "batches": sizes.shape_batches}
        sized = language.gradients(done.model, seed, **asked, max_files=files)  # type: ignore[arg-type]
        details: dict[str, Any] = {
            "seed": seed,
            "parameters": sum(p.numel() for p in done.model.parameters()),
            "held-out loss": done.run.loss,
            "steps": len(done.run.curve.losses),
        }
        kept = gradient_batches.sizes_of(language.second_moments(done))["all"]["kept"]
        left = [seen(f"kept/eps {eps}", "share", [share]) for eps, share in kept.items()]
        return left + [
            seen(f"gradient rms/{batch} tokens", "", [rms], **details)
            for batch, rms in sized.rms().items()
        ]


for _seed in REPORT_SEEDS:
    for _eps in language.EPSILONS:
        if (_eps, "fp32") != results.BASE:
            _declare_eps(_eps, "fp32", _seed)
    for _shape in language.SHAPES:
        _declare_shape(*_shape, _seed)
for _seed in results.BF16_SEEDS:
    for _eps in (1e-15, 1e-8):
        _declare_eps(_eps, "bf16", _seed)


# These three only read the records of the runs above; their minutes put them after those.
@case("language/eps", minutes=4)
def language_eps(_: Sizes = FULL) -> list[Measurement]:
    """Held-out loss against eps 1e-8, seed by seed, in fp32 and with weights and state in bf16."""
    pairs: dict[str, tuple[results.Run, results.Run, Sequence[int]]] = {
        f"minus eps 1e-08/eps {eps:g}": ((eps, "fp32"), results.BASE, REPORT_SEEDS)
        for eps in language.EPSILONS
        if (eps, "fp32") != results.BASE
    }
    default, seeds = (1e-8, "bf16"), results.BF16_SEEDS
    pairs["bf16 minus fp32/eps 1e-08"] = default, results.BASE, seeds
    pairs["minus eps 1e-08/eps 1e-15, bf16"] = (1e-15, "bf16"), default, seeds
    return [
        seen(name, "nats/token", results.differences(*pair), seeds=pair[-1])
        for name, pair in pairs.items()
    ]


@case("language/gradients", minutes=4)
def language_gradients(_: Sizes = FULL) -> list[Measurement]:
    """Gradient RMS by the tokens of a batch, and what eps leaves by Adam's second moment."""
    rms, moments = results.rms_by_batch(FULL.batches), results.second_moments()
    by_seed = [dict(zip(rms, each, strict=True)) for each in zip(*rms.values(), strict=True)]
    found = [seen("exponent against the batch", "", results.exponents(rms))]
    for batch, sizes in rms.items():
        said = [gradient_batches.predict_rms(one, batch) for one in by_seed]
        found.append(seen(f"rms/{batch} tokens", "", sizes, peers={"predicted": said}))
    for what, at in itertools.product(("below", "kept"), language.EPSILONS):
        shares = {layer: [each[layer][what][f"{at:g}"] for each in moments] for layer in moments[0]}
        found.append(seen(f"{what}/eps {at:g}", "share", shares["all"], layers=shares))
        found.append(seen(f"{what} in the embedding/eps {at:g}", "share", shares["embedding"]))
        layers = [shares[layer] for layer in shares if layer.startswith("layer ")]
        alike = [fmean(each) for each in zip(*layers, strict=True)]  # layers have equal sizes
        found.append(seen(f"{what} in the layers/eps {at:g}", "share", alike))
    return found


@case("language/shapes", minutes=4)
def language_shapes(_: Sizes = FULL) -> list[Measurement]:
    """Exponent of the gradient's RMS against the number of weights, one per seed."""
    shapes = results.rms_by_shape(max(FULL.shape_batches))
    return [
        seen(f"exponent against weights/{name}", "", results.exponents(rms), rms=rms)
        for name, rms in shapes.items()
    ]
