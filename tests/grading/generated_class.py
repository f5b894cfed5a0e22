"""A class of the lab on Lion, drawn from a seed, with the points that each student must get.

The points follow from what was written: a right formula or a named mistake, and for the clinic from
the patients' own curves. Nothing that grades is asked.
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from labcore.exercises.topics.lion import CLINIC, DRIFT, MASKED_STEP, STALL, TRANSFER
from tests.exercises.reasons import with_reasons
from tests.labs import mini

SLUG = "lion"
EXERCISES = {"masked-step": MASKED_STEP, "transfer": TRANSFER, "drift": DRIFT, "stall": STALL}
WORTH = {"masked-step": 4.0, "transfer": 2.0, "drift": 4.0, "stall": 4.0}
PATIENTS = "abcd"
HEADS = {
    "masked-step": "def masked_step(weight, grad, momentum, *, lr, decay, beta_update, beta_state, "
    "threshold):",
    "transfer": "def transfer(lr, decay, *, factor, decay_times_lr):",
    "drift": "def drift_end(weight, momentum, *, rates, decay):",
    "stall": "def smallest_rate(weight, direction, *, bits):",
}
RIGHT = {
    "masked-step": (
        """
        blend = torch.lerp(momentum, grad, 1 - beta_update)
        sign = torch.where(blend.abs() <= threshold, 0.0, blend.sign())
        sign = torch.where(blend.isfinite(), sign, torch.nan)
        moved = weight * (1 - lr * decay) - lr * sign
        return moved, torch.lerp(momentum, grad, 1 - beta_state)
        """,
        """
        mixed = grad + beta_update * (momentum - grad)
        step = (mixed > threshold).to(weight.dtype) - (mixed < -threshold).to(weight.dtype)
        step[~torch.isfinite(mixed)] = torch.nan
        kept = momentum + (1 - beta_state) * (grad - momentum)
        return weight - lr * (decay * weight + step), kept
        """,
        """
        mixed = momentum * beta_update + grad * (1 - beta_update)
        up, down = mixed > threshold, mixed < -threshold
        rest = weight - weight * lr * decay
        moved = torch.where(up, rest - lr, torch.where(down, rest + lr, rest))
        broken = mixed.isnan() | mixed.isinf()
        return moved.masked_fill(broken, float("nan")), grad.lerp(momentum, beta_state)
        """,
    ),
    "transfer": (
        """
        if decay_times_lr:
            return lr / factor, decay * factor
        return lr / factor, lr * decay
        """,
        """
        smaller = lr / factor
        return (smaller, lr * decay / smaller) if decay_times_lr else (smaller, decay * lr)
        """,
        """
        shrunk = 1 - lr * decay
        own = {True: factor * decay, False: lr * decay}[bool(decay_times_lr)]
        assert shrunk <= 1
        return [lr * (1 / factor), own][0], own
        """,
    ),
    "drift": (
        """
        for rate in rates:
            weight = (1 - rate * decay) * weight - rate * momentum.sign()
        return weight
        """,
        """
        place, way = weight.clone(), torch.sign(momentum)
        for number in range(len(rates)):
            place = place - rates[number] * (decay * place + way)
        return place
        """,
        """
        shrinks = 1 - rates * decay
        start, pushed = 1.0, 0.0
        for rate, shrink in zip(rates.tolist(), shrinks.tolist()):
            start, pushed = start * shrink, pushed * shrink + rate
        return start * weight - pushed * momentum.sign()
        """,
    ),
    "stall": (
        """
        size = weight.abs()
        power = 2 ** size.log2().floor()
        falls = torch.sign(weight) != direction
        gap = power / 2**bits
        gap = torch.where((size == power) & falls, gap / 2, gap)
        return gap / 2
        """,
        """
        mantissa, high = torch.frexp(weight.abs())
        gap = torch.ldexp(torch.ones_like(weight), high - 1 - bits)
        nearer = (mantissa == 0.5) & (torch.sign(weight) == -direction)
        return torch.where(nearer, gap / 4, gap / 2)
        """,
        """
        import math
        rates = []
        for number, way in zip(weight.flatten().tolist(), direction.flatten().tolist()):
            fraction, high = math.frexp(abs(number))
            gap = 2.0 ** (high - 1 - bits)
            rates.append(gap / 4 if fraction == 0.5 and number * way < 0 else gap / 2)
        return torch.tensor(rates, dtype=torch.float64).reshape(weight.shape)
        """,
    ),
}
UNFINISHED = (  # what is neither an answer nor a named mistake
    "    raise NotImplementedError",
    "    pass",
    "    return None",
    "    return undefined_name",
    "    return (",
    "    while False:\n        pass\n    raise ValueError('王: not <b>yet</b>')",
)
NAMES = (
    "Anna Meier",
    "王小明",
    "José Núñez",
    "O'Brien, Sam",
    "Łukasz Żak",
    "mei-lin",
    "A & B",
    "김",
)
PLAIN = ("print('my notes: 三')", "import math\nmath.pi", "# nothing", "1 / 0", "x = 3; x")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A notebook, what was put into it, and the points by grade_id that it must get."""

    student: str
    number: int
    notebook: mini.Notebook
    written: Mapping[str, str]
    points: Mapping[str, float]


def _indented(body: str) -> str:
    return textwrap.indent(textwrap.dedent(body).strip(), "    ")


def _mistaken(name: str, mistake: str) -> str:
    """The body of a named wrong answer, with a line for each variable that it closes over."""
    reference = EXERCISES[name].reference
    wrong = next(one for one in EXERCISES[name].mistakes if one.name == mistake)
    tree = ast.parse(wrong.source(reference)).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{mistake} of {name} is no function with a text of its own")
    own = inspect.getclosurevars(wrong.function(reference)).nonlocals
    lines = [f"{key} = {value!r}" for key, value in own.items()]
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):  # Any and Tensor are not there in a notebook
            node.annotation = ast.Constant("own")
    return textwrap.indent("\n".join([*lines, *map(ast.unparse, tree.body)]), "    ")


