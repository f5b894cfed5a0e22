"""One step of an engine between the plan and the commit: forwards, next tokens, what they end.

Letters: B rows of a forward, T tokens of it, V vocabulary, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Verifier
from labcore.decoding.requests import Plan
from labcore.serving.engine.forwards import Forwards, Reading
from labcore.serving.engine.outputs import Entry, Output
from labcore.serving.engine.sampling import decide
from labcore.serving.engine.scheduler import StepPlan, StepResult
from labcore.serving.engine.speculation import NO_DRAFT, Speculation

__all__ = ["Turn"]

_RESTING = Reading(blocks=(), start=0, tokens=())


class Turn:
    """What a plan brings its requests.

    entries: of the plan's chunks and decodes at least. drafts: by id; an error in place of one
    ends its request. results, reasons (of errors), news: by id, filled by `run`. drafted,
    accepted: tokens.
    """

    def __init__(
        self,
        forwards: Forwards,
        speculation: Speculation,
        plan: StepPlan,
        *,
        entries: Mapping[str, Entry],
        drafts: Mapping[str, Plan | Exception],
        verifier: Verifier,
        ends: frozenset[int],
    ) -> None:
        self.forwards, self.speculation, self.plan = forwards, speculation, plan
        self.entries, self.drafts = entries, drafts
        self.verifier, self.ends = verifier, ends
        self.results: dict[str, StepResult] = {}
        self.reasons: dict[str, str] = {}
        self.news: dict[str, Output] = {}
        self.drafted = self.accepted = 0
        self._verdicts: dict[str, Accepted] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Read the chunks, then the decodes; a forward that fails ends the requests in it."""
        for read, ids in (
            (self._prefill, [chunk.id for chunk in self.plan.chunks]),
            (self._decode, [decode.id for decode in self.plan.decodes]),
        ):
            if ids:
                self._guarded(read, ids)
        self.speculation.commit(self._verdicts)

    def all_results(self) -> dict[str, StepResult]:
        """The results, with an error for each request that has none."""
        for id in self.plan.blocks:
            if id not in self.results:
                self._fail(id, "the step was interrupted before it came to this request")
        return self.results

    def _guarded(self, read: Callable[[], None], ids: Sequence[str]) -> None:
        try:
            read()
        except Exception as problem:
            for id in ids:
                if id not in self.results:
                    self._fail(id, problem)

    def _fail(self, id: str, problem: Exception | str) -> None:
        reason = problem
        if isinstance(problem, Exception):
            reason = f"{type(problem).__name__}: {problem}"
        self.entries[id].step_back()  # what the scheduler does not take in is not said either
        self.reasons[id] = str(reason)
        self.results[id] = StepResult((), "error", str(reason))

    def _prefill(self) -> None:
        chunks = self.plan.chunks
        rows = [
            Reading(
                blocks=self.plan.blocks[chunk.id],
                start=chunk.start,
                tokens=self.entries[chunk.id].row.context[chunk.start : chunk.start + chunk.count],
            )
            for chunk in chunks
        ]
        logits, hidden = self.forwards.prefill(rows)
        for place, chunk in enumerate(chunks):
            if not chunk.last:
                self.results[chunk.id] = StepResult()
                # What is read again may end one token short: the next step is then a decode.
                self.speculation.remember(self.entries[chunk.id], hidden[place])
        last = [place for place, chunk in enumerate(chunks) if chunk.last]
        if last:
            ids = [chunks[place].id for place in last]
            whole = len(last) == len(chunks)
            self._settle(
                ids,
                logits if whole else logits[last],
                [NO_DRAFT] * len(ids),
                (hidden if whole else hidden[last])[:, None],
            )

    def _decode(self) -> None:
        plans: dict[str, Plan] = {}
        rows = []
        for decode in self.plan.decodes:
            given = self.drafts.get(decode.id, NO_DRAFT)
            if isinstance(given, Exception):
                self._fail(decode.id, given)
                continue
            if decode.drafted < given.size:  # the first nodes stay, whatever they are
                given = Plan(given.draft, given.size, decode.drafted)
            plans[decode.id] = given
            entry = self.entries[decode.id]
            rows.append(
                Reading(
                    blocks=self.plan.blocks[decode.id],
                    start=entry.state.computed,
                    tokens=[entry.row.context[-1], *given.tokens],
                    parents=given.parents,
                )
            )
        if rows:
            # In a static batch the rows that have ended are computed on.
            logits, hidden = self.forwards.decode([*rows, *[_RESTING] * len(self.plan.idle)])
            self._settle(list(plans), logits, list(plans.values()), hidden)

    def _settle(
        self, ids: Sequence[str], logits: Tensor, plans: Sequence[Plan], hidden: Tensor | None
    ) -> None:
        """Draw the next tokens of the first rows of logits [B, T, V]; hidden: [B, T, C]."""
        rows = [self.entries[id].row for id in ids]
        verdicts = decide(logits[: len(rows)], rows, plans, self.verifier)
        for place, (id, plan, verdict) in enumerate(zip(ids, plans, verdicts, strict=True)):
            if isinstance(verdict, Exception):
                self._fail(id, verdict)
                continue
            try:
                slots = self._take(place, id, plan, verdict)
            except Exception as problem:
                self._fail(id, problem)
                continue
            if hidden is not None:
                self.speculation.remember(self.entries[id], hidden[place, slots[-1]])

    def _take(self, place: int, id: str, plan: Plan, verdict: Accepted) -> list[int]:
        """Add what was decided to a request; of the tokens read, the places of those that stay.

        What can fail comes first, so that a request that fails has brought nothing.
        """
        entry = self.entries[id]
        block = [*(plan.tokens[node] for node in verdict.path), int(verdict.next_token)]
        taken = entry.take(block, self.ends)
        path = verdict.path[: taken - 1]
        slots = [0, *(node + 1 for node in path)]
        if slots[-1] != len(slots) - 1:  # a path of a tree with gaps
            self.forwards.keep(place, slots)
        if not entry.row.finish and (news := entry.news()):
            self.news[id] = news
        self.results[id] = StepResult(tuple(block[:taken]), entry.row.finish)
        self.drafted += plan.size
        self.accepted += len(path)
        self._verdicts[id] = Accepted(path, block[taken - 1], verdict.draws)
        return slots
