"""Prompts read in chunks beside outputs, under one budget of tokens a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake
from labcore.exercises.topics.inflight.drawing import kept, separating

__all__ = ["CHUNK", "CHUNKS", "NOBODYS", "some_prompts"]

NOBODYS = 400
CHUNKS = (256, 320, 352, 448)  # a student's
_Requests = Sequence[tuple[int, int, int]]
_Answer = tuple[list[list[int]], list[int]]


def in_chunks(
    requests: _Requests, steps: int, budget: int, least: int, equal: bool, *, chunk: int
) -> _Answer:
    """Tokens that each request reads in each step, and the step that brings its first token."""
    del equal
    read, said = [0] * len(requests), [0] * len(requests)
    trace, first = [], [-1] * len(requests)
    for step in range(steps):
        row, left = [0] * len(requests), budget
        for place, (_, _, output) in enumerate(requests):
            if 0 < said[place] < output:
                row[place] = 1
                left -= 1
        for place, (arrival, prompt, _) in enumerate(requests):
            lacking = max(prompt - read[place], 0)
            if arrival > step or not lacking:
                continue
            count = min(lacking, chunk, left)
            if count < min(lacking, least):
                break
            row[place] = count
            left -= count
        for place, (_, prompt, _) in enumerate(requests):
            read[place] += row[place]
            if row[place] and read[place] >= prompt:
                said[place] += 1
                first[place] = step if said[place] == 1 else first[place]
        trace.append(row)
    return trace, first


@dataclass(kw_only=True, slots=True)
class _Row:
    """A request on its way, in a mistake's bookkeeping."""

    arrival: int
    prompt: int
    output: int
    read: int = field(default=0)
    said: int = field(default=0)
    first: int = field(default=-1)

    def lacking(self) -> int:
        return max(self.prompt - self.read, 0)


def _decodes(fault: str, row: _Row) -> bool:
    if row.lacking():
        return False
    if fault == "no token of the last chunk":
        return row.said < row.output
    if fault == "last token read":
        return row.said <= row.output
    return 0 < row.said < row.output


def _count(fault: str, lacking: int, chunk: int, left: int, least: int) -> int:
    """Tokens of a prompt's next chunk, -1 where the prompts have to stop."""
    if fault == "cap unseen":
        chunk = lacking
    if fault == "last chunk over budget":
        return min(lacking, chunk) if left > 0 else -1
    count = min(lacking, chunk, left)
    smallest = min(lacking, least)
    if fault == "scraps read":
        smallest = 1
    if fault == "short rest withheld":
        smallest = least
    return count if count >= smallest else -1


def _chunks(
    fault: str, rows: Sequence[_Row], step: int, left: int, chunk: int, least: int
) -> dict[int, int]:
    taken: dict[int, int] = {}
    places = [at for at, row in enumerate(rows) if row.arrival <= step and row.lacking()]
    if fault == "shortest first":
        places.sort(key=lambda at: rows[at].lacking())
    for at in places:
        count = _count(fault, rows[at].lacking(), chunk, left, least)
        if count < 0:
            if fault == "overtaken":
                continue
            break
        taken[at] = count
        left -= count
        if fault == "one prompt a step":
            break
    return taken


def _shares(
    fault: str, rows: Sequence[_Row], step: int, budget: int, chunk: int, least: int
) -> dict[int, int]:
    """What each reads in a step."""
    decodes = [at for at, row in enumerate(rows) if _decodes(fault, row)]
    if fault == "prompts first":
        taken = _chunks(fault, rows, step, budget, chunk, least)
        left = budget - sum(taken.values())
        return taken | dict.fromkeys(decodes[:left], 1)
    left = budget if fault == "outputs for nothing" else budget - len(decodes)
    return dict.fromkeys(decodes, 1) | _chunks(fault, rows, step, left, chunk, least)


