"""What a page computes of a figure is what its Python form draws, at random settings."""

from __future__ import annotations

import random
from typing import Any

import pytest

from labcore.ui import twin
from labcore.ui.compact import plain
from labcore.ui.figures import memory
from tests.ui.figures.test_memory import CONTROLS
from tests.ui.figures.test_memory_cache import REQUESTS

pytestmark = pytest.mark.long

FORMULAS = {
    "film": (memory.film, memory.FILM_FORMULA, CONTROLS["film"]),
    "stages": (memory.stages, memory.STAGES_FORMULA, CONTROLS["stages"]),
    "requests": (memory.requests, memory.REQUESTS_FORMULA, REQUESTS),
}
COMPUTE = """([name, settings, data, frame]) => settings.map(chosen => {
    const copy = structuredClone(frame);
    labcoreFormulas[name](chosen, data, copy);
    return copy;
})"""


def numbers(frame: Any) -> list[float]:
    """All heights, 0 for none, their places, and where the axis and the lines are."""
    found = [y or 0 for trace in frame["data"] for y in trace["y"]]
    found += [x for trace in frame["data"] for x in trace["x"] if not isinstance(x, str)]
    lines = frame["layout"].get("shapes", ())
    found += [one[key] for one in lines for key in ("x0", "y0")]
    return found + list(frame["layout"]["yaxis"]["range"])


def words(frame: Any) -> Any:
    """The title, the names, and which lines and labels are shown."""
    layout = frame["layout"]
    lines = (*layout.get("shapes", ()), *layout.get("annotations", ()))
    marks = [one.get("visible", True) for one in lines]
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
