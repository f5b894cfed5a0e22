"""A language model's batch: carried rates, batch warm-up, noise scale, and what reading leaves.

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

from labcore import records
from labcore.checks import one_of
from labcore.models import Llama
from labcore.models.training import Batches, next_token_loss, train, windows
from labcore.studies.language import bench
from labcore.studies.language.results import run_record
from labcore.studies.language.tuning import REPORT_SEEDS, Setting

__all__ = [
    "CARRIED",
    "CONSTANT",
    "FIRST",
    "MICRO_BATCHES",
    "POINTS",
    "RULES",
    "TUNED_AT",
    "CarriedRun",
    "Noise",
    "WarmedUp",
    "carried",
    "differences",
    "gaps",
    "noise_scale",
    "noise_scales",
    "own_losses",
    "read_and_unread",
    "train_carried",
    "train_warming_up",
    "tuned_losses",
    "two_batch_estimate",
]

TUNED_AT = 8_192  # tokens per step at which the rate was tuned that other batches take over
RULES: Mapping[str, float] = {"unchanged": 0.0, "square root": 0.5}
"""Rule -> the power of the batches' ratio that multiplies the learning rate."""
FIRST, SHARE = 2_048, 1 / 3  # batch warm-up: tokens per step in the first third of the tokens
CONSTANT = 4_096  # tokens per step of a constant batch that makes as many steps as the warm-up
CARRIED = (
    (FIRST, "square root"),
    (CONSTANT, "square root"),
    (32_768, "unchanged"),
    (32_768, "square root"),
)
"""The batches, in tokens per step, that take over a rate, and by which of RULES."""
POINTS = (1 / 32, 1 / 8, 1 / 2, 1.0)  # shares of the training at which the noise is measured
APART_SEED = 10**6  # apart from the seeds of runs
MICRO_BATCHES = 16  # the two batches of an estimate: one forward pass, and this many
JUDGED = 32  # forward passes for the loss on what a model has read


def carried(setting: Setting, batch: int, rule: str) -> Setting:
    """Return a setting tuned at TUNED_AT tokens per step, carried over to another batch.

    rule: of RULES. The decay stays.
    """
    power = RULES[one_of("rule", rule, RULES)]
    return Setting(lr=setting.lr * (batch / TUNED_AT) ** power, decay=setting.decay)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CarriedRun:
    """A run with a carried rate. loss: on held-out files, in nats per token; losses: of every step.

    read, unread: the loss after the training on windows of text that the model has read, and on
    windows of the same files that it has not (see `read_and_unread`).
    """

    loss: float
    losses: tuple[float, ...]
    read: float
    unread: float


def train_carried(
    setting: Setting,
    batch: int,
    *,
    seed: int,
    tokens: int = bench.TOKENS,
    max_files: int | None = None,
) -> CarriedRun:
    """Train with AdamW in batches of `batch` tokens, and judge the model on what it has read."""
    model = bench.language_model(seed)
    run = bench.train_language(
        functools.partial(bench.OPTIMIZERS["AdamW"], lr=setting.lr, decay=setting.decay),
        batch=batch,
        seed=seed,
        tokens=tokens,
        model=model,
        max_files=max_files,
    )
    passes = len(run.curve.losses) * batch // (bench.ROWS * bench.LENGTH)
    text = bench.text("report", max_files=max_files)
    read, unread = read_and_unread(model, text, seed=seed, passes=passes)
    return CarriedRun(loss=run.loss, losses=tuple(run.curve.losses), read=read, unread=unread)


