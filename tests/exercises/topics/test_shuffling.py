"""The references of the lab `shuffling`, by other ways to the same results, and its notebook."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from labcore.exercises import Exercise, load, student_seed
from labcore.exercises.topics.shuffling import BUFFER, CLINIC, CORRELATION, RESUME, SPIKES
from labcore.shuffling import design_effect, intraclass_correlation
from tests.exercises.draws import answers, draws
from tests.exercises.notebook import complaints_about

FUNCTIONS = (BUFFER, RESUME, CORRELATION, SPIKES)


def test_the_topic_offers_its_exercises() -> None:
    assert load("shuffling") == [*FUNCTIONS, CLINIC]


@pytest.mark.parametrize(("exercise", "count"), [*zip(FUNCTIONS, (20, 10, 2, 2), strict=True)])
def test_the_cases_tell_every_wrong_answer_apart(exercise: Exercise, count: int, seed: int) -> None:
    for draw, student in draws(seed, count):
        for name, (function, _) in exercise.wrong.items():
            given = answers(exercise, function, draw, student)
            outcome = exercise.judge(given, seed=draw, student=student)
            assert (outcome.kind, outcome.mistake) == ("known mistake", name), (draw, student)


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda one: one.id)
def test_a_student_has_numbers_of_their_own(exercise: Exercise, seed: int) -> None:
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(60)]
    assert len({tuple(exercise.variant(number).values()) for number in numbers}) >= 4
    assert exercise.variant(numbers[0]) == exercise.variant(numbers[0])


# The buffer --------------------------------------------------------------------------------------


def test_a_buffer_loses_no_row_and_lets_none_out_too_early(seed: int) -> None:
    for draw, student in draws(seed, 10):
        for case in BUFFER.numbered_cases(draw, student):
            out = BUFFER.reference(**case)
            assert sorted(out) == list(range(case["rows"]))
            assert all(row - place <= case["size"] for place, row in enumerate(out))


def test_random_picks_make_all_orders_equally_likely(seed: int) -> None:
    """Three rows in three slots: six orders. Picks 0..5 run through all of them equally often."""
    orders = [
        tuple(BUFFER.reference(3, [first, second, 0], size=3))
        for first, second in itertools.product(range(6), repeat=2)
    ]
    counts = {order: orders.count(order) for order in orders}
    assert len(counts) == 6 and set(counts.values()) == {6}
    one_slot = BUFFER.reference(9, [random.Random(seed).randrange(99) for _ in range(9)], size=1)
    assert one_slot == list(range(9)), "one slot leaves no choice"


def test_the_example_of_the_buffer() -> None:
    assert BUFFER.reference(5, [1, 0, 0, 1, 0], size=2) == [1, 0, 3, 2, 4]


# The resume --------------------------------------------------------------------------------------


def simulated(order: Sequence[int], batch: int, workers: int) -> list[list[int]]:
    """The epoch with queues: each worker makes one batch whenever its turn comes."""
    hands: list[list[int]] = [[] for _ in range(workers)]
    for at, row in enumerate(order):
        hands[at % workers].append(row)
    batches = []
    for worker in itertools.cycle(range(workers)):
        if not any(hands):
            return batches
        if hands[worker]:
            batches.append(hands[worker][:batch])
            del hands[worker][:batch]
    return batches


def test_resumed_epoch_equals_one_that_never_stopped(seed: int) -> None:
    for draw, student in draws(seed, 5):
        for case in RESUME.numbered_cases(draw, student):
            whole = simulated(case["order"], case["batch"], case["workers"])
            for taken in range(len(whole) + 1):
                assert RESUME.reference(**{**case, "taken": taken}) == whole[taken:]


def test_other_workers_give_each_row_left_once_in_epoch_order(seed: int) -> None:
    for case in RESUME.numbered_cases(seed):
        whole = simulated(case["order"], case["batch"], case["workers"])
        gone = {row for rows in whole[: case["taken"]] for row in rows}
        left = [row for row in case["order"] if row not in gone]
        for after in (1, 3, 7, 200):
            came = RESUME.reference(**{**case, "workers_after": after})
            assert came == simulated(left, case["batch"], after)
            assert sorted(itertools.chain(*came)) == sorted(left)


def test_the_examples_of_the_resume() -> None:
    numbers = {"batch": 2, "workers": 2, "prefetch": 1}
    left = RESUME.reference(list(range(11)), 3, workers_after=2, **numbers)
    assert left == [[5, 7], [8, 10], [9]]
    left = RESUME.reference(list(range(11)), 3, workers_after=3, **numbers)
    assert left == [[5, 9], [7, 10], [8]]


def test_a_row_more_or_a_batch_too_few_is_told_by_its_place(seed: int) -> None:
    given = answers(RESUME, RESUME.reference, seed, 0)
    short = [given[0][:-1], *given[1:]]
    wanted = len(given[0])
    assert f"must have length {wanted}, got {wanted - 1}" in RESUME.judge(short, seed=seed).message
    given[0][2] = [*given[0][2], 5]
    assert "the result[2] must have length 4, got 5" in RESUME.judge(given, seed=seed).message


# Batches from a log ------------------------------------------------------------------------------


def test_correlation_matches_the_library_and_sets_the_variance(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(2, 30, (12,), generator=generator)
    batches = [
        5 * torch.randn((), generator=generator, dtype=torch.float64)
        + torch.randn(int(count), generator=generator, dtype=torch.float64)
        for count in counts
    ]
    log = {
        "counts": counts.double(),
        "means": torch.stack([batch.mean() for batch in batches]),
        "variances": torch.stack([batch.var() for batch in batches]),
    }
    icc, variance = CORRELATION.reference(**log, size=40)
    assert icc == pytest.approx(intraclass_correlation(batches), rel=1e-9)
    _, of_a_row = CORRELATION.reference(**log, size=1)
    assert variance == pytest.approx(of_a_row / 40 * (1 + 39 * icc), rel=1e-9)


def test_equal_batches_have_the_variance_that_was_measured(seed: int) -> None:
    """At the size of the log itself, the prediction is the variance of the logged means."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    rows += 5 * torch.randn(9, 1, generator=generator, dtype=torch.float64)
    counts = torch.full((9,), 6.0, dtype=torch.float64)
    log = {"counts": counts, "means": rows.mean(1), "variances": rows.var(1)}
    icc, variance = CORRELATION.reference(**log, size=6)
    assert variance == pytest.approx(rows.mean(1).var().item())
    assert 1 + 5 * icc == pytest.approx(design_effect(rows), rel=0.2)


