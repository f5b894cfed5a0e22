"""Bad batches of several kinds: their gradient is too large, points the wrong way, or is both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from labcore.checks import one_of, positive_int
from labcore.studies.clipping import exploding, networks
from labcore.studies.clipping.exploding import FACTOR, HEALTHY, Batch, ClippedRun

__all__ = [
    "AGE",
    "AGES",
    "AT",
    "KINDS",
    "LATER",
    "LENGTHS",
    "LIMITS",
    "MOMENTS",
    "SCALES",
    "Damage",
    "Restore",
    "damaged",
    "excess",
]

AGE = 20  # steps since a stale gradient was computed
# What the gradient of a bad batch is multiplied by.
SCALES = {"large": FACTOR, "large and reversed": -FACTOR, "reversed": -1.0}
KINDS = (*SCALES, "stale", "repeated", "corrupted")
AT, LENGTHS = 75, (1, 5)  # the first bad batch, and how many there are
AGES = (AT, 300, 1_500)  # a run's steps before a bad batch, where they are compared
LATER = (1, 5, 20)  # steps after the last bad batch at which its effect is read
# Limits of the global norm, where they are compared; healthy norms of the recurrent network are
# about 0.5.
LIMITS = (0.05, 0.2, 1.0, 3.0, 10.0, 100.0)
# What is restored of AdamW's state after a bad batch, and what torch calls it.
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "nothing": (),
    "momentum": ("exp_avg",),
    "second moment": ("exp_avg_sq",),
    "both": ("exp_avg", "exp_avg_sq"),
}

B = TypeVar("B")


class Damage(Generic[B]):
    """Damages the batches of the steps `at`, `at + 1`, ..., `steps` of them.

    kind: "none" or one of KINDS. "large" and "reversed" change the gradient, "stale" replaces it by
    the one of AGE steps before, "repeated" uses the batch before `at` again and again, and
    "corrupted" uses what `corrupt` makes of a step's number and batch.
    kept: gradients that another run kept for "stale", by step; this one adds its own.
    """

    def __init__(
        self,
        kind: str,
        *,
        at: int,
        steps: int = 1,
        corrupt: Callable[[int, B], B],
        kept: dict[int, list[Tensor]] | None = None,
    ) -> None:
        self.kind = one_of("kind", kind, ("none", *KINDS))
        self.bad = range(positive_int("at", at), at + positive_int("steps", steps))
        self.kept = {} if kept is None else kept
        self._corrupt = corrupt
        self._last: B | None = None

    def batch(self, step: int, drawn: B) -> B:
        """Return the batch that step number `step` uses in place of `drawn`."""
        if self.kind == "repeated":
            self._last = drawn if self._last is None or step not in self.bad else self._last
            return self._last
        if self.kind == "corrupted" and step in self.bad:
            return self._corrupt(step, drawn)
        return drawn

    @torch.no_grad()
    def gradients(self, step: int, parameters: Sequence[Tensor]) -> None:
        """Damage the gradients of step number `step`, in place, and keep those for "stale"."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if step + AGE in self.bad:
            self.kept[step] = [grad.clone() for grad in grads]
        if step not in self.bad:
            return
        if self.kind == "stale":
            for grad, old in zip(grads, self.kept[step - AGE], strict=True):
                grad.copy_(old)
        for grad in grads:
            grad.mul_(SCALES.get(self.kind, 1.0))


class Restore:
    """Puts a part of AdamW's state back to what it was before step `at`; the weights stay moved.

    Call it after each step, as `exploding.train` does with `after`. what: a key of MOMENTS.
    """

    def __init__(self, what: str, *, at: int = AT) -> None:
        self._names = MOMENTS[one_of("what", what, MOMENTS)]
        self._at = positive_int("at", at)
        self._kept: list[list[Tensor]] = []

    @torch.no_grad()
    def __call__(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state after step `at - 1`, and put it back after step `at`."""
        parts = [[state[name] for name in self._names] for state in optimizer.state.values()]
        if step == self._at - 1:
            self._kept = [[part.clone() for part in each] for each in parts]
        elif step == self._at:
            for each, old in zip(parts, self._kept, strict=True):
                for part, before in zip(each, old, strict=True):
                    part.copy_(before)


def damaged(
    network: str,
    kind: str,
    method: str,
    optimizer: str,
    seed: int,
    *,
    at: int = AT,
    bad: int = 1,
    **settings: Any,
) -> ClippedRun:
    """Train a healthy network with `bad` bad batches from step `at` on.

    kind: "none" or one of KINDS. method: as of `exploding.run`. settings: as of `exploding.run`;
    they replace those of the study.
    """
    generator = torch.Generator().manual_seed(50_000 + seed)

    def corrupt(_step: int, drawn: Batch) -> Batch:
        inputs, targets = drawn
        if network == "conv":
            classes = torch.randint(10, targets.shape, generator=generator)
            return torch.rand(inputs.shape, generator=generator), classes
        high = networks.VOCABULARY
        ids = torch.randint(high, (len(inputs), inputs.shape[1] + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    harm = Damage(kind, at=at, steps=bad, corrupt=corrupt)
    return exploding.run(
        network,
        method,
        optimizer,
        seed,
        change=harm.batch,
        spoil=lambda step, named: harm.gradients(step, [weight for _, weight in named]),
        **{**HEALTHY[one_of("network", network, HEALTHY)], **settings},
    )


def excess(
    damaged: Sequence[float | None], clean: Sequence[float], *, at: int, bad: int
) -> dict[int, float | None]:
    """Return by how much the damage raised the training loss, LATER steps after the last bad batch.

    damaged, clean: losses by step of two runs with the same batches, but for the damage. None where
    the damaged run had ended or its loss was not finite.
    """
    found: dict[int, float | None] = {}
    for later in LATER:
        step = at + bad - 1 + later
        loss = damaged[step] if step < len(damaged) else None
        found[later] = loss - clean[step] if loss is not None and math.isfinite(loss) else None
    return found
