"""Broken verifiers, one for each way in which real ones were wrong; `exact` catches each.

All but the last one are `rejection_sampling` with one line changed. They are for exercises and
tests: none has the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft, Verifier
from labcore.decoding.draws import Drawing, draws_of
from labcore.decoding.verify import one_hot, residual, tree_children

__all__ = ["FAULTS", "BrokenVerifier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenVerifier:
    """A broken verifier.

    summary: what it does wrong. evidence: where this fault was found. case: the name of a case in
    `exact.cases` that shows it.
    """

    verify: Verifier
    summary: str
    evidence: str
    case: str


def _keep(p: Tensor, draft: Draft) -> tuple[Tensor, Draft]:
    return p, draft


def _ratio(px: float, qx: float) -> float:
    return px / qx


def _broken(
    *,
    prepare: Callable[[Tensor, Draft], tuple[Tensor, Draft]] = _keep,
    accept: Callable[[float, float], float] = _ratio,
    left_of: Callable[[Tensor, Tensor], Tensor] = residual,
    between: Callable[[Tensor, Tensor], Tensor] | None = None,
    bonus: Callable[[Tensor, Tensor | None], Tensor] = lambda p, q: p,  # noqa: ARG005
    trusts: Callable[[int, float], bool] = lambda node, qx: False,  # noqa: ARG005
) -> Verifier:
    """Return rejection sampling with one part replaced.

    prepare: changes p and the draft first. accept: the probability from p(x) and q(x).
    left_of: what the next token is drawn from after a rejection; between: what the next sibling is
    judged by, None for the same. bonus: what the next token is drawn from after the last node,
    given p and that node's q (or None).
    trusts: which nodes, given their q(x), are accepted without looking at p.
    """

    def verify(p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
        p, draft = prepare(p, draft)
        children = tree_children(p, draft)
        draws = draws_of(generator)
        start = len(draws.log)
        tokens = draft.tokens.tolist()
        path: list[int] = []
        node = -1
        while True:
            end = left = p[node + 1]
            for child in children[node + 1]:
                q = one_hot(tokens[child], left) if draft.q is None else draft.q[child]
                px, qx = left[tokens[child]].item(), q[tokens[child]].item()
                if trusts(child, qx) or draws.coin(accept(px, qx)):
                    path.append(child)
                    break
                end = left_of(left, q)
                left = end if between is None else between(left, q)
            else:
                if not children[node + 1]:
                    drawn = None if draft.q is None or node < 0 else draft.q[node]
                    end = bonus(end, drawn)
                return Accepted(tuple(path), draws.token(end), tuple(draws.log[start:]))
            node = path[-1]

    return verify


def _hotter(rows: Tensor) -> Tensor:
    """Return the distribution at twice the temperature, as if the request's had been left out."""
    return rows.sqrt() / rows.sqrt().sum(-1, keepdim=True)


def _soften(draft: Draft, vocab: int) -> Draft:
    """Give a greedy draft a softmax as its q, with half the mass at the argmax."""
    if draft.q is not None or not len(draft):
        return draft
    q = torch.full((len(draft), vocab), 0.5 / (vocab - 1))
    q[torch.arange(len(draft)), draft.tokens] = 0.5
    return Draft(draft.tokens, draft.parents, q)


def _withdraw(draft: Draft) -> Draft:
    """Return the draft up to the first token of which its own drafter wasn't sure."""
    if draft.q is None:
        return draft
    sure = draft.q[torch.arange(len(draft)), draft.tokens] >= 0.25
    kept = int(sure.long().cumprod(0).sum())
    return Draft(draft.tokens[:kept], draft.parents[:kept], draft.q[:kept])


def _shifted(p: Tensor) -> Tensor:
    return torch.cat([p[1:], p[-1:]])


def _confident(node: int, qx: float) -> bool:  # noqa: ARG001
    return qx > 0.5


def _whole(p: Tensor, q: Tensor) -> Tensor:  # noqa: ARG001
    """Leave p as it was after a rejection."""
    return p


def _whole_without_q(p: Tensor, q: Tensor) -> Tensor:
    return p if q.max() == 1 else residual(p, q)


def _softmaxed(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0).softmax(0)


