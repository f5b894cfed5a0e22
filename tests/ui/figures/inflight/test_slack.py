"""The drawn shares are those of the study."""

from __future__ import annotations

import pytest

from labcore.studies.inflight.slack import QUEUES, ROWS, TAILS, sweep
from labcore.ui.figures import inflight as figures


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("tail", TAILS)
def test_both_lines_show_what_is_left(tail: float, queue: int) -> None:
    data = sweep()
    figure = figures.unused_rows(tail, queue, data=data)
    for at, line in enumerate(figure.data):
        assert list(line.x) == list(ROWS)
        assert [1 - y / 100 for y in line.y] == pytest.approx(
            [data[rows, tail, queue].used[at] for rows in ROWS]
        )
    batched, flying = data[8, tail, queue].steps
    assert f"8: {batched / flying:.1f}" in figure.layout.title.text
    with pytest.raises(ValueError, match="tail and queue"):
        figures.unused_rows(3.0, queue, data=data)
