"""What both caches keep after a block, and what each model reads next."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["AFTER_BLOCK"]

_Row = tuple[list[int], list[int], list[int], list[int]]
_Rows = Sequence[Sequence[int]]


def after_block(
    contexts: _Rows,
    cached: Sequence[int],
    drafts: _Rows,
    paths: _Rows,
    next_tokens: Sequence[int],
    parents: None,
) -> list[_Row]:
    """For each row: slots that target and draft keep of this block's, and what each reads next."""
    del parents
    rows = []
    for context, had, drafted, path, new in zip(
        contexts, cached, drafts, paths, next_tokens, strict=True
    ):
        known, accepted = len(context), len(path)
        text = [*context, *drafted[:accepted], new]
        target_length = known + accepted
        written = known + len(drafted) - 1 if drafted else had
        draft_length = min(known + accepted, written)
        rows.append(
            (
                list(range(known - 1, target_length)),
                list(range(had, draft_length)),
                text[target_length:],
                text[draft_length:],
            )
        )
    return rows


def _row(
    fault: str, context: Sequence[int], had: int, drafted: Sequence[int], accepted: int, new: int
) -> _Row:
    known, count = len(context), len(drafted)
    text = [*context, *drafted[:accepted], new]
    start, target = known - 1, known + accepted
    written = known + count - 1 if count else had
    draft = min(known + accepted, written)
    target_reads, draft_reads = text[target:], text[draft:]
    if fault == "rejected one kept":
        target, draft = min(target + 1, known + count), min(draft + 1, written)
    elif fault == "next token counted":
        target, draft = target + 1, draft + (draft == target)
    elif fault == "pending one forgotten":
        start = known
    elif fault == "last one dropped" and accepted:
        target, target_reads = target - 1, text[target - 1 :]
    elif fault == "last one read again" and accepted:
        target_reads = text[target - 1 :]
    elif fault == "trimmed alike" and count:
        draft = max(written - (count - accepted), had)
        draft_reads = text[draft:]
    elif fault == "both alike" and count:
        draft, draft_reads = target, text[target:]
    elif fault == "hole not read":
        draft_reads = draft_reads[-1:] if count and accepted == count else draft_reads
    elif fault == "only the new one read":
        draft_reads = [new]
    elif fault == "nothing drafted, all read" and not count:
        draft, draft_reads = known, text[known:]
    elif fault == "always a hole" and accepted:
        draft = target - 1
        draft_reads = text[draft:]
    elif fault == "old hole forgotten" and count:
        had = known - 1
    elif fault == "nothing kept":
        target, target_reads = known - 1, text[known - 1 :]
        draft, draft_reads = had, text[had:]
    elif fault == "everything kept":
        target, draft = known + count, written
    return [*range(start, target)], [*range(had, draft)], target_reads, draft_reads


def _wrongly(fault: str) -> Callable[..., list[_Row]]:
    def rows(
        contexts: _Rows,
        cached: Sequence[int],
        drafts: _Rows,
        paths: _Rows,
        next_tokens: Sequence[int],
        parents: None,
    ) -> list[_Row]:
        del parents
        counts = [len(path) for path in paths]
        least, most = min(counts), max(map(len, drafts))
        found = []
        for context, had, drafted, accepted, new in zip(
            contexts, cached, drafts, counts, next_tokens, strict=True
        ):
            kept, last = accepted, new
            if fault == "shortest row for all" and accepted > least:
                kept, last = least, drafted[least]
            row = _row(fault, context, had, drafted, kept, last)
            if fault == "fullness by the longest draft" and drafted and accepted < most:
                # What the draft did not read passes for read.
                length = len(context) + accepted
                row = (row[0], [*range(had, length)], row[2], row[3][-1:])
            found.append(row)
        return found

    return rows


