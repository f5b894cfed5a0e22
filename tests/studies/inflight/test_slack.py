"""What the two small schedulers fill is what their outputs need."""

from __future__ import annotations

import random
from math import isclose

from labcore.serving.simulation.workload import long_tail
from labcore.studies.inflight import slack


def test_the_rows_used_are_the_tokens_written(seed: int) -> None:
    dice = random.Random(seed)
    rows, tail, queue = dice.choice(slack.ROWS), dice.choice(slack.TAILS), dice.randrange(1, 60)
    found = slack.filled(rows, tail, queue, seed)
    outputs = long_tail(8, queue, seed, tail=tail, most=256)
    batches = [outputs[at : at + rows] for at in range(0, queue, rows)]
    assert found.steps[0] == sum(map(max, batches))
    assert found.steps[0] >= found.steps[1] >= max(outputs)
    for steps, used in zip(found.steps, found.used, strict=True):
        assert isclose(used * rows * steps, sum(outputs))


def test_a_longer_queue_gains_more_and_one_batch_nothing() -> None:
    data = slack.sweep()
    for tail in slack.TAILS:
        for rows in slack.ROWS:
            short, long = (data[rows, tail, queue].steps for queue in slack.QUEUES)
            assert long[0] / long[1] > short[0] / short[1]
        assert len(set(data[32, tail, 32].steps)) == 1  # everyone is in the first batch
