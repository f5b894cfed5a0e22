"""The exercises on a model of one's own, by other ways to the same answers, and their notebook."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from labcore.exercises import Exercise
from labcore.exercises.topics.capstone import BEST_DRAFT, BLAME, CHOOSE, CLINIC, clinic
from labcore.exercises.topics.capstone.blaming import LIFTS, some_log
from labcore.exercises.topics.capstone.choosing import EPOCHS
from labcore.exercises.topics.capstone.drafting import MARGINS
from labcore.exercises.topics.capstone.streaming import LONGEST, STOP, Sender, judged, requests
from tests.exercises.draws import answers, check_variants, draws
from tests.exercises.notebook import check_changed_rule, solved, source

SLUG = "capstone"


def told(*values: object) -> None:
    """Each of these values stands in the lab's text."""
    text = source(SLUG).read_text("utf-8").replace('\\"', '"')
    for value in values:
        assert str(value) in text, value


@pytest.mark.parametrize(
    ("exercise", "kinds"), [(CHOOSE, len(EPOCHS)), (BLAME, len(LIFTS)), (BEST_DRAFT, len(MARGINS))]
)
def test_students_have_numbers_of_their_own(exercise: Exercise, kinds: int, seed: int) -> None:
    check_variants(exercise, kinds, seed)


@pytest.mark.parametrize(
    ("cell", "function", "exercise", "words"),
    [
        ("attention-test", "choose", CHOOSE, "You leave out the cost of attention"),
        ("every-test", "blame", BLAME, "each logged loss as one step"),
        ("pause-test", "best_draft", BEST_DRAFT, "You allow any pause"),
    ],
)
def test_the_changed_rules(
    cell: str, function: str, exercise: Exercise, words: str, seed: int
) -> None:
    check_changed_rule(SLUG, cell, function, exercise, words, seed)


# Choose ------------------------------------------------------------------------------------------


def chosen(case: Mapping[str, Any]) -> tuple[int, int]:
    """Compute the rule in fractions, with tokens in place of steps."""
    qualified = []
    for width, layers, weights in case["shapes"]:
        length = case["length"]
        pairs = Fraction(sum(range(length + 1)), length) if length else 0
        step = case["batch"] * (6 * weights + 12 * layers * width * pairs)
        steps = math.floor(Fraction(case["speed"]) * case["seconds"] / step)
        tokens = min(steps * case["batch"], case["epochs"] * case["corpus"])
        steps = tokens // case["batch"]
        if steps * case["batch"] >= 20 * weights or not qualified:
            qualified.append((width, steps))
    return qualified[-1]


def test_the_choice_in_fractions(seed: int) -> None:
    function = solved(SLUG)["choose"]
    for draw, student in draws(seed, 4):
        cases = CHOOSE.numbered_cases(draw, student)
        assert [CHOOSE.reference(**case) for case in cases] == [chosen(case) for case in cases]
        for case in cases:
            rows = case | {"length": 257}
            assert function(**rows) == chosen(rows)


def test_the_example_of_the_choice() -> None:
    shapes = [(64, 2, 100_000), (96, 3, 300_000)]
    case = {"speed": 6e10, "seconds": 100, "batch": 1000, "shapes": shapes, "epochs": 4}
    function = solved(SLUG)["choose"]
    small = case | {"corpus": 1_000_000, "length": 0}
    assert function(**small) == CHOOSE.reference(**small) == (64, 4000)
    steps = [CHOOSE.reference(**small | {"corpus": 10**9, "shapes": [one]})[1] for one in shapes]
    assert steps == [10_000, 3333] and steps[1] * 1000 // 300_000 == 11
    idle = 100 * (1 - 4000 / steps[0])
    large = case | {"corpus": 10_000_000}
    whole, rows = function(**large, length=0), function(**large, length=255)
    told((64, 4000), "10,000 steps of the first shape and 3,333", f"idle for {idle:.0f} s")
    told(whole, rows)