def test_the_example_of_the_log_and_a_log_without_correlation() -> None:
    def floats(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    log = {"counts": floats(2, 4), "means": floats(1, 4), "variances": floats(2, 1)}
    icc, variance = CORRELATION.reference(**log, size=5)
    assert (round(icc, 6), variance) == (0.763314, 4.28125)
    alike = {**log, "means": floats(3, 3)}
    assert CORRELATION.reference(**alike, size=5) == (0.0, 0.25)


def test_each_log_is_needed(seed: int) -> None:
    cases = CORRELATION.numbered_cases(seed)
    found = [CORRELATION.reference(**case) for case in cases]
    assert [icc == 0 for icc, _ in found] == [False, False, True, False]
    assert [bool(case["variances"].isnan().any()) for case in cases] == [False] * 3 + [True]
    assert all(math.isfinite(value) for pair in found for value in pair)


# Spikes ------------------------------------------------------------------------------------------


def by_hand(losses: torch.Tensor, *, reach: int, factor: float, floor: float) -> torch.Tensor:
    """The rule in plain Python."""

    def middle(values: list[float]) -> float:
        values = sorted(values)
        half = len(values) // 2
        return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2

    listed, found = losses.tolist(), []
    for step, loss in enumerate(listed):
        near = [
            listed[other]
            for other in range(step - reach, step + reach + 1)
            if 0 <= other < len(listed) and other != step and math.isfinite(listed[other])
        ]
        if not math.isfinite(loss) or not near:
            found.append(not math.isfinite(loss))
            continue
        level = middle(near)
        spread = max(middle([abs(other - level) for other in near]), floor)
        found.append(loss > level + factor * spread)
    return torch.tensor(found)


def test_the_rule_in_plain_python_agrees(seed: int) -> None:
    for draw, student in draws(seed, 4):
        given = answers(SPIKES, by_hand, draw, student)
        assert SPIKES.judge(given, seed=draw, student=student).passed


def test_where_all_is_broken_or_alone(seed: int) -> None:
    numbers = {"reach": 2, "factor": 3.0, "floor": 0.1}
    for losses, right in (
        ([math.nan] * 3, [True] * 3),
        ([4.0], [False]),
        ([math.inf, 9.0, -math.inf], [True, False, True]),
        ([1.0, 1.0, 1.25, 1.0, 1.5, 1.0], [False, False, False, False, True, False]),
    ):
        found = SPIKES.reference(torch.tensor(losses, dtype=torch.float64), **numbers)
        assert found.tolist() == right


def test_the_example_of_the_spikes() -> None:
    losses = torch.tensor([1, 5, 2, 3, math.nan], dtype=torch.float64)
    found = SPIKES.reference(losses, reach=2, factor=2.0, floor=0.125)
    assert found.tolist() == [False, True, False, False, True]


# The clinic --------------------------------------------------------------------------------------


def test_the_patients_show_what_their_symptoms_say() -> None:
    seen = {**CLINIC.diagnoses(), "healthy": "healthy"}
    patients = {seen[label]: curves for label, curves in CLINIC.patients().items()}
    assert all(len(curve) == 240 for panels in patients.values() for curve in panels.values())
    loss, entropy, held = (
        {
            name: torch.tensor(list(panels.values())[place], dtype=torch.float64)
            for name, panels in patients.items()
        }
        for place in range(3)
    )
    well = "healthy"
    assert (entropy["each worker reads one class"] == 0).all()
    jumps = {name: curve[60:].diff().abs().mean() for name, curve in loss.items()}
    assert jumps["each worker reads one class"] > 1.3 * jumps[well]
    assert held["each worker reads one class"][60:].mean() < 1.1 * held[well][60:].mean()
    small = entropy["buffer too small"]
    assert 0.4 * entropy[well].mean() < small.mean() < 0.8 * entropy[well].mean()
    starts = small.reshape(4, 60)[:, :5]  # where an epoch begins
    assert (starts.mean(1) < 0.6 * small.mean()).all()
    missing = entropy["one class is never read"]
    assert missing.max() <= math.log(5) < entropy[well].mean()
    gap = held["one class is never read"] - held[well]
    assert gap[30:].min() > 0.2 and gap[-1] > gap[30]
    again = "resumes begin the epoch anew"
    assert torch.equal(loss[again][:100], loss[well][:100])
    assert (entropy[again][100:-3] == entropy[again][103:]).all()
    assert loss[again][-1] < 0.1 * loss[well][-20:].mean() and held[again][-1] > held[again][99]
    fast = "learning rate too high"
    assert torch.equal(entropy[fast], entropy[well])
    assert loss[fast][20:].mean() > 2 * loss[well][20:].mean()
    assert held[fast][20:].mean() > 2 * held[well][20:].mean()
    assert jumps[fast] > 2 * jumps[well]


# The notebook ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("if workers_after == workers", "if True", "that the old workers would have made"),
        (
            "for row in order if row in rows_left",
            "for rows in left for row in rows",
            "not in",
        ),
        (
            "return epoch([row for row in order if row in rows_left], workers_after)",
            "return epoch(order, workers_after)[taken:]",
            "in batches of the new workers",
        ),
    ],
)
def test_the_rule_with_other_workers_is_graded_by_itself(
    right: str, wrong: str, sentence: str
) -> None:
    complaints = complaints_about("shuffling", "still_to_come", right, wrong)
    assert set(complaints) == {"other-workers-test"}
    assert sentence in complaints["other-workers-test"]
