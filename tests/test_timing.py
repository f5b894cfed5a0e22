import random
import statistics

import pytest

from labcore import timing


def test_quantiles_agree_with_the_statistics_module(seed):
    dice = random.Random(seed)
    samples = [dice.random() for _ in range(dice.randrange(2, 40))]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    assert timing.quantiles(samples) == pytest.approx((cuts[1], cuts[4], cuts[7]))


def test_quantiles_of_one_and_of_none():
    assert timing.quantiles([3.0]) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="at least one"):
        timing.quantiles([])


def test_measure_calls_warmup_and_repeats():
    calls = []
    found = timing.measure(lambda: calls.append(1), repeats=7, warmup=2)
    assert len(calls) == 9
    assert found.n == 7
    assert 0 <= found.p20 <= found.p50 <= found.p80


def test_paired_runs_each_function_once_a_round_in_random_order():
    calls: list[str] = []
    names = "abc"
    found = timing.paired({n: (lambda n=n: calls.append(n)) for n in names}, rounds=20, warmup=1)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 21
    assert all(sorted(r) == sorted(names) for r in rounds)
    assert len(set(rounds[1:])) > 1
    assert all(t.n == 20 for t in found.timings.values())


def test_ratio_is_the_median_of_the_rounds_ratios():
    found = timing.Comparison(
        timings={
            "ours": timing.Timing(samples=(1.0, 2.0, 30.0)),
            "theirs": timing.Timing(samples=(2.0, 4.0, 10.0)),
        }
    )
    assert found.ratios("ours", "theirs") == [0.5, 0.5, 3.0]
    assert found.ratio("ours", "theirs") == 0.5
    with pytest.raises(ValueError, match="did you mean 'theirs'"):
        found.ratio("ours", "their")


def test_bad_input_says_what_to_do():
    with pytest.raises(ValueError, match="use measure"):
        timing.paired({"only": lambda: None})
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        timing.measure(lambda: None, repeats=0)
