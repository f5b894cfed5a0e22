"""The exercises on speculative decoding, by other ways to the same numbers, and their notebook."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from labcore.exercises import Exercise
from labcore.exercises.topics.speculative import (
    AFTER_BLOCK,
    BEST_LENGTH,
    CLINIC,
    COUNT_ACCEPTED,
    NEXT_LAW,
    audit,
)
from labcore.exercises.topics.speculative.acceptance import NOBODYS, TEMPERATURES, clear_of_ties
from labcore.exercises.topics.speculative.engine import BLOCKS, END, REQUESTS, Engine, run, tables
from labcore.exercises.topics.speculative.length import simulated_log
from tests.exercises.draws import check_variants, draws
from tests.exercises.notebook import check_changed_rule, solved, source

FUNCTIONS = (COUNT_ACCEPTED, NEXT_LAW, AFTER_BLOCK, BEST_LENGTH)
OWN = (COUNT_ACCEPTED, BEST_LENGTH)


def test_students_have_their_own_numbers(seed: int) -> None:
    for exercise in OWN:
        check_variants(exercise, 4, seed)


# Acceptance and what follows ---------------------------------------------------------------------


def logits_of(chosen: list[float]) -> Tensor:
    """Rows over three tokens whose token 0 has the given probabilities at temperature 1."""
    first = torch.tensor(chosen, dtype=torch.float64)[:, None]
    return torch.cat((first, (1 - first) / 4, 3 * (1 - first) / 4), 1).log()


def test_the_text_s_example_of_acceptance() -> None:
    case = {
        "target": logits_of([0.2, 0.5, 0.3, 0.9]),
        "draft": logits_of([0.4, 0.4, 0.6]),
        "tokens": torch.zeros(3, dtype=torch.long),
        "u": torch.tensor([0.3, 0.99, 0.6], dtype=torch.float64),
        "temperature": 1.0,
    }
    assert COUNT_ACCEPTED.reference(**case, lenience=1.0) == 2
    assert solved("speculative")["count_accepted"](**case, lenience=0.8) == 3
    text = source("speculative").read_text("utf-8")
    assert "two are accepted" in text and "all three are accepted" in text


def test_no_draw_lies_at_its_ratio_whatever_the_temperature(seed: int) -> None:
    cases = COUNT_ACCEPTED.cases(seed)
    for case, temperature in itertools.product(cases, (NOBODYS, *TEMPERATURES)):
        assert clear_of_ties(case, temperature)
    ruled_out = [
        case["target"][:-1].gather(1, case["tokens"][:, None])[case["u"] == 0].isneginf()
        for case in cases
    ]
    assert sum(int(one.sum()) for one in ruled_out) >= 5


def test_acceptance_and_residual_together_give_the_target(seed: int) -> None:
    """Exactly: the chance of a drafted token times its ratio, plus the rest by the residual."""
    draw = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, 7, generator=draw, dtype=torch.float64).softmax(-1) for _ in range(2))
    p[0, 2] = 0
    p[0] /= p[0].sum()
    fine = torch.linspace(0, 1, 801, dtype=torch.float64)[:-1] + 1 / 1600
    distribution, rejected = torch.zeros(7, dtype=torch.float64), 0.0
    for token in range(7):
        passed = sum(
            COUNT_ACCEPTED.reference(
                p.log(), q[:1].log(), torch.tensor([token]), u[None], 1.0, temperature=1.0
            )
            for u in fine
        ) / len(fine)
        assert passed == pytest.approx(min(1, (p[0, token] / q[0, token]).item()), abs=2e-3)
        distribution[token] += q[0, token] * passed
        rejected += q[0, token].item() * (1 - passed)
    distribution += rejected * NEXT_LAW.reference(p, q[:1], torch.tensor([0]), 0, None)
    assert_close(distribution, p[0], rtol=0, atol=5e-3)


def test_siblings_one_after_the_other_give_the_target(seed: int) -> None:
    """The notebook's rule for trees is exact: enumerated over two drafts for one place."""
    draw = torch.Generator().manual_seed(seed)
    distribution_of = solved("speculative")["next_law"]
    p = torch.randn(2, 5, generator=draw, dtype=torch.float64).softmax(-1)
    q, other = torch.randn(2, 1, 5, generator=draw, dtype=torch.float64).softmax(-1)
    zero = torch.tensor([0])
    left = distribution_of(p, q, zero, 0, None)
    first = torch.minimum(p[0], q[0])
    second = torch.minimum(left, other[0])
    last = distribution_of(p, q, zero, 0, other)
    miss = 1 - first.sum()
    assert_close(first + miss * (second + (1 - second.sum()) * last), p[0])


