"""A hash of what code does: it stays when wording or place changes, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from labcore.records import hashes, trees

MODULES = {"labcore", "labcore.optim", "labcore.optim.study", "labcore.studies", "labcore.x"}
CODE = """
from labcore.optim import study

SIZES = (1, 2.5)

def f(x: int) -> str:
    if x < 0:
        raise ValueError("x is too small")
    return f"{x!r} of {study.run(SIZES[0])}"
"""
SAME = {
    "a comment": CODE.replace("SIZES = (1, 2.5)", "SIZES = (1, 2.5)  # in this order"),
    "a docstring": CODE.replace("    if x", '    """Says it."""\n    if x'),
    "a message": CODE.replace("too small", "negative"),
    "an import": "import json\n" + CODE,
    "a face": CODE + '\n__all__ = ["f"]\n',
    "another layout": CODE.replace("(1, 2.5)", "(\n    1,\n    2.5,\n)"),
    "another module": CODE.replace("labcore.optim import study", "labcore import x as study"),
    "the name alone": CODE.replace("optim import study", "optim.study import run").replace(
        "study.run", "run"
    ),
    "an alias": CODE.replace("import study", "import study as s").replace("study.run", "s.run"),
    "the whole path": CODE.replace("from labcore.optim import study", "import labcore").replace(
        "study.run", "labcore.optim.study.run"
    ),
}
OTHER = {
    "a number": CODE.replace("2.5", "2.50001"),
    "a type": CODE.replace("(1, 2.5)", "(1.0, 2.5)"),
    "an annotation": CODE.replace("x: int", "x: float"),
    "a conversion": CODE.replace("x!r", "x"),
    "a text": CODE.replace(" of ", " in "),
    "another definition": CODE.replace("study.run", "study.rerun"),
    "a name that is not labcore's": CODE.replace("labcore.optim", "another.optim"),
    "another error": CODE.replace("ValueError", "TypeError"),
    "a statement more": CODE + "\nSIZES += (3,)\n",
}


def told(code: str) -> list[str]:
    return sorted(trees.statements(code, MODULES.__contains__))


@pytest.mark.parametrize("change", SAME)
def test_wording_and_place_do_not_count(change: str) -> None:
    assert SAME[change] != CODE
    assert told(SAME[change]) == told(CODE)


@pytest.mark.parametrize("change", OTHER)
def test_what_the_code_does_counts(change: str) -> None:
    assert OTHER[change] != CODE
    assert told(OTHER[change]) != told(CODE)


def test_lines_are_the_same_on_every_python() -> None:
    """`ast.dump` says other things from 3.13 on; f-strings are split otherwise from 3.12 on."""
    code = "a = f'{x:{w}}' 'b' f'c' ''\ndef g() -> None: ...\n"
    assert told(code) == [
        "Assign(targets=[Name(id='a')], value=JoinedStr(values=[FormattedValue(value=Name(id='x'), "
        "conversion=-1, format_spec=JoinedStr(values=[FormattedValue(value=Name(id='w'), "
        "conversion=-1)])), Constant(value='bc')]))",
        "FunctionDef(name='g', args=arguments(), body=[Expr(value=Constant(value=Ellipsis))], "
        "returns=Constant())",
    ]


def test_a_definition_may_move_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "labcore"
    package.mkdir()
    monkeypatch.setattr(hashes, "PACKAGE", package)
    script = tmp_path / "script.py"
    f, g = "def f(): return g()\n", "def g(): return 1\n"

    def described(benchmark: str, **files: str) -> tuple[str, str]:
        for path in package.glob("*.py"):
            path.unlink()
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)
        script.write_text(benchmark)
        found = hashes.describe(script)
        return found["benchmark"], found["labcore"]

    before = described("from labcore import a\na.f()", __init__="", a=f + g)
    moved = {"a": "from labcore.b import g\n" + f, "b": '"""Here."""\n' + g}
    assert described("import labcore.a as c\nc.f()", __init__="", **moved) == before
    moved["b"] = g.replace("1", "2")
    assert described("from labcore import a\na.f()", __init__="", **moved) != before
