"""A training that draws itself while it runs, and the curves of a recorded one."""

from __future__ import annotations

import math
import time

from IPython.display import DisplayHandle, display

from labcore import device, records
from labcore.capstone.plan import held, predicted
from labcore.capstone.project import Project
from labcore.capstone.scaling import scaling_law
from labcore.capstone.training import Moment
from labcore.ui.figures.capstone import Curves, training

__all__ = ["LiveTraining", "recorded_curves"]

DRAWN_EVERY = 2.0  # seconds
MIB = 1 << 20


class LiveTraining:
    """Pass it to `Project.train` as `watch`: it shows a figure, and keeps it current."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.moments: list[Moment] = []
        plan, choices = project.plan, project.choices
        self.memory = predicted(plan, choices).total / MIB, held(plan, choices).total / MIB
        self.per_nat = 1 / (math.log(2) * project.text.bytes_per_token)
        self.handle: DisplayHandle | None = None
        self.drawn = time.monotonic()

    def __call__(self, moment: Moment) -> None:
        """Add a step."""
        self.moments.append(moment)
        last = moment.step + 1 == self.project.plan.steps
        current = time.monotonic() - self.drawn < DRAWN_EVERY or device.building_book()
        if last or not current:
            self._draw()
            self.drawn = time.monotonic()

    def _draw(self) -> None:
        curves = self.curves
        figure = training(sum(curves.seconds) / 60, curves)
        # As a figure, it would be shown anew each time.
        bundle = figure._repr_mimebundle_()
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    @property
    def curves(self) -> Curves:
        """The steps so far, as the figure takes them."""
        plan = self.project.plan
        return Curves(
            bits=[one.loss * self.per_nat for one in self.moments],
            norms=[one.norm for one in self.moments],
            seconds=[one.seconds for one in self.moments],
            tokens=plan.tokens // plan.steps,
            planned=plan.seconds,
            steps=plan.steps,
            first=self.moments[0].step,
            expected=scaling_law()(plan.weights, plan.tokens),
            memory=self.memory,
        )


def recorded_curves(case: str) -> Curves:
    """Return the curves of a whole run that `python -m benchmarks capstone` recorded."""
    bits = records.find("capstone", case, "held-out text")
    memory = records.find("capstone", case, "memory of a step")
    told = bits.details
    per_nat = 1 / (math.log(2) * told["bytes per token"])
    return Curves(
        bits=[one * per_nat for one in told["losses"]],
        norms=told["norms"],
        seconds=told["seconds"],
        tokens=told["tokens per step"],
        planned=told["planned seconds per step"],
        steps=len(told["losses"]),
        expected=bits.peers["predicted"][0],
        memory=(memory.peers["predicted"][0], memory.p50),
    )
