"""The distribution of the token after the accepted ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["NEXT_LAW"]


def next_law(p: Tensor, q: Tensor, tokens: Tensor, accepted: int, others: Tensor | None) -> Tensor:
    """The distribution [V] of the token after the accepted ones."""
    del tokens, others
    if accepted == len(q):
        return p[accepted].clone()
    mine, theirs = p[accepted], q[accepted]
    left = (mine - theirs).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else mine.clone()


def _cases(seed: int) -> list[dict[str, Any]]:
    """Various numbers of accepted tokens, a target that rules a token out, and p equal to q."""
    draw = torch.Generator().manual_seed(seed)
    cases: list[dict[str, Any]] = []
    for drafted, accepted in ((3, 0), (4, 1), (4, 3), (3, 3), (1, 1), (5, 2), (3, 1)):
        vocab = 5 + drafted
        logits = 1.5 * torch.randn(drafted + 1, vocab, generator=draw, dtype=torch.float64)
        noise = torch.randn(drafted, vocab, generator=draw, dtype=torch.float64)
        p, q = logits.softmax(-1), (logits[:-1] + noise).softmax(-1)
        if accepted < drafted:
            # Only a token that the draft likes more than the target does can be rejected.
            tokens = (q - p[:-1]).argmax(-1)
        else:
            tokens = torch.multinomial(q, 1, generator=draw)[:, 0]
        if drafted == 5:
            p[accepted, tokens[accepted]] = 0
            p[accepted] /= p[accepted].sum()
        cases.append({"p": p, "q": q, "tokens": tokens, "accepted": accepted, "others": None})
    same = cases[-1]
    same["q"][1] = same["p"][1]
    return cases


_MISTAKES = [
    Mistake("softmaxed", ("left / total if total > 0 else mine.clone()", "left.softmax(-1)"),
            "You take the softmax of what is left. Numbers from 0 to 1 become nearly equal "
            "chances, and tokens of which nothing is left come too."),
    Mistake("softmaxed difference",
            ("left / total if total > 0 else mine.clone()", "(mine - theirs).softmax(-1)"),
            "You take the softmax of the difference. It is positive everywhere, so that tokens "
            "come that the draft has had more than enough of."),
    Mistake("not normalised", ("left / total if", "left if"),
            "What you return does not add up to 1."),
    Mistake("absolute", ("clamp(min=0)", "abs()"),
            "You take the size of the difference. Tokens that the draft proposed too often are "
            "then proposed once more."),
    Mistake("p again", ("(mine - theirs).clamp(min=0)", "mine"),
            "After a rejection you draw from the target's whole distribution. Tokens that the "
            "draft proposes too often then come too often in the text."),
    Mistake("token removed",
            [("del tokens, others", "del others"),
             ("(mine - theirs).clamp(min=0)", "mine.index_fill(0, tokens[accepted], 0)")],
            "You take the rejected token out of the target's distribution. That is right for a "
            "draft that was looked up; this one was drawn, and the others' shares change too."),
    Mistake("other way round", ("mine - theirs", "theirs - mine"),
            "You keep what the draft has more of. That is what was thrown away."),
    Mistake("p where larger", ("(mine - theirs).clamp(min=0)", "mine * (mine > theirs)"),
            "You keep the tokens that the target likes more, with their whole probability. A part "
            "of it has come already, by acceptance."),
    Mistake("p without q", ("(mine - theirs).clamp(min=0)", "mine * (1 - theirs)"),
            "You multiply by the draft's chance of another token. What the draft has delivered is "
            "subtracted, token by token."),
    Mistake("draft again", ("(mine - theirs).clamp(min=0)", "theirs"),
            "After a rejection you draw from the draft once more, and nobody judges it."),
    Mistake("bonus from the draft", ("return p[accepted]", "return q[-1]"),
            "When all are accepted your bonus comes from the draft's last row, which belongs to "
            "the token before, and from the wrong model."),
    Mistake("bonus a row early", ("return p[accepted]", "return p[-2]"),
            "When all are accepted your bonus comes from the row of the last drafted token. Behind "
            "it stands one more row."),
    Mistake("residual for the bonus", ("return p[accepted].clone()", "accepted = -1"),
            "When all are accepted you subtract the draft's last row. Nothing was proposed behind "
            "the last drafted token, so nothing is to be made up for."),
    Mistake("row behind", ("= p[accepted]", "= p[accepted + 1]"),
            "After a rejection you take the target's row behind the rejected token."),
    Mistake("first row", ("= p[accepted], q[accepted]", "= p[0], q[0]"),
            "You take the first rows, whatever was accepted."),
    Mistake("last row", ("= p[accepted]", "= p[-1]"),
            "After a rejection you take the target's last row, which follows a token that is not "
            "there any more."),
    Mistake("zero by zero", (" if total > 0 else mine.clone()", ""),
            "Where nothing is left your result is 0/0. Rounding can reject a token of two equal "
            "rows, and a text must go on."),
]  # fmt: skip

NEXT_LAW = Exercise(
    id="speculative.next_law",
    points=6,
    beyond=2,
    reference=next_law,
    mistakes=_MISTAKES,
    cases=_cases,
    rtol=1e-9,
    atol=1e-12,
    explanation="Of p(x) the acceptance has delivered min(p(x), q(x)). What is missing is "
    "max(p(x) − q(x), 0), and its sum is exactly the chance of a rejection, so dividing by the sum "
    "gives a distribution, and both ways together give p(x). The rejected token needs no care: it "
    "can be rejected only where q is larger, and there nothing is left. A softmax in place of the "
    "division was a fault of the transformers library (pull request 28508): texts looked plausible "
    "and came from another distribution. This reference knows one draft a place.",
    hints=(
        "For each of the three tokens in the example, compare how often acceptance delivers it "
        "with how often the target wants it. Then ask which row of `p` you need if all N tokens "
        "were accepted.",
        "Acceptance delivers token x with probability min(p(x), q(x)). The next token supplies "
        "the missing part, `max(p(x) − q(x), 0)`, divided by its sum over all tokens. Two cases "
        "need a plain row of `p` instead: all tokens were accepted, or nothing is missing.",
        "`left = (p[accepted] - q[accepted]).clamp(min=0)` is the part that acceptance does not "
        "deliver. Divide it by its sum only if that sum is above 0. Handle `accepted == len(q)` "
        "before this line, since `q` has no such row.",
    ),
)