class _Renamed(ast.NodeTransformer):
    """Local names with something behind them, arguments as they are."""

    def __init__(self, function: ast.FunctionDef, ending: str) -> None:
        arguments = {one.arg for one in [*function.args.args, *function.args.kwonlyargs]}
        self._own = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        } - arguments
        self._ending = ending

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(node.id + self._ending * (node.id in self._own), node.ctx)


def _varied(text: str, chance: random.Random) -> str:
    """The same function as somebody else would write it down."""
    try:
        function = ast.parse(text).body[0]
    except SyntaxError:
        return text
    if chance.random() < 0.5 and isinstance(function, ast.FunctionDef):
        _Renamed(function, chance.choice(("_2", "_neu", "名"))).visit(function)
        text = ast.unparse(function)
    if chance.random() < 0.5:
        head, _, body = text.partition("\n")
        text = f'{head}\n    """Meine Lösung, 我的."""\n\n    # so\n{body}'
    return text


def _answers(number: int, chance: random.Random) -> tuple[str, str, set[str]]:
    """A cell for the clinic, what was put into it, and the patients that it names rightly.

    The truth is in the curves: each patient's are those of one fault.
    """
    seen = CLINIC.patients(number)
    truth = {
        patient: name
        for patient, curves in seen.items()
        for name, fault in CLINIC.faults.items()
        if curves == CLINIC.observe(fault.make())
    }
    kind = chance.choice(("right", "right", "some", "some", "one fault", "untouched"))
    if kind == "untouched":
        return "def diagnose():\n    raise NotImplementedError", kind, set()
    given: dict[str, str] = {}
    right: set[str] = set()
    for patient, name in truth.items():
        roll = 0.0 if kind == "right" else chance.random()
        if kind == "one fault":
            given[patient] = next(iter(CLINIC.faults))
        elif roll < 0.5:
            given[patient] = name
        elif roll < 0.75:
            given[patient] = chance.choice([one for one in CLINIC.faults if one != name])
        elif roll < 0.85:
            given[patient] = "a fault that is none"
        if given.get(patient) == name:
            right.add(patient.lower())
    order = chance.sample(sorted(given), len(given))
    known = {patient: name for patient, name in given.items() if name in CLINIC.faults}
    reasons = with_reasons(CLINIC, known)
    shown = {patient: reasons.get(patient, given[patient]) for patient in order}
    if chance.random() < 0.5:
        return f"def diagnose():\n    return {shown!r}", kind, right
    return f"diagnose = {shown!r}", kind, right


def _extended(notebook: mini.Notebook, chance: random.Random) -> None:
    """Cells of the student's own in between, and outputs that stand for nothing."""
    for _ in range(chance.randrange(4)):
        at = chance.randrange(1, len(notebook["cells"]) + 1)
        if chance.random() < 0.5:
            cell = mini.code(f"own-{at}", chance.choice(PLAIN))
        else:
            cell = {"cell_type": "markdown", "id": f"own-{at}", "metadata": {}, "source": "## 想法"}
        notebook["cells"].insert(at, cell)


def generated(release: mini.Notebook, count: int, seed: int) -> Iterator[Made]:
    """`count` students; among any 200 of them each named mistake stands several times."""
    draw = random.Random(seed)
    queues = {
        name: cycle(draw.sample(sorted(exercise.wrong), len(exercise.wrong)))
        for name, exercise in EXERCISES.items()
    }
    for place in range(count):
        chance = random.Random(f"{seed}:{place}")
        number = chance.choice((0, chance.randrange(1, 1000), chance.randrange(10**6, 10**17)))
        notebook = copy.deepcopy(release)
        written: dict[str, str] = {}
        points: dict[str, float] = {}
        for name in EXERCISES:
            kind = chance.choices(("right", "mistake", "unfinished"), (5, 4, 1))[0]
            if kind == "right":
                body = _indented(chance.choice(RIGHT[name]))
            elif kind == "mistake":
                kind = next(queues[name])
                body = _mistaken(name, kind)
            else:
                body = chance.choice(UNFINISHED)
            source = _varied(f"{HEADS[name]}\n{body}", chance)
            mini.cell(notebook, name)["source"] = source
            written[name] = kind
            points[f"{name}-test"] = WORTH[name] * (kind == "right")
        mini.cell(notebook, "clinic")["source"], written["clinic"], right = _answers(number, chance)
        points |= {f"clinic-{one}-test": float(one in right) for one in PATIENTS}
        mini.cell(notebook, "student")["source"] = f"STUDENT = {number}"
        _extended(notebook, chance)
        student = f"{place:03d} {chance.choice(NAMES)}"
        yield Made(
            student=student, number=number, notebook=notebook, written=written, points=points
        )


def mistakes(made: Sequence[Made]) -> set[tuple[str, str]]:
    """(exercise, name) of the named mistakes that a class has made."""
    return {
        (name, kind)
        for one in made
        for name, kind in one.written.items()
        if name in EXERCISES and kind in EXERCISES[name].wrong
    }


def runs(one: Made, name: str) -> Callable[..., Any]:
    """The function that a student has written, run right here; for code of this module alone."""
    import torch

    names: dict[str, Any] = {"torch": torch}
    exec(mini.cell(one.notebook, name)["source"], names)
    found: Callable[..., Any] = names[HEADS[name].removeprefix("def ").partition("(")[0]]
    return found
