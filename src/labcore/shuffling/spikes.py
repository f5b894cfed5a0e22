"""Detect loss spikes as they happen, and keep track of the data in the batch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labcore.checks import fraction, positive, positive_int

__all__ = ["LossSpikeDetector", "Spike"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A loss spike.

    step, loss, provenance: those of its first step; provenance is what was passed to `update`.
    baseline, mad: the median of the losses before it and their median absolute deviation (after
    the floor); NaN if there were none. score: (loss - baseline)/mad; inf if the loss is not finite.
    length: updates from its first to its last step above the threshold.
    peak, peak_step: its worst loss, and when. NaN and infinity are worse than any number.
    """

    step: int
    loss: float
    baseline: float
    mad: float
    score: float
    provenance: Any = None
    length: int = 1
    peak: float
    peak_step: int


class LossSpikeDetector:
    """Compare each loss with the trailing median, in units of the median absolute deviation.

    window: the number of losses in the baseline. Finite losses are not judged until it is full.
    threshold: the number of median absolute deviations (MADs) above the median. For normal noise, a
    MAD is 0.674 standard deviations, so 6 MADs are about 4 standard deviations. A baseline of 50
    losses is itself uncertain: about one in 2,500 independent normal losses raises an alarm.
    patience: a spike ends after this many consecutive losses below the threshold. Until then,
    further losses above it belong to the same spike.
    floor: the MAD counts as at least this fraction of |median|, so a tiny rise of a constant loss
    is not a spike.

    NaN and infinity are spikes at once, even before the window is full. Losses above the threshold
    do not enter the window. After `window` of them in one spike, they become the new baseline and
    the spike ends, because the loss has moved to another level.
    """

    def __init__(
        self,
        *,
        window: int = 50,
        threshold: float = 6.0,
        patience: int = 5,
        floor: float = 0.01,
    ) -> None:
        self.window = positive_int("window", window)
        self.threshold = float(positive("threshold", threshold))
        self.patience = positive_int("patience", patience)
        self.floor = float(fraction("floor", floor))
        self._calm: deque[float] = deque(maxlen=window)
        self._above: list[float] = []
        self._spikes: list[Spike] = []
        self._last_step: int | None = None
        self._since = 0  # updates since the current spike began
        self._quiet: int | None = None  # losses below since its last one above; None: no spike

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """All spikes so far. The last one may not be over."""
        return tuple(self._spikes)

    def update(self, step: int, loss: float | Tensor, provenance: Any = None) -> Spike | None:
        """Judge one loss. Return the Spike if one begins here, or None.

        step: must be greater than the last one. provenance: what was in the batch (row indices,
        files, keys), stored unchanged in the Spike. Reading a loss tensor waits for the GPU.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"steps must increase, got {step} after {self._last_step}; call update once per "
                "step, with one detector per run"
            )
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        self._last_step = step
        baseline, mad = self._baseline()
        score = self._score(value, baseline, mad)
        self._since += 1
        if score <= self.threshold:
            self._calm.append(value)
            self._rest()
            return None
        if self._quiet is None:
            begun = Spike(
                step=step,
                loss=value,
                baseline=baseline,
                mad=mad,
                score=score,
                provenance=provenance,
                peak=value,
                peak_step=step,
            )
            self._spikes.append(begun)
            self._since = 1
        else:
            begun = None
            self._extend(step, value)
        self._quiet = 0
        self._keep(value)
        return begun

    def _baseline(self) -> tuple[float, float]:
        if not self._calm:
            return math.nan, math.nan
        median = statistics.median(self._calm)
        mad = statistics.median(abs(loss - median) for loss in self._calm)
        return median, max(mad, self.floor * abs(median))

    def _score(self, loss: float, baseline: float, mad: float) -> float:
        if not math.isfinite(loss):
            return math.inf
        if len(self._calm) < self.window or loss <= baseline:
            return 0.0
        return (loss - baseline) / mad if mad else math.inf

    def _rest(self) -> None:
        if self._quiet is not None:
            self._quiet += 1
            if self._quiet >= self.patience:
                self._end()

    def _end(self) -> None:
        self._quiet = None
        self._above.clear()

    def _extend(self, step: int, loss: float) -> None:
        event = dataclasses.replace(self._spikes[-1], length=self._since)
        if math.isfinite(event.peak) and not loss <= event.peak:
            event = dataclasses.replace(event, peak=loss, peak_step=step)
        self._spikes[-1] = event

    def _keep(self, loss: float) -> None:
        """Remember the losses of a spike. A full window of them is a new level."""
        if math.isfinite(loss):
            self._above.append(loss)
        if len(self._above) == self.window:
            self._calm.extend(self._above)
            self._end()

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next update depends on, and the spikes with their provenance."""
        return {
            "settings": [self.window, self.threshold, self.patience, self.floor],
            "calm": list(self._calm),
            "above": list(self._above),
            "spikes": [
                {field.name: getattr(spike, field.name) for field in dataclasses.fields(spike)}
                for spike in self._spikes
            ],
            "last_step": self._last_step,
            "since": self._since,
            "quiet": self._quiet,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`. Raises ValueError if the settings differ."""
        settings = [self.window, self.threshold, self.patience, self.floor]
        if list(state["settings"]) != settings:
            raise ValueError(
                "a state needs a detector with the same window, threshold, patience and floor, got "
                f"{state['settings']} for {settings}; build the detector with the state's settings"
            )
        self._calm = deque(state["calm"], maxlen=self.window)
        self._above = list(state["above"])
        self._spikes = [Spike(**spike) for spike in state["spikes"]]
        self._last_step, self._since = state["last_step"], state["since"]
        self._quiet = state["quiet"]
