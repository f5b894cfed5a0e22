"""An EAGLE-like head as a proposer of dynamic trees.

Letters: B rows, C width.
Source: Li et al., EAGLE-2, 2024, arXiv 2406.16858; EAGLE-3, 2025, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labcore.checks import positive_int
from labcore.decoding.contract import Accepted, Draft, SamplingConfig
from labcore.decoding.eagle.fused import FusedEagle, Memory, fused_eagle
from labcore.decoding.eagle.head import EagleHead
from labcore.decoding.eagle.trees import Costs
from labcore.decoding.rows import check_rows, common_prefix

__all__ = ["Eagle"]

_NOTHING = Draft.chain([])


@dataclass(slots=True)
class _Row:
    """A row's states that the head hasn't read, and the tokens of the pairs that it has.

    first: the position of the oldest known state. states: those that wait, each [n, C].
    """

    memory: Memory
    first: int = 0
    read: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the newest known state."""
        return self.first + len(self.read) + sum(map(len, self.states))


class Eagle:
    """Drafts trees whose size follows from how sure the head is and what rows cost.

    head: of the target, in fp32 on the CPU. costs: decide what is drafted. gamma: the most levels.
    The head reads the target's state at each token that stays, which `observe` brings. Without it,
    the head starts over in each step from the one state that `propose` gets.
    Nothing is drawn, so q is None, and lossless verifiers stay lossless. At a temperature the
    confidences are the head's probabilities at that temperature; greedily they are sharpened as
    the head was fitted.
    """

    def __init__(self, head: EagleHead, *, costs: Costs | None = None, gamma: int = 5) -> None:
        self._given = head
        self.costs = Costs() if costs is None else costs
        self.gamma = positive_int("gamma", gamma)
        self.reset()

    def reset(self) -> None:
        """Forget all rows and take the weights that the head has now."""
        self.head: FusedEagle = fused_eagle(self._given)
        self._rows: dict[int, _Row] = {}

    def observe(self, row: int, start: int, hidden: Tensor) -> None:
        """Learn the target's states [n, C] at positions start .. start + n - 1 of a row.

        What was known from start on is forgotten; if something before start is unknown, everything
        before it is forgotten.
        """
        known = self._rows.get(row)
        if known is None or not known.first <= start <= known.end:
            known = self._rows[row] = _Row(self.head.new_memory(), first=start)
        if start < known.end:
            _forget(known, start)
        if len(hidden):
            known.states.append(hidden)

    @torch.inference_mode()
    def propose(
        self,
        contexts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingConfig],
        max_tokens: Sequence[int],
        generators: Sequence[torch.Generator],
        *,
        hidden: Tensor | None = None,
    ) -> list[Draft]:
        """Return a tree at most min(gamma, max_tokens[b]) deep for each row; see `Proposer`.

        A row of which the target has read nothing gets no draft.
        """
        check_rows(contexts, samplings, max_tokens, generators)
        drafts = [_NOTHING] * len(contexts)
        for row, (context, most) in enumerate(zip(contexts, max_tokens, strict=True)):
            if not most or len(context) < 2 or not self._follow(row, context, hidden):
                continue
            temperature = samplings[row].temperature
            grown = self.head.draft(
                self._rows[row].memory,
                self.costs,
                depth=min(self.gamma, most),
                sharpness=1 / temperature if temperature else self._given.sharpness,
            )
            chosen = self.costs.best(grown)
            if chosen:
                drafts[row] = grown.draft(chosen)
        return drafts

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Do nothing: the states that are observed next show what was accepted."""

    def _follow(self, row: int, context: Sequence[int], hidden: Tensor | None) -> bool:
        """Read the pairs that the head lacks; return whether it has read the newest."""
        last = len(context) - 1
        known = self._rows.get(row)
        if known is not None:
            told = list(context[known.first + 1 : known.first + 1 + len(known.read)])
            if common_prefix(told, known.read) < len(known.read):
                known = None  # another request's states
        if known is None or known.end != last:
            if hidden is None:
                return False
            known = self._rows[row] = _Row(self.head.new_memory(), first=last - 1)
            known.states.append(hidden[row : row + 1])
        if known.states:
            waiting = known.states[0] if len(known.states) == 1 else torch.cat(known.states)
            tokens = list(context[known.end - len(waiting) + 1 :])
            self.head.read(known.memory, waiting, tokens)
            known.read += tokens
            known.states.clear()
        return True


def _forget(row: _Row, start: int) -> None:
    """Drop everything that is known from position start on."""
    kept = start - row.first
    if kept < len(row.read):
        del row.read[kept:]
        row.memory.length, row.memory.feature = kept, None
        row.states.clear()
    elif row.states:
        row.states = [torch.cat(row.states)[: kept - len(row.read)]]
