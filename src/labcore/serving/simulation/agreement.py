"""Compare a simulated run with a measured one: rates, medians, and tails with their uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

from labcore.checks import positive
from labcore.serving.simulation.simulate import Run, bootstrap

__all__ = ["Agreement", "agreement"]

_TIMES = ("queue", "ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One quantity in two runs of the same requests.

    simulated, measured: requests or tokens per second, or seconds. low, high: for a p99, the
    bootstrap interval of the measured run; otherwise, the measured value minus and plus the
    tolerance.
    """

    simulated: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The relative error (simulated - measured) / measured; NaN if measured is 0."""
        return (self.simulated - self.measured) / self.measured if self.measured else float("nan")

    @property
    def agrees(self) -> bool:
        """Whether the simulated value lies between low and high."""
        return self.low <= self.simulated <= self.high


def agreement(
    simulated: Run, measured: Run, *, tolerance: float = 0.15, level: float = 0.95, seed: int = 0
) -> dict[str, Agreement]:
    """Compare two runs: "requests/s", "tokens/s", and "ttft p50", "ttft p99", ... for each time.

    tolerance: relative tolerance of rates and medians. level: confidence level of the interval for
    a p99, from resampling the measured requests. With few requests the interval depends on the
    largest few and is too narrow (see `bootstrap`). A time that no request has is omitted.
    Raises ValueError unless both runs served requests with the same ids.
    """
    positive("tolerance", tolerance)
    ids = [sorted(one.id for one in run.metrics) for run in (simulated, measured)]
    if ids[0] != ids[1] or not ids[0]:
        raise ValueError(
            f"both runs must serve the same requests, got {len(ids[0])} and {len(ids[1])} ids "
            "that differ; simulate the requests that were measured"
        )
    told = {}
    for name, field in (("requests/s", "requests_per_second"), ("tokens/s", "tokens_per_second")):
        told[name] = _near(getattr(simulated, field), getattr(measured, field), tolerance)
    first, second = simulated.summary(), measured.summary()
    for name in _TIMES:
        values = [value for one in measured.metrics if (value := getattr(one, name)) is not None]
        if not values or not first[name]["n"]:
            continue
        told[f"{name} p50"] = _near(first[name]["p50"], second[name]["p50"], tolerance)
        low, high = bootstrap(values, 0.99, seed=seed, level=level)
        told[f"{name} p99"] = Agreement(
            simulated=first[name]["p99"], measured=second[name]["p99"], low=low, high=high
        )
    return told


def _near(simulated: float, measured: float, tolerance: float) -> Agreement:
    return Agreement(
        simulated=simulated,
        measured=measured,
        low=measured * (1 - tolerance),
        high=measured * (1 + tolerance),
    )
