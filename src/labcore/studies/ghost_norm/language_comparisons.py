"""What the recorded runs of the language model say about its batch, seed by seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from labcore import records
from labcore.studies.ghost_norm.language import CONSTANT, FIRST, Noise
from labcore.studies.language import bench
from labcore.studies.language.curves import reported, tokens_to
from labcore.studies.language.tuning import REPORT_SEEDS

__all__ = [
    "GOALS",
    "critical_batch",
    "differences",
    "noise_scales",
    "own_losses",
    "token_ratios",
    "tuned_differences",
    "tuned_losses",
]

# A training loss in nats per token -> the batches, in tokens per step, that reach it.
GOALS = {5.9: (2_048, 8_192, 32_768), 4.7: (2_048, 8_192)}


def _own(name: str) -> list[records.Record]:
    cases = (f"language/{name}/seed {seed}" for seed in REPORT_SEEDS)
    return [records.find("ghost_norm", case, "held-out loss") for case in cases]


def own_losses(name: str) -> list[float]:
    """Return the held-out losses of this chapter's runs: "32768/unchanged", "warm-up" and so on."""
    return [record.p50 for record in _own(name)]


def tuned_losses(batch: int) -> Sequence[float]:
    """Return the held-out losses of AdamW tuned at a batch of `labcore.studies.language`."""
    return reported(batch, "AdamW").held_out


def _paired(
    pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> dict[str, list[float]]:
    return {name: [a - b for a, b in zip(*pair, strict=True)] for name, pair in pairs.items()}


def tuned_differences() -> dict[str, list[float]]:
    """Return differences of tuned batches' held-out losses in nats per token, by name and seed."""
    steps = itertools.pairwise(bench.BATCHES)
    return _paired({f"{b} minus {a}": (tuned_losses(b), tuned_losses(a)) for a, b in steps})


def differences() -> dict[str, list[float]]:
    """Return differences of held-out losses in nats per token, by name and seed.

    A run that is "tuned" has the rate that is best at its own batch; the others, TUNED_AT's.
    """
    large = max(bench.BATCHES)
    root, unchanged = own_losses(f"{large}/square root"), own_losses(f"{large}/unchanged")
    warm_up, constant = own_losses("warm-up"), own_losses(f"{CONSTANT}/square root")
    first = tuned_losses(FIRST)
    return _paired(
        {
            f"{large}/unchanged minus tuned": (unchanged, tuned_losses(large)),
            f"{large}/square root minus tuned": (root, tuned_losses(large)),
            f"{large}/square root minus unchanged": (root, unchanged),
            f"warm-up minus {CONSTANT}": (warm_up, constant),
            f"warm-up minus {FIRST}, tuned": (warm_up, first),
            f"{CONSTANT} minus {FIRST}, tuned": (constant, first),
        }
    )


def token_ratios() -> dict[str, list[float]]:
    """Return the tokens to a training loss over those of the smallest batch, by name and seed."""
    small = min(bench.BATCHES)
    return {
        f"tokens ratio, {batch} over {small}/to training loss {loss:g}": [
            a / b
            for a, b in zip(
                tokens_to(loss, batch, "AdamW"), tokens_to(loss, small, "AdamW"), strict=True
            )
        ]
        for loss, batches in GOALS.items()
        for batch in batches
        if batch != small
    }


def critical_batch(ratio: float, few: int, many: int) -> float:
    """Return the batch size at which tokens double, from the tokens that two batches need.

    ratio: tokens at batch `many` over those at batch `few`, to one loss. If a batch B needs
    1 + B / critical times the least tokens (McCandlish et al., arXiv 1812.06162), the ratio lies
    between 1, where the result is infinite, and many / few, where it is 0.
    """
    if ratio <= 1:
        return math.inf
    return max(many - ratio * few, 0.0) / (ratio - 1)


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
