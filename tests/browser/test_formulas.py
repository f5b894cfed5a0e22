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
    "film": (memory.film, memory.FILM_FORMULA, CONTROLS["film"]),
    "stages": (memory.stages, memory.STAGES_FORMULA, CONTROLS["stages"]),
}
COMPUTE = """([name, settings, data, frame]) => settings.map(chosen => {
    const copy = structuredClone(frame);
    labcoreFormulas[name](chosen, data, copy);
    return copy;
})"""


def numbers(frame: Any) -> list[float]:
    """The heights of all bars or areas, their places, and where axis and lines are."""
    found = [y for trace in frame["data"] for y in trace["y"]] + frame["layout"]["yaxis"]["range"]
    found += [x for trace in frame["data"] for x in trace["x"] if not isinstance(x, str)]
    return found + [one[key] for one in frame["layout"]["shapes"] for key in ("x0", "y0")]


def words(frame: Any) -> Any:
    """The title, the names, and which lines and labels are shown."""
    layout = frame["layout"]
    marks = [one.get("visible", True) for one in (*layout["shapes"], *layout["annotations"])]
    return layout["title"]["text"], marks, [trace["name"] for trace in frame["data"]]


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
