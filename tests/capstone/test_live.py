"""A training draws itself: a figure at once, and the last step at the end."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plotly.io as pio
import pytest

from labcore.capstone import Choices, Corpus, Moment, Plan, ScalingLaw
from labcore.capstone import live as drawing
from labcore.capstone.project import Project


class Shown:
    """Stands for a notebook's output, and keeps each figure's title."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def display(self, bundle: Any, *, raw: bool, display_id: bool) -> Shown:
        assert display_id
        self.update(bundle, raw=raw)
        return self

    def update(self, bundle: Any, *, raw: bool) -> None:
        assert raw
        figure = bundle["application/vnd.plotly.v1+json"]
        self.titles.append(figure["layout"]["title"]["text"])


def test_steps_are_drawn_as_they_end(
    text: Corpus, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, clock = Shown(), itertools.count()
    monkeypatch.setattr(drawing, "display", shown.display)
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    monkeypatch.setattr(drawing, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    law = ScalingLaw(floor=0.5, by_weights=50, by_tokens=50, worst=0)
    monkeypatch.setattr(drawing, "scaling_law", lambda: law)
    plan = dataclasses.replace(plan, seconds=0.1)
    project = Project(folder=tmp_path, asked={}, text=text, plan=plan, choices=Choices())
    live = drawing.LiveTraining(project)
    for step in range(plan.steps):
        live(Moment(step=step, loss=2.0, norm=1.0, seconds=0.1))
    assert shown.titles[0].startswith(f"Step 2 of {plan.steps}")
    assert shown.titles[-1].startswith(f"Step {plan.steps} of {plan.steps}")
    assert 2 < len(shown.titles) < plan.steps
    curves = live.curves
    assert curves.expected == law(plan.weights, plan.tokens)
    assert curves.bits == [pytest.approx(2.0 / 0.6931472 / text.bytes_per_token)] * plan.steps
    assert curves.memory[0] == pytest.approx(curves.memory[1], rel=0.1)
