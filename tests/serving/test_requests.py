"""A request is checked where it is made; clocks go forward only."""

import math

import pytest

from labcore.decoding import SamplingConfig
from labcore.serving.clock import Clock, ManualClock
from labcore.serving.engine.request import Request, State

SAMPLING = SamplingConfig(max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"id": ""}, ValueError, "id must be a text"),
        ({"id": 3}, ValueError, "id must be a text"),
        ({"prompt": "words"}, TypeError, "row of tokens, got str; encode"),
        ({"prompt": 3}, TypeError, "row of tokens, got int"),
        ({"prompt": ()}, ValueError, "at least one token"),
        ({"prompt": (1, -2)}, ValueError, "at least 0, got -2"),
        ({"sampling": {"max_tokens": 3}}, TypeError, "SamplingConfig, got dict"),
        ({"priority": 1.5}, TypeError, "priority must be a whole number, got 1.5"),
        ({"priority": True}, TypeError, "priority must be a whole number"),
        ({"deadline": math.nan}, ValueError, "deadline must be finite"),
        ({"arrival": math.inf}, ValueError, "arrival must be a finite"),
    ],
)
def test_a_bad_request_is_told_at_the_door(fields, error, said: str) -> None:
    good = {"id": "a", "prompt": (1, 2), "sampling": SAMPLING}
    assert Request(**good).longest == 4
    with pytest.raises(error, match=said):
        Request(**good | fields)


def test_a_state_begins_with_the_prompt_and_counts_from_there() -> None:
    state = State(Request("a", [4, 5], SAMPLING))
    assert (state.tokens, state.output, state.emitted, state.missing) == ([4, 5], [], 0, 2)
    assert not state.decoding
    state.tokens.append(6)
    state.computed = 2
    assert (state.output, state.emitted, state.missing, state.decoding) == ([6], 1, 1, True)
    # A prompt of one token is a prompt: there is no output to decode yet.
    assert not State(Request("b", (7,), SAMPLING)).decoding


def test_a_manual_clock_moves_when_told_and_never_back() -> None:
    clock = ManualClock(2.0)
    assert clock.now() == clock.now() == 2.0
    assert clock.advance(0.5) == clock.now() == 2.5
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a clock never goes back"):
            clock.advance(seconds)
    assert clock.now() == 2.5
    real = Clock()
    assert real.now() <= real.now()
