"""What a generation did: counts for every run, and every step in full on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft
from labcore.decoding.verify import residual

__all__ = ["Position", "Statistics", "Step", "Tally", "Trace", "step_of"]

_NO_NUMBER = float("nan")


@dataclass(frozen=True, slots=True)
class Position:
    """What became of the drafted tokens at one position of the drafts (one depth of the trees)."""

    drafted: int = 0
    tried: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """accepted / drafted: how often the draft was accepted up to here."""
        return self.accepted / self.drafted if self.drafted else _NO_NUMBER

    @property
    def alpha(self) -> float:
        """accepted / tried: how often this token was accepted, given that those before it were."""
        return self.accepted / self.tried if self.tried else _NO_NUMBER

    def __add__(self, other: Position) -> Position:
        return Position(
            self.drafted + other.drafted,
            self.tried + other.tried,
            self.accepted + other.accepted,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counts for one row, or summed over several.

    steps: target forwards in which the row had a token, without the prompt's. tokens: in the
    output. drafted: tokens proposed. tried: tokens judged, whether accepted or rejected. accepted:
    tokens that are in the output. Neither tried nor accepted counts tokens after the end of the
    output (EOS, a stop text, max_tokens).
    by_position: the same by position in the draft, the first token first.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    tried: int = 0
    by_position: tuple[Position, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, as serving engines log it; NaN when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else _NO_NUMBER

    @property
    def alpha(self) -> float:
        """accepted / tried, the probability that a judged token is accepted; NaN without one.

        Source: Leviathan, Kalman and Matias, 2023, arXiv 2211.17192.
        """
        return self.accepted / self.tried if self.tried else _NO_NUMBER

    @property
    def tokens_per_step(self) -> float:
        """tokens / steps; NaN without a step."""
        return self.tokens / self.steps if self.steps else _NO_NUMBER

    def __add__(self, other: Statistics) -> Statistics:
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=Position())
        return Statistics(
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            tried=self.tried + other.tried,
            by_position=tuple(one + two for one, two in pairs),
        )

    @classmethod
    def total(cls, parts: Iterable[Statistics]) -> Statistics:
        """Return the sum of several."""
        return sum(parts, cls())


class Tally:
    """The steps of one row, until it's known where its output ends.

    A stop text may take back tokens of earlier steps, so nothing is counted before that.
    """

    def __init__(self) -> None:
        # Per step: output before it, nodes at each depth, tried ones at each depth, accepted.
        self._steps: list[tuple[int, Sequence[int], Sequence[int], int]] = []

    def add(
        self, start: int, parents: Sequence[int] | None, size: int, path: Sequence[int]
    ) -> None:
        """Record a step. start: tokens of the output before it; parents: None for a chain."""
        if parents is None:
            drafted: Sequence[int] = (1,) * size
            tried: Sequence[int] = (1,) * min(size, len(path) + 1)
        else:
            depths = _depths(parents)
            drafted = _histogram(depths)
            tried = _histogram([depths[node] for node in tried_nodes(parents, path)])
        self._steps.append((start, drafted, tried, len(path)))

    def statistics(self, kept: int) -> Statistics:
        """Return the counts if the first `kept` tokens are the output."""
        places: list[list[int]] = []
        for start, drafted, tried, path in self._steps:
            accepted = min(path, max(kept - start, 0))
            # A rejection after the path counts if the token in its place is in the output.
            judged = path + 1 if start + path < kept else accepted
            places += ([0, 0, 0] for _ in range(len(drafted) - len(places)))
            for depth, nodes in enumerate(drafted):
                places[depth][0] += nodes
                places[depth][1] += tried[depth] if depth < min(judged, len(tried)) else 0
                places[depth][2] += depth < accepted
        by_position = tuple(Position(*counts) for counts in places)
        return Statistics(
            steps=len(self._steps),
            tokens=kept,
            drafted=sum(position.drafted for position in by_position),
            tried=sum(position.tried for position in by_position),
            accepted=sum(position.accepted for position in by_position),
            by_position=by_position,
        )


def tried_nodes(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """Return the judged nodes in order, including earlier siblings of accepted ones."""
    tried = []
    parent = -1
    for chosen in (*path, None):
        for node in (node for node, before in enumerate(parents) if before == parent):
            tried.append(node)
            if node == chosen:
                parent = node
                break
    return tried


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _histogram(depths: Sequence[int]) -> list[int]:
    return [depths.count(depth) for depth in range(max(depths, default=-1) + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One row in one step, as the verifier saw it. N nodes of the draft, V vocabulary.

    row: the row. context: tokens before the step, the last not yet read by the target.
    draft_tokens, draft_parents: the draft. q: fp32 [N, V], or None. p: fp32 [N + 1, V].
    path, next_token, draws: the verifier's decision, with its uniform random numbers.
    tried: the judged nodes, in order. ratios: min(1, p / q) of each, where p is what earlier
    siblings left of it.
    residual: fp32 [V], from which rejection sampling draws the next token after a rejection; None
    if nothing was rejected. bonus: whether the next token is a bonus, because no token was
    rejected.
    tokens: what was added to the context; fewer than path and next token if the output ended
    inside.
    target_length, draft_length: tokens of the context that the target's and the proposer's cache
    hold after the step; draft_length is None for a proposer without a cache.
    """

    row: int
    context: int
    draft_tokens: tuple[int, ...]
    draft_parents: tuple[int, ...]
    q: Tensor | None
    p: Tensor
    path: tuple[int, ...]
    next_token: int
    draws: tuple[float, ...]
    tried: tuple[int, ...]
    ratios: tuple[float, ...]
    residual: Tensor | None
    bonus: bool
    tokens: tuple[int, ...]
    target_length: int
    draft_length: int | None


@dataclass(frozen=True, slots=True)
class Trace:
    """Every step of every row, in chronological order."""

    steps: list[Step] = field(default_factory=list)

    def row(self, row: int) -> list[Step]:
        """Return the steps of one row."""
        return [step for step in self.steps if step.row == row]


def step_of(
    p: Tensor,
    draft: Draft,
    decided: Accepted,
    *,
    row: int,
    context: int,
    tokens: Sequence[int],
    target_length: int,
    draft_length: int | None,
) -> Step:
    """Return a step for the trace, with copies of p and q and what follows from them."""
    drafted, parents = draft.tokens.tolist(), draft.parents.tolist()
    tried = tried_nodes(parents, decided.path)
    ratios = []
    with torch.inference_mode(False):  # so that any caller may use the copies
        p = p.clone().float().cpu()
        q = None if draft.q is None else draft.q.clone().float().cpu()
        left = p[0]
        for node in tried:
            token = drafted[node]
            chance = _one_hot(token, left) if q is None else q[node]
            ratios.append(min(1.0, float(left[token] / chance[token])))
            left = p[node + 1] if node in decided.path else residual(left, chance)
    rejected = len(tried) > 0 and tried[-1] not in decided.path
    return Step(
        row=row,
        context=context,
        draft_tokens=tuple(drafted),
        draft_parents=tuple(parents),
        q=q,
        p=p,
        path=tuple(decided.path),
        next_token=decided.next_token,
        draws=tuple(decided.draws),
        tried=tuple(tried),
        ratios=tuple(ratios),
        residual=left if rejected else None,
        bonus=len(tried) > 0 and not rejected,
        tokens=tuple(tokens),
        target_length=target_length,
        draft_length=draft_length,
    )


def _one_hot(token: int, like: Tensor) -> Tensor:
    row = torch.zeros_like(like)
    row[token] = 1
    return row
