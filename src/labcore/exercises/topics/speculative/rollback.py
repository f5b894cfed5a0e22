"""What both caches keep after a block, and what each model reads next."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    """For each row: this block's slots that each cache keeps, and what each model reads next."""
    del parents
    rows = []
    for context, had, drafted, path, new in zip(
        contexts, cached, drafts, paths, next_tokens, strict=True
    ):
        known, accepted = len(context), len(path)
        text = [*context, *drafted[:accepted], new]
        target = known + accepted
        written = known + len(drafted) - 1 if drafted else had
        draft = min(target, written)
        kept = [*range(known - 1, target)], [*range(had, draft)]
        rows.append((*kept, text[target:], text[draft:]))
    return rows


def _cases(seed: int) -> list[dict[str, Any]]:
    """Each kind of row alone, ragged batches, rows without a draft, and lagging draft models."""
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
    """plan: for each row, the tokens drafted, accepted, and missing from the draft's cache."""
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


_MISTAKES = [
    Mistake("hole not read", ("text[draft:]", "[new] if drafted else text[draft:]"),
            "After a full acceptance, your draft model reads only the next token. It has never "
            "read the last token that it drafted, so that position stays empty for the rest of "
            "the request."),
    Mistake("only the new one read", ("text[draft:]", "[new]"),
            "Your draft model always reads only the next token. Compare its cache with the text: "
            "in some rows, more is missing."),
    Mistake("both alike", ("min(target, written)", "target if drafted else had"),
            "You make the draft model's cache as long as the target's. After a full acceptance, "
            "that keeps a slot that was never written."),
    Mistake("trimmed alike", ("min(target, written)", "max(target - 1, had) if drafted else had"),
            "You remove as many slots from the draft's cache as from the target's. The draft model "
            "has written one slot fewer, so it loses an accepted token with every rejection."),
    Mistake("always a hole", ("min(target,", "min(target - (accepted > 0),"),
            "Your draft model reads the last accepted token again in every row. It lacks that "
            "token only if it was the last one drafted."),
    Mistake("rejected one kept",
            [("- 1, target)", "- 1, min(target + 1, known + len(drafted)))"),
             ("had, draft)", "had, min(draft + 1, written))")],
            "You keep the slot of the rejected token in both caches, and everything that follows "
            "attends to it."),
    Mistake("everything kept",
            [("- 1, target)", "- 1, known + len(drafted))"), ("had, draft)", "had, written)")],
            "Your caches keep the rejected tokens."),
    Mistake("nothing kept",
            [("target = known + accepted", "target = known - 1"), ("min(target, written)", "had")],
            "You discard the whole block. The accepted tokens are in both caches exactly as after "
            "plain decoding, and reading them again is the work that drafting should save."),
    Mistake("next token counted",
            [("- 1, target)", "- 1, target + 1)"),
             ("had, draft)", "had, draft + (draft == target))")],
            "You count the next token as cached. It was chosen from the last row of logits, and "
            "neither model has read it."),
    Mistake("pending one forgotten", ("known - 1, target", "known, target"),
            "You leave out the target's first slot of this block. It holds the last token of the "
            "context, which the target read along with the draft."),
    Mistake("last one dropped", ("        kept", "        target -= accepted > 0\n        kept"),
            "You drop the last accepted token from the target's cache and read it again. The text "
            "stays right, but every block wastes the work of one token."),
    Mistake("last one read again", ("text[target:]", "text[target - (accepted > 0) :]"),
            "The target keeps the last accepted token in its cache and also reads it again, so "
            "the cache then holds it twice."),
    Mistake("nothing drafted, all read", ("else had", "else known"),
            "If nothing was drafted, the draft model did not run. Your answer assumes that it has "
            "read the whole context."),
    Mistake("old hole forgotten", ("range(had,", "range(known - 1 if drafted else had,"),
            "Your draft model's slots begin with the last token of the context. In some rows, its "
            "cache lacked more than that token, and it read the missing ones in this block."),
    Mistake("cached ignored",
            ("known, accepted = len(context), len(path)",
             "known, accepted, had = len(context), len(path), len(context) - 1"),
            "You assume that both caches held everything but the last token of the context. In "
            "some rows, the draft model's cache held less; `cached` gives the number."),
    Mistake("shortest row for all",
            [("len(path)", "min(map(len, paths))"),
             ("*drafted[:accepted], new]", "*[*drafted[: len(path)], new][: accepted + 1]]")],
            "You cut all rows back to the one with the fewest accepted tokens. Each row has its "
            "own length."),
    Mistake("fullness by the longest draft", ("len(drafted) - 1", "max(map(len, drafts)) - 1"),
            "You decide whether a draft was fully accepted by the longest draft of the batch. A "
            "shorter draft can be fully accepted too."),
]  # fmt: skip

AFTER_BLOCK = Exercise(
    id="speculative.after_block",
    points=6,
    beyond=2,
    reference=after_block,
    mistakes=_MISTAKES,
    cases=_cases,
    explanation="A cache may keep a token only if its model has read it and it is still part of "
    "the text. The target has read the whole draft, so it drops the rejected tokens. The draft "
    "model has not read the last token that it drafted, so it drops one slot fewer; after a full "
    "acceptance it drops nothing and lacks one token. An engine in which each model always reads "
    "one token next leaves a hole there. Nothing fails and the output stays right, but drafts get "
    "worse until the request ends (vLLM issues 5765 and 9730, TensorRT-LLM 5285). If you count "
    "what is cached and read what is missing, as here, there is no special case. This reference "
    "handles chains only.",
    hints=(
        "For one request, list the tokens that each model has read by the end of the block. Which "
        "drafted token did the draft model never read? And what did it read if nothing was "
        "drafted?",
        "Count how many tokens of the new text each cache holds. For the target, these are the "
        "context and the accepted tokens. For the draft model, take the smaller of the target's "
        "count and the number of tokens that the draft model has read. Each model keeps the "
        "block's slots below its own count and reads the rest of the text next.",
        "`have = min(known + len(paths[b]), known + len(drafts[b]) - 1) if drafts[b] else "
        "cached[b]` is the draft model's count after the block, where `known` is "
        "`len(contexts[b])`. It keeps the slots from `cached[b]` to `have - 1` and reads the text "
        "from position `have` on.",
    ),
)
