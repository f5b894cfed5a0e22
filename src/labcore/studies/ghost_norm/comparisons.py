"""What the recorded runs on MNIST-1D say about large batches and ghosts, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.studies.ghost_norm import sweeps
from labcore.studies.ghost_norm.large_batches import EPOCHS, LARGE, SMALL

__all__ = ["EQUAL_LOSSES", "GHOSTS_GOAL", "NORMS", "costs", "difference", "differences", "updates"]

NORMS = ("batch norm", "ghosts of 32", "layer norm")
"""The kinds that were trained at every batch size."""
GHOSTS_GOAL = "to the small batch's accuracy, with ghosts"
EQUAL_LOSSES = (sweeps.EQUAL_LOSS, 0.5)


def difference(mine: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return differences of accuracies in percentage points, seed by seed."""
    return [100 * (a - b) for a, b in zip(mine, other, strict=True)]


def differences(what: str) -> dict[str, list[float]]:
    """Return differences of "accuracy" or "test_loss", by name and seed.

    Accuracies in percentage points, losses in nats. "Small" is the batch of 32 with batch
    normalization, at the same training loss or after the number of epochs that is named.
    """
    small, large = (sweeps.lengths("batch norm", batch) for batch in (SMALL, LARGE))
    ghosts = sweeps.lengths("ghosts of 32", LARGE)
    layer = [sweeps.lengths("layer norm", batch) for batch in (LARGE, SMALL)]
    pairs = {}
    for loss in EQUAL_LOSSES:
        mine, whole, goal = (each.at(what, loss) for each in (ghosts, large, small))
        at = f"at training loss {loss:g}"
        pairs[f"{at}/large minus small"] = (whole, goal)
        pairs[f"{at}/large with ghosts minus small"] = (mine, goal)
        pairs[f"{at}/ghosts' own effect"] = (mine, whole)
        pairs[f"{at}/layer norm, large minus small"] = (
            layer[0].at(what, loss),
            layer[1].at(what, loss),
        )
    for epochs in (EPOCHS, 2 * EPOCHS, 4 * EPOCHS):
        mine, whole = (each.after(what, epochs) for each in (ghosts, large))
        pairs[f"after {epochs} epochs/ghosts' own effect"] = (mine, whole)
        for of in (EPOCHS, 2 * EPOCHS):
            goal = small.after(what, of)
            pairs[f"after {epochs} epochs/ghosts minus small after {of}"] = (mine, goal)
            pairs[f"after {epochs} epochs/large minus small after {of}"] = (whole, goal)
    pairs |= {f"fresh rows, {name}": pair for name, pair in _fresh(what).items()}
    return {
        name: difference(*pair)
        if what == "accuracy"
        else [a - b for a, b in zip(*pair, strict=True)]
        for name, pair in pairs.items()
    }


def _fresh(what: str) -> dict[str, tuple[list[float], list[float]]]:
    small, large, ghosts = (
        sweeps.lengths(kind, batch, fresh=True)
        for kind, batch in (("batch norm", SMALL), ("batch norm", LARGE), ("ghosts of 32", LARGE))
    )
    loss = sweeps.FRESH_LOSS
    goal, after = small.at(what, loss), f"after {EPOCHS} epochs"
    return {
        f"at training loss {loss:g}/large minus small": (large.at(what, loss), goal),
        f"at training loss {loss:g}/large with ghosts minus small": (ghosts.at(what, loss), goal),
        f"{after}/large minus small": (large.after(what, EPOCHS), small.after(what, EPOCHS)),
        f"{after}/ghosts' own effect": (ghosts.after(what, EPOCHS), large.after(what, EPOCHS)),
    }


def costs(kind: str, loss: float) -> dict[int, list[float]]:
    """Return the updates to a training loss over those of the smallest batch, by batch and seed.

    kind: of NORMS. The smallest batch is no larger than a ghost, so its ghosts are plain batch
    normalization.
    """
    runs = {
        batch: sweeps.lengths(kind if (kind, batch) in sweeps.CURVES else NORMS[0], batch)
        for batch in sweeps.BATCHES
    }
    few = runs[min(runs)].updates_at(loss)
    return {
        batch: [a / b for a, b in zip(each.updates_at(loss), few, strict=True)]
        for batch, each in runs.items()
    }


def updates() -> dict[str, list[float]]:
    """Return the updates of the large batch over those of the small batch, by goal and seed.

    Whole batches do not reach the small batch's accuracy on every seed, so that goal is for ghosts.
    """
    small, ghosts = sweeps.lengths("batch norm", SMALL), sweeps.lengths("ghosts of 32", LARGE)
    goal, taken = small.after("accuracy", EPOCHS), small.updates[small.epochs.index(EPOCHS)]
    return {
        f"to training loss {sweeps.EQUAL_LOSS:g}": costs("batch norm", sweeps.EQUAL_LOSS)[LARGE],
        GHOSTS_GOAL: [each / taken for each in ghosts.updates_to(goal)],
    }