def read_and_unread(model: Llama, text: Tensor, *, seed: int, passes: int) -> tuple[float, float]:
    """Return a model's loss on windows that its training has read and on others, in nats per token.

    text: tokens int64 [N]. The training read the first `passes` batches of windows of `seed`. The
    other windows share no token with them. Raises ValueError if there is no such window.
    """
    places = torch.arange(len(text))
    read, apart = (
        windows(places, batch=bench.ROWS, length=bench.LENGTH, seed=each)
        for each in (seed, APART_SEED + seed)
    )
    covered = torch.zeros(len(text), dtype=torch.bool)
    for n in range(passes):
        covered[read(n)[0]] = True
    mine = torch.cat([read(n * passes // JUDGED)[0] for n in range(JUDGED)])
    others = torch.cat([apart(n)[0] for n in range(2 * JUDGED)])
    others = others[~covered[others].any(1)]
    if not len(others):
        raise ValueError(f"the training must leave windows of the text unread; it read {passes}")
    return _mean_loss(model, text[mine]), _mean_loss(model, text[others])


@torch.no_grad()
def _mean_loss(model: Llama, rows: Tensor) -> float:
    device = model.embed_tokens.weight.device
    total = sum(
        next_token_loss(model, part.to(device))[0].item() for part in rows.split(bench.ROWS)
    )
    return total / (rows.shape[0] * (rows.shape[1] - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """A two-batch estimate, in tokens: E|g|² = signal + noise / tokens for a batch's gradient g.

    signal: |G|², the squared norm of the true gradient. noise: the trace of the covariance of one
    token's gradient. Both are unbiased, so a signal near 0 can come out negative.
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


# Records -----------------------------------------------------------------------------------------


def tuned_losses(batch: int) -> list[float]:
    """Return the held-out losses of AdamW tuned at a batch of `labcore.studies.language`."""
    return [run_record(batch, "AdamW", f"seed {seed}").p50 for seed in REPORT_SEEDS]


def _own(name: str) -> list[records.Record]:
    cases = (f"language/{name}/seed {seed}" for seed in REPORT_SEEDS)
    return [records.find("ghost_norm", case, "held-out loss") for case in cases]


def own_losses(name: str) -> list[float]:
    """Return the held-out losses of this chapter's runs: "32768/unchanged", "warm-up" and so on."""
    return [record.p50 for record in _own(name)]


def gaps(batch: int) -> list[float]:
    """Return the loss on text not read minus the loss on text read, by seed, in nats per token.

    batch: of CARRIED, with the rate that the square root of the batches' ratio scales.
    """
    runs = [record.details for record in _own(f"{batch}/square root")]
    return [run["unread"] - run["read"] for run in runs]


def differences() -> dict[str, list[float]]:
    """Return differences of losses in nats per token, by name and seed."""
    tuned = {batch: tuned_losses(batch) for batch in bench.BATCHES}
    own = {f"{batch}/{rule}": own_losses(f"{batch}/{rule}") for batch, rule in CARRIED}
    small, large = min(bench.BATCHES), max(bench.BATCHES)
    gap = {batch: gaps(batch) for batch in (small, large)}
    pairs = {
        f"tuned, {batch} minus {TUNED_AT}": (tuned[batch], tuned[TUNED_AT])
        for batch in (small, large)
    }
    pairs |= {
        f"{batch}/{rule} minus tuned": (own[f"{batch}/{rule}"], tuned[batch])
        for batch, rule in CARRIED
        if batch in tuned
    }
    root, unchanged = own[f"{large}/square root"], own[f"{large}/unchanged"]
    pairs |= {
        f"{large}/square root minus unchanged": (root, unchanged),
        f"warm-up minus {CONSTANT}": (own_losses("warm-up"), own[f"{CONSTANT}/square root"]),
        f"gap/{large} minus {small}": (gap[large], gap[small]),
    }
    found = {name: [a - b for a, b in zip(*pair, strict=True)] for name, pair in pairs.items()}
    return found | {f"gap/{batch}": each for batch, each in gap.items()}


def noise_scales() -> dict[float, tuple[float, dict[str, list[float]]]]:
    """Return the noise scale in tokens by share of the training, and what each seed found.

    Signal and noise are averaged over the seeds before they are divided, as their ratio is biased.
    """
    runs = [record.details["noise"] for record in _own("warm-up")]
    found = {}
    for share in runs[0]:
        by_seed = {part: [run[share][part] for run in runs] for part in ("signal", "noise")}
        pooled = Noise(signal=fmean(by_seed["signal"]), noise=fmean(by_seed["noise"]))
        found[float(share)] = pooled.scale, by_seed
    return found