def test_time_and_text_are_both_limits_and_sometimes_nothing_qualifies(seed: int) -> None:
    found = set()
    for draw, student in draws(seed, 12):
        for case in CHOOSE.numbered_cases(draw, student):
            width, steps = CHOOSE.reference(**case)
            _, in_time = CHOOSE.reference(**case | {"corpus": 10**15})
            weights = next(one[2] for one in case["shapes"] if one[0] == width)
            found.add((steps == in_time, steps * case["batch"] >= 20 * weights))
    assert found == {(one, other) for one in (True, False) for other in (True, False)}


# Blame -------------------------------------------------------------------------------------------


def test_the_example_of_the_blame() -> None:
    usual = {"wiki.txt": 8, "mail.txt": 2}
    spiked = {"wiki.txt": 5, "mail.txt": 4, "notes.md": 1}
    losses = [2.0, 2.2] * 10 + [3.0]
    case = {"losses": losses, "rows": [usual] * 20 + [spiked], "every": 1}
    for lift in (2, 4):
        right = BLAME.reference(**case, lift=lift)
        assert solved(SLUG)["blame"](**case, lift=lift) == right
        told(str(right).replace("'", '"'))
    case["losses"] = [*losses[:-1], 2.9]
    assert BLAME.reference(**case, lift=2) == (None, None), "the limit itself is no spike"
    level = statistics.median(losses[:20])
    spread = statistics.median(abs(one - level) for one in losses[:20])
    told(f"limit is {level + 8 * spread:.1f}")


@pytest.mark.parametrize("every", [1, 3])
def test_the_planted_file_is_found_and_nobody_else(every: int, seed: int) -> None:
    chance, function = random.Random(seed), solved(SLUG)["blame"]
    shown = set()
    for _ in range(60):
        log = some_log(chance, every=every)
        step, file = function(**log, lift=4)
        if every == 1:
            assert BLAME.reference(**log, lift=4) == (step, file)
        shown.add((step is None, file is None))
        if file is not None:
            assert log["rows"][step][file] == max(
                one.get(file, 0) for one in log["rows"][step - step % every :][:every]
            )
    assert shown == {(True, True), (False, True), (False, False)}
    for kind in ("slow", "dip"):
        calm = [function(**some_log(chance, kind, every), lift=4) for _ in range(20)]
        assert calm.count((None, None)) >= 15


# Draft -------------------------------------------------------------------------------------------


def test_the_example_of_the_drafts() -> None:
    drafts = {"n-grams": (0.5, 0.0, [0.8, 0.75]), "head": (1.0, 1.0, [0.7, 0.5])}
    case = {"drafts": drafts, "passes": {1: 10.0, 2: 11.0, 3: 12.0}, "margin": 1.05}
    function = solved(SLUG)["best_draft"]
    for pause, words in ((None, '("n-grams", 2, 1.545)'), (11.5, '("n-grams", 1, 1.333)')):
        name, length, speed = function(**case, pause=pause)
        assert f'("{name}", {length}, {speed:.3f})' == words
        told(words)
    *_, speed = function(**case | {"drafts": {"head": drafts["head"]}}, pause=None)
    told(f"a speed of {speed:.3f}")


def test_the_speed_is_that_of_many_passes(seed: int) -> None:
    """Ten thousand passes in a row, in expected tokens and time, have the speed of the answer."""
    for draw, student in draws(seed, 6):
        for case in BEST_DRAFT.numbered_cases(draw, student):
            name, length, speed = BEST_DRAFT.reference(**case)
            if name is None:
                assert (length, speed) == (0, 1.0)
                continue
            found, cost, chances = case["drafts"][name]
            exact = [math.prod(chances[:n]) for n in range(length + 1)]
            each = sum(n * (exact[n] - exact[n + 1]) for n in range(length)) + length * exact[-1]
            with_draft = round(10_000 * found)
            tokens = 10_000 + with_draft * each
            plain = case["passes"][1]
            time = with_draft * (case["passes"][length + 1] + length * cost)
            time += (10_000 - with_draft) * plain
            assert speed == pytest.approx(tokens / time * plain, rel=1e-9)
            assert speed >= case["margin"]


