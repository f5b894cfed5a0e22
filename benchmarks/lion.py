"""Lion and AdamW against lion-pytorch and torch.optim: step time, state bytes, runs on digits."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lion_pytorch.foreach import Lion as PeerLion
from torch import Tensor, nn

from benchmarks.runner import Measurement, case, exact, seen
from labcore.data import digits
from labcore.device import default_device
from labcore.optim import AdamW, Lion
from labcore.studies.digits_runs import DigitsRun, Setting, Sweep, TrainConfig, train_digits
from labcore.studies.lion import tuning
from labcore.timing import Comparison, paired

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
WIDTH, VOCABULARY, POSITIONS, LAYERS = 384, 25_600, 512, 12
REPETITIONS = 8
# The targets of the chunked and bucketed implementations: (name, peer) -> list -> ratio.
BARS = {
    ("Lion", "lion-pytorch foreach"): {"quarter-gpt2": 0.65, "thousand": 0.95},
    ("AdamW", "torch AdamW foreach"): {"quarter-gpt2": 0.75, "thousand": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases on digits measure."""

    learning_rates: tuple[float, ...] = tuning.LEARNING_RATES
    decays: tuple[float, ...] = tuning.DECAYS
    tuning_seeds: tuple[int, ...] = tuning.TUNING_SEEDS
    report_seeds: tuple[int, ...] = tuning.REPORT_SEEDS
    steps: Mapping[int, int] = field(default_factory=lambda: tuning.STEPS)  # batch -> steps
    target: float = tuning.TARGET
    precision_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    precision_steps: int = 1000


FULL = Sizes()
SMALL = Sizes(
    learning_rates=(1e-2, 3e-2),
    decays=(0.0, 0.1),
    tuning_seeds=(100, 101),
    report_seeds=(0, 1, 2),
    steps={16: 24, 64: 8},
    target=2.2,
    precision_seeds=(0, 1),
    precision_steps=5,
)


def quarter_gpt2() -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2 small at half its width and vocabulary.

    They are 148 tensors with 31.3 M parameters.
    """
    w = WIDTH
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(VOCABULARY, w), (POSITIONS, w), *(block * LAYERS), (w,), (w,)]


LISTS: dict[str, list[tuple[int, ...]]] = {
    "quarter-gpt2": quarter_gpt2(),
    "thousand": [(1000,)] * 1000,
}


def makers() -> dict[str, Make]:
    """Return our optimizers and the peers, each with weight decay and its usual learning rate."""
    return {
        "Lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
        "lion-pytorch foreach": lambda p: PeerLion(p, lr=1e-4, weight_decay=0.1),
        "AdamW": lambda p: AdamW(p, lr=1e-3, weight_decay=0.01),
        "torch AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        "torch AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    }


def parameters(shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> list[Tensor]:
    """Return parameters of `shapes` with gradients, from one seed."""
    generator = torch.Generator(device).manual_seed(0)
    found: list[Tensor] = []
    for shape in shapes:
        draw = torch.randn(2, *shape, generator=generator, device=device)
        param = torch.nn.Parameter(0.02 * draw[0])
        param.grad = 0.01 * draw[1]
        found.append(param)
    return found


def largest_difference(shapes: Sequence[tuple[int, ...]], ours: Make, peer: Make) -> float:
    """Return the largest gap between two optimizers' parameters after three equal steps."""
    ends = []
    for make in (ours, peer):
        params = parameters(shapes)
        optimizer = make(params)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        ends.append(params)
    return max(float((a - b).abs().max().detach()) for a, b in zip(*ends, strict=True))


def _equal_or_refuse(shapes: Sequence[tuple[int, ...]]) -> dict[str, float]:
    gaps = {}
    for ours, peer in BARS:
        gap = largest_difference(shapes, makers()[ours], makers()[peer])
        if not gap <= 1e-7:
            raise RuntimeError(
                f"{ours} and {peer} must agree to 1e-7 before they are timed, got {gap}"
            )
        gaps[f"{ours} against {peer}"] = gap
    return gaps


def _milliseconds(comparisons: Sequence[Comparison], name: str) -> list[float]:
    return [1e3 * seconds for each in comparisons for seconds in each.timings[name].samples]


