"""Gradient clipping: bad batches, exploding gradients, a language model, and speed."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from benchmarks.lion import parameters, quarter_gpt2
from benchmarks.runner import Measurement, case, seen
from labcore import records
from labcore.clipping import clip_by_global_norm
from labcore.studies.clipping import damage, effects, exploding, language, population
from labcore.studies.clipping.exploding import UPDATES, ClippedRun
from labcore.studies.language import bench
from labcore.studies.language.results import best, run_record
from labcore.studies.language.tuning import REPORT_SEEDS
from labcore.timing import paired


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases measure."""

    seeds: tuple[int, ...] = exploding.SEEDS
    steps: int = exploding.STEPS
    bad_step: int = damage.AT
    ages: tuple[int, ...] = damage.AGES
    kinds: tuple[str, ...] = damage.KINDS
    batch: Mapping[str, int] = field(default_factory=lambda: exploding.BATCH)
    # Network -> arguments of its class that replace those of every experiment.
    networks: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"RNN": {}, "LSTM": {}, "conv": {}}
    )
    loud: Mapping[str, str] = field(default_factory=lambda: exploding.LOUD)
    tuning_seeds: tuple[int, ...] = exploding.TUNING_SEEDS
    loud_limits: Mapping[str, tuple[float, ...]] = field(
        default_factory=lambda: exploding.LOUD_LIMITS
    )
    limits: tuple[float, ...] = damage.LIMITS
    depths: tuple[int, ...] = (2, 4, 8, 16)
    length: int = population.LENGTH
    shapes: Sequence[tuple[int, ...]] = field(default_factory=quarter_gpt2)  # of peers' gradients
    # Of the language model: a whole run, and a run with branches.
    tokens: int = bench.TOKENS
    branch_steps: int = language.BRANCH_STEPS
    branch_at: int = language.BRANCH_AT
    held_out_rows: int = 128
    max_files: int | None = None

    def training(self, network: str) -> dict[str, Any]:
        """Return the arguments of a run that the sizes set."""
        return {"steps": self.steps, "batch": self.batch[network], **self.networks[network]}


FULL = Sizes()
SMALL = Sizes(
    seeds=(0, 1),
    steps=46,
    bad_step=21,
    ages=(21, 24),
    kinds=("large and reversed",),
    batch={"RNN": 2, "LSTM": 2, "conv": 4},
    networks={
        "RNN": {"width": 10},
        "LSTM": {"width": 10},
        "conv": {"depth": 3, "channels": 3},
    },
    loud={"RNN": "recurrent.", "conv": "layers.1."},
    tuning_seeds=(7,),
    loud_limits={"RNN": (0.1, 10.0), "conv": (0.2, 10.0)},
    limits=(0.01, 10.0),
    depths=(2, 3),
    length=12,
    shapes=[(7, 3), (5,)],
    tokens=3 * 8_192,
    branch_steps=23,
    branch_at=21,
    held_out_rows=16,
    max_files=8,
)


AFTER = 5.0  # minutes: the cases that only read records come after the runs they read
NORMS = ("global", "local, per layer")
WORST = "large and reversed"
SHORT: dict[str, Any] = {
    "options": {"betas": (0.9, 0.95)}
}  # the memory of AdamW in language models


# Small networks ----------------------------------------------------------------------------------
@case("growth/common", minutes=4)
def growth_common(sizes: Sizes = FULL) -> list[Measurement]:
    """Whether a gradient explodes on its whole way back, in networks as libraries make them."""
    found = []
    for family, networks in population.IN_USE.items():
        ways = {
            name: {
                state: [
                    population.whole_way(
                        family,
                        name,
                        seed,
                        trained=state == "trained",
                        length=sizes.length,
                        **sizes.training(network),
                    )
                    for seed in sizes.seeds
                ]
                for state in ("new", "trained")
            }
            for name, (network, _) in networks.items()
        }
        every = [way for states in ways.values() for each in states.values() for way in each]
        found.append(
            seen(
                f"explodes/{family}",
                "share of networks",
                [float(way >= population.EXPLODED) for way in every],
                seeds=sizes.seeds,
                log10={
                    name: {state: [_log10(way) for way in each] for state, each in states.items()}
                    for name, states in ways.items()
                },
            )
        )
    return found


