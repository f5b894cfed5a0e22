"""One step of an engine between the plan and the commit: one forward, next tokens, what they end.

Letters: N tokens whose logits are wanted, V vocabulary, C width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft, Verifier
from labcore.decoding.requests import Plan
from labcore.decoding.verify import greedy_match
from labcore.serving.engine.cache import Segment
from labcore.serving.engine.outputs import Entry, Output
from labcore.serving.engine.runner import Runner
from labcore.serving.engine.scheduler import StepPlan, StepResult
from labcore.serving.engine.speculation import Speculation

__all__ = ["Turn"]

_NO_DRAFT = Plan(Draft.chain([]), 0, 0)
_IDLE = Segment(blocks=(), start=0, tokens=(0,))


class Turn:
    """What a plan brings its requests.

    entries: those of the plan's requests at least. drafts: by id; an error in place of a draft ends
    its request. verifier: for rows that sample; at temperature 0, tokens are matched.
    results, reasons (of errors), news: by id, filled by `run`. drafted, accepted: tokens.
    """

    def __init__(
        self,
        runner: Runner,
        speculation: Speculation,
        plan: StepPlan,
        *,
        entries: Mapping[str, Entry],
        drafts: Mapping[str, Plan | Exception],
        verifier: Verifier,
        ends: frozenset[int],
    ) -> None:
        self.runner, self.speculation, self.plan = runner, speculation, plan
        self.entries, self.verifier, self.ends = entries, verifier, ends
        self.results: dict[str, StepResult] = {}
        self.reasons: dict[str, str] = {}
        self.news: dict[str, Output] = {}
        self.drafted = self.accepted = 0
        self._drafts = drafts
        self._verdicts: dict[str, Accepted] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Read all chunks and decodes in one forward; an error in it ends all of its requests."""
        try:
            self._read()
        except Exception as problem:
            for id in self.plan.blocks:
                if id not in self.results:
                    self._fail(id, problem)
        self.speculation.commit(self._verdicts)

    def all_results(self) -> dict[str, StepResult]:
        """Return the results, with an error for each request that has none."""
        for id in self.plan.blocks:
            if id not in self.results:
                self._fail(id, "the step was interrupted before it came to this request")
        return self.results

    def _fail(self, id: str, problem: Exception | str) -> None:
        reason = problem
        if isinstance(problem, Exception):
            reason = f"{type(problem).__name__}: {problem}"
        self.entries[
            id
        ].reset_to_committed()  # what the scheduler doesn't take in isn't reported either
        self.reasons[id] = str(reason)
        self.results[id] = StepResult((), "error", str(reason))

    def _read(self) -> None:
        # First those that get tokens, so that their logits are the first rows.
        drawing: dict[str, tuple[Plan, Segment]] = {}
        for decode in self.plan.decodes:
            draft = self._drafts.get(decode.id, _NO_DRAFT)
            if not isinstance(draft, Exception) and not self._known(draft.tokens):
                draft = ValueError(
                    f"a draft's tokens must lie below the model's vocabulary, got {draft.tokens}"
                )
            if isinstance(draft, Exception):
                self._fail(decode.id, draft)
                continue
            if decode.drafted < draft.size:  # the first nodes stay, whatever they are
                draft = Plan(draft.draft, draft.size, decode.drafted)
            drawing[decode.id] = draft, self._decode(decode.id, draft)
        whole = [chunk for chunk in self.plan.chunks if chunk.last]
        parts = [chunk for chunk in self.plan.chunks if not chunk.last]
        segments = {chunk.id: self._chunk(chunk.id, chunk.count) for chunk in self.plan.chunks}
        drawing |= {chunk.id: (_NO_DRAFT, segments[chunk.id]) for chunk in whole}
        # In a static batch, the rows that have ended are still computed.
        idle = [_IDLE] * self.plan.rests
        read = [segment for _, segment in drawing.values()] + [segments[c.id] for c in parts] + idle
        if not read:
            return
        wanted = [draft.size + 1 for draft, _ in drawing.values()]
        # A request may decode after a chunk that wasn't its last: its drafts need the hidden state.
        told = int(self.speculation.reads_hidden)
        logits, hidden = self.runner.run(read, [*wanted, *[told] * len(parts), *[0] * len(idle)])
        for place, chunk in enumerate(parts):
            self.results[chunk.id] = StepResult()
            if told and hidden is not None:
                self.speculation.remember(self.entries[chunk.id], hidden[sum(wanted) + place])
        if drawing:
            self._draw(drawing, logits, hidden)

    def _known(self, tokens: Sequence[int]) -> bool:
        vocabulary = self.runner.model.config.vocab_size
        return not tokens or 0 <= min(tokens) <= max(tokens) < vocabulary

    def _chunk(self, id: str, count: int) -> Segment:
        state, context = self.entries[id].state, self.entries[id].row.context
        start = state.computed
        return Segment(
            blocks=self.plan.blocks[id], start=start, tokens=context[start : start + count]
        )

    def _decode(self, id: str, draft: Plan) -> Segment:
        entry = self.entries[id]
        parents = None
        if draft.parents is not None:
            parents = [-1, *(parent + 1 for parent in draft.parents)]
        return Segment(
            blocks=self.plan.blocks[id],
            start=entry.state.computed,
            tokens=[entry.row.context[-1], *draft.tokens],
            parents=parents,
        )

    def _draw(
        self, drawing: Mapping[str, tuple[Plan, Segment]], logits: Tensor, hidden: Tensor | None
    ) -> None:
        """Draw the next tokens from the first rows of logits [N, V]; hidden: [N, C]."""
        largest, best = logits.max(-1)
        # One look at the device for all greedy requests; -1 where the logits aren't finite.
        greedy = torch.where(largest.isfinite(), best, -1).tolist()
        first = 0
        for id, (draft, segment) in drawing.items():
            row, rows = self.entries[id].row, logits[first : first + draft.size + 1]
            sampling = row.sampling
            plain = sampling.temperature == 0 and sampling.repetition_penalty == 1
            try:
                if plain and not draft.size and greedy[first] >= 0:
                    verdict = Accepted((), greedy[first])
                else:
                    chosen = greedy_match if sampling.temperature == 0 else self.verifier
                    verdict = draft.verify(rows, row, chosen)[1]
                last = self._take(id, draft, segment, verdict)
            except Exception as problem:
                self._fail(id, problem)
            else:
                if hidden is not None:
                    self.speculation.remember(self.entries[id], hidden[first + last])
            first += draft.size + 1

    def _take(self, id: str, draft: Plan, segment: Segment, verdict: Accepted) -> int:
        """Add what was decided to a request; return the place of the last token read that stays.

        What can fail comes first, so that a request that fails has brought nothing.
        """
        entry = self.entries[id]
        settled = draft.settle(verdict, entry.row, self.ends)
        slots = settled.slots
        if slots[-1] != len(slots) - 1:  # a path of a tree with gaps
            self.runner.cache.keep(segment, slots)
        if not entry.row.finish and (news := entry.news()):
            self.news[id] = news
        self.results[id] = StepResult(tuple(settled.tokens), entry.row.finish)
        self.drafted += draft.size
        self.accepted += len(slots) - 1
        self._verdicts[id] = settled.accepted
        return slots[-1]
