"""The references of the lab `clipping`, by other ways to the same results, and its notebook."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from labcore.clipping import clip_by_global_norm
from labcore.exercises import Exercise, load, student_seed
from labcore.exercises.matching import difference
from labcore.exercises.topics.clipping import CLINIC, HISTORY, SCALING, SHARDS
from tests.exercises.draws import answers, draws
from tests.exercises.notebook import complaints_about

FUNCTIONS = (SHARDS, HISTORY, SCALING)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_topic_offers_its_exercises() -> None:
    assert load("clipping") == [*FUNCTIONS, CLINIC]


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda one: one.id)
def test_no_two_answers_agree_in_all_cases(exercise: Exercise, seed: int) -> None:
    for draw, student in draws(seed, 4):
        functions = {"right": exercise.reference}
        functions |= {name: function for name, (function, _) in exercise.wrong.items()}
        given = {name: answers(exercise, fn, draw, student) for name, fn in functions.items()}
        for name, mine in given.items():
            for other, theirs in given.items():
                agree = [
                    difference(one, two, rtol=exercise.rtol, atol=exercise.atol) is None
                    for one, two in zip(mine, theirs, strict=True)
                ]
                assert name == other or not all(agree), (name, other, draw, student)


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda one: one.id)
def test_a_student_has_numbers_of_their_own(exercise: Exercise, seed: int) -> None:
    numbers = [student_seed("secret", f"{seed} {n}") for n in range(60)]
    assert len({tuple(exercise.variant(number).values()) for number in numbers}) >= 4
    assert exercise.variant(numbers[0]) == exercise.variant(numbers[0])


# Shards ------------------------------------------------------------------------------------------


def test_the_layout_changes_nothing(seed: int) -> None:
    """One worker with everything is clipped by the library to the same numbers."""
    for draw, student in draws(seed, 5):
        for case in SHARDS.numbered_cases(draw, student):
            norm, clipped = SHARDS.reference(**case)
            columns = zip(*case["shards"], strict=True)
            whole = [
                parts[0] if copied else torch.cat(parts)
                for parts, copied in zip(columns, case["replicated"], strict=True)
            ]
            parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in whole]
            for parameter, grad in zip(parameters, whole, strict=True):
                parameter.grad = grad.clone()
            found = clip_by_global_norm(parameters, case["max_norm"])
            assert found.norm.item() == pytest.approx(norm, rel=1e-9)
            for place, parameter in enumerate(parameters):
                mine = [held[place] for held in clipped]
                joined = mine[:1] if case["replicated"][place] else [torch.cat(mine)]
                torch.testing.assert_close(joined[0], parameter.grad)
                if case["replicated"][place]:
                    assert all(torch.equal(mine[0], other) for other in mine)


def test_the_example_of_the_shards() -> None:
    case = {"shards": [[floats(2), floats(6)], [floats(3), floats(6)]], "replicated": [False, True]}
    norm, clipped = SHARDS.reference(**case, max_norm=3.5, norm_type=2.0)
    assert norm == 7
    assert [[part.item() for part in held] for held in clipped] == [[1, 3], [1.5, 3]]
    for p, right in ((1.0, 11), (math.inf, 6)):
        assert SHARDS.reference(**case, max_norm=1.0, norm_type=p)[0] == right


# The history -------------------------------------------------------------------------------------


def test_the_example_of_the_history() -> None:
    found = HISTORY.reference(floats(1, math.nan, 3, 8, 10, 2), window=2, factor=2.0)
    torch.testing.assert_close(found, floats(1, 0, 1, 0.5, 0.7, 1))


def test_no_step_is_longer_than_the_limit_of_the_steps_before(seed: int) -> None:
    """The clipped norms, finite ones alone, are their own history."""
    for draw, student in draws(seed, 4):
        for case in HISTORY.numbered_cases(draw, student):
            norms, window, factor = case["norms"], case["window"], case["factor"]
            found = HISTORY.reference(**case)
            assert torch.equal(found == 0, ~norms.isfinite())
            used = (found * norms)[norms.isfinite()]
            assert torch.equal(used[:window], norms[norms.isfinite()][:window])
            limits = factor * used.unfold(0, window, 1)[:-1].quantile(0.5, dim=1)
            assert (used[window:] <= limits * (1 + 1e-12)).all()
            raw = norms[norms.isfinite()][window:]
            torch.testing.assert_close(used[window:], torch.minimum(raw, limits))


def test_after_a_lasting_rise_the_limit_follows(seed: int) -> None:
    for draw, student in draws(seed, 3):
        window, factor = HISTORY.variant(student).values()
        norms = floats(*[1.0] * 20, *[40.0] * (12 * window))
        found = HISTORY.reference(norms, window=window, factor=factor)
        assert draw >= 0 and found[20] == factor / 40 and found[-1] == 1


# Loss scaling ------------------------------------------------------------------------------------


def test_the_example_of_the_scaling() -> None:
    gradients = torch.tensor([[8, 16], [24, 16]], dtype=torch.float16)
    # The mean over tokens weighs the first row three times.
    gradient, scale, good = SCALING.reference(gradients, [3, 1], 4.0, 2, max_norm=1.0, patience=3)
    torch.testing.assert_close(gradient, floats(0.6, 0.8))
    assert (scale, good) == (8.0, 0)


def test_how_the_batch_is_cut_changes_nothing(seed: int) -> None:
    """Rows of one token each, or their means: the same step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-8, 8, (8, 5), generator=generator).half()  # means in float16 are exact
    numbers = {"max_norm": 0.5, "patience": 9}
    single = SCALING.reference(tokens, [1] * 8, 2.0, 3, **numbers)
    means = torch.stack([tokens[:4].mean(0), tokens[4:6].mean(0), tokens[6:].mean(0)])
    cut = SCALING.reference(means, [4, 2, 2], 2.0, 3, **numbers)
    empty = torch.cat([means, torch.full((1, 5), math.nan, dtype=torch.float16)])
    with_empty = SCALING.reference(empty, [4, 2, 2, 0], 2.0, 3, **numbers)
    for other in (cut, with_empty):
        assert difference(other, single, rtol=1e-12, atol=1e-12) is None