def _ratios(comparisons: Sequence[Comparison], name: str, reference: str) -> list[float]:
    """Return one median per repetition, because its rounds share their tensors' addresses."""
    return [each.ratio(name, reference) for each in comparisons]


def step_times(name: str) -> list[Measurement]:
    """Time all five on the same tensors in the same rounds; refuse to time wrong results."""
    shapes = LISTS[name]
    gaps = _equal_or_refuse(shapes)
    comparisons = []
    for seed in range(REPETITIONS):
        params = parameters(shapes)
        steps = {title: make(params).step for title, make in makers().items()}
        comparisons.append(paired(steps, rounds=9, warmup=2, seed=seed))
    count = sum(param.numel() for param in params)
    details: dict[str, Any] = {"tensors": len(params), "parameters": count, "largest gap": gaps}
    peers = {title: _milliseconds(comparisons, title) for title in makers()}
    found = [
        seen(
            f"{title} step",
            "ms",
            peers[title],
            peers={other: times for other, times in peers.items() if other != title},
            **details,
        )
        for title in ("Lion", "AdamW")
    ]
    pairs = [*BARS, ("AdamW", "torch AdamW fused"), ("Lion", "AdamW")]
    pairs.append(("Lion", "torch AdamW fused"))
    for ours, peer in pairs:
        bar = BARS.get((ours, peer), {}).get(name)
        more = {**details, "bar": bar} if bar else details
        found.append(seen(f"{ours} over {peer}", "ratio", _ratios(comparisons, ours, peer), **more))
    return found


@case("step-time/quarter-gpt2", minutes=0.5, needs="cpu")
def step_time_quarter_gpt2() -> list[Measurement]:
    """A model's parameters: matrices of 0.1 to 10 M elements take most of the time."""
    return step_times("quarter-gpt2")


@case("step-time/thousand", minutes=0.1, needs="cpu")
def step_time_thousand() -> list[Measurement]:
    """A thousand tensors of a thousand elements: calls take most of the time."""
    return step_times("thousand")


@case("state-bytes/quarter-gpt2", minutes=0.1)
def state_bytes() -> list[Measurement]:
    """Bytes of optimizer state per parameter, counted after one step."""
    params = parameters(quarter_gpt2())
    count = sum(param.numel() for param in params)
    chosen = {
        **makers(),
        "Lion bf16": lambda p: Lion(p, state_dtype=torch.bfloat16),
        "AdamW bf16": lambda p: AdamW(p, state_dtype=torch.bfloat16),
    }
    measured = {}
    for title, make in chosen.items():
        optimizer = make(params)
        optimizer.step()
        tensors = [t for entry in optimizer.state.values() for t in entry.values()]
        measured[title] = sum(t.numel() * t.element_size() for t in tensors) / count
    found = [
        seen(
            f"{title} state",
            "bytes/parameter",
            [measured[title]],
            peers={other: [size] for other, size in measured.items() if other != title},
            tensors=len(params),
            parameters=count,
        )
        for title in ("Lion", "Lion bf16", "AdamW", "AdamW bf16")
    ]
    for dtype in ("", " bf16"):
        ratio = measured[f"AdamW{dtype}"] / measured[f"Lion{dtype}"]
        found.append(exact(f"AdamW over Lion{dtype}", "ratio", ratio))
    return found


