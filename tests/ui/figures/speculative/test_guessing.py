"""Text colored by who guessed it: all of it, in order, in lines that a phone has room for."""

import random

import pytest

from labcore.studies.speculative.guesses import GUESSERS, Written, forty
from labcore.ui.figures.speculative import guessing as figures


def shown(figure, axis: str) -> str:
    """The text of a panel, read line by line."""
    cells = [
        (y, base, text, item.name)
        for item in figure.data
        if (item.yaxis or "y") == axis
        for y, base, text in zip(item.y, item.base, item.text, strict=True)
        if text
    ]
    return "".join(text for _, _, text, _ in sorted(cells)).replace("\u00a0", " ")


def some(seed: int) -> Written:
    chance = random.Random(seed)
    who = "".join(chance.choice(("t", "dt", "ddt", "nnnt")) for _ in range(9)) + "nn"
    words = ("def", " x", "\n", "\n    ", "(", " a_rather_long_name" * 3, "):\n", "é")
    return Written(prompt="a\nb = 1\n", tokens=tuple(chance.choice(words) for _ in who), who=who)


def test_all_of_the_text_is_there_in_its_order_and_color(seed: int) -> None:
    written = some(seed)
    figure = figures.guessed(written)
    text = "a\nb = 1\n".replace("\n", "") + "".join(written.tokens).replace("\n", "↵")
    assert shown(figure, "y") == text
    for item in figure.data:
        for base, width in zip(item.base, item.x, strict=True):
            assert base + width <= figures.COLUMNS
    letters = {"target": "t", "draft model": "d", "n-grams": "n"}
    for name, letter in letters.items():
        trace = next(item for item in figure.data if item.name == name)
        whole = sum(len(t) for t, w in zip(written.tokens, written.who, strict=True) if w == letter)
        assert sum(trace.x) == whole


def test_a_step_ends_with_a_token_of_the_target_and_the_last_may_not(seed: int) -> None:
    written = some(seed)
    steps = written.who.count("t") + 1
    assert figures.guessed(written).layout.title.text == (
        f"{len(written.who)} tokens in {steps} passes: {len(written.who) / steps:.2f} per pass"
    )
    before = 0
    for passes in range(1, steps + 1):
        figure = figures.bursts(passes, data=written)
        told = figure.layout.title.text
        plain, drafted = (int(x) for x in told.removeprefix(f"After {passes} passes: ").split(
            " tokens, and "))  # fmt: skip
        assert plain == min(passes, len(written.who)) and before < drafted
        assert shown(figure, "y2").startswith(shown(figure, "y"))
        before = drafted
    assert before == len(written.who)


def test_the_forty_are_drawn_alike_and_fit_a_phone() -> None:
    data = forty()
    kinds, heights = set(), set()
    for name in data:
        for guesser, temperature in ((GUESSERS[0], 0.0), (GUESSERS[1], 0.7), (GUESSERS[2], 0.0)):
            figure = figures.guessed_by(name, guesser, temperature, data=data)
            kinds.add(tuple((item.type, item.name) for item in figure.data))
            heights.add(figure.layout.height)
            assert max(y for item in figure.data for y in item.y) < figures.ROWS, name
            assert len(figure.layout.title.text) <= 44
    assert len(kinds) == len(heights) == 1


def test_a_recorded_way_must_exist() -> None:
    with pytest.raises(KeyError, match="0.3"):
        figures.guessed_by("code 1", GUESSERS[0], 0.3, data=forty())
