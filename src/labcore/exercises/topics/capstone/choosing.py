"""Choose a model's width and its training steps, limited by time and by text."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

__all__ = ["CHOOSE", "EPOCHS", "NOBODYS", "WIDTHS", "some_run"]

NOBODYS = 4
EPOCHS = (2, 3, 5, 6)  # for numbered students
WIDTHS = (64, 96, 128, 160, 192, 256, 320, 384, 512)
VOCABULARY = 2048
_Shapes = Sequence[tuple[int, int, int]]


def choose(
    speed: float,
    seconds: float,
    corpus: int,
    batch: int,
    length: int,
    shapes: _Shapes,
    *,
    epochs: int,
) -> tuple[int, int]:
    """Return the width to train and its number of steps."""
    del length
    found = 0, 0
    for width, _, weights in shapes:
        in_time = speed * seconds / (6 * weights * batch)
        steps = int(min(in_time, epochs * corpus / batch))
        if found == (0, 0) or steps * batch >= 20 * weights:
            found = width, steps
    return found


def _nearest(
    speed: float,
    seconds: float,
    corpus: int,
    batch: int,
    length: int,
    shapes: _Shapes,
    *,
    epochs: int,
) -> tuple[int, int]:
    """The shape that is nearest to the rule's size."""
    wanted = min(math.sqrt(speed * seconds / 120), epochs * corpus / 20)
    one = min(shapes, key=lambda shape: abs(math.log(shape[2] / wanted)))
    return choose(speed, seconds, corpus, batch, length, [one], epochs=epochs)


def some_run(chance: random.Random, length: int = 0) -> dict[str, Any]:
    """Draw shapes, and a time and a text that feed about one of them."""
    shapes = [
        (width, width // 32, VOCABULARY * width + 12 * (width // 32) * width**2)
        for width in sorted(chance.sample(WIDTHS, 6))
    ]
    width, layers, weights = chance.choice(shapes)
    tokens = 20 * weights * chance.uniform(0.5, 1.8)
    seconds = chance.randint(60, 3600)
    cost = 6 * weights + 6 * layers * width * length
    return {
        "speed": float(round(cost * tokens / seconds)),
        "seconds": seconds,
        "corpus": int(tokens * chance.choice((0.1, 0.25, 0.5, 2.0)) * chance.uniform(0.7, 1.4)),
        "batch": 2 ** chance.randint(12, 15),
        "length": length,
        "shapes": shapes,
    }


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"epochs": epochs} for epochs in (NOBODYS, *EPOCHS)]
    wrong = (function for function, _ in CHOOSE.wrong.values())
    return separating(lambda: some_run(chance), [choose, *wrong], variants)


def _own_epochs(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"capstone.choose:{student}")
    return {"epochs": chance.choice(EPOCHS) if student else NOBODYS}


_FED = "steps * batch >= 20 * weights"
_MISTAKES = [
    Mistake("text has no end", ("min(in_time, epochs * corpus / batch)", "in_time"),
            "You train as long as the time lasts, however often that reads the text. Beyond the "
            "allowed number of epochs, the model learns little."),
    Mistake("one pass", ("epochs * corpus", "corpus"),
            "You read the text only once. It may be read `epochs` times."),
    Mistake("fed by time", (_FED, "in_time * batch >= 20 * weights"),
            "You choose the shape by the time alone and apply the text's limit only to its steps. "
            "That leaves a large model with too few tokens."),
    Mistake("fed by text", (_FED, "epochs * corpus >= 20 * weights"),
            "You choose the shape by the text alone. The time must also suffice for 20 tokens per "
            "weight."),
    Mistake("forward alone", ("(6 *", "(2 *"),
            "You count the forward pass only. A training step also runs the backward pass, which "
            "costs twice as much."),
    Mistake("step of one token", ("6 * weights * batch", "6 * weights"),
            "You count a step as if it read one token. It reads `batch` tokens."),
    Mistake("smallest", (f"found == (0, 0) or {_FED}", "found == (0, 0)"),
            "You stop at the first shape. A larger one may also get its 20 tokens per weight."),
    Mistake("largest", (f"found == (0, 0) or {_FED}", "True"),
            "You always take the largest shape, though it may read far fewer than 20 tokens per "
            "weight."),
    Mistake("nearest", _nearest,
            "You take the shape that is nearest to the ideal size, even if it is above it. Then "
            "it doesn't reach 20 tokens per weight."),
    Mistake("stops at twenty",
            ("found = width, steps", "found = width, min(steps, 20 * weights // batch)"),
            "You stop training at 20 tokens per weight. That is the minimum for choosing a shape; "
            "training goes on while time and text last."),
    Mistake("nothing below twenty", (f"found == (0, 0) or {_FED}", _FED),
            "If no shape reaches 20 tokens per weight, you train nothing. The smallest shape is "
            "still the best choice then."),
    Mistake("rounded up", ("steps = int(", "steps = math.ceil("),
            "You round the steps up. The last step no longer fits into the time or the text."),
    Mistake("tokens returned", ("found = width, steps", "found = width, steps * batch"),
            "Your second number counts tokens. A step reads `batch` of them."),
]  # fmt: skip

CHOOSE = Exercise(
    id="capstone.choose",
    points=5,
    beyond=2,
    reference=choose,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_epochs,
    returns=("width", "number of steps"),
    explanation="Two limits apply to every shape: the steps that fit into the time, and the steps "
    "that the text can feed. The smaller one counts, and it must count before the shape is chosen. "
    "If you choose by time and cap the steps afterward, you get a model that is too large for its "
    "text: it would have to read the same few pages dozens of times (Muennighoff et al., 2023, "
    "found that up to four epochs are nearly as good as new text, and that later ones bring less "
    "and less). When the text is the limit, time is left over. The way to use it is more text, "
    "not more weights. This reference leaves out the FLOPs of attention.",
    hints=(
        "In the example, how many steps of each width does the time allow, and how many does the "
        "text? Which of the two numbers is the limit for each width?",
        "For each shape, compute the steps that fit into the time and the steps in `epochs` "
        "readings of the text, and keep the smaller number, rounded down. The shape qualifies if "
        "these steps read at least 20 tokens per weight. Take the largest shape that qualifies, "
        "or the smallest of all if none does.",
        "`steps = int(min(speed * seconds / (6 * weights * batch), epochs * corpus / batch))` is "
        "the number of steps of a shape. It qualifies if `steps * batch >= 20 * weights`.",
    ),
)