def _cases(seed: int) -> list[dict[str, Any]]:
    """One row of each kind; ragged rows; rows with nothing drafted; a draft model behind."""
    chance = random.Random(seed)
    plans = [
        [(3, 1, 1)],
        [(4, 4, 1)],
        [(4, 0, 1)],
        [(1, 1, 1)],
        [(0, 0, 1)],
        [(3, 3, 2), (5, 2, 1), (2, 2, 1)],
        [(4, 1, 3), (0, 0, 2), (4, 4, 2), (1, 0, 1)],
        [(2, 1, 1), (0, 0, 3), (3, 2, 2)],
    ]
    return [_case(chance, plan) for plan in plans]


def _case(chance: random.Random, plan: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """plan: for each row how many are drafted, accepted, and lacking in the draft's cache."""
    case: dict[str, Any] = {
        name: [] for name in ("contexts", "cached", "drafts", "paths", "next_tokens")
    }
    for drafted, accepted, lacking in plan:
        known = chance.randint(4, 9)
        tokens = chance.sample(range(10, 100), known + drafted + 1)
        case["contexts"].append(tokens[:known])
        case["cached"].append(known - lacking)
        case["drafts"].append(tokens[known:-1])
        case["paths"].append([*range(accepted)])
        case["next_tokens"].append(tokens[-1])
    return {**case, "parents": None}


_HINTS = {
    "hole not read": "After a full acceptance your draft model goes on with the next token alone. "
    "It never read the last token that it drafted: that place stays empty for the whole request.",
    "only the new one read": "Your draft model always reads the next token alone. Compare what its "
    "cache holds with the text: there are rows in which more is lacking.",
    "both alike": "Your draft model's cache is made as long as the target's. After a full "
    "acceptance that keeps a slot that nobody has written.",
    "trimmed alike": "You cut as many slots from the draft's cache as from the target's. The draft "
    "model has written one less, so it loses an accepted token with every rejection.",
    "always a hole": "Your draft model reads the last accepted token again in every row. It lacks "
    "that token only where it was the last one drafted.",
    "rejected one kept": "The slot of the rejected token stays in your caches, and everything that "
    "follows attends to it.",
    "everything kept": "Your caches keep what was rejected.",
    "nothing kept": "You throw away the whole block. What was accepted stands in both caches as it "
    "would after plain decoding, and reading it again is the work that was to be saved.",
    "next token counted": "You count the next token as cached. It was chosen from the last row of "
    "logits and nobody has read it.",
    "pending one forgotten": "Of the target's slots you leave out the first of this block: the "
    "last token of the context, which the target read along with the draft.",
    "last one dropped": "You drop the last accepted token from the target's cache and read it "
    "again. That is right, and a token of work lost in every block.",
    "last one read again": "The target's cache keeps the last accepted token and reads it once "
    "more: it then stands there twice.",
    "nothing drafted, all read": "Where nothing was drafted the draft model did not run. Your "
    "bookkeeping says that it has read the context.",
    "old hole forgotten": "Your draft model's slots begin with the last token of the context. In "
    "some rows it lacked more than that and has read it in this block.",
    "shortest row for all": "You cut all rows back to the one with the fewest accepted tokens. "
    "Rows have lengths of their own.",
    "fullness by the longest draft": "Whether a draft was accepted as a whole is measured by the "
    "longest draft of the batch. A shorter one may be accepted as a whole too.",
}

AFTER_BLOCK = Exercise(
    id="speculative.after_block",
    reference=after_block,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    explanation="A cache may hold what has been read and still stands in the text. The target has "
    "read the whole draft, so it loses what was rejected; the draft model has not read the last "
    "token that it drafted, so it loses one less, and after a full acceptance nothing, while one "
    "token is lacking. An engine that always reads one token next leaves a hole there: nothing "
    "fails, the output stays right, and drafts get worse until the request ends (vLLM issues 5765 "
    "and 9730, TensorRT-LLM 5285). Counting what is cached and reading what is lacking, as here, "
    "has no special case. This reference knows chains.",
)