def test_the_text_s_example_of_the_next_token() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [1, 0, 0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.8, 0.1]], dtype=torch.float64)
    right = torch.tensor([0.8, 0, 0.2], dtype=torch.float64)
    assert_close(NEXT_LAW.reference(p, q, torch.tensor([1]), 0, None), right)
    more = torch.tensor([[0.5, 0.1, 0.4]], dtype=torch.float64)
    distribution_of = solved("speculative")["next_law"]
    assert distribution_of(p, q, torch.tensor([1]), 0, more).tolist() == [1, 0, 0]


# Rollback ----------------------------------------------------------------------------------------


def test_caches_hold_the_text_when_both_have_read_what_is_next(seed: int) -> None:
    """Played out: tokens in slots, cut back and read on, are the text without its last token."""
    for case in AFTER_BLOCK.numbered_cases(seed):
        del case["parents"]
        rows = zip(*case.values(), strict=True)
        answers = AFTER_BLOCK.reference(**case, parents=None)
        for (context, had, drafted, path, new), answer in zip(rows, answers, strict=True):
            text = [*context, *(drafted[node] for node in path), new]
            target = [*context, *drafted]
            draft = [*context, *drafted[:-1]] if drafted else context[:had]
            for read, before, kept, reads in (
                (target, len(context) - 1, answer[0], answer[2]),
                (draft, had, answer[1], answer[3]),
            ):
                assert all(before <= slot < len(read) for slot in kept)
                assert read[:before] + [read[slot] for slot in kept] + reads == text


def test_the_text_s_examples_of_two_caches() -> None:
    def block(drafted: list[int], path: list[int], parents: Any) -> Any:
        function = solved("speculative")["after_block"]
        return function([[7, 8, 9, 5]], [3], [drafted], [path], [6], parents)

    for path, right in (
        ([0], ([3, 4], [3, 4], [6], [6])),
        ([0, 1, 2], ([3, 4, 5, 6], [3, 4, 5], [6], [3, 6])),
    ):
        assert block([1, 2, 3], path, None) == [right]
        assert str(right) in source("speculative").read_text("utf-8")
    right = ([3, 4, 7], [3, 4], [6], [4, 6])
    assert block([1, 2, 3, 4], [0, 3], [[-1, -1, 0, 0]]) == [right]
    assert str(right) in source("speculative").read_text("utf-8")


def test_a_chain_as_a_tree_is_a_chain(seed: int) -> None:
    function = solved("speculative")["after_block"]
    for case in AFTER_BLOCK.numbered_cases(seed):
        chains = [[*range(-1, len(drafted) - 1)] for drafted in case["drafts"]]
        assert function(**{**case, "parents": chains}) == AFTER_BLOCK.reference(**case)


# Length ------------------------------------------------------------------------------------------


def test_the_text_s_example_of_lengths() -> None:
    log = [(2, 2), (2, 0), (2, 1), (1, 1)]
    length, speedup = BEST_LENGTH.reference(log, [0.0, 10.0, 11.0, 12.0], 1, draft_time=1.0)
    assert length == 2 and speedup == pytest.approx(1.518, abs=5e-4)
    times = [0.0, *map(float, range(10, 19))]
    function = solved("speculative")["best_length"]
    assert function(log, times, 3, draft_time=1.0) == (1, pytest.approx(1.3125))


def test_equal_drafts_bring_what_the_log_counts(seed: int) -> None:
    """For drafts of one length the estimate is the mean of what was accepted, and one."""
    chance = random.Random(seed)
    log = [(4, min(accepted, 4)) for _, accepted in simulated_log(chance, 0.9, 0.5, 6)]
    mean = sum(accepted for _, accepted in log) / len(log)
    times = [0.0, 1.0, 1e9, 1e9, 1e9, 1.0]
    length, speedup = BEST_LENGTH.reference(log, times, 1, draft_time=0.0)
    assert (length, speedup) == (4, pytest.approx(1 + mean))


def test_one_target_wants_no_draft_and_others_do(seed: int) -> None:
    for number, student in draws(seed, 3):
        cases = BEST_LENGTH.numbered_cases(number, student)
        lengths = [BEST_LENGTH.reference(**case)[0] for case in cases]
        assert lengths[-2:] == [0, 1] and max(lengths) >= 2


# The clinic --------------------------------------------------------------------------------------


