"""A judged: what the sandbox tells is believed in nothing, and one death is not the end."""

from __future__ import annotations

import copy
import inspect
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labcore.exercises.running import play, play_forked
from labcore.exercises.topics.lion import STALL
from labcore.grading import session
from labcore.grading.intake.submissions import mend
from labcore.grading.judged import Judged, run_and_judge
from labcore.grading.judging import HandedIn, Sandbox, _read
from labcore.grading.plan import _happened
from labcore.grading.sandbox import Limits
from labcore.labs import releases
from labcore.labs.source import read_lab
from tests.grading.hostile import GUARD
from tests.labs import mini

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(cell_s=8, wall_s=150, memory_mib=mini.MEMORY_MIB, file_mib=64)


def tried(
    root: Path,
    change: Callable[[mini.Notebook], object] = bool,
    *,
    number: int | None = 0,
    extra: Mapping[str, str] | None = None,
    **answers: str,
) -> Judged:
    """A judged of the mini lab with these answers; change: of its source, extra: plain cells."""
    lab = read_lab(mini.source_path(mini.checkout(root, change)))
    notebook = mini.solved(copy.deepcopy(mini.released(root)), **answers)
    for name, text in (extra or {}).items():
        mini.cell(notebook, name)["source"] = text
    mended = mend(notebook, mini.read(root / "labs" / "release" / "mini" / "mini.ipynb"))
    return run_and_judge(lab, mended.notebook, number=number, limits=LIMITS)


GOOD = {"answers": [9], "changed": [[]], "kind": "", "problem": "", "at": None}


@pytest.mark.parametrize(
    "told",
    [
        None,
        7,
        "answers",
        [],
        {},
        np.zeros(3),
        torch.zeros(3),
        np.array("x"),
        GOOD | {"answers": 9},
        GOOD | {"answers": np.array(9)},
        GOOD | {"answers": []},
        GOOD | {"answers": [9, 9]},
        GOOD | {"changed": None},
        GOOD | {"changed": [7]},
        GOOD | {"changed": []},
        GOOD | {"kind": "right"},
        GOOD | {"kind": None},
        GOOD | {"kind": ["missing"]},
        GOOD | {"kind": np.array(["", ""])},
        {name: value for name, value in GOOD.items() if name != "at"},
    ],
    ids=repr,
)
def test_what_is_no_answer_is_an_error_of_the_answer(told: Any) -> None:
    played = _read(told, 1)
    assert (played.kind, list(played.answers)) == ("error", [])
    assert "did not come from your function's return" in played.problem


@pytest.mark.parametrize("at", [-1, 1, True, "0", 10**30, None])
def test_a_place_outside_the_cases_is_none(at: Any) -> None:
    failed = GOOD | {
        "answers": [],
        "changed": [],
        "kind": "error",
        "problem": "x" * 10**6,
        "at": at,
    }
    played = _read(failed, 1)
    assert played.kind == "error" and played.at is None and len(played.problem) < 10_000
    assert _read(failed | {"at": 0}, 1).at == 0
    assert _read(GOOD, 1).answers == [9]


@pytest.mark.parametrize(
    "told",
    [None, np.zeros(3), {}, {"told": "text"}, [1], {"told": np.frombuffer(b"[]", np.uint8)}],
    ids=repr,
)
def test_a_run_that_tells_nothing_of_use_is_a_problem(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sandbox, "_ask", lambda *_: told)
    with Sandbox(LIMITS, sandboxed=True) as sandbox:
        ran = sandbox.run(mini.mini_lab(), ["double"])
    assert "malformed answer" in ran.problem and ran.number is None
    assert len(ran.outputs) == len(ran.counts) == len(mini.mini_lab()["cells"])


def handed_in(told: Mapping[str, Any]) -> HandedIn:
    """A function that was described so, of a sandbox that is never asked."""
    return HandedIn("double", Sandbox(LIMITS, sandboxed=True), told, "")


