"""Drafts for the requests of an engine, whose proposer sees them as the rows of one batch.

Letters: B rows, C width of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig
from labcore.decoding.ngram import NGram
from labcore.decoding.requests import Plan
from labcore.serving.engine.outputs import Entry

__all__ = ["Speculation"]

_NOTHING = Accepted((), -1)
_IDLE = SamplingConfig()


class Speculation:
    """A proposer, and its B slots, the rows of its batch; a request keeps its slot while it runs.

    proposer: "ngram", a `Proposer`, or None, which drafts nothing. slots: B, at least as many as
    requests run. max_length: the most tokens of a request. vocab_size: the model's.
    reads_hidden: whether the proposer may read hidden states; one without this attribute may.
    observes: whether it needs those of all tokens.
    Raises ValueError or TypeError for anything else in place of a proposer.
    """

    def __init__(
        self, proposer: str | Proposer | None, *, slots: int, max_length: int, vocab_size: int
    ) -> None:
        if isinstance(proposer, str) and proposer != "ngram":
            raise ValueError(f"proposer must be 'ngram', a Proposer or None, got {proposer!r}")
        chosen: Any = NGram() if proposer == "ngram" else proposer
        if chosen is not None and not hasattr(chosen, "propose"):
            raise TypeError(f"proposer must have propose, got {type(chosen).__name__}")
        reset = getattr(chosen, "reset", None)
        if callable(reset):
            reset()
        self.proposer: Proposer | None = chosen
        self.reads_hidden = chosen is not None and getattr(chosen, "reads_hidden", True)
        self.observes = callable(getattr(chosen, "observe", None))
        self._max_length, self._vocab_size = max_length, vocab_size
        self._holders: list[Entry | None] = [None] * slots
        self._resting = torch.Generator()
        self._hidden: Tensor | None = None  # [B, C], at the last token that was read
        self._asked: dict[int, Entry] = {}  # by slot, until the commit
        self._failed: dict[str, Exception] = {}  # by id, of the last commit

    @torch.inference_mode()
    def propose(self, entries: Iterable[Entry]) -> dict[str, Plan | Exception]:
        """Return the drafts of the requests that decode, by id, or an error in place of a draft.

        If the last commit raised an error, its requests get that one.
        """
        failed, self._failed, self._asked = self._failed, {}, {}
        if self.proposer is None:
            return {}
        decoding = [one for one in entries if one.state.status == "running" and one.state.decoding]
        drafts: dict[str, Plan | Exception] = {
            one.id: failed[one.id] for one in decoding if one.id in failed
        }
        asked = {self._slot(one): one for one in decoding if one.id not in failed}
        slots = len(self._holders)
        contexts: list[list[int]] = [[] for _ in range(slots)]
        samplings, generators, limits = [_IDLE] * slots, [self._resting] * slots, [0] * slots
        for slot, one in asked.items():
            contexts[slot], samplings[slot] = one.row.context, one.row.sampling
            generators[slot] = one.drafting
            left = one.row.sampling.max_tokens - one.row.emitted - 1  # one more follows the draft
            limits[slot] = max(0, min(left, self._room(one)))
        if not any(limits):
            return drafts
        try:
            found = self.proposer.propose(
                contexts, samplings, limits, generators, hidden=self._hidden
            )
            if len(found) != slots:
                raise ValueError(
                    f"propose must return a draft for each of the {slots} rows, got {len(found)}"
                )
        except Exception as problem:
            return drafts | {one.id: problem for one in asked.values()}
        self._asked = asked
        for slot, one in asked.items():
            try:
                drafts[one.id] = self._plan(found[slot], limits[slot], self._room(one))
            except Exception as problem:
                drafts[one.id] = problem
        return drafts

    def commit(self, accepted: Mapping[str, Accepted]) -> None:
        """Tell the proposer which drafted tokens were accepted: none of a draft that wasn't read.

        The tokens are already decided, so an error of the proposer waits for the next `propose`.
        """
        if self.proposer is None or not self._asked:
            return
        rows = [_NOTHING] * len(self._holders)
        for slot, one in self._asked.items():
            rows[slot] = accepted.get(one.id, _NOTHING)
        try:
            self.proposer.commit(rows)
        except Exception as problem:
            self._failed = {one.id: problem for one in self._asked.values()}
        self._asked = {}

    def remember(self, entry: Entry, start: int, hidden: Tensor) -> None:
        """Keep the hidden state at the last token of a request that was read and stays.

        hidden: [n, C], at the last n of those tokens. start: the position of the first token that
        the forward read; with a proposer that observes, hidden has the states of all of them.
        """
        if self._hidden is None:
            self._hidden = hidden.new_zeros(len(self._holders), hidden.shape[1])
        slot = self._slot(entry)
        self._hidden[slot] = hidden[-1]
        self._observe(entry, slot, start, hidden)

    def _observe(self, entry: Entry, slot: int, start: int, hidden: Tensor) -> None:
        """Let the proposer see states; like in `commit`, its error waits for the next draft."""
        if self.observes:
            proposer: Any = self.proposer
            try:
                proposer.observe(slot, start, hidden)
            except Exception as problem:
                self._failed[entry.id] = problem

    def _slot(self, entry: Entry) -> int:
        """Return the slot of a running request: its last one, or that of one that doesn't run."""
        if entry.slot is None or self._holders[entry.slot] is not entry:
            entry.slot = next(
                slot
                for slot, one in enumerate(self._holders)
                if one is None or one.state.status != "running"
            )
            self._holders[entry.slot] = entry
            if self._hidden is not None:
                self._observe(entry, entry.slot, 0, self._hidden[:0])
        return entry.slot

    def _room(self, entry: Entry) -> int:
        return self._max_length - len(entry.row.context)

    def _plan(self, draft: Draft, depth: int, room: int) -> Plan:
        plan = Plan(draft, depth, room)
        if plan.tokens and not 0 <= min(plan.tokens) <= max(plan.tokens) < self._vocab_size:
            raise ValueError(
                f"a draft's tokens must lie below the model's vocabulary, got {plan.tokens}"
            )
        return plan
