"""Exercise.check and what a student reads for each way to go wrong."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from labcore.exercises import (
    CheckFailedError,
    Exercise,
    Outcome,
    core,
    load,
    running,
    slugs,
    student_seed,
    switch_off_solutions,
)
from labcore.exercises.mistakes import Mistake
from labcore.exercises.outcome import NotCheckedError
from labcore.exercises.topics.lion import CLINIC, MASKED_STEP
from labcore.processes import Worker, worker


def halve(x: torch.Tensor, k: float) -> tuple[torch.Tensor, float]:
    return x / k, k


def cases(seed: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(3, 1, 5, generator=draw), "k": 2.5},
        {"x": torch.tensor([1.0, torch.nan, -4.0]), "k": -0.5},
    ]


EXERCISE = Exercise(
    id="test.halve",
    reference=halve,
    mistakes=[
        Mistake("product", lambda x, k: (x * k, k), "You multiply."),
        Mistake("difference", lambda x, k: (x - k, k), "You subtract."),
    ],
    cases=cases,
    explanation="Division undoes multiplication.",
    returns=("quotient", "divisor"),
    timeout_s=60,
)


def raises(x: torch.Tensor, k: float) -> Any:
    return x.reshape(7, 7), k


def too_much(x: torch.Tensor, k: float) -> Any:
    return torch.ones(2**30).sum() * x, k


def leaves(x: torch.Tensor, k: float) -> Any:
    sys.exit()


LOCK = threading.Lock()


def locked(x: torch.Tensor, k: float) -> Any:
    with LOCK:
        return x / k, k


PLANTED: dict[str, tuple[Any, str, str]] = {
    "an error": (raises, "error", r"RuntimeError: shape .*\n    raises, line \d+: return x"),
    "memory": (too_much, "memory", r"2048 MiB; .*\n    too_much, line \d+: return torch.ones"),
    "os._exit": (lambda x, k: os._exit(3), "exit", r"exit code 3 .*os\._exit"),
    "sys.exit": (leaves, "exit", r"ended with SystemExit"),
    "what cannot travel": (
        lambda x, k, lock=LOCK: (x / k, k), "error", r"cannot be sent .*cannot pickle.*inside",
    ),
    "a set": (lambda x, k: {1}, "error", r"only .* can be passed, got set"),
    "an enormous answer": (lambda x, k: list(range(10**6)), "error", r"must fit in 1048576 bytes"),
    "no return": (lambda x, k: None, "wrong", r"case 2 of 2 \(all fail\), .* None.*`return`"),
    "numpy": (lambda x, k: ((x / k).numpy(), k), "wrong", r"quotient .*torch\.from_numpy"),
    "a dtype": (lambda x, k: ((x / k).double(), k), "wrong", r"dtype float32, got float64"),
    "a shape": (lambda x, k: ((x / k).squeeze(), k), "wrong", r"shape \(3, 1, 5\), got \(3, 5\)"),
    "no NaN": (
        lambda x, k: (torch.nan_to_num(x / k), k), "wrong",
        r"case 2 of 2 \(the only one that fails\), .*1 of yours is a number",
    ),
    "a NaN": (lambda x, k: (x / k * float("nan"), k), "wrong", r"2 of yours are NaN"),
    "three results": (lambda x, k: (x, k, k), "wrong", r"length 2, got 3"),
    "the divisor": (lambda x, k: (x / k, k + 1), "wrong", r"divisor is 0\.5, expected -0\.5"),
    "other arguments": (lambda x: x, "refused", r"arguments x, k by these names, got \(x\)"),
    "a result": (halve(torch.ones(1), 1.0), "refused", r"the function itself, got \("),
    "in place": (lambda x, k: (x.div_(k), k), "in place", r"right, but .*argument `x` in place"),
    "a known mistake": (lambda x, k: (k * x, k), "known mistake", r"You multiply.\n\(in case 2"),
    "both": (lambda x, k: (x.mul_(k), k), "known mistake", r"You multiply(?s:.*)`x` in place"),
    "nearly": (lambda x, k: (x / k * 1.00001, k), "wrong", r"2 of 3 numbers differ"),
    "a factor": (lambda x, k: (x / k / 3, k), "wrong", r"The returned quotient is 0\.333333 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_way_to_go_wrong_is_told(name: str, seed: int) -> None:
    if name == "memory" and sys.platform != "linux":
        pytest.skip("only Linux holds a process to its memory")
    fn, kind, words = PLANTED[name]
    outcome = EXERCISE.check(fn, seed=seed)
    assert not outcome and outcome.kind == kind, outcome
    assert re.search(words, outcome.message), outcome
    assert "Traceback" not in outcome.message and "labcore/" not in outcome.message
    assert repr(outcome).split() == f"{outcome.message} {outcome.repeat}".split()
    assert max(map(len, repr(outcome).split("\n"))) <= 100
    if kind not in ("in place",) and name not in ("other arguments", "a result"):
        assert f"seed={seed}" in outcome.repeat and "seed=" not in outcome.message
    # The worker is good for the next one, whatever happened.
    assert EXERCISE.check(halve, seed=seed).passed


def test_an_answer_may_not_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(memory_mib=1024, answer_mib=1) as small:
        monkeypatch.setattr(running, "_worker", small)
        outcome = EXERCISE.check(lambda x, k: torch.ones(2**19))
    assert outcome.kind == "error" and "at most 1 MiB" in outcome.message


def test_a_loop_without_end_is_ended() -> None:
    def forever(x: torch.Tensor, k: float) -> Any:
        while True:
            pass

    outcome = replace(EXERCISE, timeout_s=0.3).check(forever)
    assert outcome.kind == "timeout" and "0.3 s" in outcome.message


def test_a_function_of_a_notebook_shows_its_own_line() -> None:
    cell, file = "def solve(x, k):\n    y = helper(x)\n    return y, k\n", "/tmp/ipykernel_1/7.py"
    helper, other = "def helper(x):\n    return x @ x[0, 0, 0]\n", "/tmp/ipykernel_1/8.py"
    names: dict[str, Any] = {"__name__": "__main__"}
    for text, path in ((cell, file), (helper, other)):
        exec(compile(text, path, "exec"), names)
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    outcome = EXERCISE.check(names["solve"])
    assert outcome.kind == "error"
    assert "helper, line 2: return x @ x[0, 0, 0]" in outcome.message
    exec("def solve(x, k):\n    return divide(x, k), k\ndivide = lambda x, k: x / k", names)
    assert EXERCISE.check(names["solve"]).passed


def test_what_a_function_prints_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def loud(x: torch.Tensor, k: float) -> Any:
        print("k is", k)
        return x / k, k

    assert EXERCISE.check(loud).passed
    assert "k is -0.5" in capsys.readouterr().out


def test_the_stub_is_missing_and_keeps_the_solution_closed() -> None:
    closed = replace(EXERCISE, id="test.closed")

    def stub(x: torch.Tensor, k: float) -> Any:
        raise NotImplementedError("write this part")

    outcome = closed.check(stub)
    assert outcome.kind == "missing" and "`stub`" in outcome.message
    assert "first attempt" in repr(closed.solution()) and closed.solution().code == ""
    assert "def halve" in closed.solution(reveal=True).code
    closed.check(lambda x, k: None)
    assert "def halve" in closed.solution().code


def test_a_release_may_switch_its_topics_solutions_off() -> None:
    lion, epsilon = load("lion"), load("adamw_epsilon")
    try:
        switch_off_solutions("lion")
        assert all("switched off" in repr(one.solution(reveal=True)) for one in lion)
        assert not any("switched off" in repr(one.solution(reveal=True)) for one in epsilon)
    finally:
        core.switched_off.clear()
    assert not any("switched off" in repr(one.solution(reveal=True)) for one in lion)
    with pytest.raises(ValueError, match="did you mean 'lion'"):
        switch_off_solutions("loin")


def test_a_fresh_seed_each_time_and_a_told_one_repeats() -> None:
    def complaint(seed: int | None) -> str:
        return repr(EXERCISE.check(lambda x, k: (x * 0, k), seed=seed))

    fresh = complaint(None)
    assert fresh != complaint(None)
    told = re.search(r"seed=(\d+)", fresh)
    assert told is not None and complaint(int(told[1])) == fresh


def test_require_raises_the_message_only_if_the_check_failed() -> None:
    EXERCISE.check(halve).require()
    with pytest.raises(CheckFailedError, match="You subtract"):
        EXERCISE.check(lambda x, k: (x - k, k)).require()


def test_graded_cells_message_does_not_say_how_to_repeat_it() -> None:
    outcome = EXERCISE.check(lambda x, k: (x * 0, k), seed=7)
    assert "check(..., seed=7)" in repr(outcome) and "numbered_cases(7) instead" in repr(outcome)
    assert (
        "numbered_cases(7, 31)"
        in EXERCISE.check(lambda x, k: (x * 0, k), seed=7, student=31).repeat
    )
    with pytest.raises(CheckFailedError) as caught:
        outcome.require()
    assert str(caught.value).split() == outcome.message.split()
    assert max(map(len, str(caught.value).split("\n"))) <= 100


def test_the_inputs_are_shown_where_the_results_differ_most() -> None:
    def once(x: torch.Tensor, k: float) -> Any:
        answer = (x / k).clone()
        if answer.ndim == 3:
            answer[2, 0, 3] += 1
        return answer, k

    x = EXERCISE.numbered_cases(5)[0]["x"][2, 0, 3].item()
    message = EXERCISE.check(once, seed=5).message
    assert "most of all at [2, 0, 3]" in message
    assert f"There x = {x:.6g}; k = 2.5." in message


def test_arguments_are_named_in_stub_order_and_in_the_plural() -> None:
    swapped = replace(EXERCISE, cases=lambda seed: [dict(reversed(cases(seed)[0].items()))])
    assert list(swapped.numbered_cases(0)[0]) == ["x", "k"]

    right = [halve(**case) for case in EXERCISE.numbered_cases(0)]
    both = EXERCISE.judge(right, seed=0, changed=[["x"], ["k"]])
    assert "changes its arguments `k`, `x` in place" in both.message
    one = EXERCISE.judge(right, seed=0, changed=[["x"], ["x"]])
    assert "changes its argument `x` in place" in one.message


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("def solve(x, k):\n    exit()", "exit", r"^Not yet: your function calls exit\(\)"),
        ("def solve(x, k):\n    return float(input()), k", "error", r"calls input\(\)"),
        (
            "import functools\n@functools.lru_cache\ndef solve(x, k):\n    return x / k, k",
            "error",
            r"such as functools\.lru_cache",
        ),
        ("def solve(x, k):\n    return queue / k, k", "error", "name 'queue' is not defined"),
        ("def solve(x, k):\n    return math.pi, k", "refused", "module `math` is not imported"),
    ],
)
def test_what_only_a_notebook_knows_gets_one_clear_sentence(
    text: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # IPython's exit holds the session, which cannot be pickled, no more than a lock can.
    names: dict[str, Any] = {"__name__": "__main__", "exit": LOCK}
    exec(text, names)
    monkeypatch.setattr(sys.modules["__main__"], "solve", names["solve"], raising=False)
    outcome = EXERCISE.check(names["solve"])
    assert outcome.kind == kind and re.search(words, outcome.message), outcome


def test_a_students_own_numbers_replace_those_of_all_cases() -> None:
    own = replace(EXERCISE, variant=lambda student: {"k": float(student or 2)})
    assert {case["k"] for case in own.numbered_cases(0, 13)} == {13.0}
    assert own.check(lambda x, k: (x / 13, k), student=13).passed
    assert not own.check(lambda x, k: (x / 13, k), student=4)


def test_dtypes_may_be_arguments() -> None:
    def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    casting = replace(
        EXERCISE,
        reference=cast,
        cases=lambda _: [{"x": torch.ones(2), "dtype": torch.bfloat16}],
        mistakes=(),
    )
    assert casting.check(lambda x, dtype: x.to(dtype)).passed
    assert "bfloat16, got float16" in casting.check(lambda x, dtype: x.half()).message


def fair(came: Sequence[Any], _: Sequence[Any], __: Sequence[Any]) -> str | None:
    """Whether 4,000 throws are fair; 5 standard deviations, a false alarm in 1.7 million."""
    mean = torch.stack(list(came)).mean().item()
    return None if abs(mean - 0.5) < 5 * 0.5 / 4000**0.5 else f"the mean is {mean:.3f}, not 0.5"


@pytest.mark.parametrize(
    ("coin", "kind"),
    [
        (lambda seed: (torch.rand(1000) < 0.5).float(), "right"),
        (lambda seed: (torch.rand(1000) < 0.7).float(), "wrong"),
        (lambda seed: torch.ones(1000), "known mistake"),
        (lambda seed: None, "wrong"),
        (lambda seed: torch.ones(1), "known mistake"),
    ],
)
def test_random_answers_are_judged_together(
    coin: Callable[[int], Any], kind: str, seed: int
) -> None:
    def reference(seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(2, (1000,), generator=draw).float()

    def like(came: Any, right: Any, every: Any) -> str | None:
        # Against the wrong answer, which is always 1, or the reference, whose mean is a half.
        if all(bool((one == 1).all()) for one in right):
            return None if all(bool((one == 1).all()) for one in came) else "not always 1"
        return fair(came, right, every)

    throwing = replace(
        EXERCISE,
        reference=reference,
        mistakes=[
            Mistake("always one", lambda seed: torch.ones(1000), "It never falls on zero."),
        ],
        cases=lambda seed: [{"seed": seed + n} for n in range(4)],
        compare=like,
    )
    assert throwing.check(coin, seed=seed).kind == kind


def test_where_no_process_can_be_started_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError("no process is left")

    monkeypatch.setattr(running, "_worker", None)
    monkeypatch.setattr(worker, "Child", none_left)
    outcome = EXERCISE.check(halve)
    assert outcome.kind == "unavailable" and not outcome.passed
    assert "none can be started here: no process is left" in outcome.message
    with pytest.raises(NotCheckedError, match="Nothing was checked"):
        outcome.require()


def test_judge_needs_no_process(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(core, "play", None)
    answers = [halve(**case) for case in EXERCISE.numbered_cases(seed)]
    assert EXERCISE.judge(answers, seed=seed).passed
    answers[1] = answers[0]
    assert EXERCISE.judge(answers, seed=seed).kind == "wrong"
    assert EXERCISE.judge(answers, seed=seed, changed=[["x"], []]).kind == "wrong"


def test_a_students_number_needs_the_secret() -> None:
    number = student_seed("class of 2031", "Ada Lovelace")
    assert number == student_seed("class of 2031", "  ada lovelace ")
    assert number != student_seed("class of 2032", "Ada Lovelace")
    many = {student_seed("class of 2031", f"student {n}") for n in range(500)}
    assert len(many) == 500 and all(0 < one < 2**31 for one in many)
    assert student_seed("s", "Zoë") == student_seed("s", "Zoe\u0308")
    for secret, name in (("", "Ada"), ("s", "  ")):
        with pytest.raises(ValueError, match="must hold at least one character"):
            student_seed(secret, name)


def test_load_knows_the_slugs_and_names_them() -> None:
    assert "lion" in slugs() and not {"core", "clinic", "matching", "running"} & set(slugs())
    assert MASKED_STEP in load("lion")
    with pytest.raises(ValueError, match="slug must be one of .*did you mean 'lion'"):
        load("lions")


@pytest.mark.parametrize("student", ["12", 1.5, True, -1, None])
def test_a_students_number_is_a_whole_number(student: Any) -> None:
    with pytest.raises(ValueError, match="student must be a whole number"):
        EXERCISE.check(halve, student=student)
    with pytest.raises(ValueError, match="student must be a whole number"):
        CLINIC.patients(student)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {"answers": [], "changed": []},
        {"answers": [1, 2], "changed": [[], []], "failure": 5},
        {"answers": [1], "changed": [[]], "failure": None},
        {"answers": 7, "changed": [[]], "failure": None},
        {"answers": [1, 2], "changed": [3, 4], "failure": None},
        {"answers": [], "changed": [], "failure": {"type": "E", "text": None, "frames": []}},
        {"answers": [], "changed": [], "failure": {"type": "E", "text": "", "frames": [[1]]}},
        {
            "answers": [],
            "changed": [],
            "failure": {"type": "E", "text": "", "frames": [3]},
        },
    ],
)
def test_what_a_worker_tells_is_not_taken_on_trust(told: Any) -> None:
    played = running._read(told, halve, 2)
    assert played.kind == "error" and played.problem


def test_each_hint_but_the_first_opens_after_another_attempt(seed: int) -> None:
    own = replace(EXERCISE, id=f"test.hinted{seed}", hints=("Divide.", "Divide x.", "`x / k`"))
    later = "The next hint opens after another attempt."
    assert own.hint().text == own.hint().text == f"**Hint 1 of 3.** Divide.\n\n{later}"

    def stub(x: torch.Tensor, k: float) -> Any:
        raise NotImplementedError

    own.check(stub, seed=seed)  # no attempt
    assert "Hint 2" not in own.hint().text
    for number in (2, 3):
        for _ in range(3):  # more attempts before it's asked for don't open more
            outcome = own.check(lambda x, k: (x, k), seed=seed)
            assert "Stuck? Replace `check` with `hint`" in outcome.repeat
        assert f"Hint {number} of 3" in own.hint().text == own.hint().text
        assert (later in own.hint().text) == (number == 2)
    assert own.hint().text.endswith("**Hint 3 of 3.** `x / k`")
    assert replace(own, id=f"test.none{seed}", hints=()).hint().text == ""
    passed = replace(own, id=f"test.passed{seed}")
    assert passed.check(passed.reference, seed=seed)
    assert "Hint 3 of 3" in passed.hint().text and later not in passed.hint().text


def test_things_are_shown_in_few_words() -> None:
    assert repr(EXERCISE) == "<exercise test.halve: check(function), hint(), solution()>"
    assert repr(CLINIC).startswith("<clinic lion.clinic: patients()")


def test_an_outcome_is_shown_by_its_message() -> None:
    assert repr(Outcome(passed=True, kind="right", message="Right.")) == "Right."
