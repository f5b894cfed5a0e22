"""Lion and AdamW against lion-pytorch and torch.optim: step time, state bytes, runs on digits."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from lion_pytorch.foreach import Lion as PeerLion
from torch import Tensor, nn

from benchmarks.runner import Measurement, case
from labcore.data import digits
from labcore.device import default_device
from labcore.optim import AdamW, Lion
from labcore.studies.digits_runs import DigitsRun, Setting, TrainConfig, train_digits
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
        Measurement(
            quantity=f"{title} step",
            unit="ms",
            samples=peers[title],
            peers={other: times for other, times in peers.items() if other != title},
            details=details,
        )
        for title in ("Lion", "AdamW")
    ]
    pairs = [*BARS, ("AdamW", "torch AdamW fused"), ("Lion", "AdamW")]
    pairs.append(("Lion", "torch AdamW fused"))
    for ours, peer in pairs:
        bar = BARS.get((ours, peer), {}).get(name)
        found.append(
            Measurement(
                quantity=f"{ours} over {peer}",
                unit="ratio",
                samples=_ratios(comparisons, ours, peer),
                details={**details, **({"bar": bar} if bar else {})},
            )
        )
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
        Measurement(
            quantity=f"{title} state",
            unit="bytes/parameter",
            samples=[measured[title]],
            peers={other: [size] for other, size in measured.items() if other != title},
            details={"tensors": len(params), "parameters": count},
        )
        for title in ("Lion", "Lion bf16", "AdamW", "AdamW bf16")
    ]
    for dtype in ("", " bf16"):
        ratio = measured[f"AdamW{dtype}"] / measured[f"Lion{dtype}"]
        found.append(
            Measurement(
                quantity=f"AdamW over Lion{dtype}",
                unit="ratio",
                samples=[ratio],
                details={"exact": True},
            )
        )
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
        details = {"elements": elements, "bytes an element": moved[title]}
        ratio = _ratios(comparisons, "copy", title)
        share = [r * moved[title] / moved["copy"] for r in ratio]
        ours = _milliseconds(comparisons, title)
        found += [
            Measurement(
                quantity=f"{title} fused step",
                unit="ms",
                samples=ours,
                peers=times,
                details=details,
            ),
            Measurement(
                quantity=f"{title} over torch AdamW fused",
                unit="ratio",
                samples=_ratios(comparisons, title, "torch AdamW fused"),
                details={**details, "bar": 1.0},
            ),
            Measurement(
                quantity=f"{title} share of copy bandwidth",
                unit="ratio",
                samples=share,
                details={**details, "bar": 0.85},
            ),
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
def _reported(name: str, setting: Setting, batch: int) -> list[DigitsRun]:
    return tuning.report(name, setting, batch, tuning.REPORT_SEEDS)


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
        Measurement(quantity=quantity, unit=units[0], samples=lion, peers=peers, details=details),
        Measurement(quantity=difference, unit=units[1], samples=between, details=details),
    ]


@case("digits/sweep", minutes=3)
def digits_sweep() -> list[Measurement]:
    """Ratio of AdamW's to Lion's good learning rates on validation images, by batch size."""
    found = []
    for batch in tuning.STEPS:
        sweeps = {name: tuning.tuned(name, batch) for name in tuning.OPTIMIZERS}
        # On a plateau the best rate is random; the middle of those within a point is more stable.
        plateau = {name: result.plateau(0.01) for name, result in sweeps.items()}
        middle = {name: statistics.geometric_mean(rates) for name, rates in plateau.items()}
        details = {
            "learning_rates": tuning.LEARNING_RATES,
            "decays": tuning.DECAYS,
            "seeds": tuning.TUNING_SEEDS,
            "chosen": _plain({name: result.best() for name, result in sweeps.items()}),
            "plateau": plateau,
            # [decays, learning_rates, seeds]
            "accuracy": {
                name: torch.round(result.accuracy, decimals=4).tolist()
                for name, result in sweeps.items()
            },
        }
        found.append(
            Measurement(
                quantity=f"learning-rate ratio/batch {batch}",
                unit="AdamW / Lion",
                samples=[middle["AdamW"] / middle["Lion"]],
                details=details,
            )
        )
    return found


@case("digits/accuracy", minutes=3.5)
def digits_accuracy() -> list[Measurement]:
    """Test accuracy of the settings with the best validation accuracy."""
    found = []
    for batch in tuning.STEPS:
        chosen = {name: tuning.tuned(name, batch).best() for name in tuning.OPTIMIZERS}
        runs = {name: _reported(name, best, batch) for name, best in chosen.items()}
        found += _compared(
            f"accuracy/batch {batch}",
            f"accuracy difference/batch {batch}",
            ("", "percentage points"),
            {name: [run.accuracy for run in each] for name, each in runs.items()},
            chosen=_plain(chosen),
            seeds=tuning.REPORT_SEEDS,
        )
    return found


@case("digits/convergence", minutes=3.5)
def digits_convergence() -> list[Measurement]:
    """Steps to the target loss with the settings that reach it first."""
    found = []
    for batch in tuning.STEPS:
        chosen = {name: tuning.tuned(name, batch).fastest() for name in tuning.OPTIMIZERS}
        runs = {name: _reported(name, best, batch) for name, best in chosen.items()}
        found += _compared(
            f"steps/batch {batch}",
            f"steps ratio/batch {batch}",
            ("steps", "Lion / AdamW"),
            {name: [*map(float, tuning.steps_to_target(each))] for name, each in runs.items()},
            chosen=_plain(chosen),
            seeds=tuning.REPORT_SEEDS,
            target=tuning.TARGET,
        )
    return found


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16, fp32 master weights": (torch.bfloat16, {"master_weights": True}),
    "bf16, stochastic rounding": (torch.bfloat16, {"stochastic_rounding": True}),
}
PRECISION_SEEDS, PRECISION_STEPS = (0, 1, 2, 3, 4), 1000
LAYERS_OF_STEP = (1024, 2048, 1024)


@case("digits/bf16", minutes=0.5)
def digits_bf16() -> list[Measurement]:
    """Test accuracy by precision of the weights, at learning rates below and above the stall."""
    found = []
    for lr in (1e-4, 3e-4, 1e-3):
        accuracy: dict[str, list[float]] = {name: [] for name in PRECISIONS}
        for (name, (dtype, choice)), seed in itertools.product(PRECISIONS.items(), PRECISION_SEEDS):
            generator = torch.Generator().manual_seed(seed)
            make = functools.partial(Lion, lr=lr, generator=generator, **choice)
            config = TrainConfig(steps=PRECISION_STEPS, dtype=dtype, schedule="constant", seed=seed)
            accuracy[name].append(train_digits(make, config, digits()).accuracy)
        found.append(
            Measurement(
                quantity=f"accuracy/lr {lr:g}",
                unit="",
                samples=accuracy.pop("bf16"),
                peers=accuracy,
                details={"steps": PRECISION_STEPS, "batch": 64, "seeds": PRECISION_SEEDS},
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
        found.append(
            Measurement(
                quantity=f"time ratio/batch {batch}",
                unit="Lion / AdamW",
                samples=_ratios(comparisons, "Lion", "AdamW"),
                details={"layers": LAYERS_OF_STEP},
            )
        )
    return found
