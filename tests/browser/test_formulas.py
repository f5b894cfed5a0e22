"""What a page computes of a figure is what its Python form draws, at random settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from labcore.ui import twin
from labcore.ui.compact import plain
from labcore.ui.figures import attention, memory
from tests.ui.figures.test_attention import DESIGNER
from tests.ui.figures.test_memory import CONTROLS
from tests.ui.figures.test_memory_cache import REQUESTS

pytestmark = pytest.mark.long

FORMULAS = {
    "film": (memory.film, memory.FILM_FORMULA, CONTROLS["film"]),
    "levers": (memory.levers, memory.LEVERS_FORMULA, CONTROLS["levers"]),
    "stages": (memory.stages, memory.STAGES_FORMULA, CONTROLS["stages"]),
    "requests": (memory.requests, memory.REQUESTS_FORMULA, REQUESTS),
    "designer": (attention.designer, attention.DESIGNER_FORMULA, DESIGNER),
}
COMPUTE = """([name, settings, data, frame]) => settings.map(chosen => {
    const copy = structuredClone(frame);
    labcoreFormulas[name](chosen, data, copy);
    return copy;
})"""


def numbers(frame: Any) -> list[float]:
    """All numbers of a figure, in the order of its tree."""
    return [leaf for leaf in leaves(frame) if type(leaf) in (int, float)]


def words(frame: Any) -> list[Any]:
    """Everything else: titles, names, colors, and which lines and labels are shown."""
    return [leaf for leaf in leaves(frame) if type(leaf) not in (int, float)]


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists and dictionaries, but for the text alternative."""
    if isinstance(tree, dict):
        for key, branch in sorted(tree.items()):
            if key != "meta":
                yield from leaves(branch)
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from leaves(branch)
    else:
        yield tree


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
        drawn = plain(draw(**chosen).to_dict())
        assert words(computed) == words(drawn), chosen
        assert numbers(computed) == pytest.approx(numbers(drawn), rel=1e-3, abs=1e-6), chosen
    watched.calm()
