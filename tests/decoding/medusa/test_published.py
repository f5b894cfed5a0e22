"""Numbers of others stand in the package as their sources print them."""

from __future__ import annotations

import itertools

from labcore.decoding.medusa.published import SCORERS

# Of vLLM's pull request 5691: requests, drafted tokens, one kernel's ms, batch expansion's ms.
ROWS = """
4 5 13.7 15.4
8 5 14.8 17.7
16 5 18.4 23.9
32 5 25.5 36.4
64 5 35.1 54.5
128 5 70.9 96.2
"""


def test_the_scorers_times_are_those_of_the_pull_request() -> None:
    rows = [line.split() for line in ROWS.split("\n") if line]
    assert {int(n): (float(slow), float(fast)) for n, _, fast, slow in rows} == SCORERS
    assert all(expanded > kernel for expanded, kernel in SCORERS.values())
    for few, many in itertools.pairwise(SCORERS):
        assert few < many and all(
            less < more for less, more in zip(SCORERS[few], SCORERS[many], strict=True)
        )
