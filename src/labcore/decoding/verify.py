"""Verifiers decide which drafted tokens to accept, and which token comes after them.

A draft is a tree; a node's children are tried in order. p is the target's distribution, q the
draft's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labcore import checks
from labcore.decoding.contract import Accepted, Draft, Verifier
from labcore.decoding.draws import draws_of

__all__ = [
    "LOSSLESS",
    "VERIFIERS",
    "TypicalAcceptance",
    "block_verification",
    "check_draft",
    "greedy_match",
    "rejection_sampling",
    "residual",
    "sample_and_compare",
    "tree_children",
]


def greedy_match(p: Tensor, draft: Draft, generator: Any = None) -> Accepted:  # noqa: ARG001
    """Accept the tokens that equal the target's argmax (the first if several tie).

    p: [N + 1, V]. There's no randomness: it's lossless if p is one-hot, as at temperature 0.
    Otherwise it gives the argmax of p instead of a sample. Errors as in `check_draft`.
    """
    children = tree_children(p, draft)
    tokens, wanted = draft.tokens.tolist(), p.argmax(-1).tolist()
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        said = wanted[node + 1]
        node = next((child for child in children[node + 1] if tokens[child] == said), None)
        path += [] if node is None else [node]
    return Accepted(tuple(path), said)


def rejection_sampling(p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
    """Accept token x with probability min(1, p(x) / q(x)); after a rejection, use the residual.

    p: fp32 or fp64 [N + 1, V]. generator: a torch.Generator or `Draws`. A rejected child leaves
    `residual(p, q)` for the next child; if there's none, the next token is drawn from it. After the
    last node, the next token comes from p itself, the bonus. If q is None, the residual is p
    without the token. The output has the target's distribution if each node was drawn from its row
    of q, given its ancestors and its earlier siblings. Errors as in `check_draft`.
    Source: Leviathan, Kalman and Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318; for trees
    Miao et al., arXiv:2305.09781.
    """
    children = tree_children(p, draft)
    draws = draws_of(generator)
    start = len(draws.log)
    rows, tokens = p.detach().cpu(), draft.tokens.tolist()
    q = None if draft.q is None else draft.q.detach().cpu()
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        left, parent, node = rows[node + 1], node, None
        for child in children[parent + 1]:
            token = tokens[child]
            drawn_with = 1.0 if q is None else q[child, token].item()
            if draws.coin(left[token].item() / drawn_with):
                path.append(child)
                node = child
                break
            left = residual(left, one_hot(token, left) if q is None else q[child])
    return Accepted(tuple(path), draws.token(left), tuple(draws.log[start:]))


def sample_and_compare(p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
    """Draw each token from p and continue while it's in the draft.

    p: fp32 or fp64 [N + 1, V]. This is as exact as `rejection_sampling` and needs no q, but it
    accepts a drafted token with probability sum(p q), never more than sum(min(p, q)). Errors as in
    `check_draft`.
    """
    children = tree_children(p, draft)
    draws = draws_of(generator)
    start = len(draws.log)
    rows, tokens = p.detach().cpu(), draft.tokens.tolist()
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        said = draws.token(rows[node + 1])
        node = next((child for child in children[node + 1] if tokens[child] == said), None)
        path += [] if node is None else [node]
    return Accepted(tuple(path), said, tuple(draws.log[start:]))


def block_verification(p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
    """Judge whole paths, from the leaves to the root, so that a good token makes up for a bad one.

    p: fp32 or fp64 [N + 1, V]; all arithmetic is in fp64. A node's weight is the probability that
    the step ends at it or below, given its path: min(1, w p(x) / q(x)), where w is its parent's
    weight. If nothing below a child is accepted, `residual(w p, q)` judges the next child, with a
    weight so small that the whole comes out right. After its last child a node is accepted with the
    weight that's left, and the next token is drawn from the residual that's left.
    It is as exact as `rejection_sampling`, under the same condition on q, even if the shape of the
    draft depends on its tokens. On a chain it never accepts fewer tokens in expectation, and no
    exact rule that sees only this block accepts more. On a tree whose deeper branches come later it
    may accept fewer. Errors as in `check_draft`.
    Source: Sun et al., Block Verification, arXiv:2403.10444; for trees, Weng et al., Traversal
    Verification, arXiv:2505.12398.
    """
    children = tree_children(p, draft)
    draws = draws_of(generator)
    start = len(draws.log)
    rows, tokens = p.detach().cpu().double(), draft.tokens.tolist()
    q = None if draft.q is None else draft.q.detach().cpu().double()

    def visit(node: int, weight: float) -> tuple[tuple[int, ...], Tensor] | None:
        """Return the accepted path from here on and the next token's distribution, or None."""
        left = rows[node + 1]
        for child in children[node + 1]:
            drawn = one_hot(tokens[child], left) if q is None else q[child]
            ratio = (left[tokens[child]] / drawn[tokens[child]]).item()
            found = visit(child, min(1.0, weight * ratio))
            if found is not None:
                return (node, *found[0]), found[1]
            above = (weight * left - drawn).clamp(min=0)
            total = above.sum().item()
            left = above / total if total > 0 else left
            if weight < 1:  # otherwise it stays 1, even if rounding leaves nothing above
                weight = total / (total + 1 - weight)
        return ((node,), left) if node < 0 or draws.coin(weight) else None

    path, left = visit(-1, 1.0) or ((-1,), rows[0])
    return Accepted(path[1:], draws.token(left), tuple(draws.log[start:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class TypicalAcceptance:
    """Lossy: accept what the target finds typical, p(x) > min(threshold, alpha exp(-H(p))).

    H is the entropy of p in nats. The deepest path of such tokens is accepted, the first if several
    tie, and the next token is drawn from p after it. The output doesn't have the target's
    distribution; `exact.typical_bias` measures the difference. At temperature 0 it is greedy.
    It accepts far more than `rejection_sampling` if drafts are the likeliest tokens, as Medusa's
    heads give them, and hardly more if they are drawn. Medusa's own code differs in two places: the
    next token is the argmax of p (`generate_candidates`), so that its output isn't random at all,
    and among equally deep paths the likeliest is accepted.
    Source: Cai et al., Medusa, arXiv:2401.10774; medusa/model/utils.py in FasterDecoding/Medusa.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        checks.non_negative("threshold", self.threshold)
        checks.non_negative("alpha", self.alpha)
        if self.threshold > 1:
            raise ValueError(f"threshold must be at most 1, got {self.threshold}")

    def bound(self, p: Tensor) -> Tensor:
        """Return what p(x) must exceed: [...] from p [..., V]."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)

    def __call__(self, p: Tensor, draft: Draft, generator: Any = None) -> Accepted:
        """Verify a draft, as the other verifiers do."""
        tree_children(p, draft)
        draws = draws_of(generator)
        start = len(draws.log)
        parents = draft.parents.long().cpu()
        rows = p.detach().cpu()
        chances = rows[parents + 1, draft.tokens.cpu()]
        typical = (chances > self.bound(rows)[parents + 1]).tolist()
        paths: list[tuple[int, ...]] = [()]  # paths[i + 1] ends in node i
        best: tuple[int, ...] = ()
        for node, parent in enumerate(parents.tolist()):
            before = paths[parent + 1]
            stands = typical[node] and (parent < 0 or before[-1:] == (parent,))
            paths.append((*before, node) if stands else ())
            best = max(best, paths[-1], key=len)
        end = best[-1] if best else -1
        said = draws.token(rows[end + 1])
        return Accepted(best, said, tuple(draws.log[start:]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p - q, 0), normalized (not softmaxed): [V] from two rows [V].

    If nothing is left, because p equals q up to rounding, return p. ValueError for other shapes.
    """
    if p.ndim != 1 or p.shape != q.shape:
        came = f"{tuple(p.shape)} and {tuple(q.shape)}"
        raise ValueError(f"p and q must be rows [V] of the same length, got {came}")
    above = (p - q).clamp(min=0)
    total = above.sum()
    return above / total if total > 0 else p


def one_hot(token: int, like: Tensor) -> Tensor:
    """Return the q of a token that wasn't drawn: [V], in the dtype of `like`."""
    row = torch.zeros_like(like)
    row[token] = 1
    return row


def check_draft(draft: Draft, vocab: int) -> None:
    """Raise unless `draft` is a tree over tokens 0 ... vocab - 1 with a valid q.

    TypeError: tokens or parents that aren't integers; q below fp32, because a rounded q isn't what
    the token was drawn from. ValueError: wrong shapes, tokens outside the vocabulary, a node before
    its parent, a row of q that isn't a distribution, a token that its row of q couldn't give.
    """
    tokens, parents, q = draft.tokens, draft.parents, draft.q
    for name, ids in (("tokens", tokens), ("parents", parents)):
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"draft.{name} must be whole numbers, got {ids.dtype}")
    if tokens.ndim != 1 or parents.shape != tokens.shape:
        came = f"{tuple(tokens.shape)} and {tuple(parents.shape)}"
        raise ValueError(f"draft.tokens and draft.parents must both be [N], got {came}")
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        if not 0 <= token < vocab:
            raise ValueError(f"draft.tokens must lie below {vocab}, got {token} at node {node}")
        if not -1 <= parent < node:
            rule = "draft.parents must be -1 or a node before the child"
            raise ValueError(f"{rule}, got {parent} at node {node}")
    if q is None:
        return
    if q.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"draft.q must be float32, got {q.dtype}; draw from it in float32 too")
    if q.shape != (len(draft), vocab):
        raise ValueError(f"draft.q must be {(len(draft), vocab)}, got {tuple(q.shape)}")
    if len(draft) and not (q.min() >= 0 and ((q.sum(-1) - 1).abs() < 1e-3).all()):
        raise ValueError(
            "each row of draft.q must be at least 0 and add up to 1, got other rows; pass "
            "probabilities, not logits"
        )
    if len(draft) and not (q.gather(1, tokens.long()[:, None].to(q.device)) > 0).all():
        raise ValueError(
            "draft.q must be above 0 at each drafted token, got 0; pass the q it was drawn from"
        )


def tree_children(p: Tensor, draft: Draft) -> list[list[int]]:
    """Check p and the draft; return the children of the prefix at [0], of node i at [i + 1].

    TypeError for p below fp32; ValueError unless p is [N + 1, V]; other errors as in `check_draft`.
    """
    if p.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"p must be float32, got {p.dtype}; compute the softmax in float32")
    if p.ndim != 2 or len(p) != len(draft) + 1:
        rule = f"p must be [N + 1, V] with N + 1 = {len(draft) + 1} rows"
        raise ValueError(f"{rule}, got {tuple(p.shape)}")
    check_draft(draft, p.shape[1])
    children: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents.tolist()):
        children[parent + 1].append(node)
    return children


VERIFIERS: dict[str, Verifier] = {
    "greedy": greedy_match,
    "rejection": rejection_sampling,
    "sample_and_compare": sample_and_compare,
    "block": block_verification,
    "typical": TypicalAcceptance(),
}
"""The verifiers by name."""

LOSSLESS = frozenset({"greedy", "rejection", "sample_and_compare", "block"})
"""The names whose output has the target's distribution; greedy only at temperature 0."""
