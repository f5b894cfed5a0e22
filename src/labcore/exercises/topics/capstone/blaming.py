"""Find where a loss spiked and which file's rows are to blame."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

__all__ = ["BLAME", "LIFTS", "NOBODYS", "WINDOW", "some_log"]

NOBODYS = 4
LIFTS = (3, 5, 6, 7)  # for numbered students
WINDOW, SPREADS, LEAST = 20, 8, 3  # lines of the log, spreads above the level, rows of a file
STEPS, ROWS = 54, 32
USUAL = {"library.txt": 0.5, "wiki.txt": 0.2, "forum.txt": 0.12, "manual.txt": 0.08,
         "mail.txt": 0.05, "tables.csv": 0.03, "notes.md": 0.015, "faq.txt": 0.005}  # fmt: skip
KINDS = ("file", "new file", "file that stays", "chance", "slow", "dip")
_Blame = tuple[int | None, str | None]


def blame(
    losses: Sequence[float], rows: Sequence[Mapping[str, int]], every: int, *, lift: float
) -> _Blame:
    """Return the step of the first spike, and the file to blame for it."""
    del every
    for step in range(WINDOW, len(losses)):
        before = losses[step - WINDOW : step]
        level = statistics.median(before)
        spread = statistics.median(abs(loss - level) for loss in before)
        if losses[step] > level + SPREADS * spread:
            break
    else:
        return None, None
    usual: Counter[str] = sum(map(Counter, rows[:step]), Counter())
    lifts, whole = {}, sum(rows[step].values())
    for file, count in rows[step].items():
        if count >= LEAST:
            share = usual[file] / usual.total()
            lifts[file] = count / whole / share if share else math.inf
    suspect = max(lifts, key=lambda file: lifts[file])
    return step, suspect if lifts[suspect] >= lift else None


def _largest(
    losses: Sequence[float], rows: Sequence[Mapping[str, int]], every: int, *, lift: float
) -> _Blame:
    """Take the largest loss, wherever it is."""
    step = max(range(len(losses)), key=lambda at: losses[at])
    if not step:
        return 0, None
    _, file = blame([*[0.0] * step, 1.0], rows, every, lift=lift)
    return step, file


def some_log(chance: random.Random, kind: str = "", every: int = 1) -> dict[str, Any]:
    """Draw losses and files of a run with a spike or something like it; kind: one of KINDS.

    every: steps per logged loss.
    """
    kind = kind or chance.choice(KINDS)
    step = chance.randint(WINDOW + 8, STEPS - 15)
    files = list(USUAL)
    culprit = "crawl.txt" if kind == "new file" else chance.choice(files[2:])
    # Just enough noisy rows for the limit of some student, in one of the spike's steps or in two.
    limit = chance.choice((NOBODYS, *LIFTS)) * chance.choice((1.0, 1.0, 2.0))
    bad = chance.sample(range(every), min(every, chance.choice((1, 1, 2))))
    comes = chance.choice((0, 0, step // 2))  # the culprit's first step
    losses: list[float] = []
    rows: list[dict[str, int]] = []
    many = 0
    for at in range(STEPS):
        loss = 2.5 + 2.5 * math.exp(-at / 8) + chance.gauss(0, 0.03)
        if at == step and kind in KINDS[:3]:
            usual = sum(one.get(culprit, 0) for one in rows) / len(rows)
            wanted = usual * (limit * every - every + len(bad)) / len(bad)
            many = min(max(math.ceil(wanted), 4), ROWS)
        for sub in range(every):
            stays = kind == "file that stays" and at > step
            noisy = many if stays or (at == step and sub in bad) else 0
            absent = noisy or at < comes
            weights = [0 if absent and name == culprit else USUAL[name] for name in files]
            drawn = chance.choices(files, weights, k=ROWS - noisy) + [culprit] * noisy
            rows.append(dict(Counter(drawn)))
        if kind == "slow":
            loss += 0.03 * max(at - step, 0)
        if kind == "dip" and at == step:
            loss -= 1.0
        if kind in KINDS[:4] and step <= at < step + 5:
            loss += 1.2 * 0.5 ** (at - step)
        if kind in KINDS[:4] and at == step + 13:
            loss += 3.5  # a second spike
        losses.append(round(loss, 3))
    return {"losses": losses, "rows": rows, "every": every}


@kept
def _cases(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"lift": lift} for lift in (NOBODYS, *LIFTS)]
    wrong = (function for function, _ in BLAME.wrong.values())
    cases = separating(lambda: some_log(chance), [blame, *wrong], variants)
    return [*cases, some_log(chance, "slow"), some_log(chance, "chance")]


def _own_lift(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"capstone.blame:{student}")
    return {"lift": chance.choice(LIFTS) if student else NOBODYS}


_LIFT = "count / whole / share if share else math.inf"
_MISTAKES = [
    Mistake("most rows", (_LIFT, "lift + count"),
            "You blame the file with the most rows in the step. A large file has many rows in "
            "every step."),
    Mistake("extra rows", (_LIFT, "lift + count / whole - share"),
            "You blame the file whose share grew by the largest difference. Divide by the usual "
            "share instead."),
    Mistake("one row is enough", ("count >= LEAST", "count"),
            "You blame a rare file for a row or two. By chance, some rare file is in almost every "
            "step."),
    Mistake("somebody must be guilty", ("suspect if lifts[suspect] >= lift else None", "suspect"),
            "You blame a file for every spike. If none is above its usual share by the factor "
            "`lift`, the answer is None."),
    Mistake("the spike is usual", ("rows[:step])", "rows[: step + 1])"),
            "You count the rows of the spike in the usual share. They hide what is unusual about "
            "them."),
    Mistake("the whole run is usual", ("rows[:step])", "rows)"),
            "You take the usual share from the whole run. What came after the spike doesn't say "
            "what was usual before it."),
    Mistake("new files ignored", (" if share else math.inf", " if share else 0.0"),
            "You never blame a file that first comes in the spike's step. It is the first that "
            "one should suspect."),
    Mistake("equal shares", ("usual[file] / usual.total()", "1 / len(usual)"),
            "You assume that all files have the same usual share. Count their rows before the "
            "spike."),
    Mistake("largest loss", _largest,
            "You take the largest loss of the run. At the start, every loss is large, and a later "
            "spike may be higher than the first."),
    Mistake("compared with the start", ("losses[step - WINDOW : step]", "losses[:WINDOW]"),
            "You compare every step with the first steps of the run. The loss has fallen since "
            "then, so a spike can be below that level."),
    Mistake("compared with the run", ("losses[step - WINDOW : step]", "losses[:step]"),
            "You compare with all steps so far. The first ones make the spread so wide that a "
            "spike fits into it."),
    Mistake("mean and deviation",
            [("level = statistics.median", "level = statistics.mean"),
             ("statistics.median(abs(loss - level) for loss in before)",
              "statistics.pstdev(before)"), ("SPREADS *", "3 *")],
            "You compare with the mean and the standard deviation. The task asks for medians."),
    Mistake("ups and downs", ("losses[step] > level +", "abs(losses[step] - level) >"),
            "You also report a loss that falls suddenly. A spike is above the level."),
    Mistake("spread forgotten", ("level + SPREADS * spread", "level + spread"),
            "You report a step as soon as it is one spread above the level. Noise does that all "
            "the time."),
]  # fmt: skip

BLAME = Exercise(
    id="capstone.blame",
    points=6,
    beyond=2,
    reference=blame,
    mistakes=_MISTAKES,
    cases=_cases,
    variant=_own_lift,
    returns=("step", "file"),
    explanation="The number of rows says how large a file is. The lift says how unusual it is that "
    "so many of them came at once. But the lift of a rare file is large by chance as soon as a "
    "single row of it comes, so don't suspect a file before it has a few rows. The usual share "
    "must come from before the spike, because a noisy file that keeps coming would otherwise look "
    "usual. And some spikes have no file to blame: if the learning rate is too high, the loss "
    "spikes on ordinary rows. Whoever always blames some file will throw away good text. This "
    "reference needs a loss for each step.",
    hints=(
        "Which step of the example is above the limit? How many rows would you expect from each "
        "file in that step, and how many came?",
        "Find the first step whose loss is above the median of the 20 before it by more than 8 "
        "times their median distance from that median. Then count each file's rows in the steps "
        "before the spike. Among the files with 3 rows or more in the step, take the largest "
        "lift, and answer None if it is below `lift`.",
        "`rows[step][file] / sum(rows[step].values()) / (usual[file] / usual.total())` is the lift "
        "of a file, where `usual` is a `Counter` of the rows in the steps before the spike.",
    ),
)
