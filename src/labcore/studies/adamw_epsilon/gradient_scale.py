"""How small gradients become in wider models, and where a fixed epsilon starts to matter.

The models are small Llamas on the bytes of Python's documentation, with increasing width and
constant depth, batch size and length. All settings are in this module and were chosen on
TUNING_SEED, before SEEDS were run. The learning rate of each width is the best of 1e-3, 2e-3, 4e-3,
8e-3 and 1.6e-2 after STEPS steps, with weights of 1/√width. It halves as the width doubles (at 32
and at 512, it's the end of the grid).

The root mean square (RMS) of a gradient is its norm over the square root of the number of
parameters. It falls with the width even if the norm stays constant. The loss is a mean over tokens.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labcore.checks import non_negative, one_of, positive, positive_int
from labcore.data import python_text
from labcore.models.config import LlamaConfig
from labcore.models.llama import Llama
from labcore.models.tokenizer import ByteTokenizer
from labcore.models.training import Batches, next_token_loss, train, windows
from labcore.studies.adamw_epsilon.epsilon import predict_attenuation

__all__ = [
    "EPSILONS",
    "EPS_WIDTHS",
    "GROUPS",
    "INITS",
    "SEEDS",
    "STEPS",
    "TUNING_SEED",
    "WIDTHS",
    "EpsRun",
    "GradientScale",
    "batches",
    "config",
    "first_gradient",
    "fit_power",
    "gradient_rms",
    "groups",
    "held_out_loss",
    "learning_rate",
    "loss_by_eps",
    "make",
    "rms_by_width",
    "shares_left",
    "update_attenuation",
]

WIDTHS = (32, 64, 128, 256, 512)
EPS_WIDTHS = (32, 64, 128, 256)
EPSILONS = (1e-8, 1e-5, 1e-4, 1e-3, 1e-2)
TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
STEPS = 50
BYTES, LAYERS, HEAD, BATCH, LENGTH = 256, 2, 16, 8, 64
MEASURED_BATCHES = 4
HELD_OUT_ROWS = 64
MAX_BYTES = {"train": 1_000_000, "held_out": 200_000}
INITS = ("1/sqrt(width)", "0.02")

GROUPS = ("embedding", "attention", "mlp", "head", "norms", "all")
_MARKS = {
    "embed_tokens.": "embedding",
    ".self_attn.": "attention",
    ".mlp.": "mlp",
    "lm_head.": "head",
    "norm.": "norms",
}


def config(width: int, *, init: str = "1/sqrt(width)") -> LlamaConfig:
    """Return the model for a width, a multiple of 16: two layers, heads of 16, 256 byte tokens.

    init: standard deviation of initial weights, "1/sqrt(width)", or Llama's "0.02" at any width.
    """
    one_of("init", init, INITS)
    positive_int("width", width)
    return LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=8 * width // 24 * 8,  # 8/3 of the width, as in Llama
        num_hidden_layers=LAYERS,
        num_attention_heads=max(1, width // HEAD),
        max_position_embeddings=LENGTH,
        initializer_range=0.02 if init == "0.02" else width**-0.5,
    )


def learning_rate(width: int) -> float:
    """Return the best rate on TUNING_SEED: 4e-3 at a width of 128, inversely proportional to it."""
    return 4e-3 * 128 / positive_int("width", width)


def make(width: int, seed: int, *, init: str = "1/sqrt(width)") -> Llama:
    """Return a new fp32 model with weights drawn from `seed` alone."""
    return Llama(config(width, init=init), generator=torch.Generator().manual_seed(seed))


@functools.cache
def _corpus(part: str) -> Tensor:
    """Return the byte tokens [N] of Python's documentation."""
    text = python_text(part, max_bytes=MAX_BYTES[part]).text
    return torch.tensor(ByteTokenizer().encode(text), dtype=torch.int64)


def batches(seed: int) -> Batches:
    """Return training batches from `labcore.models.windows`: number -> (tokens [8, 65], None)."""
    return windows(_corpus("train"), batch=BATCH, length=LENGTH, seed=seed)


@torch.no_grad()
def held_out_loss(model: Llama) -> float:
    """Return the nats per byte over 64 fixed windows of files that training never sees."""
    rows, _ = windows(_corpus("held_out"), batch=HELD_OUT_ROWS, length=LENGTH)(0)
    total, count = next_token_loss(model, rows.to(model.embed_tokens.weight.device))
    return total.item() / count