def test_each_kind_of_step_occurs(seed: int) -> None:
    for draw, student in draws(seed, 20):
        cases = SCALING.numbered_cases(draw, student)
        steps = [SCALING.reference(**case) for case in cases]
        moves = [
            (step[1] / case["scale"], step[0] is None)
            for step, case in zip(steps, cases, strict=True)
        ]
        assert moves == [(1, False), (2, False), (0.5, True), (1, False), (1, True)]
        lengths = [step[0].norm().item() for step in steps if step[0] is not None]
        limit = pytest.approx(cases[0]["max_norm"])
        assert [length == limit for length in lengths] == [True, False, True]
        assert [step[2] for step in steps] == [3, 0, 0, 2, cases[4]["good"]]


# The clinic --------------------------------------------------------------------------------------


def test_the_patients_show_what_their_symptoms_say() -> None:
    seen = {**CLINIC.diagnoses(), "healthy": "healthy"}
    patients = {seen[label]: curves for label, curves in CLINIC.patients().items()}
    loss, length, cosine = (
        {name: floats(*list(panels.values())[place]) for name, panels in patients.items()}
        for place in range(3)
    )
    assert all(len(curve) == 200 for curve in loss.values())
    well, limit, loud = "healthy", 0.5 + 1e-9, [60, 100, 140, 180]
    straight = {name for name, curve in cosine.items() if (curve > 1 - 1e-9).all()}
    assert straight == {well, "clipped before the backward pass", "clipped before unscaling"}
    assert (length[well] < limit).all() and length[well].min() < 0.25
    assert loss[well][-1] < 0.1 * loss[well][0]
    late = length["clipped before the backward pass"]
    assert (late[[0, *loud]] > 2).all() and late.max() > 10 * limit
    after = [step + 1 for step in loud]
    rise = loss["clipped before the backward pass"]
    assert (rise[after] > 2 * rise[loud]).all()
    tiny = length["clipped before unscaling"]
    assert tiny.max() < limit / 1000 and tiny.max() - tiny.min() < 1e-9
    assert loss["clipped before unscaling"][-1] > 0.95 * loss[well][0]
    each = "each tensor clipped by itself"
    assert limit < length[each].max() <= 1 + 1e-9 and length[each][loud].min() > 1.5 * limit
    assert cosine[each].min() > 0.7 and (cosine[each][loud] < 0.9).all()
    assert (cosine[each][length[each] < 0.4] > 0.98).all()
    summed = "gradients never zeroed"
    assert (length[summed] - 0.5).abs().max() < 1e-9
    assert cosine[summed][40:].mean() < 0.5 and cosine[summed].min() < -0.2
    assert loss[summed][-40:].mean() > 1.5 * loss[well][-40:].mean()


# The notebook ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("    total = 0.0\n", "    total, norm_type = 0.0, 2.0\n", "the Euclidean one for every p"),
        ("total ** (1 / norm_type)", "total**0.5", "and then take the square root"),
    ],
)
def test_the_rule_of_other_norms_is_graded_by_itself(right: str, wrong: str, sentence: str) -> None:
    complaints = complaints_about("clipping", "clipped_shards", right, wrong)
    assert set(complaints) == {"other-norms-test"}
    assert sentence in complaints["other-norms-test"]
