"""A language model's batch: carried rates, batch warm-up, and the noise scale.

The model, its text, and its tuned runs are those of `labcore.studies.language`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from labcore.checks import one_of
from labcore.models import Llama
from labcore.models.training import Batches, next_token_loss, train, windows
from labcore.studies.language import bench
from labcore.studies.language.tuning import Setting

__all__ = [
    "CARRIED",
    "CONSTANT",
    "FIRST",
    "MICRO_BATCHES",
    "POINTS",
    "RULES",
    "TUNED_AT",
    "Noise",
    "WarmedUp",
    "carried",
    "noise_scale",
    "train_warming_up",
    "two_batch_estimate",
]

TUNED_AT = 8_192  # tokens per step at which the rate was tuned that other batches take over
RULES: Mapping[str, float] = {"unchanged": 0.0, "square root": 0.5}
"""Rule -> the power of the batches' ratio that multiplies the learning rate."""
FIRST, SHARE = 2_048, 1 / 3  # batch warm-up: tokens per step in the first third of the tokens
CONSTANT = 4_096  # tokens per step of a constant batch that makes as many steps as the warm-up
CARRIED = (
    (CONSTANT, "square root"),
    (32_768, "unchanged"),
    (32_768, "square root"),
)
"""The batches, in tokens per step, that take over a rate, and by which of RULES."""
POINTS = (1 / 32, 1 / 8, 1 / 2, 1.0)  # shares of the training at which the noise is measured
APART_SEED = 10**6  # apart from the seeds of runs
MICRO_BATCHES = 16  # the two batches of an estimate: one forward pass, and this many


def carried(setting: Setting, batch: int, rule: str) -> Setting:
    """Return a setting tuned at TUNED_AT tokens per step, carried over to another batch.

    rule: of RULES. It changes the rate alone: the decay, the betas and epsilon stay, which Malladi
    et al. (arXiv 2205.10287) change as well.
    """
    power = RULES[one_of("rule", rule, RULES)]
    return Setting(lr=setting.lr * (batch / TUNED_AT) ** power, decay=setting.decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """A two-batch estimate, in tokens: E|g|² = signal + noise / tokens for a batch's gradient g.

    signal: |G|², the squared norm of the true gradient. noise: the trace of the covariance of one
    window's mean gradient, times the window's tokens. The windows are drawn independently; the
    tokens in a window aren't. Both are unbiased, so a signal near 0 can come out negative.
    """

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The simple noise scale, in tokens; infinite if the signal is lost in the noise."""
        return self.noise / self.signal if self.signal > 0 else math.inf


def two_batch_estimate(small: float, large: float, sizes: tuple[int, int]) -> Noise:
    """Solve E|g|² = signal + noise / size for two batch sizes.

    small, large: the squared norm of the gradient of a batch of sizes[0] and of sizes[1].
    Source: McCandlish et al., arXiv 1812.06162, appendix A.1.
    """
    few, many = sizes
    noise = (small - large) / (1 / few - 1 / many)
    return Noise(signal=(many * large - few * small) / (many - few), noise=noise)


def noise_scale(model: Llama, batches: Batches, *, count: int = MICRO_BATCHES) -> Noise:
    """Estimate the noise of a model's gradient from the first `count` of `batches`.

    The small batch is one of them, averaged over all; the large one is all together. The model's
    gradients and weights stay as they are.
    """
    weights = list(model.parameters())
    total, squares, predicted = [torch.zeros_like(w) for w in weights], [], 0
    for n in range(count):
        tokens, counts = batches(n)
        loss, predicted = next_token_loss(model, tokens.to(weights[0].device), counts)
        gradients = torch.autograd.grad(loss / predicted, weights)
        squares.append(_square(gradients))
        torch._foreach_add_(total, list(gradients))
    large = _square(total) / count**2
    return two_batch_estimate(fmean(squares), large, (predicted, count * predicted))


def _square(tensors: Sequence[Tensor]) -> float:
    return sum(each.double().square().sum().item() for each in tensors)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WarmedUp:
    """A run with batch warm-up. loss: on held-out files, in nats per token. losses: of every step.

    noise: share of the training -> the estimate there.
    """

    loss: float
    losses: tuple[float, ...]
    noise: Mapping[float, Noise]


class _ClipAndMeasure:
    """A clipping hook that also measures the noise; `passes` forward passes make a step."""

    def __init__(self, estimate: Callable[[], Noise], points: Sequence[float], total: int) -> None:
        self.estimate = estimate
        self.places = {round(point * total): point for point in points}
        self.noise: dict[float, Noise] = {}
        self.done, self.passes = 0, 1

    def __call__(self, parameters: list[nn.Parameter]) -> Tensor | float | None:
        self.measure()
        self.done += self.passes
        return bench.clip_to(1.0)(parameters)

    def measure(self) -> None:
        """Estimate the noise if a point lies in the step that begins now."""
        for place in range(self.done, self.done + self.passes):
            if place in self.places:
                self.noise[self.places[place]] = self.estimate()


def train_warming_up(
    make: Callable[[Llama], torch.optim.Optimizer],
    *,
    seed: int,
    tokens: int = bench.TOKENS,
    points: Sequence[float] = POINTS,
    micro_batches: int = MICRO_BATCHES,
    max_files: int | None = None,
) -> WarmedUp:
    """Train at FIRST tokens per step for the first third of `tokens`, then at TUNED_AT.

    The text, its order, and the schedule of the learning rate by tokens are those of a run of
    TUNED_AT tokens per step with the same seed (`bench.train_language`); in the smaller batches the
    rate follows the square root. The noise is measured on other windows of the same text, from
    `micro_batches` of them.
    """
    unit = bench.ROWS * bench.LENGTH  # tokens of one forward pass
    total, first = tokens // unit, round(SHARE * tokens / unit)
    text = bench.text("report", max_files=max_files)
    read, apart = (
        windows(text, batch=bench.ROWS, length=bench.LENGTH, seed=each)
        for each in (seed, APART_SEED + seed)
    )
    model = bench.language_model(seed)
    optimizer, losses = make(model), []
    estimate = functools.partial(noise_scale, model, apart, count=micro_batches)
    clip = _ClipAndMeasure(estimate, points, total)
    for start, end, batch in ((0, first, FIRST), (first, total, TUNED_AT)):
        clip.passes = batch // unit
        curve = train(
            model,
            functools.partial(_from, read, start),
            optimizer,
            steps=(end - start) // clip.passes,
            accumulate=clip.passes,
            clip=clip,
            schedule=functools.partial(_factor, batch=batch, start=start, total=total),
            progress=False,
        )
        losses += curve.losses
    clip.measure()
    loss = bench.held_out_loss(model, bench.text("held out", max_files=max_files))
    return WarmedUp(loss=loss, losses=tuple(losses), noise=clip.noise)


def _from(batches: Batches, start: int, n: int) -> tuple[Tensor, Tensor | None]:
    return batches(start + n)


def _factor(step: int, *, batch: int, start: int, total: int) -> float:
    """Return the rate's factor after `start` forward passes and `step` steps, of `total` passes."""
    done = start + step * (batch // (bench.ROWS * bench.LENGTH))
    return (batch / TUNED_AT) ** RULES["square root"] * bench.warmup_and_decay(done, total)