def groups(model: Llama) -> dict[str, list[nn.Parameter]]:
    """Return the parameters by function: each is in one of GROUPS, and also in "all".

    A tied head has no parameters, so the model then has no such group.
    """
    found: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        group = next(group for mark, group in _MARKS.items() if mark in name)
        found[group].append(parameter)
        found["all"].append(parameter)
    return {name: parameters for name, parameters in found.items() if parameters}


def gradient_rms(model: Llama, tokens: Tensor, *, loss_scale: float = 1.0) -> dict[str, float]:
    """Return the RMS of the gradient of the mean next-token loss, by parameter group.

    tokens: integers [B, T], or [N, B, T] for N batches, whose mean squares are averaged. The result
    is the root of what Adam's exp_avg_sq settles at.
    loss_scale: factor for the loss.
    Sums are fp64. Existing gradients of the model are cleared.
    """
    positive("loss_scale", loss_scale)
    if tokens.dim() not in (2, 3) or tokens.is_floating_point():
        raise ValueError(
            f"tokens must be integers [B, T] or [N, B, T], got {tokens.dtype} {tuple(tokens.shape)}"
        )
    stack = tokens if tokens.dim() == 3 else tokens[None]
    parts = groups(model)
    squares = dict.fromkeys(parts, 0.0)
    for batch in stack:
        model.zero_grad(set_to_none=True)
        loss, count = next_token_loss(model, batch)
        (loss / count * loss_scale).backward()
        for name, parameters in parts.items():
            squares[name] += _sum_of_squares(p.grad for p in parameters)
    model.zero_grad(set_to_none=True)
    counts = {name: sum(p.numel() for p in parameters) for name, parameters in parts.items()}
    return {name: math.sqrt(squares[name] / len(stack) / counts[name]) for name in parts}


def _sum_of_squares(tensors: Iterable[Tensor | None]) -> float:
    return sum(t.double().square().sum().item() for t in tensors if t is not None)


def first_gradient(width: int, seed: int, *, init: str = "0.02") -> Tensor:
    """Return the gradient of a new model on its first batch, fp32 [weights], all in one row."""
    model = make(width, seed, init=init)
    loss, count = next_token_loss(model, batches(seed)(0)[0])
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss / count, [*model.parameters()])]
    )