def test_function_has_the_parameters_it_has_in_the_sandbox() -> None:
    def theirs(a: Any, /, b: Any, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **more: Any) -> Any:
        raise NotImplementedError

    parameters = inspect.signature(theirs).parameters.values()
    told = [[one.name, one.kind.name, one.default is not one.empty] for one in parameters]
    ours = inspect.signature(handed_in({"parameters": told}))
    assert list(ours.parameters) == [*"abc", "rest", "d", "e", "more"]
    for one, other in zip(ours.parameters.values(), parameters, strict=True):
        assert one.kind is other.kind
        assert (one.default is one.empty) == (other.default is other.empty)
    with pytest.raises(TypeError, match="missing a required"):
        ours.bind(1)


@pytest.mark.parametrize(
    "parameters",
    [None, 7, [[1]], [["x", "ODD", False]], [["1x", "KEYWORD_ONLY", False]], [[[], [], []]], "abc"],
)
def test_invalid_parameters_give_a_function_that_takes_anything(parameters: Any) -> None:
    found = inspect.signature(handed_in({"parameters": parameters, "lines": 5}))
    assert [one.name for one in found.parameters.values()] == ["args", "kwargs"]


def _doubles(x: Any) -> Any:
    return 2 * x


def _spoils(x: Any) -> Any:
    x += 1
    return x


def _raises(x: Any) -> Any:
    raise ValueError(f"王 <b> {x.shape}")


def _is_a_stub(x: Any) -> Any:
    raise NotImplementedError


def _leaves(x: Any) -> Any:
    raise SystemExit(3)


def _answers_oddly(x: Any) -> Any:
    return object()


def _asks_for_much(x: Any) -> Any:
    return torch.zeros(10**12)


def _sleeps(x: Any) -> Any:
    time.sleep(60)


@pytest.mark.parametrize(
    "fn",
    [_doubles, _spoils, _raises, _is_a_stub, _leaves, _answers_oddly, _asks_for_much, _sleeps],
)
def test_a_fork_tells_the_same_as_a_worker(fn: Callable[..., Any]) -> None:
    cases = [{"x": torch.arange(3.0)}, {"x": torch.zeros(0, 2)}]
    seconds = 1.0 if fn is _sleeps else 20.0
    forked, worked = play_forked(fn, cases, seconds), play(fn, cases, timeout_s=seconds)
    assert (forked.kind, forked.problem, forked.at) == (worked.kind, worked.problem, worked.at)
    assert forked.changed == worked.changed and len(forked.answers) == len(worked.answers)
    for one, other in zip(forked.answers, worked.answers, strict=True):
        assert torch.equal(one, other)
    kinds = {_doubles: "", _spoils: "", _is_a_stub: "missing", _leaves: "exit", _sleeps: "timeout"}
    wanted = "memory" if fn is _asks_for_much else kinds.get(fn, "error")
    assert forked.kind == wanted and torch.equal(cases[0]["x"], torch.arange(3.0))


def _uncheckable(notebook: mini.Notebook) -> None:
    """The first graded cell finds no compiler."""
    test = mini.cell(notebook, mini.DOUBLE)
    test["source"] = test["source"].replace(
        "assert double(4) == 8, 'hidden double'",
        "from labcore.exercises import outcome\nraise outcome.NotCheckedError('no compiler')",
    )


def test_dying_cells_are_left_out_and_uncheckable_ones_reported(
    tmp_path: Path, bubblewrap: None
) -> None:
    judged = tried(tmp_path, _uncheckable, extra={"more": "print('here')\nimport os\nos._exit(1)"})
    assert judged.errors == {mini.DOUBLE: ("NotCheckedError", "no compiler")}
    assert (judged.died, judged.stopped, judged.unchecked, judged.problem) == (1, 0, 1, "")
    assert list(_happened(judged)) == [
        "a cell killed the kernel (skipped)",
        "a cell could not be checked on this machine; see the feedback page",
    ]
    left_out = [one for one in judged.outputs if one and one[0].get("ename") == "KernelDied"]
    assert len(left_out) == 1 and "skipped" in left_out[0][0]["traceback"][0]
    assert Judged.from_json(judged.to_json()) == judged


def test_function_that_kills_the_sandbox_spares_the_others(
    tmp_path: Path, bubblewrap: None
) -> None:
    kills = f"def double(x):\n    exec({GUARD!r})\n    import os\n    os.kill(-1, 9)"
    judged = tried(tmp_path, double=kills)
    name, message = judged.errors[mini.DOUBLE]
    assert list(judged.errors) == [mini.DOUBLE] and name == "RuntimeError"
    assert "it killed the sandbox that it ran in" in message