def test_sometimes_no_draft_pays(seed: int) -> None:
    assert None in [name for name, *_ in answers(BEST_DRAFT, BEST_DRAFT.reference, seed, 0)]


# The clinic --------------------------------------------------------------------------------------


def received(tokens: tuple[bytes, ...], **faults: bool) -> str:
    sender = Sender(**faults)
    for token in tokens:
        sender.take(token)
        if sender.stopped:
            return sender.sent
    sender.end()
    return sender.sent


def test_a_healthy_sender_sends_the_right_text_however_it_is_cut(seed: int) -> None:
    every = requests(60, 1, seed)
    for one in every:
        assert received(one.tokens) == one.right
        assert max(map(len, one.tokens)) <= 4 and len(one.tokens) <= LONGEST
    stops = [one for one in every if STOP in b"".join(one.tokens).decode("utf-8", "ignore")]
    assert len(stops) == 20 and all(STOP not in one.right for one in stops)


@pytest.mark.parametrize(
    ("fault", "came"),
    [
        ("alone", "né, ok###x#"),
        ("eager", "né, ok##"),
        ("bytewise", "n��, ok"),
        ("forgetful", "né, ok"),
    ],
)
def test_what_each_fault_sends(fault: str, came: str) -> None:
    tokens = (b"n\xc3", b"\xa9, ", b"ok", b"##", b"#x#")
    assert received(tokens) == "né, ok"
    assert received(tokens, **{fault: True}) == came


def test_held_text_is_sent_at_the_end_unless_it_is_forgotten() -> None:
    assert received((b"C", b"##")) == "C##" and received((b"C", b"##"), forgetful=True) == "C"


def test_the_patients_show_what_their_symptoms_say() -> None:
    seen = CLINIC.diagnoses()
    curves = {
        seen.get(label, "healthy"): tuple(panels.values())
        for label, panels in CLINIC.patients().items()
    }
    wrong, missing, held, queue = curves["healthy"]
    assert not any(wrong) and not any(missing) and queue[-1] == 0 < max(queue)
    alone = curves["the stop text is looked for in each token alone"]
    assert alone[0][-1] > 100 and not any(alone[1]) and sum(alone[3]) > 2 * sum(queue)
    eager = curves["nothing is held back for a stop text"]
    stops = clinic.REQUESTS // 3
    assert 0 < eager[0][-1] <= 2 * stops and eager[1] == missing and eager[3] == queue
    assert eager[2][-1] < held[-1]
    bytewise = curves["each token is decoded by itself"]
    assert bytewise[0][-1] >= 2 * bytewise[1][-1] > 100 and bytewise[3] == queue
    forgetful = curves["held text is dropped at the end"]
    assert 0 < forgetful[1][-1] <= 2 * stops
    assert (forgetful[0], *forgetful[2:]) == (wrong, held, queue)
    clinging = curves["a client that left keeps its place"]
    assert clinging[:2] == (wrong, missing) and sum(clinging[3]) > 2 * sum(queue)


def test_everybody_is_served_and_the_text_has_the_clinic_s_numbers() -> None:
    server = CLINIC.healthy()
    for _ in range(clinic.STEPS):
        server.step()
    assert len(server.ended) == clinic.REQUESTS and not server.running
    left = [row for row in server.ended if row.left]
    assert left and not any(sum(judged(row)) for row in server.ended)
    told(
        f"Each server has {clinic.PLACES} places",
        f"{clinic.REQUESTS} in all",
        f"each of {clinic.STEPS}",
    )
    told(f"`{STOP}`", "every fourth step")


def test_the_notebook_s_diagnosis_reads_the_curves(seed: int) -> None:
    names = dict(solved(SLUG))
    for student in (seed, seed + 1, seed + 2):
        names["patients"] = CLINIC.patients(student)
        code = names["diagnose"].__code__
        found = type(names["diagnose"])(code, names)()
        assert CLINIC.check(found, student=student).passed