def test_the_tables_end_only_once() -> None:
    target, one, many, draft = tables()
    for table in (target, one, many, draft):
        after_end = table[:, END].softmax(-1)
        assert (after_end[..., END] == 1).all()
    assert (one != many).any() and (one - many).abs().nan_to_num().max() < 0.1
    assert (one - target).abs().nan_to_num().max() < 0.1


def test_the_patients_show_what_their_symptoms_say() -> None:
    healthy = run(Engine())
    assert healthy.distance.max() < 0.04 and healthy.gap == 0
    assert not healthy.differing.any() and len(healthy.accepted) == BLOCKS

    softmaxed = run(Engine(softmaxed=True))
    assert softmaxed.distance.min() > healthy.distance.max()
    assert softmaxed.differing[-1] > 0.9 and softmaxed.gap > 1

    hole = run(Engine(hole=True))
    assert hole.accepted[0] == healthy.accepted[0]
    assert hole.accepted[-1] < 0.6 * hole.accepted[0]
    unlike = run(Engine(unlike=True))
    assert (unlike.accepted < healthy.accepted).all()
    assert unlike.accepted.max() - unlike.accepted.min() < 0.08
    for one in (hole, unlike):
        assert one.distance.max() < 0.05 and not one.differing.any()

    past = run(Engine(past_end=True))
    assert past.accepted[-1] > past.accepted[0] + 0.15
    assert past.delivered[-1] < 0.7 * past.delivered[0]
    assert not past.differing.any() and past.distance.max() < 0.04

    narrow = run(Engine(narrow=True))
    assert (narrow.accepted - healthy.accepted).abs().max() < 0.05
    assert 0 < narrow.differing[-1] < 0.2 and 0 < narrow.gap < 0.1
    assert narrow.distance.max() < 0.05


def test_the_audit_counts_what_differs(seed: int) -> None:
    words = audit(seed)
    names = CLINIC.diagnoses(seed)
    assert words.keys() == names.keys()
    for label, name in names.items():
        same = f"none of {REQUESTS}" in words[label]
        assert same != (name.startswith("no fault") or "softmax" in name)
    assert f"{REQUESTS:,} requests" in source("speculative").read_text("utf-8")


# The notebook's own rules ------------------------------------------------------------------------


RULES: dict[str, tuple[str, Exercise, str]] = {
    "lenience-test": ("count_accepted", COUNT_ACCEPTED, "strict, whatever"),
    "siblings-test": ("next_law", NEXT_LAW, "ignore `others`"),
    "trees-test": ("after_block", AFTER_BLOCK, "whatever the parents are"),
    "rows-test": ("best_length", BEST_LENGTH, "whatever `rows` is"),
}


@pytest.mark.parametrize("cell", RULES)
def test_a_rule_that_labcore_does_not_know_is_graded(cell: str, seed: int) -> None:
    function, exercise, words = RULES[cell]
    check_changed_rule("speculative", cell, function, exercise, words, seed)


# What students may also write: no hint that leads away -------------------------------------------


def one_less(target: Tensor, draft: Tensor, *others: Any, **more: Any) -> int:
    return max(COUNT_ACCEPTED.reference(target, draft, *others, **more) - 1, 0)


def even(p: Tensor, **_: Any) -> Tensor:
    return torch.full_like(p[0], 1 / p.shape[1])


def lengths_alone(**case: Any) -> Any:
    return [(len(a), len(b), c, d) for a, b, c, d in AFTER_BLOCK.reference(**case)]


def always_two(log: Any, times: Any, rows: int, *, draft_time: float) -> tuple[int, float]:
    return 2, BEST_LENGTH.reference(log, times, rows, draft_time=draft_time)[1]


OTHERS: list[tuple[Exercise, Callable[..., Any], str]] = [
    (COUNT_ACCEPTED, one_less, "the result is"),
    (NEXT_LAW, even, "numbers differ"),
    (AFTER_BLOCK, lengths_alone, "must be a list of"),
    (BEST_LENGTH, always_two, "the returned length is 2"),
]


@pytest.mark.parametrize(("exercise", "answer", "words"), OTHERS, ids=[one.id for one in FUNCTIONS])
def test_an_unknown_mistake_is_told_by_its_numbers(
    exercise: Exercise, answer: Callable[..., Any], words: str, seed: int
) -> None:
    given = [answer(**case) for case in exercise.numbered_cases(seed)]
    outcome = exercise.judge(given, seed=seed)
    assert outcome.kind == "wrong" and words in outcome.message, outcome
