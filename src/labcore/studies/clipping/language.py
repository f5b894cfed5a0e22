"""Clipping in the language model that the training chapters share: its limit, and bad batches.

The bench clips the global norm to 1. Here a whole run is clipped otherwise, or a run is damaged
after BRANCH_AT of its BRANCH_STEPS steps and continued in branches, each with its own damage and
its own protection.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from labcore.checks import one_of
from labcore.clipping import clip_by_global_norm
from labcore.models import Llama
from labcore.models.training import Batches, Clip, next_token_loss, train, windows
from labcore.studies.clipping.damage import KINDS as ALL_KINDS
from labcore.studies.clipping.damage import LENGTHS, Damage
from labcore.studies.clipping.exploding import UPDATES
from labcore.studies.clipping.updates import UpdateClippedAdamW
from labcore.studies.language import bench
from labcore.studies.language.bench import LanguageRun
from labcore.studies.language.tuning import Setting

__all__ = [
    "BRANCH_AT",
    "BRANCH_BATCH",
    "BRANCH_STEPS",
    "FEWER",
    "KINDS",
    "LIMITS",
    "METHODS",
    "PHASES",
    "SIGMAS",
    "SKIP",
    "WINDOW",
    "Branch",
    "SkipStep",
    "branches",
    "clipped_share",
    "train_limited",
]

Parameters = list[torch.nn.Parameter]


def _unclipped(parameters: Parameters) -> Tensor:
    return clip_by_global_norm(parameters, math.inf).norm


# What stands in for the bench's global norm of 1 in a whole run.
LIMITS: Mapping[str, Clip] = {
    "no clipping": _unclipped,
    "max_norm 0.1": bench.clip_to(0.1),
}
# How the gradients of a branch are clipped; UPDATES clips none of them.
CLIPS: Mapping[str, Clip] = {
    "none": _unclipped,
    "max_norm 1.0": bench.clip_to(1.0),
    UPDATES: _unclipped,
}
SKIP, FEWER = "skip", "steps fewer"  # `SkipStep`; an undamaged run without as many steps
METHODS = (*CLIPS, SKIP)
WINDOW, SIGMAS = 128, 6.0  # of SkipStep
# A gradient that is large but right keeps its direction when it is clipped, so it is left out.
KINDS = tuple(kind for kind in ALL_KINDS if kind != "large")
BRANCH_BATCH, BRANCH_STEPS, BRANCH_AT = 2_048, 116, 84  # tokens per step; steps; the first bad one
# A phase of a run, as shares of its steps.
PHASES = {"warmup": (0.0, 0.1), "to the middle": (0.1, 0.5), "second half": (0.5, 1.0)}


def clipped_share(
    norms: Sequence[float], max_norm: float, phase: tuple[float, float] = (0.0, 1.0)
) -> float:
    """Return the share of a phase's steps whose norm is above `max_norm`."""
    first, last = (round(share * len(norms)) for share in phase)
    steps = norms[first:last]
    return sum(norm > max_norm for norm in steps) / len(steps)


def train_limited(
    limit: str,
    setting: Setting,
    *,
    batch: int,
    seed: int,
    tokens: int = bench.TOKENS,
    max_files: int | None = None,
) -> LanguageRun:
    """Run the bench with AdamW and a clipping of LIMITS; its curve has the norms before clipping.

    The other arguments are as of `labcore.studies.language.tuning.train_setting`.
    """
    return bench.train_language(
        functools.partial(bench.OPTIMIZERS["AdamW"], lr=setting.lr, decay=setting.decay),
        batch=batch,
        seed=seed,
        tokens=tokens,
        clip=LIMITS[one_of("limit", limit, LIMITS)],
        max_files=max_files,
    )


class SkipStep:
    """Leaves out steps with a strange loss or norm, by OLMo-core's rule; clips the others to 1.

    A value is strange if it is more than SIGMAS standard deviations from the mean of the last
    WINDOW values before it. With fewer than half as many, the last included, nothing is left out,
    and the values of a step that was left out stay in the window. Leaving out a step changes
    neither the weights nor the optimizer's state. `loss` and `clip` are those of
    `labcore.models.training.train`, for steps of one batch; the norm is that before clipping.
    losses, norms: of the steps before. left_out: the steps, counted from the first call.
    Source: SkipStepOptimizer of https://github.com/allenai/OLMo-core.
    """

    def __init__(self, losses: Iterable[float], norms: Iterable[float]) -> None:
        self._losses, self._norms = [*losses], [*norms]
        self._first = len(self._norms)
        self.left_out: list[int] = []

    def loss(self, model: Llama, tokens: Tensor, counts: Tensor | None) -> tuple[Tensor, int]:
        """Compute the next-token loss and keep its mean."""
        total, predicted = next_token_loss(model, tokens, counts)
        self._losses.append(float(total.detach()) / predicted)
        return total, predicted

    def clip(self, parameters: Parameters) -> Tensor | float | None:
        """Clip the gradients, or remove them if the step is to be left out; return the norm."""
        norm = bench.clip_to(1.0)(parameters)
        self._norms.append(float(norm or 0.0))
        if _strange(self._losses) or _strange(self._norms):
            self.left_out.append(len(self._norms) - 1 - self._first)
            _remove(parameters)
        return norm


