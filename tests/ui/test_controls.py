import itertools
import math
import random

import pytest

from labcore.ui import Choice, Control, IntSlider, LogSlider, Nodes, Slider, Toggle


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Slider(low=0, high=1, default=1.5), ValueError, "between 0 and 1, got 1.5"),
        (lambda: Slider(low=2, high=1, default=1), ValueError, "low must be below high"),
        (lambda: Slider(low=0, high=1, default=0, step=2), ValueError, "step must be above 0"),
        (lambda: Slider(low=0, high=1, default=0, step=1e-9), ValueError, "step 1e-09 .* larger"),
        (lambda: Slider(low=0, high=math.inf, default=0), ValueError, "high must be finite"),
        (lambda: Slider(low="0", high=1, default=0), TypeError, "low must be a number"),
        (lambda: IntSlider(low=0, high=4, default=5), ValueError, "between 0 and 4, got 5"),
        (lambda: IntSlider(low=0, high=4, default=1.0), TypeError, "whole number, got 1.0"),
        (lambda: IntSlider(low=0, high=4, default=1, step=5), ValueError, "between 1 and"),
        (lambda: LogSlider(low=0, high=1, default=0.1), ValueError, "use Slider"),
        (lambda: LogSlider(low=0.1, high=1, default=10), ValueError, "got 10"),
        (lambda: LogSlider(low=0.1, high=1, default=1, points=1), ValueError, "points .* 2, got 1"),
        (lambda: Choice(options=("a",)), ValueError, "two options"),
        (lambda: Choice(options="ab"), TypeError, "sequence of values"),
        (lambda: Choice(options=("a", "a")), ValueError, "must differ"),
        (lambda: Choice(options={"a": "one", "b": "one"}), ValueError, "must differ"),
        (lambda: Choice(options=("lion", "adamw"), default="loin"), ValueError, "mean 'lion'"),
        (lambda: Toggle(default=1), TypeError, "True or False"),
        (lambda: Nodes(parents=()), ValueError, "earlier node"),
        (lambda: Nodes(parents=(-1, 1)), ValueError, "earlier node"),
        (lambda: Nodes(parents=(-1,), names=("a", "b")), ValueError, "1 nodes, got 2"),
        (lambda: Nodes(parents=(-1, 0), default=(2,)), ValueError, "from 0 to 1, got 2"),
    ],
)
def test_a_wrong_control_says_the_rule_and_what_came(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_positions_are_the_ends_and_equal_steps(seed):
    draw = random.Random(seed)
    low, steps, step = draw.uniform(-5, 5), draw.randrange(2, 60), draw.uniform(0.01, 3)
    slider = Slider(low=low, high=low + steps * step, default=low, step=step)
    positions = slider.positions()
    assert len(positions) == steps + 1
    assert positions[0] == pytest.approx(low)
    assert positions[-1] == pytest.approx(low + steps * step)
    assert Slider(low=0, high=1, default=0, step=0.1).positions()[3] == 0.3


def test_a_step_that_does_not_reach_the_end_stops_below():
    assert Slider(low=0, high=1, default=0, step=0.3).positions() == (0, 0.3, 0.6, 0.9)
    assert IntSlider(low=1, high=8, default=1, step=3).positions() == (1, 4, 7)


def test_log_positions_have_one_factor(seed):
    draw = random.Random(seed)
    low, factor, points = draw.uniform(1e-6, 1), draw.uniform(1.1, 4), draw.randrange(2, 30)
    slider = LogSlider(low=low, high=low * factor ** (points - 1), default=low, points=points)
    positions = slider.positions()
    assert len(positions) == points
    ratios = [b / a for a, b in itertools.pairwise(positions)]
    assert ratios == pytest.approx([factor] * (points - 1))
    assert (positions[0], positions[-1]) == (slider.low, slider.high)


@pytest.mark.parametrize(
    ("control", "value"),
    [
        (Slider(low=0, high=1, default=0), 1.01),
        (IntSlider(low=0, high=9, default=0), 10),
        (LogSlider(low=1, high=9, default=1), 0.9),
        (Choice(options=("a", "b")), "c"),
    ],
)
def test_a_value_outside_is_refused_by_name(control, value):
    with pytest.raises(ValueError, match="lr must be"):
        control.check("lr", value)
    assert control.check("lr", control.default) == control.default


def test_values_read_well():
    assert Slider(low=0, high=1, default=0, unit="s").text(0.123456) == "0.1235 s"
    scale = LogSlider(low=1e-4, high=1e8, default=1e-2)
    said = {0.00031622: "0.000316", 999.6: "1,000", 16384: "16,384", 2e6: "2e+06"}
    assert {value: scale.text(value) for value in said} == said
    assert IntSlider(low=0, high=9999, default=0, unit="B").text(4096) == "4,096 B"
    assert [Toggle().text(v) for v in (False, True)] == ["off", "on"]
    words = Choice(options={"sgd": "SGD", 8: "eight"}, unit="B")
    assert [words.text(option) for option in words.positions()] == ["SGD B", "eight B"]
    assert words.default == words.check("name", "sgd") == "sgd"
    assert all(
        isinstance(c, Control)
        for c in (Slider(low=0, high=1, default=0), Choice(options=(1, 2)), Toggle())
    )


def test_a_chosen_node_comes_with_its_ancestors_and_goes_with_what_is_below(seed):
    draw = random.Random(seed)
    parents = [draw.randrange(-1, node) if node else -1 for node in range(30)]
    nodes, value = Nodes(parents=parents), ()
    for _ in range(300):
        node = draw.randrange(30)
        before, value = set(value), nodes.toggled(value, node)
        assert value == nodes.check("nodes", value) and (node in value) is (node not in before)
        changed = set(value) ^ before
        for other in changed:  # one line of ancestors came, or one subtree went
            high, low = max(node, other), min(node, other)
            while high > low:
                high = parents[high]
            assert high == low
    assert nodes.check("nodes", [29]) == nodes.toggled((), 29)
    assert nodes.positions()[7] == tuple(range(7)) and nodes.text(value).endswith(" of 30")
