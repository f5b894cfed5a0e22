"""What the recorded runs on MNIST-1D say about large batches and ghosts, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.studies.ghost_norm import sweeps
from labcore.studies.ghost_norm.large_batches import EPOCHS, LARGE, SMALL

__all__ = ["GHOSTS_GOAL", "LONG", "difference", "points", "updates"]

LONG = 4 * EPOCHS  # epochs of the large batch's long runs
GHOSTS_GOAL = "to the small batch's accuracy, with ghosts"
LOSS = f"at training loss {sweeps.EQUAL_LOSS:g}"


def difference(mine: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return differences of accuracies in percentage points, seed by seed."""
    return [100 * (a - b) for a, b in zip(mine, other, strict=True)]


def points() -> dict[str, list[float]]:
    """Return differences of test accuracy, in percentage points, by name and seed.

    "Small" is the batch of 32 after EPOCHS epochs, unless the training loss or the rows are named.
    """
    small, large = (sweeps.lengths("batch norm", batch) for batch in (SMALL, LARGE))
    ghosts = sweeps.lengths("ghosts of 32", LARGE)
    goal = small.accuracy_after(EPOCHS)
    loss = sweeps.EQUAL_LOSS
    layer = [sweeps.lengths("layer norm", batch).accuracy_at(loss) for batch in (LARGE, SMALL)]
    fresh = [sweeps.lengths("batch norm", batch, fresh=True) for batch in (LARGE, SMALL)]
    found = {
        f"{LOSS}/large minus small": (large.accuracy_at(loss), small.accuracy_at(loss)),
        f"{LOSS}/large with ghosts minus small": (
            ghosts.accuracy_at(loss),
            small.accuracy_at(loss),
        ),
        f"{LOSS}/ghosts' own effect": (ghosts.accuracy_at(loss), large.accuracy_at(loss)),
        f"{LOSS}/layer norm, large minus small": (layer[0], layer[1]),
        f"fresh rows, after {EPOCHS} epochs/large minus small": (
            fresh[0].accuracy_after(EPOCHS),
            fresh[1].accuracy_after(EPOCHS),
        ),
    }
    for epochs in (EPOCHS, 2 * EPOCHS, LONG):
        mine, whole = ghosts.accuracy_after(epochs), large.accuracy_after(epochs)
        found[f"after {epochs} epochs/ghosts' own effect"] = (mine, whole)
        found[f"after {epochs} epochs/ghosts minus small after {EPOCHS}"] = (mine, goal)
        found[f"after {epochs} epochs/large minus small after {EPOCHS}"] = (whole, goal)
    return {name: difference(*pair) for name, pair in found.items()}


def updates() -> dict[str, list[float]]:
    """Return the updates of the large batch over those of the small batch, by goal and seed.

    Whole batches do not reach the small batch's accuracy on every seed, so that goal is for ghosts.
    """
    small, large = (sweeps.lengths("batch norm", batch) for batch in (SMALL, LARGE))
    ghosts, loss = sweeps.lengths("ghosts of 32", LARGE), sweeps.EQUAL_LOSS
    goal, taken = small.accuracy_after(EPOCHS), small.updates[small.epochs.index(EPOCHS)]
    pairs = zip(large.updates_at(loss), small.updates_at(loss), strict=True)
    return {
        f"to training loss {loss:g}": [a / b for a, b in pairs],
        GHOSTS_GOAL: [each / taken for each in ghosts.updates_to(goal)],
    }
