"""What a page computes of a figure is what its Python form draws, at random settings."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from labcore.ui import Nodes, twin
from labcore.ui.compact import plain
from labcore.ui.figures import attention, inflight, medusa, memory, speculative
from tests.ui.figures.inflight.test_rivals import RIVALS
from tests.ui.figures.medusa import test_trees as trees
from tests.ui.figures.speculative.test_batches import BATCHES, MEASURED
from tests.ui.figures.test_attention import DESIGNER
from tests.ui.figures.test_memory import CONTROLS
from tests.ui.figures.test_memory_cache import REQUESTS

pytestmark = pytest.mark.long

FORMULAS = {
    "film": (memory.film, memory.FILM_FORMULA, CONTROLS["film"]),
    "levers": (memory.levers, memory.LEVERS_FORMULA, CONTROLS["levers"]),
    "stages": (memory.stages, memory.STAGES_FORMULA, CONTROLS["stages"]),
    "requests": (memory.requests, memory.REQUESTS_FORMULA, REQUESTS),
    "rivals": (inflight.two_policies, inflight.RIVALS_FORMULA, RIVALS),
    "designer": (attention.designer, attention.DESIGNER_FORMULA, DESIGNER),
    "batches": (
        functools.partial(speculative.gain_by_batch, data=MEASURED),
        speculative.gain_formula(MEASURED),
        BATCHES,
    ),
}
DRAWN = ("medusa tree", "medusa speed")  # of data that a chapter measures


def case(name: str, seed: int) -> tuple[Callable[..., Any], twin.Formula, dict[str, Any]]:
    """A figure function, its formula and its controls."""
    if name not in DRAWN:
        return FORMULAS[name]
    tree = name == DRAWN[0]
    data = trees.guesses(seed) if tree else trees.sweep(seed)
    function = medusa.tree_picker if tree else medusa.speed_by_tree
    controls = trees.picked(data) if tree else trees.SWEPT
    return functools.partial(function, data=data), data.formula(), controls


def value(control: Any, pick: random.Random) -> Any:
    """Any value of a control; of a tree, any nodes."""
    if isinstance(control, Nodes):
        return control.check("nodes", [pick.randrange(len(control.parents)) for _ in range(5)])
    return pick.choice(control.positions())


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


@pytest.mark.parametrize("name", [*FORMULAS, *DRAWN])
def test_the_page_and_python_agree(name: str, watch: Any, seed: int) -> None:
    draw, formula, controls = case(name, seed)
    pick = random.Random(seed)
    settings = [
        {key: value(control, pick) for key, control in controls.items()} for _ in range(200)
    ]
    watched = watch()
    watched.page.add_script_tag(path=twin.FORMULAS)
    first = draw(**{key: control.default for key, control in controls.items()})
    told = [formula.name, settings, formula.data(), plain(first.to_dict())]
    for chosen, computed in zip(settings, watched.page.evaluate(COMPUTE, told), strict=True):
        drawn = plain(draw(**chosen).to_dict())
        assert words(computed) == words(drawn), chosen
        assert numbers(computed) == pytest.approx(numbers(drawn), rel=1e-3, abs=1e-6), chosen
    watched.calm()