def _unclamped(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs() if (p - q).any() else p


def _goes_on(p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
    """Judge every node of a chain and keep all that pass, even after one that didn't."""
    tree_children(p, draft)
    draws: Drawing = draws_of(generator)
    start = len(draws.log)
    path = []
    for node, token in enumerate(draft.tokens.tolist()):
        row = p[int(draft.parents[node]) + 1]
        if draws.coin(
            row[token].item() / (1.0 if draft.q is None else draft.q[node, token].item())
        ):
            path.append(node)
    return Accepted(tuple(path), draws.token(p[-1]), tuple(draws.log[start:]))


FAULTS: dict[str, BrokenVerifier] = {
    "softmaxed_residual": BrokenVerifier(
        verify=_broken(left_of=_softmaxed),
        summary="The residual goes through a softmax instead of being divided by its sum, so tokens"
        " without any residual can follow a rejection.",
        evidence="HF PR 28508",
        case="drawn chain",
    ),
    "greedy_draft_sampled_rule": BrokenVerifier(
        verify=_broken(prepare=lambda p, draft: (p, _soften(draft, p.shape[1]))),
        summary="The draft takes its argmax but is judged as if it had drawn from its softmax:"
        " p / q with a q below 1 accepts too often.",
        evidence="HF PR 30778, reverted in HF PR 33534",
        case="one-hot chain",
    ),
    "parameters_missing_on_p": BrokenVerifier(
        verify=_broken(prepare=lambda p, draft: (_hotter(p), draft)),
        summary="Temperature, top-k and top-p reach the draft and not the target, so the output has"
        " the distribution of a hotter target.",
        evidence="vLLM PR 10198",
        case="drawn chain",
    ),
    "q_before_parameters": BrokenVerifier(
        verify=_broken(
            prepare=lambda p, draft: (
                p,
                Draft(draft.tokens, draft.parents, None if draft.q is None else _hotter(draft.q)),
            )
        ),
        summary="Temperature, top-k and top-p are applied when the draft draws but not in the q"
        " that it passes on, so the ratio uses a q that nothing was drawn from.",
        evidence="HF issue 47932; the other half of vLLM PR 10198",
        case="drawn chain",
    ),
    "bf16_draws": BrokenVerifier(
        verify=_broken(accept=lambda px, qx: max(px / qx, 1 / 512)),
        summary="The uniform number is bf16, and a token is rejected if the number exceeds its"
        " ratio. One draw in 512 is 0, which doesn't exceed the ratio of a token with p = 0.",
        evidence="measured on the CPU: torch.rand in bf16 is 0 once in 512 draws",
        case="nothing in common",
    ),
    "no_residual": BrokenVerifier(
        verify=_broken(left_of=_whole),
        summary="After a rejection the next token is drawn from p, so tokens that the draft favors"
        " get their share twice.",
        evidence="Leviathan et al., arXiv:2211.17192: the residual is what makes it exact",
        case="drawn chain",
    ),
    "one_hot_without_residual": BrokenVerifier(
        verify=_broken(left_of=_whole_without_q),
        summary="Without a q (an n-gram's draft) the residual is left out, so the rejected token"
        " can come back.",
        evidence="vLLM takes q as one-hot there: the recovered token is p without the drafted one",
        case="one-hot chain",
    ),
    "residual_not_clamped": BrokenVerifier(
        verify=_broken(left_of=_unclamped),
        summary="The residual is |p - q| instead of max(p - q, 0): tokens that the draft already"
        " gave too often are drawn again.",
        evidence="the max(0, .) in Leviathan et al., arXiv:2211.17192",
        case="drawn chain",
    ),
    "accept_without_q": BrokenVerifier(
        verify=_broken(accept=lambda px, qx: px),  # noqa: ARG005
        summary="A token is accepted with probability p(x) instead of min(1, p(x) / q(x)), but with"
        " the residual of the other rule.",
        evidence="two exact rules mixed: p(x) belongs to sample-and-compare",
        case="drawn chain",
    ),
    "accept_where_p_is_larger": BrokenVerifier(
        verify=_broken(accept=lambda px, qx: float(px >= qx)),
        summary="A token is accepted if p(x) >= q(x) and never otherwise, without a coin.",
        evidence="caught in review: vllm-project.github.io PR 80",
        case="drawn chain",
    ),
    "swapped": BrokenVerifier(
        verify=_broken(accept=lambda px, qx: qx / px if px > 0 else 1.0),
        summary="Draft and target are swapped: a token is accepted with min(1, q / p).",
        evidence="papers name the two the other way around: here p is the target's",
        case="drawn chain",
    ),
    "bonus_from_q": BrokenVerifier(
        verify=_broken(bonus=lambda p, q: p if q is None else q),
        summary="When all tokens are accepted, the bonus token is drawn from q instead of p.",
        evidence="the bonus token of Leviathan et al., arXiv:2211.17192",
        case="drawn chain",
    ),
    "rows_shifted": BrokenVerifier(
        verify=_broken(prepare=lambda p, draft: (_shifted(p), draft)),
        summary="Each token is judged by the distribution after it instead of before it.",
        evidence="the row of node i is i + 1, row 0 follows the prefix",
        case="drawn chain",
    ),
    "first_unverified": BrokenVerifier(
        verify=_broken(trusts=lambda node, qx: node == 0),  # noqa: ARG005
        summary="The first drafted token is never verified.",
        evidence="several engines",
        case="drawn chain",
    ),
    "confirmed_unseen": BrokenVerifier(
        verify=_broken(trusts=_confident),
        summary="A token that a second guess confirms (an n-gram match, a confident draft) is"
        " accepted without looking at p.",
        evidence="the tempting reading of n-gram then logits: only p can accept a token",
        case="one-hot chain",
    ),
    "withdrawn_token": BrokenVerifier(
        verify=_broken(prepare=lambda p, draft: (p[: len(_withdraw(draft)) + 1], _withdraw(draft))),
        summary="The draft ends before a token that was drawn but of which the draft model wasn't"
        " sure, so the remaining tokens no longer follow q.",
        evidence="a stop rule may look at a drafted token but may never withdraw it",
        case="drawn chain",
    ),
    "siblings_by_whole_p": BrokenVerifier(
        verify=_broken(between=_whole),
        summary="In a tree, each sibling is judged by the whole p instead of what its earlier"
        " siblings left of it.",
        evidence="the tree rule of EAGLE's evaluate_posterior and of SpecInfer, arXiv:2305.09781",
        case="drawn tree",
    ),
    "goes_on_after_rejection": BrokenVerifier(
        verify=_goes_on,
        summary="Tokens after a rejected one are still accepted, although they were judged after"
        " a token that isn't in the output.",
        evidence="acceptance counted as the number of accepted nodes instead of the first prefix",
        case="drawn chain",
    ),
}
"""The faults by name; each fails `exact.Case.distance` on the case that it names."""
