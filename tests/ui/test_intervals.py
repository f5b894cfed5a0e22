"""Numbers on one axis: where they stand is where the axis says, and a rule shades its own side."""

import math
import random
import re

import pytest

from labcore.claims import Measured, Rule
from labcore.ui.intervals import Row, drawn, in_words, number

PLACE = re.compile(r'class="(tick|dot|bar)" style="left:([-\d.]+)%(?:;width:([-\d.]+)%)?"')
SIDE = re.compile(r'style="--from:([\d.]+)%;--wide:([\d.]+)%;--bound:([\d.]+)%"')
TICK = re.compile(r'class="tick" style="left:([-\d.]+)%">([^<]+)<')


def places(markup: str, name: str) -> list[float]:
    return [float(left) for found, left, _ in PLACE.findall(markup) if found == name]


def value(tick: str) -> float:
    return float(tick.replace(",", ""))


@pytest.mark.parametrize("log", [False, True])
def test_a_dot_stands_between_the_ticks_that_its_number_lies_between(seed: int, log: bool) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        means = [10 ** dice.uniform(-3, 3) if log else dice.uniform(-5, 9) for _ in range(4)]
        if log:
            means += [1e-3, 1e3]
        rows = [Row(name="x", measured=Measured.exactly(mean)) for mean in means]
        markup = drawn(rows)
        ticks = [(float(at), value(text)) for at, text in TICK.findall(markup)]
        assert len(ticks) >= 2
        for at, mean in zip(places(markup, "dot"), means, strict=True):
            assert 0 <= at <= 100
            for tick_at, tick in ticks:
                if abs(at - tick_at) > 0.2:
                    assert (at > tick_at) == (mean > tick)


@pytest.mark.parametrize("rule", [Rule(at_least=2.0), Rule(at_most=2.0)])
def test_the_shaded_side_is_where_the_rule_holds(seed: int, rule: Rule) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        mean = dice.uniform(0.1, 8)
        markup = drawn([Row(name="x", measured=Measured.exactly(mean))], rule=rule)
        (at,) = places(markup, "dot")
        left, width, bound = map(float, SIDE.search(markup).groups())
        assert bound in (left, left + width)
        if abs(mean - 2.0) > 0.1:
            assert (left <= at <= left + width) == (rule.judge(Measured.exactly(mean)) == "holds")


def test_words_escape_and_say_the_interval() -> None:
    one = Measured(mean=1234.5, low=1000.0, high=20_000.0, n=3)
    assert in_words(one, "tokens/s") == "1,230 [1,000, 20,000] tokens/s"
    assert in_words(Measured.exactly(0.25)) == "0.25"
    assert in_words(Measured(mean=2, low=-math.inf, high=math.inf, n=1)) == "2"
    assert [number(x) for x in (0, 1e-9, 0.000123, 2.5e9, -4.0)] == [
        "0", "1e-09", "0.000123", "2.50e+09", "-4",
    ]  # fmt: skip
    assert "&lt;b&gt;" in drawn([Row(name="<b>", measured=one)])
    with pytest.raises(ValueError, match="at least one row"):
        drawn([])


def test_only_a_number_with_an_interval_is_called_a_mean() -> None:
    exact, spread = Measured.exactly(0.5), Measured(mean=0.5, low=0.4, high=0.6, n=3)
    assert "<small>value</small>" in drawn([Row(name="x", measured=exact)], unit="ratio")
    both = drawn([Row(name="x", measured=exact), Row(name="y", measured=spread)], unit="ms")
    assert "<small>mean [95% interval], ms</small>" in both