def gpu_steps(elements: int) -> list[Measurement]:
    """Time fused steps over one list of matrices, torch's fused AdamW, and a plain copy."""
    params = parameters([(elements // 16, 4)] * 4, device="cuda")
    optimizers = {
        "Lion": Lion(params, lr=1e-4, weight_decay=0.1, fused=True),
        "AdamW": AdamW(params, lr=1e-3, weight_decay=0.01, fused=True),
        "torch AdamW fused": torch.optim.AdamW(params, lr=1e-3, fused=True),
    }
    source = torch.empty(4 * elements, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    functions: dict[str, Callable[[], object]] = {t: o.step for t, o in optimizers.items()}
    functions["copy"] = lambda: target.copy_(source)
    comparisons = [
        paired(functions, rounds=9, warmup=3, seed=seed, device=torch.device("cuda"))
        for seed in range(REPETITIONS)
    ]
    # Bytes per element: Lion reads p, g, m and writes p, m; AdamW also reads and writes v; a copy
    # reads 4 and writes 4.
    moved = {"Lion": 20, "AdamW": 28, "copy": 8}
    found = []
    for title in ("Lion", "AdamW"):
        times = {t: _milliseconds(comparisons, t) for t in functions if t != title}
        details: dict[str, Any] = {"elements": elements, "bytes an element": moved[title]}
        ratio = _ratios(comparisons, "copy", title)
        share = [r * moved[title] / moved["copy"] for r in ratio]
        ours = _milliseconds(comparisons, title)
        fused = _ratios(comparisons, title, "torch AdamW fused")
        found += [
            seen(f"{title} fused step", "ms", ours, peers=times, **details),
            seen(f"{title} over torch AdamW fused", "ratio", fused, **details, bar=1.0),
            seen(f"{title} share of copy bandwidth", "ratio", share, **details, bar=0.85),
        ]
    return found


@case("fused/16M", minutes=0.2, needs="gpu")
def fused_16m() -> list[Measurement]:
    """16 M elements: state, weights and gradients are far larger than any cache."""
    return gpu_steps(1 << 24)


@case("fused/128M", minutes=0.3, needs="gpu")
def fused_128m() -> list[Measurement]:
    """128 M elements: launch costs are negligible."""
    return gpu_steps(1 << 27)


# Lion against AdamW on digits; see `tuning` for how settings are chosen and reported.
def _tuned(batch: int, sizes: Sizes) -> dict[str, Sweep]:
    return {
        name: tuning.tuned(
            name,
            batch,
            steps=sizes.steps[batch],
            learning_rates=sizes.learning_rates,
            decays=sizes.decays,
            seeds=sizes.tuning_seeds,
            target=sizes.target,
        )
        for name in tuning.OPTIMIZERS
    }


def _reported(
    chosen: Mapping[str, Setting], batch: int, sizes: Sizes
) -> dict[str, list[DigitsRun]]:
    return {
        name: tuning.report(name, best, batch, sizes.report_seeds, steps=sizes.steps[batch])
        for name, best in chosen.items()
    }


def _plain(chosen: dict[str, Setting]) -> dict[str, Any]:
    return {name: asdict(setting) for name, setting in chosen.items()}


def _compared(
    quantity: str,
    difference: str,
    units: tuple[str, str],
    samples: dict[str, list[float]],
    **details: Any,
) -> list[Measurement]:
    """Return Lion's samples with AdamW's as peers, and their pairwise differences or ratios."""
    pairs = list(zip(samples["Lion"], samples["AdamW"], strict=True))
    between = [100 * (a - b) if units[1] == "percentage points" else a / b for a, b in pairs]
    lion, peers = samples["Lion"], {"AdamW": samples["AdamW"]}
    return [
        seen(quantity, units[0], lion, peers=peers, **details),
        seen(difference, units[1], between, **details),
    ]


@case("digits/sweep", minutes=3)
def digits_sweep(sizes: Sizes = FULL) -> list[Measurement]:
    """Ratio of AdamW's to Lion's good learning rates on validation images, by batch size."""
    found = []
    for batch in sizes.steps:
        sweeps = _tuned(batch, sizes)
        # On a plateau the best rate is random; the middle of those within a point is more stable.
        plateau = {
            name: [
                one.lr for one in result.plateau() if one.weight_decay == result.best().weight_decay
            ]
            for name, result in sweeps.items()
        }
        middle = {name: statistics.geometric_mean(rates) for name, rates in plateau.items()}
        found.append(
            seen(
                f"learning-rate ratio/batch {batch}",
                "AdamW / Lion",
                [middle["AdamW"] / middle["Lion"]],
                learning_rates=sizes.learning_rates,
                decays=sizes.decays,
                seeds=sizes.tuning_seeds,
                chosen=_plain({name: result.best() for name, result in sweeps.items()}),
                plateau=plateau,
                # [decays, learning_rates, seeds]
                accuracy={
                    name: torch.round(result.accuracy, decimals=4).tolist()
                    for name, result in sweeps.items()
                },
            )
        )
    return found


@case("digits/accuracy", minutes=7)
def digits_accuracy(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy of the settings with the best validation accuracy, and of the whole plateau.

    Among the settings within a point of the best, which one wins is chance. So the plateau's
    accuracy, the mean over all of them, is what the claim is judged by.
    """
    found = []
    for batch in sizes.steps:
        sweeps = _tuned(batch, sizes)
        chosen = {name: result.best() for name, result in sweeps.items()}
        plateau = {name: result.plateau() for name, result in sweeps.items()}
        accuracy = {
            name: {
                setting: [run.accuracy for run in _reported({name: setting}, batch, sizes)[name]]
                for setting in settings
            }
            for name, settings in plateau.items()
        }
        best = {name: accuracy[name][setting] for name, setting in chosen.items()}
        means = {
            name: [statistics.fmean(each) for each in zip(*by.values(), strict=True)]
            for name, by in accuracy.items()
        }
        units = ("", "percentage points")
        told = {"chosen": _plain(chosen), "seeds": sizes.report_seeds}
        settings = {name: [asdict(one) for one in each] for name, each in plateau.items()}
        found += _compared(
            f"accuracy/batch {batch}", f"accuracy difference/batch {batch}", units, best, **told
        )
        found += _compared(
            f"plateau accuracy/batch {batch}", f"plateau accuracy difference/batch {batch}",
            units, means, settings=settings, seeds=sizes.report_seeds,
        )  # fmt: skip
    return found


@case("digits/convergence", minutes=3.5)
def digits_convergence(sizes: Sizes = FULL) -> list[Measurement]:
    """Steps to the target loss with the settings that reach it first."""
    found = []
    for batch in sizes.steps:
        chosen = {name: result.fastest() for name, result in _tuned(batch, sizes).items()}
        runs = _reported(chosen, batch, sizes)
        found += _compared(
            f"steps/batch {batch}",
            f"steps ratio/batch {batch}",
            ("steps", "Lion / AdamW"),
            {
                name: [*map(float, tuning.steps_to_target(each, sizes.target))]
                for name, each in runs.items()
            },
            chosen=_plain(chosen),
            seeds=sizes.report_seeds,
            target=sizes.target,
        )
    return found


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16, fp32 master weights": (torch.bfloat16, {"master_weights": True}),
    "bf16, stochastic rounding": (torch.bfloat16, {"stochastic_rounding": True}),
}
LAYERS_OF_STEP = (1024, 2048, 1024)


@case("digits/bf16", minutes=0.5)
def digits_bf16(sizes: Sizes = FULL) -> list[Measurement]:
    """Test accuracy by precision of the weights, at learning rates below and above the stall."""
    found = []
    for lr in (1e-4, 3e-4, 1e-3):
        accuracy: dict[str, list[float]] = {name: [] for name in PRECISIONS}
        for (name, (dtype, choice)), seed in itertools.product(
            PRECISIONS.items(), sizes.precision_seeds
        ):
            generator = torch.Generator().manual_seed(seed)
            make = functools.partial(Lion, lr=lr, generator=generator, **choice)
            config = TrainConfig(
                steps=sizes.precision_steps, dtype=dtype, schedule="constant", seed=seed
            )
            accuracy[name].append(train_digits(make, config, digits()).accuracy)
        found.append(
            seen(
                f"accuracy/lr {lr:g}",
                "",
                accuracy.pop("bf16"),
                peers=accuracy,
                steps=sizes.precision_steps,
                batch=64,
                seeds=sizes.precision_seeds,
            )
        )
    return found


def _training_step(make: Callable[..., torch.optim.Optimizer], batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    first, second = itertools.starmap(nn.Linear, itertools.pairwise(LAYERS_OF_STEP))
    model = nn.Sequential(first, nn.ReLU(), second).to(default_device())
    inputs = torch.randn(batch, LAYERS_OF_STEP[0], device=default_device())
    optimizer = make(model.parameters(), lr=1e-4, weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


@case("training-step/mlp", minutes=0.3)
def training_step() -> list[Measurement]:
    """Time of a whole training step: how much of the optimizer's speedup remains."""
    found = []
    for batch in (32, 512):
        comparisons = []
        for seed in range(REPETITIONS):
            steps = {n: _training_step(make, batch) for n, make in tuning.OPTIMIZERS.items()}
            comparisons.append(paired(steps, rounds=15, seed=seed, device=default_device()))
        ratio = _ratios(comparisons, "Lion", "AdamW")
        found.append(
            seen(f"time ratio/batch {batch}", "Lion / AdamW", ratio, layers=LAYERS_OF_STEP)
        )
    return found