def _strange(values: Sequence[float]) -> bool:
    *window, last = values[-WINDOW - 1 :]
    if len(window) + 1 < WINDOW // 2:
        return False
    return not abs(last - statistics.fmean(window)) <= SIGMAS * statistics.stdev(window)


def _remove(parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.grad = None


def _without(steps: int) -> Clip:
    """Return a hook that leaves out the first `steps` steps, and clips as the bench does."""
    seen = 0

    def clip(parameters: Parameters) -> Tensor | float | None:
        nonlocal seen
        norm = bench.clip_to(1.0)(parameters)
        seen += 1
        if seen <= steps:
            _remove(parameters)
        return norm

    return clip


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A continued run. losses, norms: from the first bad step on, in nats per token and before
    clipping. held_out: the loss on held-out files at the end. left_out: the steps that SKIP left
    out, counted from the first bad one.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    held_out: float
    left_out: tuple[int, ...]


def branches(
    kind: str,
    setting: Setting,
    *,
    seed: int,
    steps: int = BRANCH_STEPS,
    at: int = BRANCH_AT,
    held_out_rows: int = 128,
    max_files: int | None = None,
) -> dict[tuple[int, str], Branch]:
    """Train to step `at` as the bench does, then to the end in branches by (length, method).

    kind: "none" or one of KINDS. A length is one of LENGTHS, the number of bad batches, of which
    `at` is the first. For "none" every method has one branch, and FEWER has one for each length,
    without as many steps. A step reads BRANCH_BATCH tokens. The branches start from the same
    weights and optimizer state, and read the same batches, but for the damage.
    """
    source = windows(
        bench.text("report", max_files=max_files), batch=bench.ROWS, length=bench.LENGTH, seed=seed
    )
    judged_on = bench.text("held out", max_files=max_files)
    schedule = functools.partial(bench.warmup_and_decay, steps=steps)
    corrupt = functools.partial(_random_tokens, seed=seed)
    wanted = [*itertools.product(LENGTHS, METHODS)]
    if kind == "none":
        wanted = [(LENGTHS[0], method) for method in METHODS] + [(n, FEWER) for n in LENGTHS]
    # Keeps the gradients that the stale branches use.
    keeper = Damage("none", at=at, steps=max(LENGTHS), corrupt=corrupt)
    found = {}
    with TemporaryDirectory() as folder:
        trunk, branch = Path(folder) / "trunk.pt", Path(folder) / "branch.pt"
        model = bench.language_model(seed)
        before = train(
            model,
            source,
            _optimizer(model, "none", setting),
            steps=at,
            clip=_damaging(keeper, bench.clip_to(1.0), 0),
            schedule=schedule,
            checkpoint=trunk,
            save_every=at,
            progress=False,
        )
        for length, method in wanted:
            shutil.copy(trunk, branch)
            harm = Damage(kind, at=at, steps=length, corrupt=corrupt, kept=keeper.kept)
            harm.batch(at - 1, source(at - 1))
            skip = SkipStep(before.losses, [norm or 0.0 for norm in before.norms])
            clips = {**CLIPS, SKIP: skip.clip, FEWER: _without(length)}
            model = bench.language_model(seed)
            curve = train(
                model,
                _damaged(source, harm),
                _optimizer(model, method, setting),
                steps=steps,
                loss=skip.loss if method == SKIP else next_token_loss,
                clip=_damaging(harm, clips[method], at),
                schedule=schedule,
                checkpoint=branch,
                save_every=steps,
                progress=False,
            )
            found[length, method] = Branch(
                losses=tuple(curve.losses[at:]),
                norms=tuple(norm or 0.0 for norm in curve.norms[at:]),
                held_out=bench.held_out_loss(model, judged_on, held_out_rows),
                left_out=tuple(skip.left_out),
            )
    return found


def _damaged(source: Batches, harm: Damage[tuple[Tensor, Tensor | None]]) -> Batches:
    return lambda n: harm.batch(n, source(n))


def _damaging(harm: Damage[tuple[Tensor, Tensor | None]], clip: Clip, first: int) -> Clip:
    """Return a hook that damages the gradients, then clips them; its first call is step `first`."""
    step = first

    def hook(parameters: Parameters) -> Tensor | float | None:
        nonlocal step
        harm.gradients(step, parameters)
        step += 1
        return clip(parameters)

    return hook


def _random_tokens(
    n: int, drawn: tuple[Tensor, Tensor | None], *, seed: int
) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + n)
    tokens, counts = drawn
    return torch.randint(bench.CONFIG.vocab_size, tokens.shape, generator=generator), counts


def _optimizer(model: Llama, method: str, setting: Setting) -> torch.optim.Optimizer:
    """Return the bench's AdamW, or for UPDATES the one with clipped updates and equal groups."""
    adamw = bench.OPTIMIZERS["AdamW"](model, lr=setting.lr, decay=setting.decay)
    if method != UPDATES:
        return adamw
    groups = [
        {key: group[key] for key in ("params", "weight_decay")} for group in adamw.param_groups
    ]
    first = adamw.param_groups[0]
    return UpdateClippedAdamW(groups, lr=first["lr"], betas=first["betas"], eps=first["eps"])
