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
    """Various numbers of accepted tokens, a target that excludes a token, and p equal to q."""
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
            "You take the softmax of the residual. It turns numbers between 0 and 1 into nearly "
            "equal probabilities, so even tokens with no residual can be drawn."),
    Mistake("softmaxed difference",
            ("left / total if total > 0 else mine.clone()", "(mine - theirs).softmax(-1)"),
            "You take the softmax of the difference. It is positive everywhere, so tokens that the "
            "draft already proposes too often are drawn again."),
    Mistake("not normalized", ("left / total if", "left if"),
            "Your result does not add up to 1."),
    Mistake("absolute", ("clamp(min=0)", "abs()"),
            "You take the absolute value of the difference. Tokens that the draft proposed too "
            "often then come even more often."),
    Mistake("p again", ("(mine - theirs).clamp(min=0)", "mine"),
            "After a rejection, you draw from the target's whole distribution. Tokens that the "
            "draft proposes too often are then too frequent in the text."),
    Mistake("token removed",
            [("del tokens, others", "del others"),
             ("(mine - theirs).clamp(min=0)", "mine.index_fill(0, tokens[accepted], 0)")],
            "You remove the rejected token from the target's distribution. That is right for a "
            "draft that was looked up. This one was sampled, so the other tokens' probabilities "
            "change too."),
    Mistake("other way round", ("mine - theirs", "theirs - mine"),
            "You keep the part where the draft has more than the target. That is the part that "
            "was rejected."),
    Mistake("p where larger", ("(mine - theirs).clamp(min=0)", "mine * (mine > theirs)"),
            "You keep the whole probability of the tokens that the target likes more. Acceptance "
            "has already delivered part of it."),
    Mistake("p without q", ("(mine - theirs).clamp(min=0)", "mine * (1 - theirs)"),
            "You multiply by the draft's probability of any other token. Subtract instead, token "
            "by token, what the draft has delivered."),
    Mistake("draft again", ("(mine - theirs).clamp(min=0)", "theirs"),
            "After a rejection, you draw from the draft again, and the target never judges that "
            "token."),
    Mistake("bonus from the draft", ("return p[accepted]", "return q[-1]"),
            "If all tokens are accepted, your bonus token comes from the draft's last row: the "
            "wrong model, and the position before the right one."),
    Mistake("bonus a row early", ("return p[accepted]", "return p[-2]"),
            "If all tokens are accepted, your bonus token comes from the row of the last drafted "
            "token. There is one more row after it."),
    Mistake("residual for the bonus", ("return p[accepted].clone()", "accepted = -1"),
            "If all tokens are accepted, you subtract the draft's last row. Nothing was proposed "
            "after the last drafted token, so there is nothing to make up for."),
    Mistake("next row", ("= p[accepted]", "= p[accepted + 1]"),
            "After a rejection, you take the target's row for the position after the rejected "
            "token."),
    Mistake("first row", ("= p[accepted], q[accepted]", "= p[0], q[0]"),
            "You take the first rows, whatever was accepted."),
    Mistake("last row", ("= p[accepted]", "= p[-1]"),
            "After a rejection, you take the target's last row, which follows a token that is no "
            "longer in the text."),
    Mistake("zero by zero", (" if total > 0 else mine.clone()", ""),
            "If nothing is left, your result is 0/0. Rounding can cause a rejection between two "
            "equal rows, and the text must still continue."),
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
    explanation="Acceptance has delivered min(p(x), q(x)) of p(x). What is missing is "
    "max(p(x) − q(x), 0). Its sum is exactly the probability of a rejection, so dividing by the "
    "sum gives a distribution, and the two parts together give p(x). The rejected token needs no "
    "special care: it can be rejected only where q is larger, and there the residual is 0. A "
    "softmax instead of the division was a bug in the transformers library (pull request 28508): "
    "the texts looked plausible but came from another distribution. This reference handles one "
    "draft per position.",
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
