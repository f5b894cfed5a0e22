"""Lion and AdamW against lion-pytorch and torch.optim: step time, state bytes, loss, precision."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lion_pytorch.foreach import Lion as PeerLion
from torch import Tensor

from benchmarks.runner import Measurement, case, exact, seen
from labcore.data import digits
from labcore.device import default_device
from labcore.models import train, windows
from labcore.optim import AdamW, AdamW8bit, Lion
from labcore.studies.digits_runs import TrainConfig, train_digits
from labcore.studies.language import bench
from labcore.studies.language.curves import reported, token_ratios
from labcore.timing import Comparison, paired

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
WIDTH, VOCABULARY, POSITIONS, LAYERS = 384, 25_600, 512, 12
REPETITIONS = 8
FUSED = "torch AdamW fused"
# The targets of our implementations: (name, peer) -> list -> ratio.
BARS = {
    ("Lion", "lion-pytorch foreach"): {"quarter-gpt2": 0.65, "thousand": 0.95},
    ("AdamW", "torch AdamW foreach"): {"quarter-gpt2": 0.75, "thousand": 0.9},
    ("Lion fused", FUSED): {"quarter-gpt2": 0.75},
    ("AdamW fused", FUSED): {"quarter-gpt2": 1.0},
}
# Before one of ours is timed, its steps must equal those of the optimizer named here. Fused
# Lion is compared with the rule: rounding can flip lion-pytorch's sign where the blend is near 0.
RULE = "Lion's rule"
SAME_STEPS = {
    "Lion": "lion-pytorch foreach",
    "Lion fused": RULE,
    "AdamW": "torch AdamW foreach",
    "AdamW fused": FUSED,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the cases that train measure."""

    precision_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    precision_steps: int = 1000
    repetitions: int = 4


FULL = Sizes()
SMALL = Sizes(
    precision_seeds=(0, 1),
    precision_steps=5,
    repetitions=1,
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
        "Lion fused": lambda p: Lion(p, lr=1e-4, weight_decay=0.1, fused=True),
        "lion-pytorch foreach": lambda p: PeerLion(p, lr=1e-4, weight_decay=0.1),
        "AdamW": lambda p: AdamW(p, lr=1e-3, weight_decay=0.01),
        "AdamW fused": lambda p: AdamW(p, lr=1e-3, weight_decay=0.01, fused=True),
        "torch AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        FUSED: lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
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
    known = makers() | {RULE: lambda p: Lion(p, lr=1e-4, weight_decay=0.1, foreach=False)}
    for ours, peer in SAME_STEPS.items():
        gap = largest_difference(shapes, known[ours], known[peer])
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
    """Time all on the same tensors in the same rounds; refuse to time wrong results."""
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
        for title in SAME_STEPS
    ]
    pairs = [*BARS, ("AdamW", FUSED), ("Lion", "AdamW"), ("Lion", FUSED)]
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


def _peers_8bit(params: list[Tensor]) -> dict[str, torch.optim.Optimizer]:
    """Return AdamW8bit of bitsandbytes, otherwise of torchao, or nothing if neither is there."""
    for peer in ("bitsandbytes", "torchao"):
        if importlib.util.find_spec(peer):
            make = importlib.import_module(f"{peer}.optim").AdamW8bit
            return {f"{peer} AdamW8bit": make(params, lr=1e-3)}
    return {}


