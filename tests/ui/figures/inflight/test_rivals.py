"""Two policies are drawn as their runs are, and the page draws what Python draws."""

from __future__ import annotations

import random

import pytest

from labcore.studies.inflight.rivals import BUDGETS, CHUNKS, LOADS, POOLS, rivals
from labcore.ui import Choice, explore, twin
from labcore.ui.compact import dumps
from labcore.ui.figures import inflight as figures
from labcore.ui.figures.inflight.batches import KINDS

RIVALS = {
    "first": Choice(options=tuple(figures.POLICIES)),
    "second": Choice(options=tuple(figures.POLICIES), default="no-evict"),
    "load": Choice(options=LOADS, default=0.8),
    "pool": Choice(options=POOLS, default=28),
    "budget": Choice(options=BUDGETS, default=64),
    "chunk": Choice(options=CHUNKS, default=64),
}
LETTERS_OF_A_PHONE = 44  # of an annotation, whose letters are smaller than a title's


def drawn_bars(figure, name: str, panel: str) -> list[tuple[float, float, int]]:
    (item,) = (one for one in figure.data if (one.name, one.xaxis) == (name, panel))
    if item.x == (None,):
        return []
    return [
        (item.x[at], item.x[at + 1], item.y[at] - 1) for at in range(0, len(item.x), 3)
    ]  # fmt: skip


def test_each_panel_shows_its_own_run(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(20):
        chosen = {key: pick.choice(control.positions()) for key, control in RIVALS.items()}
        figure = figures.two_policies(**chosen)
        for panel, name in (("x", chosen["first"]), ("x3", chosen["second"])):
            chunk = min(chosen["chunk"], chosen["budget"])
            setting = chosen["load"], chosen["pool"], chosen["budget"], chunk
            run = rivals()[figures.POLICIES[name], *setting]
            for kind, (label, _) in KINDS.items():
                bars = [(b.begin, b.end, b.slot) for b in run.bars if b.kind == kind]
                assert drawn_bars(figure, label, panel) == bars
            assert max(count for _, count in run.held) <= chosen["pool"]
            assert figure.layout.xaxis.range[1] >= run.seconds
        for note in figure.layout.annotations:
            assert max(map(len, note.text.replace("<b>", "").split("<br>"))) <= LETTERS_OF_A_PHONE
        assert figure.layout.meta["alt"].endswith(".")


@pytest.mark.parametrize("name", RIVALS)
def test_every_control_changes_the_figure(name: str) -> None:
    start = {key: control.default for key, control in RIVALS.items()} | {"load": 1.2}
    start |= {"pool": 84, "budget": 192, "chunk": 192} if name in ("budget", "chunk") else {}
    shown = [
        dumps(figures.two_policies(**start | {name: value}).to_plotly_json()["data"])
        for value in RIVALS[name].positions()
    ]
    assert len(set(shown)) == len(shown)
    with pytest.raises(ValueError, match=f"{name} must be"):
        figures.two_policies(**start | {name: "none" if name in ("first", "second") else 7})


def test_the_static_page_carries_the_explorer(monkeypatch) -> None:
    monkeypatch.setenv("LABCORE_BOOK", "1")
    shown = explore(
        figures.two_policies, alt="x", formula=figures.RIVALS_FORMULA, **RIVALS
    )  # fmt: skip
    found = shown._repr_mimebundle_()[twin.MIME]
    assert [control["name"] for control in found["controls"]] == list(RIVALS)
    assert len(dumps(figures.RIVALS_FORMULA.data())) < 500_000
