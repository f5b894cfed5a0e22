"""What a page computes of a figure is what its Python form draws, at random settings."""

from __future__ import annotations

import random
from typing import Any

import pytest

from labcore.ui import twin
from labcore.ui.compact import plain
from labcore.ui.figures import memory
from tests.ui.figures.test_memory import CONTROLS

pytestmark = pytest.mark.long

FORMULAS = {
    "moments": (memory.moments, memory.MOMENTS_FORMULA, CONTROLS["moments"]),
    "stages": (memory.stages, memory.STAGES_FORMULA, CONTROLS["stages"]),
}
COMPUTE = """([name, settings, data, frame]) => settings.map(chosen => {
    const copy = structuredClone(frame);
    labcoreFormulas[name](chosen, data, copy);
    return copy;
})"""


def numbers(frame: Any) -> list[float]:
    """The heights of all bars, and where the axis ends."""
    return [y for bar in frame["data"] for y in bar["y"]] + frame["layout"]["yaxis"]["range"]


def words(frame: Any) -> Any:
    """The title, and which lines and labels are shown."""
    layout = frame["layout"]
    marks = [one["visible"] for one in (*layout["shapes"], *layout["annotations"])]
    return layout["title"]["text"], marks


@pytest.mark.parametrize("name", FORMULAS)
def test_the_page_and_python_agree(name: str, watch: Any, seed: int) -> None:
    draw, formula, controls = FORMULAS[name]
    pick = random.Random(seed)
    settings = [
        {key: pick.choice(control.positions()) for key, control in controls.items()}
        for _ in range(200)
    ]
    watched = watch()
    watched.page.add_script_tag(path=twin.FORMULAS)
    told = [formula.name, settings, formula.data(), plain(draw().to_dict())]
    for chosen, computed in zip(settings, watched.page.evaluate(COMPUTE, told), strict=True):
        drawn = draw(**chosen).to_plotly_json()
        assert words(computed) == words(drawn), chosen
        assert numbers(computed) == pytest.approx(numbers(drawn), rel=1e-4, abs=1e-6), chosen
    watched.calm()