def gpu_steps(elements: int) -> list[Measurement]:
    """Time fused steps over one list of matrices, torch's fused AdamW, and a plain copy."""
    params = parameters([(elements // 16, 4)] * 4, device=str(default_device()))
    peers_8bit = _peers_8bit(params)
    optimizers = {
        "Lion": Lion(params, lr=1e-4, weight_decay=0.1, fused=True),
        "AdamW": AdamW(params, lr=1e-3, weight_decay=0.01, fused=True),
        "AdamW8bit": AdamW8bit(params, lr=1e-3, weight_decay=0.01, fused=True),
        **peers_8bit,
        FUSED: torch.optim.AdamW(params, lr=1e-3, fused=True),
    }
    source = torch.empty(4 * elements, dtype=torch.uint8, device=default_device())
    target = torch.empty_like(source)
    functions: dict[str, Callable[[], object]] = {t: o.step for t, o in optimizers.items()}
    functions["copy"] = lambda: target.copy_(source)
    comparisons = [
        paired(functions, rounds=9, warmup=3, seed=seed, device=default_device())
        for seed in range(REPETITIONS)
    ]
    # Bytes per element: Lion reads p, g, m and writes p, m; AdamW also reads and writes v; a copy
    # reads 4 and writes 4. A code has 1 byte, and a scale for each moment's 256 codes has 4.
    moved = {"Lion": 20, "AdamW": 28, "AdamW8bit": 16 + 16 / 256, "copy": 8}
    found = [
        seen(f"AdamW8bit over {peer}", "ratio", _ratios(comparisons, "AdamW8bit", peer))
        for peer in peers_8bit
    ]
    for title in ("Lion", "AdamW", "AdamW8bit"):
        times = {t: _milliseconds(comparisons, t) for t in functions if t != title}
        details: dict[str, Any] = {"elements": elements, "bytes an element": moved[title]}
        ratio = _ratios(comparisons, "copy", title)
        share = [r * moved[title] / moved["copy"] for r in ratio]
        ours = _milliseconds(comparisons, title)
        fused = _ratios(comparisons, title, FUSED)
        found += [
            seen(f"{title} fused step", "ms", ours, peers=times, **details),
            seen(f"{title} over torch AdamW fused", "ratio", fused, **details, bar=1.0),
            seen(f"{title} share of copy bandwidth", "ratio", share, **details, bar=0.85),
        ]
    return found


@case("parity/optimizers", minutes=0.2, needs="gpu")
def parity(elements: int = 1_000_003) -> list[Measurement]:
    """Compare fused steps with the rule in float64, beside the unfused steps' error.

    The error is the 99.9th percentile of the weights': the sign of an update near 0 may differ, and
    so may the code of a moment near the border between two.
    Raises RuntimeError if the fused error is over twice the other's.
    """
    found, generator = [], torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(elements, generator=generator) for _ in range(6))
    for kind in (Lion, AdamW, AdamW8bit):
        title, unfused = kind.__name__, dict[str, Any](fused=False)
        if kind is not AdamW8bit:
            unfused["foreach"] = False

        def after(dtype: torch.dtype, *, kind: type = kind, **settings: Any) -> Tensor:
            param = torch.nn.Parameter(start.to(default_device(), dtype, copy=True))
            optimizer = kind([param], lr=1e-3, weight_decay=0.1, **settings)
            for grad in grads:
                param.grad = grad.to(param)
                optimizer.step()
            return param.detach().double()

        right = after(torch.float64, **unfused)
        ours, plain = (
            float((after(torch.float32, **settings) - right).abs().quantile(0.999))
            for settings in (dict[str, Any](fused=True), unfused)
        )
        if not ours <= 2 * plain:
            raise RuntimeError(
                f"{title}'s fused error must be at most twice the other's, {plain}, got {ours}"
            )
        found.append(exact(f"{title} fused error over unfused", "ratio", ours / plain))
    return found


@case("fused/16M", minutes=0.2, needs="gpu")
def fused_16m() -> list[Measurement]:
    """16 M elements: state, weights and gradients are far larger than any cache."""
    return gpu_steps(1 << 24)


@case("fused/128M", minutes=0.3, needs="gpu")
def fused_128m() -> list[Measurement]:
    """128 M elements: launch costs are negligible."""
    return gpu_steps(1 << 27)


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16, fp32 master weights": (torch.bfloat16, {"master_weights": True}),
    "bf16, stochastic rounding": (torch.bfloat16, {"stochastic_rounding": True}),
}


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


STEPPED = ("AdamW", "Lion", "Lion fused", "Muon", FUSED)


def _step_times(batch: int, repetitions: int, names: Sequence[str] = STEPPED) -> list[Measurement]:
    """Time whole training steps of the language model, by optimizer."""
    comparisons = []
    for seed in range(repetitions):
        steps = {name: _language_step(name, batch, seed) for name in names}
        comparisons.append(paired(steps, rounds=3, warmup=1, seed=seed, device=default_device()))
    return [
        seen("AdamW", "s/step", [ms / 1e3 for ms in _milliseconds(comparisons, "AdamW")]),
        *(
            seen(f"{one} over {other}", "ratio", _ratios(comparisons, one, other))
            for one, other in (
                ("Lion", "AdamW"),
                ("Muon", "AdamW"),
                ("Lion", FUSED),
                ("Lion fused", FUSED),
            )
            if {one, other} <= set(names)
        ),
    ]


def _fused(own: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return our fused Lion for our Lion, or torch's fused AdamW for ours, with its settings."""
    names = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [
        {name: value for name, value in group.items() if name in names}
        for group in own.param_groups
    ]
    return (Lion if isinstance(own, Lion) else torch.optim.AdamW)(groups, fused=True)


def _language_step(optimizer: str, batch: int, seed: int) -> Callable[[], Any]:
    """Return a function that takes one step on tokens drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(bench.CONFIG.vocab_size, (100_000,), generator=generator)
    model = bench.language_model(seed)
    unfused = {FUSED: "AdamW", "Lion fused": "Lion"}.get(optimizer)
    own = bench.OPTIMIZERS[unfused or optimizer](model, lr=1e-3, decay=0.1)
    return functools.partial(
        train,
        model,
        windows(tokens, batch=bench.ROWS, length=bench.LENGTH),
        _fused(own) if unfused else own,
        steps=1,
        accumulate=batch // (bench.ROWS * bench.LENGTH),
        clip=bench.clip_to(1.0),
        progress=False,
    )


# Optimizers whose runs `benchmarks/language.py` recorded, by tokens per step.
COMPARED = {
    2_048: ("AdamW", "Lion"),
    8_192: ("AdamW", "Lion", "Lion 0.95/0.98", "Lion 0.95/0.95", "Muon"),
    32_768: ("AdamW", "Lion"),
}


def language_losses(batch: int) -> list[Measurement]:
    """Compare optimizers with AdamW, seed by seed, by records of `benchmarks/language.py`."""
    runs = {name: reported(batch, name) for name in COMPARED[batch]}
    found, adamw = [], runs.pop("AdamW")
    for name, run in runs.items():
        pairs = zip(run.held_out, adamw.held_out, strict=True)
        tokens = token_ratios(batch, name, "AdamW")
        details: dict[str, Any] = {
            "steps": run.steps,
            "settings": {name: asdict(run.setting), "AdamW": asdict(adamw.setting)},
        }
        found += [
            seen(f"{name} minus AdamW", "nats/token", [a - b for a, b in pairs], **details),
            seen(f"tokens, {name} over AdamW", "ratio", tokens, **details),
        ]
    return found


def _declare_loss(batch: int) -> None:
    @case(f"language/loss/{batch}", minutes=0.1)
    def _() -> list[Measurement]:
        return language_losses(batch)


for _batch in COMPARED:
    _declare_loss(_batch)


@case("language/step-time/2048", minutes=0.5)
def step_times_2048(sizes: Sizes = FULL) -> list[Measurement]:
    """Whole training steps of the language model with few tokens."""
    return _step_times(2_048, sizes.repetitions)


@case("language/step-time/8192", minutes=2)
def step_times_8192(sizes: Sizes = FULL) -> list[Measurement]:
    """Whole training steps of the language model with more tokens."""
    return _step_times(8_192, sizes.repetitions)


@case("language/step-time/32768", minutes=2)
def step_times_32768(sizes: Sizes = FULL) -> list[Measurement]:
    """Whole training steps with the most tokens, for the two optimizers that run with them."""
    return _step_times(32_768, min(2, sizes.repetitions), ("AdamW", "Lion"))