def _numbered(notebook: mini.Notebook) -> None:
    """A lab whose first test depends on the student's number."""
    mini.cell(notebook, "begin")["source"] = "STUDENT = 0"
    test = mini.cell(notebook, mini.DOUBLE)
    test["source"] = test["source"].replace(
        "double(4) == 8", "(double(STUDENT), STUDENT) == (10, 5)"
    )


@pytest.mark.parametrize(
    ("cell", "number", "passes", "concern"),
    [
        ("STUDENT = 7", 5, True, ""),  # the roster's number counts
        ("STUDENT = 2 + 3", None, True, "graded as 5"),
        ("STUDENT = 'five'", None, False, "graded as 0"),
    ],
)
def test_number_is_the_rosters_or_the_notebooks_final_one(
    tmp_path: Path, bubblewrap: None, cell: str, number: int | None, passes: bool, concern: str
) -> None:
    judged = tried(tmp_path, _numbered, number=number, extra={"begin": cell})
    assert (mini.DOUBLE not in judged.errors) == passes and mini.SQUARE not in judged.errors
    assert [concern in text for text in judged.concerns] == ([True] if concern else [])


def test_halves_of_signs_in_an_error_can_be_written() -> None:
    judged = Judged(outputs=[], counts=[], errors={"a": ("E", "\ud800")})
    assert Judged.from_json(judged.to_json()).errors == {"a": ("E", "?")}


FORGED = """
import json, pathlib
import labcore.grading.session as session
real = session.export
def export(names, folder):
    real(names, folder)
    path = pathlib.Path(folder, "handed_in.json")
    told = json.loads(path.read_text())
    told['=HYPERLINK("https://evil.example")'] = {"copied": True}
    told["double"] |= {"passed": True, "points": 5, "score": 5, "errors": []}
    path.write_text(json.dumps(told))
session.export = export
"""


def test_what_the_session_says_of_itself_counts_for_nothing(
    tmp_path: Path, bubblewrap: None
) -> None:
    wrong = "def double(x):\n    return 0"
    judged = tried(tmp_path, extra={"begin": FORGED}, double=wrong)
    assert set(judged.errors) == {mini.DOUBLE}
    assert judged.concerns and not any("HYPERLINK" in one for one in judged.concerns)


CALLS = """
def transfer(lr, decay, *, factor, decay_times_lr):
    own = getattr(lion.TRANSFER, "refer" + "ence")
    return own(lr, decay, factor=factor, decay_times_lr=decay_times_lr)
"""
ASKS = """
def diagnose():
    found = {}
    for label, name in getattr(lion.CLINIC, "diag" + "noses")(STUDENT).items():
        column, places = next(iter(lion.CLINIC.telling(name).items()))
        found[label] = name, column, places[0]
    return found
"""


@pytest.mark.parametrize(
    ("thing", "plain"),
    [
        ({"A": ("betas swapped", "no gradient", 3)}, {"A": ["betas swapped", "no gradient", 3]}),
        ({"A": object()}, None),
        (float, None),
    ],
)
def test_a_value_that_is_handed_in_is_plain_data(thing: Any, plain: Any) -> None:
    assert session._plain(thing) == plain


def test_labcores_own_solution_under_another_name_is_a_concern(bubblewrap: None) -> None:
    """What passes may be a call in disguise, or a copy: a person gets told."""
    lab = read_lab(releases.source_paths(ROOT)["lion"])
    release = mini.read(releases.release_path(ROOT, "lion"))
    notebook = copy.deepcopy(release)
    copied = textwrap.dedent(inspect.getsource(STALL.reference)).replace("Tensor", "object")
    for name, text in {"transfer": CALLS, "clinic": ASKS, "stall": copied}.items():
        mini.cell(notebook, name)["source"] = text
    judged = run_and_judge(lab, mend(notebook, release).notebook, number=0, limits=Limits())
    passed = {"transfer-test", "stall-test", *(f"clinic-{one}-test" for one in "abcd")}
    assert set(lab.points) - set(judged.errors) == passed
    told = [f"{name} calls labcore's own solution" for name in lab.points if name in passed]
    told.remove("stall-test calls labcore's own solution")
    assert list(judged.concerns) == [*told, "smallest_rate is a copy of labcore's own solution"]
