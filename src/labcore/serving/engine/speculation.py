"""Drafts for the requests of an engine, whose proposer sees them as the rows of one batch.

Letters: B the engine's slots, N nodes of a draft, T tokens of a forward, C width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Proposer, SamplingConfig
from labcore.decoding.ngram import NGram
from labcore.decoding.requests import Plan
from labcore.serving.engine.outputs import Entry

__all__ = ["Speculation"]

_NOTHING = Accepted((), -1)
_RESTING = SamplingConfig()


class Speculation:
    """A proposer and the places of requests among its B rows: one keeps its place while it runs.

    proposer: "ngram", a `Proposer`, or None, which drafts nothing. slots: B. max_length: the most
    tokens of a request. reads_hidden: whether the proposer may look at hidden states.
    Raises ValueError or TypeError for what is no proposer.
    """

    def __init__(self, proposer: str | Proposer | None, slots: int, max_length: int) -> None:
        if isinstance(proposer, str) and proposer != "ngram":
            raise ValueError(f"proposer must be 'ngram', a Proposer or None, got {proposer!r}")
        chosen: Any = NGram() if proposer == "ngram" else proposer
        if chosen is not None and not hasattr(chosen, "propose"):
            raise TypeError(f"proposer must have propose, got {type(chosen).__name__}")
        reset = getattr(chosen, "reset", None)
        if callable(reset):
            reset()
        self.proposer: Proposer | None = chosen
        self.reads_hidden = chosen is not None and not isinstance(chosen, NGram)
        self._slots, self._max_length = slots, max_length
        self._free = list(range(slots - 1, -1, -1))
        self._resting = torch.Generator()
        self._hidden: Tensor | None = None  # [B, C], at the last token that was read
        self._asked: list[Entry] = []
        self._failed: dict[str, Exception] = {}  # of a commit, by the ids that it was about

    @torch.inference_mode()
    def propose(self, entries: Iterable[Entry]) -> dict[str, Plan | Exception]:
        """The drafts of the requests that decode, by id; what went wrong in place of one.

        Where the commit before went wrong, that is what its requests get.
        """
        self._asked = []
        failed, self._failed = self._failed, {}
        if self.proposer is None:
            return {}
        asked = [one for one in entries if one.state.status == "running" and one.state.decoding]
        told: dict[str, Plan | Exception] = {
            one.id: failed[one.id] for one in asked if one.id in failed
        }
        asked = [one for one in asked if one.id not in told]
        limits = [0] * self._slots
        rooms = {one.id: self._max_length - len(one.row.context) for one in asked}
        contexts: list[list[int]] = [[] for _ in limits]
        samplings, generators = [_RESTING] * self._slots, [self._resting] * self._slots
        for one in asked:
            place, row = self._place(one), one.row
            contexts[place], samplings[place] = row.context, row.sampling
            generators[place] = one.drafting
            left = row.sampling.max_tokens - row.emitted - 1  # the last token follows a draft
            limits[place] = max(0, min(left, rooms[one.id]))
        if not any(limits):
            return told
        self._asked = asked
        try:
            drafts = self.proposer.propose(
                contexts, samplings, limits, generators, hidden=self._hidden
            )
            if len(drafts) != self._slots:
                raise ValueError(
                    f"propose must return a draft for each of the {self._slots} rows, got "
                    f"{len(drafts)}"
                )
        except Exception as problem:
            self._asked = []
            return told | {one.id: problem for one in asked}
        for one in asked:
            place = self._place(one)
            try:
                told[one.id] = Plan(drafts[place], limits[place], rooms[one.id])
            except Exception as problem:
                told[one.id] = problem
        return told

    def commit(self, accepted: Mapping[str, Accepted]) -> None:
        """Tell the proposer what became of its drafts; of those not read, nothing stands.

        Their tokens are decided, so an error of the proposer waits for the next `propose`.
        """
        if self.proposer is None or not self._asked:
            return
        rows = [_NOTHING] * self._slots
        for one in self._asked:
            if one.slot is not None:  # else it has left meanwhile
                rows[one.slot] = accepted.get(one.id, _NOTHING)
        asked, self._asked = self._asked, []
        try:
            self.proposer.commit(rows)
        except Exception as problem:
            self._failed = {one.id: problem for one in asked}

    def remember(self, entry: Entry, hidden: Tensor | None) -> None:
        """Keep the hidden state [C] at the last token of the request that was read."""
        if not self.reads_hidden or hidden is None:
            return
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._slots, len(hidden))
        self._hidden[self._place(entry)] = hidden

    def leave(self, entry: Entry) -> None:
        """Give the place of a request to another."""
        if entry.slot is not None:
            self._free.append(entry.slot)
            entry.slot = None

    def _place(self, entry: Entry) -> int:
        if entry.slot is None:
            entry.slot = self._free.pop()
        return entry.slot
