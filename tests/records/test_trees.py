"""A hash of what code does: it stays when wording or place changes, and only then."""

from __future__ import annotations

from collections.abc import Callable
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
    found = trees.statements(code, MODULES.__contains__)
    return sorted(one.line for one in found if one.line)


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


Describe = Callable[..., tuple[str, str]]


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Returns the hashes of the function f of a benchmark, with a package of these modules."""
    package = tmp_path / "labcore"
    package.mkdir()
    monkeypatch.setattr(hashes, "PACKAGE", package)
    script = tmp_path / "script.py"

    def hashes_of(benchmark: str, gpu: bool = False, **modules: str) -> tuple[str, str]:
        for path in package.glob("*.py"):
            path.unlink()
        for name, text in {"__init__": "", **modules}.items():
            (package / f"{name}.py").write_text(text)
        script.write_text(benchmark)
        found = hashes.describe(script, "f", gpu=gpu)
        return found["benchmark"], found["labcore"]

    return hashes_of


USES_A = "from labcore import a\ndef f(): return a.f()\n"
F, G = "def f(): return g()\n", "def g(): return 1\n"


def test_a_definition_may_move_to_another_file(described: Describe) -> None:
    before = described(USES_A, a=F + G)
    moved = {"a": "from labcore.b import g\n" + F, "b": '"""Here."""\n' + G}
    renamed = USES_A.replace("from labcore import a", "import labcore.a as c").replace("a.f", "c.f")
    assert described(renamed, **moved) == before
    assert described(USES_A, **{**moved, "b": G.replace("1", "2")}) != before


@pytest.mark.parametrize(
    ("benchmark", "module"),
    [
        (USES_A + "def h(): return 2\nX = [f for f in (1, 2)]\n", F + G),
        (USES_A, F + G + "import os\nSEEDS = (0, 1)\ndef unused(): return g() + 1\n"),
        (USES_A + "from labcore import b\nb.g()\n"[:22], F + G),
    ],
    ids=["in the benchmark", "in the module", "an import"],
)
def test_what_a_case_does_not_use_does_not_count(
    described: Describe, benchmark: str, module: str
) -> None:
    before = described(USES_A, a=F + G, b=G)
    assert described(benchmark, a=module, b=G) == before


@pytest.mark.parametrize(
    "change",
    [
        {"a": "from labcore.b import g\n" + F.replace("g()", "g() + 1")},
        {"b": G.replace("1", "2")},
        {"b": "def g(): return N\nN = 2\n"},
        {"b": G + "N = 1\nN += g()\nprint(N)\n"},
        {"__init__": "print(1)"},
        {"benchmark": USES_A.replace("a.f()", "a.f() + N") + "for N in (1, 2): pass\n"},
        {"benchmark": "from labcore import a\ndef f(): return getattr(a, 'f')()\n"},
    ],
)
def test_what_a_case_uses_counts(described: Describe, change: dict[str, str]) -> None:
    files = {"benchmark": USES_A, "a": "from labcore.b import g\n" + F, "b": G}
    assert described(**{**files, **change}) != described(**files)


KERNEL = "import triton\n@triton.jit\ndef h(): pass\n" + G


@pytest.mark.parametrize("gpu", [False, True])
def test_kernels_count_on_a_gpu_alone(described: Describe, gpu: bool) -> None:
    files = {"benchmark": USES_A, "a": "from labcore.b import g\n" + F, "gpu": gpu}
    changed = described(**files, b=KERNEL.replace("return 1", "return h[1,]()"))
    assert (described(**files, b=KERNEL) != changed) == gpu


def test_a_module_that_is_passed_on_counts_as_a_whole(described: Describe) -> None:
    whole = "from labcore import a\ndef f(): return vars(a)\n"
    assert described(whole, a=F + G + "N = 1\n") != described(whole, a=F + G)


def test_a_definition_inside_a_function_is_found_by_the_function(described: Describe) -> None:
    nested = "def f(n):\n    def _(): return n + N\n    return _\nN = 1\nf(3)\n"
    assert described(nested) != described(nested.replace("N = 1", "N = 2"))


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ("def f():\n    N = 1\n    return N\n", False),
        ("def f(N): return N\n", False),
        ("def f(*N, **other): return N\n", False),
        ("def f(): return [N for N in (1, 2) if N]\n", False),
        ("def f(): return (lambda N: N)(1)\n", False),
        ("def f():\n    N = 1\n    def g(): return N\n    return g\n", False),
        ("def f():\n    def N(): return 1\n    return N()\n", False),
        ("def f(N=N): return N\n", True),
        ("def f(n: N): return n\n", True),
        ("def f(): return [N for N in N]\n", True),
        ("def f(): return {n: N for n in (1, 2)}\n", True),
        ("def f():\n    global N\n    N = N + 1\n    return N\n", True),
        ("def f():\n    def g(N): return N\n    return g(N)\n", True),
        ("def f(n): return n.N + N\n", True),
        ("class A:\n    N = 1\n    def g(self): return N\ndef f(): return A().g()\n", True),
    ],
)
def test_a_functions_own_name_is_no_definition(
    described: Describe, body: str, counts: bool
) -> None:
    assert (described(body + "N = 1\n") != described(body + "N = 2\n")) == counts
