"""The distribution of the token behind the accepted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labcore.exercises.core import Exercise
from labcore.exercises.mistakes import Mistake

__all__ = ["NEXT_LAW"]


def next_law(p: Tensor, q: Tensor, tokens: Tensor, accepted: int, others: Tensor | None) -> Tensor:
    """The distribution [V] of the token behind the accepted ones."""
    del tokens, others
    if accepted == len(q):
        return p[accepted].clone()
    left = (p[accepted] - q[accepted]).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else p[accepted].clone()


def _left(fault: str, p: Tensor, q: Tensor, token: int) -> Tensor:
    """What a mistake makes of a rejected place's rows p and q, [V], before it is normalised."""
    if fault == "token removed":
        kept = p.clone()
        kept[token] = 0
        return kept
    return {
        "absolute": (p - q).abs(),
        "p again": p,
        "other way round": (q - p).clamp(min=0),
        "p where larger": p * (p > q),
        "p without q": p * (1 - q),
        "draft again": q,
    }.get(fault, (p - q).clamp(min=0))


def _bonus(fault: str, p: Tensor, q: Tensor) -> Tensor:
    """What a mistake draws from when all are accepted."""
    if fault == "residual for the bonus":
        left = (p[-1] - q[-1]).clamp(min=0)
        return left / left.sum()
    return {"bonus from the draft": q[-1], "bonus a row early": p[-2]}.get(fault, p[-1])


def _wrongly(fault: str) -> Callable[..., Tensor]:
    def law(p: Tensor, q: Tensor, tokens: Tensor, accepted: int, others: Tensor | None) -> Tensor:
        del others
        if accepted == len(q):
            return _bonus(fault, p, q).clone()
        row = {"row behind": accepted + 1, "first row": 0, "last row": len(q)}.get(fault, accepted)
        mine = p[row]
        theirs = q[min(row, len(q) - 1)] if fault == "first row" else q[accepted]
        left = _left(fault, mine, theirs, int(tokens[accepted]))
        if fault == "softmaxed":
            return left.softmax(-1)
        if fault == "softmaxed difference":
            return (mine - theirs).softmax(-1)
        if fault == "not normalised":
            return left if left.sum() > 0 else mine.clone()
        if fault == "zero by zero":
            return left / left.sum()
        return left / left.sum() if left.sum() > 0 else mine.clone()

    return law


def _cases(seed: int) -> list[dict[str, Any]]:
    """Each number of accepted tokens; a target that leaves tokens out; p equal to q."""
    draw = torch.Generator().manual_seed(seed)
    cases: list[dict[str, Any]] = []
    for drafted, accepted in ((3, 0), (4, 1), (4, 3), (3, 3), (1, 1), (5, 2), (3, 1)):
        vocab = 5 + drafted
        logits = 1.5 * torch.randn(drafted + 1, vocab, generator=draw, dtype=torch.float64)
        noise = torch.randn(drafted, vocab, generator=draw, dtype=torch.float64)
        p, q = logits.softmax(-1), (logits[:-1] + noise).softmax(-1)
        if accepted < drafted:
            # A token that can be rejected: the draft likes it more than the target does.
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


_HINTS = {
    "softmaxed": "You take the softmax of what is left. Numbers from 0 to 1 become nearly equal "
    "chances, and tokens of which nothing is left come too.",
    "softmaxed difference": "You take the softmax of the difference. It is positive everywhere, so "
    "that tokens come that the draft has had more than enough of.",
    "not normalised": "What you return does not add up to 1.",
    "absolute": "You take the size of the difference. Tokens that the draft proposed too often are "
    "then proposed once more.",
    "p again": "After a rejection you draw from the target's whole distribution. Tokens that the "
    "draft proposes too often then come too often in the text.",
    "token removed": "You take the rejected token out of the target's distribution. That is "
    "right for a draft that was looked up; this one was drawn, and the others' shares change too.",
    "other way round": "You keep what the draft has more of. That is what was thrown away.",
    "p where larger": "You keep the tokens that the target likes more, with their whole "
    "probability. A part of it has come already, by acceptance.",
    "p without q": "You multiply by the draft's chance of another token. What the draft has "
    "delivered is subtracted, token by token.",
    "draft again": "After a rejection you draw from the draft once more, and nobody judges it.",
    "bonus from the draft": "When all are accepted your bonus comes from the draft's last row, "
    "which belongs to the token before, and from the wrong model.",
    "bonus a row early": "When all are accepted your bonus comes from the row of the last drafted "
    "token. Behind it stands one more row.",
    "residual for the bonus": "When all are accepted you subtract the draft's last row. "
    "Nothing was proposed behind the last drafted token, so nothing is to be made up for.",
    "row behind": "After a rejection you take the target's row behind the rejected token.",
    "first row": "You take the first rows, whatever was accepted.",
    "last row": "After a rejection you take the target's last row, which follows a token that is "
    "not there any more.",
    "zero by zero": "Where nothing is left your result is 0/0. Rounding can reject a token of two "
    "equal rows, and a text must go on.",
}

NEXT_LAW = Exercise(
    id="speculative.next_law",
    reference=next_law,
    mistakes=[Mistake(name, _wrongly(name), hint) for name, hint in _HINTS.items()],
    cases=_cases,
    rtol=1e-9,
    atol=1e-12,
    explanation="Of p(x) the acceptance has delivered min(p(x), q(x)). What is missing is "
    "max(p(x) − q(x), 0), and its sum is exactly the chance of a rejection, so dividing by the sum "
    "gives a distribution, and both ways together give p(x). The rejected token needs no care: it "
    "can be rejected only where q is larger, and there nothing is left. A softmax in place of the "
    "division was a fault of the transformers library (pull request 28508): texts looked plausible "
    "and came from another distribution. This reference knows one draft a place.",
)