@case("growth/by seed", minutes=AFTER)
def growth_by_seed(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """The same as a share per seed: the networks of a list aren't a sample, so only seeds vary."""
    found = []
    for family in population.IN_USE:
        record = records.find("clipping", "growth/common", f"explodes/{family}")
        every = [way for states in record.details["log10"].values() for way in states.values()]
        line = math.log10(population.EXPLODED)
        shares = [statistics.fmean(way >= line for way in one) for one in zip(*every, strict=True)]
        found.append(seen(f"explodes/{family}", "share of networks", shares))
    return found


def _log10(way: float) -> float:
    """Return the logarithm to base 10, within what a figure shows."""
    return round(min(max(math.log10(max(way, 1e-99)), -99.0), 99.0), 2)


DIRECTIONS = ("global", "local, per layer", "AGC", "value")


@case("direction/depth", minutes=0.2)
def direction_by_depth(sizes: Sizes = FULL) -> list[Measurement]:
    """Cosine between a new network's raw gradient and the one clipped to a tenth of its norm."""
    conv = {**exploding.HEALTHY["conv"], **sizes.networks["conv"]}
    found: list[Measurement] = []
    for depth in sizes.depths:
        found += _cosines(f"conv of {depth}", "conv", {**conv, "depth": depth}, sizes)
    return found + _cosines("RNN", "RNN", {"gain": 1.0, **sizes.networks["RNN"]}, sizes)


def _cosines(
    name: str, network: str, settings: Mapping[str, Any], sizes: Sizes
) -> list[Measurement]:
    taken = [effects.snapshot(network, seed=seed, **settings) for seed in sizes.seeds]
    found = []
    for choice in DIRECTIONS:
        effect = [
            effects.effect(each, exploding.comparable(choice, each, _tenth(each))) for each in taken
        ]
        found.append(
            seen(
                f"cosine/{name}, {choice}",
                "",
                [each.cosine for each in effect],
                seeds=sizes.seeds,
                kept=[each.kept for each in effect],
            )
        )
    return found


def _tenth(taken: effects.Snapshot) -> float:
    return float(effects.flat(taken.gradients).norm()) / 10


def harm(
    network: str,
    optimizer: str,
    methods: Sequence[str],
    sizes: Sizes,
    *,
    kinds: Sequence[str] = (WORST,),
    lengths: Sequence[int] = (1,),
) -> list[Measurement]:
    """Measure what bad batches cost, against undamaged runs with the same clipping."""
    found = []
    settings = {"at": sizes.bad_step, **sizes.training(network)}
    for method in methods:
        args = (method, optimizer)
        clean = [damage.damaged(network, "none", *args, s, **settings) for s in sizes.seeds]
        for kind in kinds:
            for bad in lengths:
                runs = [
                    damage.damaged(network, kind, *args, s, bad=bad, **settings)
                    for s in sizes.seeds
                ]
                found += _compared(f"{optimizer}, {kind}, {bad}, {method}", runs, clean, bad, sizes)
    return found


def _compared(
    name: str, runs: list[ClippedRun], clean: list[ClippedRun], bad: int, sizes: Sizes
) -> list[Measurement]:
    pairs = [*zip(runs, clean, strict=True)]
    higher = [
        damage.excess(run.losses, other.losses, at=sizes.bad_step, bad=bad) for run, other in pairs
    ]
    return [
        seen(
            f"accuracy lost/{name}",
            "percentage points",
            [100 * (other.accuracy - run.accuracy) for run, other in pairs],
            seeds=sizes.seeds,
            accuracy=[run.accuracy for run in runs],
            excess={str(later): [each[later] for each in higher] for later in damage.LATER},
            norms=[_finite(run.norms[sizes.bad_step]) for run in runs],
        ),
        seen(
            f"not finite/{name}",
            "share of runs",
            [float(not run.finite) for run in runs],
            seeds=sizes.seeds,
        ),
        seen(
            f"bad step over its median/{name}",
            "ratio",
            [bad_step(run.moves, sizes.bad_step) for run in runs],
            seeds=sizes.seeds,
        ),
    ]


def bad_step(moves: Sequence[float], at: int) -> float:
    """Return the ratio of step `at` to the median of the 20 steps before it."""
    return moves[at] / statistics.median(moves[at - 20 : at])


def _finite(value: float) -> float | None:
    """Replace NaN and infinity, which JSON doesn't have, by None."""
    return value if math.isfinite(value) else None


@case("damage/AdamW", minutes=3)
def damage_adamw(sizes: Sizes = FULL) -> list[Measurement]:
    """Bad batches of every kind, for one step and for five, in the recurrent network with AdamW."""
    methods = ("none", "global", UPDATES)
    return harm("RNN", "AdamW", methods, sizes, kinds=sizes.kinds, lengths=damage.LENGTHS)


@case("damage/SGD", minutes=2)
def damage_sgd(sizes: Sizes = FULL) -> list[Measurement]:
    """The same with gradient descent."""
    methods = ("none", "global")
    return harm("RNN", "SGD", methods, sizes, kinds=sizes.kinds, lengths=damage.LENGTHS)


@case("damage/conv", minutes=1)
def damage_conv(sizes: Sizes = FULL) -> list[Measurement]:
    """One batch whose gradient is large and reversed, in the convolutional network."""
    return [
        item
        for optimizer in exploding.OPTIMIZERS
        for item in harm("conv", optimizer, ("none", "global"), sizes)
    ]


@case("damage/age", minutes=2.4)
def damage_by_age(sizes: Sizes = FULL) -> list[Measurement]:
    """The step at the same batch with AdamW and no clipping, after more and more steps."""
    settings = sizes.training("RNN")
    found = []
    for at in sizes.ages:
        args = ("RNN", WORST, "none", "AdamW")
        runs = [
            damage.damaged(*args, seed, at=at, **{**settings, "steps": at + 1})
            for seed in sizes.seeds
        ]
        moves = [bad_step(run.moves, at) for run in runs]
        found.append(seen(f"bad step over its median/step {at}", "ratio", moves, seeds=sizes.seeds))
    return found


@case("damage/limits", minutes=2.7)
def damage_by_limit(sizes: Sizes = FULL) -> list[Measurement]:
    """What a limit costs in the recurrent network without a bad batch, with one and with five.

    The reference is the undamaged run without clipping.
    """
    settings, found = {"at": sizes.bad_step, **sizes.training("RNN")}, []
    seeds, before = sizes.seeds[:3], slice(sizes.bad_step - 20, sizes.bad_step)
    for optimizer in exploding.OPTIMIZERS:
        clean = [damage.damaged("RNN", "none", "none", optimizer, s, **settings) for s in seeds]
        usual = [statistics.median(run.norms[before]) for run in clean]
        for limit in sizes.limits:
            for kind, bad in (("none", 0), *((WORST, bad) for bad in damage.LENGTHS)):
                chosen = {**settings, "limit": limit, "bad": max(bad, 1)}
                runs = [
                    damage.damaged("RNN", kind, "global", optimizer, s, **chosen) for s in seeds
                ]
                pairs = zip(runs, clean, strict=True)
                found.append(
                    seen(
                        f"accuracy lost/{optimizer}, {bad}, {limit:g}",
                        "percentage points",
                        [100 * (other.accuracy - run.accuracy) for run, other in pairs],
                        seeds=seeds,
                        usual_norms=usual,
                    )
                )
    return found


@case("damage/moments", minutes=0.9)
def damage_moments(sizes: Sizes = FULL) -> list[Measurement]:
    """The same batch under AdamW without clipping, and then parts of its state are restored.

    And with a second moment that remembers 20 steps.
    """
    settings = {"at": sizes.bad_step, **sizes.training("RNN")}
    arms: list[tuple[str, str, dict[str, Any]]] = [("beta2 0.95", "nothing", SHORT)]
    arms += [(f"restored: {what}", what, {}) for what in damage.MOMENTS]
    found = []
    for name, what, extra in arms:
        lost, moves = [], []
        for seed in sizes.seeds:
            run = functools.partial(
                damage.damaged, "RNN", method="none", optimizer="AdamW", seed=seed, **settings
            )
            clean = run(kind="none", **extra)
            bad = run(kind=WORST, after=damage.Restore(what, at=sizes.bad_step), **extra)
            lost.append(100 * (clean.accuracy - bad.accuracy))
            moves.append(bad_step(bad.moves, sizes.bad_step))
        quantity = f"accuracy lost/{name}"
        found.append(seen(quantity, "percentage points", lost, seeds=sizes.seeds, moves=moves))
    return found


@case("natural/RNN", minutes=0.4)
def natural(sizes: Sizes = FULL) -> list[Measurement]:
    """The recurrent network whose gradients explode by themselves, against smaller weights."""
    found = []
    for optimizer in exploding.OPTIMIZERS:
        clean = _drawn("none", optimizer, exploding.HEALTHY["RNN"], sizes)
        for method in ("none", "global"):
            runs = _drawn(method, optimizer, exploding.EXPLODING, sizes)
            pairs = zip(runs, clean, strict=True)
            name = f"{optimizer}, {method}"
            found += [
                seen(
                    f"accuracy lost/{name}",
                    "percentage points",
                    [100 * (other.accuracy - run.accuracy) for run, other in pairs],
                    seeds=sizes.seeds,
                    accuracy=[run.accuracy for run in runs],
                    clipped=[statistics.fmean(kept < 0.999 for kept in run.kept) for run in runs],
                    first_norms=[run.norms[0] for run in runs],
                ),
                seen(
                    f"not finite/{name}",
                    "share of runs",
                    [float(not run.finite) for run in runs],
                    seeds=sizes.seeds,
                ),
            ]
    return found


def _drawn(
    method: str, optimizer: str, weights: Mapping[str, Any], sizes: Sizes
) -> list[ClippedRun]:
    settings = {**sizes.training("RNN"), **weights}
    return [exploding.run("RNN", method, optimizer, seed, **settings) for seed in sizes.seeds]


def _declare_loud(network: str) -> None:
    @case(f"loud-layer/{network}", minutes=3)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        return [loud_layer(network, optimizer, sizes) for optimizer in exploding.OPTIMIZERS]


def loud_layer(network: str, optimizer: str, sizes: Sizes) -> Measurement:
    """Compare local and global norms where one layer's gradient is always 1000 times too large.

    Each norm has its best limit, which is chosen on other seeds.
    """

    def accuracy(method: str, seeds: Sequence[int], limit: float | None = None) -> list[float]:
        settings = {"layer": sizes.loud[network], "limit": limit, **sizes.training(network)}
        return [
            exploding.loud_run(network, method, optimizer, seed, **settings).accuracy
            for seed in seeds
        ]

    tried = {
        method: {
            limit: accuracy(method, sizes.tuning_seeds, limit)
            for limit in sizes.loud_limits[network]
        }
        for method in NORMS
    }
    means = {
        method: {limit: statistics.fmean(each) for limit, each in every.items()}
        for method, every in tried.items()
    }
    limits = {method: max(every, key=every.__getitem__) for method, every in means.items()}
    reached = {method: accuracy(method, sizes.seeds, limits[method]) for method in NORMS}
    pairs = zip(*(reached[method] for method in NORMS), strict=True)
    return seen(
        f"local minus global/{optimizer}",
        "percentage points",
        [100 * (local - whole) for whole, local in pairs],
        seeds=sizes.seeds,
        limits=limits,
        accuracy={**reached, "none": accuracy("none", sizes.seeds)},
        tried={
            method: {f"{limit:g}": each for limit, each in every.items()}
            for method, every in tried.items()
        },
        tuning_seeds=sizes.tuning_seeds,
    )


for _network in exploding.LOUD:
    _declare_loud(_network)


# The language model ------------------------------------------------------------------------------
BATCH = 8_192  # tokens per step of the whole runs


def _declare_share(batch: int) -> None:
    @case(f"language/clipped share/{batch}", minutes=AFTER)
    def _(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
        runs = [run_record(batch, "AdamW", f"seed {seed}") for seed in REPORT_SEEDS]
        norms = [run.details["norms"] for run in runs]
        shares = [
            seen(
                f"clipped/{name}",
                "share of steps",
                [language.clipped_share(each, 1.0, phase) for each in norms],
                seeds=REPORT_SEEDS,
            )
            for name, phase in {"whole run": (0.0, 1.0), **language.PHASES}.items()
        ]
        spikes = [_spike(each) for each in norms]
        name = "largest norm over the median after warmup"
        return [*shares, seen(name, "ratio", spikes, seeds=REPORT_SEEDS)]


def _spike(norms: Sequence[float]) -> float:
    later = norms[round(language.PHASES["warmup"][1] * len(norms)) :]
    return max(later) / statistics.median(later)


def _declare_limit(limit: str, seed: int) -> None:
    @case(f"language/{limit}/seed {seed}", minutes=3.9)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        setting = best(BATCH, "AdamW")
        run = language.train_limited(
            limit,
            setting,
            batch=BATCH,
            seed=seed,
            tokens=sizes.tokens,
            max_files=sizes.max_files,
        )
        return [
            seen(
                "held-out loss",
                "nats/token",
                [run.loss],
                setting=asdict(setting),
                losses=[round(loss, 4) for loss in run.curve.losses],
                norms=[round(norm or 0.0, 4) for norm in run.curve.norms],
            )
        ]


def _declare_difference(limit: str) -> None:
    @case(f"language/limits/{limit}", minutes=AFTER)
    def _(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
        found = []
        for seed in REPORT_SEEDS:
            usual = run_record(BATCH, "AdamW", f"seed {seed}")
            name = f"language/{limit}/seed {seed}"
            found.append(records.find("clipping", name, "held-out loss").p50 - usual.p50)
        return [seen("minus max_norm 1.0", "nats/token", found, seeds=REPORT_SEEDS)]


def _declare_damage(kind: str, seed: int) -> None:
    @case(f"language-damage/{kind}/seed {seed}", minutes=2.5 if kind == "none" else 3.2)
    def _(sizes: Sizes = FULL) -> list[Measurement]:
        setting = best(language.BRANCH_BATCH, "AdamW")
        found = language.branches(
            kind,
            setting,
            seed=seed,
            steps=sizes.branch_steps,
            at=sizes.branch_at,
            held_out_rows=sizes.held_out_rows,
            max_files=sizes.max_files,
        )
        return [
            seen(
                f"held-out loss/{bad}, {method}",
                "nats/token",
                [branch.held_out],
                setting=asdict(setting),
                losses=[_finite(round(loss, 4)) for loss in branch.losses],
                norms=[_finite(round(norm, 4)) for norm in branch.norms],
                left_out=branch.left_out,
            )
            for (bad, method), branch in found.items()
        ]


@case("language-damage/harm", minutes=AFTER)
def language_harm(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """What each damage cost: held-out loss minus that of the undamaged branch, seed by seed."""
    found = []
    for method in language.METHODS:
        clean = _branches("none", 1, method)
        for kind, bad in itertools.product(language.KINDS, damage.LENGTHS):
            runs = _branches(kind, bad, method)
            left_out = [run.details["left_out"] for run in runs]
            name = f"higher loss/{kind}, {bad}, {method}"
            found.append(_paired(name, runs, clean, left_out=left_out))
    return found


@case("language-damage/steps fewer", minutes=AFTER)
def language_fewer(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """What as many steps are worth, and how far damaged branches are from losing only that much.

    The undamaged branch without these steps is what a perfect detector of bad batches would leave.
    """
    clean, found = _branches("none", 1, "max_norm 1.0"), []
    for bad in damage.LENGTHS:
        fewer = _branches("none", bad, language.FEWER)
        found.append(_paired(f"higher loss/{bad}", fewer, clean))
        for kind, method in itertools.product(language.KINDS, language.METHODS):
            name = f"beyond/{kind}, {bad}, {method}"
            found.append(_paired(name, _branches(kind, bad, method), fewer))
    return found


@case("language-damage/saved", minutes=AFTER)
def language_saved(sizes: Sizes = FULL) -> list[Measurement]:  # noqa: ARG001
    """What a protection saves in equally damaged branches: held-out loss without it minus with."""
    kinds = [("none", 1), *itertools.product(language.KINDS, damage.LENGTHS)]
    return [
        _paired(
            f"saved/{kind}, {bad}, {method}",
            _branches(kind, bad, "none"),
            _branches(kind, bad, method),
        )
        for kind, bad in kinds
        for method in language.METHODS
        if method != "none"
    ]


def _paired(
    quantity: str, runs: list[records.Record], others: list[records.Record], **details: Any
) -> Measurement:
    """Return the held-out losses of runs minus those of others, seed by seed."""
    pairs = zip(runs, others, strict=True)
    differences = [run.p50 - other.p50 for run, other in pairs]
    return seen(quantity, "nats/token", differences, seeds=REPORT_SEEDS, **details)


def _branches(kind: str, bad: int, method: str) -> list[records.Record]:
    """Return the branches of all seeds."""
    names = [f"language-damage/{kind}/seed {seed}" for seed in REPORT_SEEDS]
    quantity = f"held-out loss/{bad}, {method}"
    return [records.find("clipping", name, quantity) for name in names]


for _batch in bench.BATCHES:
    _declare_share(_batch)
for _limit in language.LIMITS:
    _declare_difference(_limit)
for _seed in REPORT_SEEDS:
    for _limit in language.LIMITS:
        _declare_limit(_limit, _seed)
    for _kind in ("none", *language.KINDS):
        _declare_damage(_kind, _seed)


# Peers -------------------------------------------------------------------------------------------
REPETITIONS, ROUNDS = 8, 15
BARS = {"clipping": 1.05, "not clipping": 0.7}
SHRINK = 0.999


class Limit:
    """A limit that falls by 0.1% per call, which makes every call clip the shared gradients."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.value = exact_norm(params)

    def __call__(self) -> float:
        """Return the next limit."""
        self.value *= SHRINK
        return self.value


def exact_norm(params: Sequence[Tensor]) -> float:
    """Return the norm of all gradients, in float64."""
    grads = [p.grad for p in params if p.grad is not None]
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def _same_or_refuse(shapes: Sequence[tuple[int, ...]], limit: float) -> float:
    """Return the largest gap between our gradients and torch's after one call.

    Raises RuntimeError if it is too large to time the two.
    """
    ours, theirs = parameters(shapes), parameters(shapes)
    clip_by_global_norm(ours, limit)
    nn.utils.clip_grad_norm_(theirs, limit, foreach=True)
    gap = max(float((a.grad - b.grad).abs().max()) for a, b in zip(ours, theirs, strict=True))  # type: ignore[operator]
    if not gap <= 1e-5:
        raise RuntimeError(
            f"labcore's gradients and torch's must agree to 1e-5 before they are timed, got {gap}"
        )
    return gap


def clip_times(name: str, sizes: Sizes) -> list[Measurement]:
    """Time our clipping and torch's foreach clipping on the same gradients, in the same rounds."""
    gap = _same_or_refuse(sizes.shapes, 1.0 if name == "clipping" else math.inf)
    comparisons, coefficients = [], []
    for seed in range(REPETITIONS):
        params = parameters(sizes.shapes)
        limit: Callable[[], float] = Limit(params) if name == "clipping" else lambda: 1e9

        def ours(params: Sequence[Tensor] = params, limit: Callable[[], float] = limit) -> None:
            coefficients.append(float(clip_by_global_norm(params, limit()).coefficients))

        def torchs(params: Sequence[Tensor] = params, limit: Callable[[], float] = limit) -> None:
            nn.utils.clip_grad_norm_(params, limit(), foreach=True)

        both = {"labcore": ours, "torch foreach": torchs}
        comparisons.append(paired(both, rounds=ROUNDS, warmup=2, seed=seed))
    if any((factor < 1) != (name == "clipping") for factor in coefficients):
        raise RuntimeError(f"every call must be {name}, got coefficients {coefficients}")
    milliseconds = {
        side: [1e3 * t for each in comparisons for t in each.timings[side].samples]
        for side in ("labcore", "torch foreach")
    }
    details: dict[str, Any] = {
        "tensors": len(params),
        "largest gap": gap,
        "bar": BARS[name],
    }
    return [
        seen(
            "labcore over torch foreach",
            "ratio",
            [each.ratio("labcore", "torch foreach") for each in comparisons],
            **details,
        ),
        seen(
            "clip_by_global_norm",
            "ms",
            milliseconds["labcore"],
            peers={"torch foreach": milliseconds["torch foreach"]},
            **details,
        ),
    ]


@case("clip-time/clipping", minutes=0.15, needs="cpu")
def clip_time_clipping(sizes: Sizes = FULL) -> list[Measurement]:
    """A model's gradients, above the limit in every call: they are read once and scaled."""
    return clip_times("clipping", sizes)


@case("clip-time/not-clipping", minutes=0.15, needs="cpu")
def clip_time_not_clipping(sizes: Sizes = FULL) -> list[Measurement]:
    """The same below the limit, like most steps: torch still multiplies by 1."""
    return clip_times("not clipping", sizes)
