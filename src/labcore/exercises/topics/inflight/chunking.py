"""Read prompts in chunks alongside outputs, under one token budget per step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.drawing import kept, separating
from labcore.exercises.mistakes import Mistake

__all__ = ["CHUNK", "CHUNKS", "NOBODYS", "some_prompts"]

NOBODYS = 400
CHUNKS = (256, 320, 352, 448)  # for numbered students
_Requests = Sequence[tuple[int, int, int]]
_Answer = tuple[list[list[int]], list[int]]


def in_chunks(
    requests: _Requests, steps: int, budget: int, least: int, equal: bool, *, chunk: int
) -> _Answer:
    """Return the tokens that each request reads per step, and the step of each first token."""
    del equal
    read, first = [0] * len(requests), [-1] * len(requests)
    trace = []
    for step in range(steps):
        row, left = [0] * len(requests), budget
        for index, (_, prompt, output) in enumerate(requests):
            if prompt <= read[index] < prompt + output - 1:
                row[index] = 1
                left -= 1
        for index, (arrival, prompt, _) in enumerate(requests):
            lacking = prompt - read[index]
            if arrival > step or lacking <= 0:
                continue
            count = min(lacking, chunk, left)
            if count < min(lacking, least):
                break
            row[index] = count
            left -= count
        for index, (_, prompt, _) in enumerate(requests):
            read[index] += row[index]
            if row[index] and read[index] == prompt:
                first[index] = step
        trace.append(row)
    return trace, first


def some_prompts(chance: random.Random, equal: bool = False) -> dict[str, Any]:
    """Draw requests that arrive one after another, with prompts of one to four chunks."""
    requests = []
    arrival = 0
    for _ in range(chance.randint(3, 6)):
        requests.append((arrival, chance.randint(1, 1200), chance.randint(1, 5)))
        arrival += chance.choice((0, 0, 1, 2))
    return {
        "requests": requests,
        "steps": 11,
        "budget": chance.randint(300, 1100),
        "least": chance.choice((16, 64, 128, 200)),
        "equal": equal,
    }


@kept
def _drawn(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    variants = [{"chunk": chunk} for chunk in (NOBODYS, *CHUNKS)]
    wrong = (function for function, _ in CHUNK.wrong.values())
    return separating(lambda: some_prompts(chance), [in_chunks, *wrong], variants)


def _cases(seed: int) -> list[dict[str, Any]]:
    golden = {"requests": [(0, 800, 4)] * 3, "steps": 4, "budget": 1024, "least": 64}
    return [{**golden, "equal": False}, *_drawn(seed)]


def _own_chunk(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"inflight.chunk:{student}")
    return {"chunk": chance.choice(CHUNKS) if student else NOBODYS}


CHUNK = Exercise(
    id="inflight.chunk",
    points=6,
    beyond=2,
    reference=in_chunks,
    mistakes=[
        Mistake(
            "prompts first",
            [
                ("                left -= 1\n", ""),
                (
                    "            read[index] += row[index]\n",
                    "            if read[index] >= prompt:\n"
                    "                row[index] = min(row[index], left)\n"
                    "                left -= row[index]\n"
                    "            read[index] += row[index]\n",
                ),
            ],
            "You read prompts first and outputs with what is left. A long prompt then stalls all "
            "outputs until it is read.",
        ),
        Mistake(
            "cap unseen",
            ("min(lacking, chunk, left)", "min(lacking, left)"),
            "Your prompts take the whole remaining budget. There is a limit on what one prompt "
            "may take.",
        ),
        Mistake(
            "no token of the last chunk",
            [("output - 1", "output"), ("read[index] == prompt", "read[index] == prompt + 1")],
            "Your request produces nothing after its last chunk and starts its output one step "
            "late. That chunk reads the prompt's last token, and the model computes the first "
            "output token from it.",
        ),
        Mistake(
            "token of every chunk",
            [
                (
                    "read[index] < prompt + output - 1",
                    "read[index] and sum(past[index] > 0 for past in trace) < output",
                ),
                ("read[index] == prompt", "first[index] < 0"),
            ],
            "Your request produces a token after every chunk. In the middle of the prompt, the "
            "next token is already known.",
        ),
        Mistake(
            "outputs for nothing",
            ("                left -= 1\n", ""),
            "Your outputs take nothing from the budget, so a step reads more tokens than it may.",
        ),
        Mistake(
            "last chunk over budget",
            [
                ("min(lacking, chunk, left)", "min(lacking, chunk)"),
                ("count < min(lacking, least)", "left <= 0"),
            ],
            "The last chunk of your step is as long as `chunk` allows, even if less of the "
            "budget is left.",
        ),
        Mistake(
            "scraps read",
            ("count < min(lacking, least)", "count < 1"),
            "You read chunks that are shorter than allowed.",
        ),
        Mistake(
            "short rest withheld",
            ("min(lacking, least)", "least"),
            "Your prompt waits if it lacks only a few tokens. A chunk that finishes its prompt "
            "may be short.",
        ),
        Mistake(
            "short rest needs more",
            ("count < min(lacking, least)", "left < least"),
            "If less than `least` of the budget is left, you read no prompt. One that lacks only "
            "a few tokens may still fit.",
        ),
        Mistake(
            "overtaken",
            ("break", "continue"),
            "If a prompt's chunk would be too short, you go on to the next prompt. It overtakes, "
            "and may do so in every step.",
        ),
        Mistake(
            "one prompt per step",
            ("left -= count", "break"),
            "You read one prompt per step, even if the budget has room for more.",
        ),
        Mistake(
            "last token read",
            ("output - 1", "output"),
            "Your requests also read their last output token. Nothing is generated after it.",
        ),
        Mistake(
            "output in the same step",
            [
                ("(_, prompt, _)", "(_, prompt, output)"),
                (
                    "first[index] = step",
                    "first[index] = step\n"
                    "                row[index] += output > 1\n"
                    "                read[index] += output > 1",
                ),
            ],
            "Your request reads the end of its prompt and its first output token in the same "
            "step. That token is known only when the step is over.",
        ),
        Mistake(
            "shortest first",
            (
                "(arrival, prompt, _) in enumerate(requests)",
                "(arrival, prompt, _) in sorted("
                "enumerate(requests), key=lambda one: one[1][1] - read[one[0]])",
            ),
            "You read the prompt that lacks the fewest tokens first. Follow the order of the list.",
        ),
    ],
    cases=_cases,
    variant=_own_chunk,
    returns=("tokens read", "steps of the first tokens"),
    explanation="A running output takes one token of every step's budget before anything else, so "
    "its time per token depends on the budget and not on the prompts that arrive. The rest goes to "
    "prompts in order of arrival. The cap keeps one prompt from taking all of it, and the least "
    "length keeps a step from launching work for a handful of tokens; only the end of a prompt may "
    "be shorter. The chunk that finishes a prompt reads its last token, and the logits there give "
    "the first output token, so a request reads prompt + output − 1 tokens in all. With three "
    "prompts of 800 tokens, a budget of 1,024, and chunks of 400, this is the trace that vLLM's "
    "own scheduler test expects. This reference reads in order.",
    hints=(
        "How many tokens does a request with 800 prompt tokens and 4 output tokens read in all? "
        "Then ask what a prompt does that lacks 10 tokens when `least` is 64.",
        "One number per request is enough: the tokens that it has read. While the number is below "
        "the prompt's length, the request is reading its prompt. From there on it reads 1 token "
        "per step, until it has read prompt + output − 1 tokens. In each step, outputs take their "
        "tokens off the budget first, and prompts share the rest in order. Add the tokens of the "
        "step to these numbers only when the step is planned.",
        "`if count < min(lacking, least): break`, with `count = min(lacking, chunk, left)`, stops "
        "all further prompts if a chunk would be too short. `lacking` is what the prompt has "
        "not read, and `left` is the budget that remains. A prompt that lacks fewer than `least` "
        "tokens still reads them if the budget allows.",
    ),
)