def fit_power(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Fit ys ≈ factor · xs^exponent by least squares on logarithms; return exponent and factor.

    xs, ys: positive, with at least two different xs. Raises ValueError otherwise.
    """
    if len(set(xs)) < 2 or min(*xs, *ys) <= 0:
        raise ValueError(f"xs and ys must be above 0 with two different xs, got {xs} and {ys}")
    line = statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])
    return line.slope, math.exp(line.intercept)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientScale:
    """The gradient's RMS after `steps` steps, by parameter group: fp64 [widths, seeds] each.

    parameters: the number of parameters at each width.
    """

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: int
    init: str
    rms: Mapping[str, Tensor]
    parameters: tuple[int, ...]

    def exponents(self, group: str = "all") -> list[float]:
        """Return the RMS's exponent in the width per seed; -1 halves the RMS as width doubles."""
        table = self.rms[one_of("group", group, self.rms)]
        return [fit_power(self.widths, column.tolist())[0] for column in table.T]


def rms_by_width(
    widths: Sequence[int] = WIDTHS,
    seeds: Sequence[int] = SEEDS,
    *,
    steps: Sequence[int] = (0, STEPS),
    init: str = "1/sqrt(width)",
) -> dict[int, GradientScale]:
    """Measure gradients of new models (0) and after steps of AdamW, by the number of steps.

    Each measurement averages four batches that training doesn't use. On one core, widths 32 to 128
    with two seeds and 30 steps take about 6 s, of which 2 s are for reading the text once. All of
    WIDTHS and SEEDS take more than a minute.
    """
    marks = sorted({int(non_negative("steps", step)) for step in steps})
    found: dict[int, dict[str, list[list[float]]]] = {mark: {} for mark in marks}
    counts = []
    for width in widths:
        rows: dict[int, list[dict[str, float]]] = {mark: [] for mark in marks}
        for seed in seeds:
            model, draw = make(width, seed, init=init), batches(seed)
            optimizer = _adamw(model, width, 1e-8)
            fresh = torch.stack([draw(10**6 + n)[0] for n in range(MEASURED_BATCHES)])
            done = 0
            for mark in marks:
                if mark > done:
                    more = functools.partial(_later, draw, done)
                    train(model, more, optimizer, steps=mark - done, progress=False)
                    done = mark
                rows[mark].append(gradient_rms(model, fresh))
        counts.append(sum(p.numel() for p in model.parameters()))
        for mark, measured in rows.items():
            for group in measured[0]:
                found[mark].setdefault(group, []).append([each[group] for each in measured])
    return {
        mark: GradientScale(
            widths=tuple(widths),
            seeds=tuple(seeds),
            steps=mark,
            init=init,
            rms={name: torch.tensor(t, dtype=torch.float64) for name, t in tables.items()},
            parameters=tuple(counts),
        )
        for mark, tables in found.items()
    }


def _adamw(model: Llama, width: int, eps: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate(width), eps=eps, fused=True)


def _later(draw: Batches, start: int, n: int) -> tuple[Tensor, Tensor | None]:
    """Return batch `start + n`, because `train` counts from 0 even if a run continues."""
    return draw(start + n)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpsRun:
    """One training run with one eps.

    loss: held-out loss after the last step, in nats per byte. rms: √ of the mean v̂, by group.
    attenuation: the RMS of the last update over its RMS at eps = 0 with the same moments, by group.
    """

    loss: float
    rms: Mapping[str, float]
    attenuation: Mapping[str, float]


def loss_by_eps(
    width: int, eps: float, seed: int, *, steps: int = STEPS, init: str = "1/sqrt(width)"
) -> EpsRun:
    """Train a model with a width and eps; everything else is the same for all eps."""
    non_negative("eps", eps)
    model = make(width, seed, init=init)
    optimizer = _adamw(model, width, eps)
    train(model, batches(seed), optimizer, steps=positive_int("steps", steps), progress=False)
    parts = groups(model)
    rms = {}
    for name, parameters in parts.items():
        roots = [_moments(optimizer, p)[1] for p in parameters]
        rms[name] = math.sqrt(_sum_of_squares(roots) / sum(r.numel() for r in roots))
    return EpsRun(
        loss=held_out_loss(model),
        rms=rms,
        attenuation={n: update_attenuation(optimizer, p, eps) for n, p in parts.items()},
    )


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return m̂ and √v̂ of one parameter in fp64, using the betas of the first group."""
    state, (beta1, beta2) = optimizer.state[parameter], optimizer.param_groups[0]["betas"]
    step = float(state["step"])
    mean = state["exp_avg"].double() / (1 - beta1**step)
    return mean, (state["exp_avg_sq"].double() / (1 - beta2**step)).sqrt()


def update_attenuation(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], eps: float
) -> float:
    """Return the RMS of m̂ / (√v̂ + eps) over that of m̂ / √v̂, with Adam's current moments.

    It's measured per weight, so it's exact for any distribution of gradients. The formula
    RMS/(RMS + eps) uses a single number for all √v̂ instead. Weights that had no gradient aren't
    counted. Returns NaN if no weight had one.
    """
    non_negative("eps", eps)
    with_eps = without = 0.0
    for parameter in parameters:
        mean, root = _moments(optimizer, parameter)
        moved = root != 0  # True for NaN, so NaN shows in the result
        with_eps += _sum_of_squares([mean[moved] / (root[moved] + eps)])
        without += _sum_of_squares([mean[moved] / root[moved]])
    return math.sqrt(with_eps / without) if without else math.nan


def shares_left(runs: Sequence[EpsRun], eps: float) -> dict[str, dict[str, float]]:
    """Return means over runs with `eps`, by group: the RMS, and what is left of the last update.

    "measured" is weight by weight, and "predicted" by the formula from the RMS of the group.
    """
    names = runs[0].rms
    rms = {name: statistics.fmean(run.rms[name] for run in runs) for name in names}
    measured = {name: statistics.fmean(run.attenuation[name] for run in runs) for name in names}
    predicted = {name: predict_attenuation(size, eps) for name, size in rms.items()}
    return {"rms": rms, "measured": measured, "predicted": predicted}