def _wrongly(fault: str) -> Callable[..., _Answer]:
    def answer(
        requests: _Requests, steps: int, budget: int, least: int, equal: bool, *, chunk: int
    ) -> _Answer:
        del equal
        rows = [_Row(arrival=a, prompt=p, output=o) for a, p, o in requests]
        trace = []
        for step in range(steps):
            shares = _shares(fault, rows, step, budget, chunk, least)
            for at, count in list(shares.items()):
                row = rows[at]
                decoded = not row.lacking()
                row.read += count
                said = decoded or not row.lacking()
                if fault == "no token of the last chunk":
                    said = decoded
                if fault == "token of every chunk":
                    said = True
                row.said += said
                if row.said and row.first < 0:
                    row.first = step
                if fault == "output in the same step" and not decoded and said and row.output > 1:
                    row.said += 1
                    shares[at] += 1
            trace.append([shares.get(at, 0) for at in range(len(rows))])
        return trace, [row.first for row in rows]

    return answer


_HINTS = {
    "prompts first": "You read prompts first and outputs with what is left. A long prompt then "
    "stops all outputs for as long as it lasts.",
    "cap unseen": "Your prompts take as much as the budget has. Look for what one of them may "
    "take at most.",
    "no token of the last chunk": "Behind its last chunk your request says nothing, and begins "
    "with the next step. The chunk has read the last token of the prompt, and what it computes "
    "there is the next one.",
    "token of every chunk": "Your request says something behind each chunk. What it computes in "
    "the middle of its prompt is known already.",
    "outputs for nothing": "Your outputs take no part in the budget, so that a step reads more "
    "tokens than it may.",
    "last chunk over budget": "Your last chunk of a step is as long as the cap allows, even where "
    "the budget ends before.",
    "scraps read": "You read chunks that are shorter than they may be.",
    "short rest withheld": "Your prompt waits when little of it is left. There is nothing more to "
    "wait for.",
    "overtaken": "Where a prompt's chunk would be too short you go on to the next prompt. It "
    "overtakes, and may do so in every step.",
    "one prompt a step": "You read one prompt a step, even where the budget has room for more.",
    "last token read": "Your requests read the token that they said last. Nobody asks what comes "
    "behind it.",
    "output in the same step": "Your request reads the end of its prompt and its first output "
    "token in one step. That token is known when the step is over.",
    "shortest first": "You read the prompt first that lacks least. The order is that of the list.",
}
_WRONG = {name: _wrongly(name) for name in _HINTS}


def some_prompts(chance: random.Random, equal: bool = False) -> dict[str, Any]:
    """Requests that come one behind the other, with prompts of one chunk to four."""
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
    return separating(lambda: some_prompts(chance), [in_chunks, *_WRONG.values()], variants)


def _cases(seed: int) -> list[dict[str, Any]]:
    golden = {"requests": [(0, 800, 4)] * 3, "steps": 4, "budget": 1024, "least": 64}
    return [{**golden, "equal": False}, *_drawn(seed)]


def _own_chunk(student: int) -> Mapping[str, Any]:
    chance = random.Random(f"inflight.chunk:{student}")
    return {"chunk": chance.choice(CHUNKS) if student else NOBODYS}


CHUNK = Exercise(
    id="inflight.chunk",
    reference=in_chunks,
    mistakes=[Mistake(name, _WRONG[name], hint) for name, hint in _HINTS.items()],
    cases=_cases,
    variant=_own_chunk,
    returns=("tokens read", "steps of the first tokens"),
    explanation="An output that runs takes one token of the budget in every step, before anything "
    "else: so its time a token depends on the budget and not on the prompts that arrive. What is "
    "left goes to prompts in the order of arrival. The cap keeps one of them from taking all of "
    "it, and the least length keeps a step from launching work for a handful of tokens; a "
    "prompt's rest may be as short as it is. The chunk that ends a prompt reads its last token, "
    "and the logits there are those of the first output token, so a request reads prompt + output "
    "− 1 tokens in all. With three prompts of 800, a budget of 1,024 and chunks of 400 this is the "
    "trace that vLLM's own test of its scheduler expects. This reference reads in order.",
)
