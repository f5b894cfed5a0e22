"""One step of an engine, from its plan to its results: one forward, and the tokens after it.

Letters: N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labcore.decoding.contract import Accepted, Draft, Verifier
from labcore.decoding.requests import Plan, likeliest
from labcore.decoding.verify import greedy_match
from labcore.serving.engine.cache import Segment
from labcore.serving.engine.outputs import Entry, Output
from labcore.serving.engine.plan import Chunk, Decode, StepPlan, StepResult
from labcore.serving.engine.runner import Runner
from labcore.serving.engine.speculation import Speculation

__all__ = ["Step"]

_NO_DRAFT = Plan(Draft.chain([]), 0, 0)
_IDLE = Segment(blocks=(), start=0, tokens=(0,))


@dataclass(kw_only=True, slots=True)
class Step:
    """Executes one plan.

    entries: all requests of the plan, by id. drafts: by id; an error in place of a draft ends its
    request. verifier: for requests that sample; at temperature 0 a drafted token must be the most
    likely one. ends: the tokens that end an output.
    results: by id, and news: outputs to report. `run` fills both.
    """

    runner: Runner
    speculation: Speculation
    plan: StepPlan
    entries: Mapping[str, Entry]
    drafts: Mapping[str, Plan | Exception]
    verifier: Verifier
    ends: frozenset[int]
    results: dict[str, StepResult] = field(init=False, default_factory=dict)
    news: list[Output] = field(init=False, default_factory=list)
    _verdicts: dict[str, Accepted] = field(init=False, default_factory=dict)

    @torch.inference_mode()
    def run(self) -> None:
        """Read all decodes and chunks in one forward and draw the next tokens.

        An error in the forward ends all of its requests; an error in one request ends only that.
        """
        try:
            self._read()
        except Exception as problem:
            self.fail_rest(problem)
        self.speculation.commit(self._verdicts)

    def fail_rest(self, problem: Exception | str) -> None:
        """End all requests of the plan that have no result yet."""
        for id in self.plan.blocks:
            if id not in self.results:
                self._fail(id, problem)

    def _fail(self, id: str, problem: Exception | str) -> None:
        if isinstance(problem, Exception):
            problem = f"{type(problem).__name__}: {problem}"
        self.entries[id].reset()  # the scheduler keeps no token of this step, so none is reported
        self.results[id] = StepResult((), "error", problem)

    def _read(self) -> None:
        reading: list[tuple[Chunk | Decode, Plan, Segment]] = []
        wanted = []  # how many tokens at the end of each segment need logits
        reads: list[Chunk | Decode] = [*self.plan.decodes, *self.plan.chunks]
        for one in reads:
            draft = self.drafts.get(one.id, _NO_DRAFT)
            if isinstance(draft, Exception):
                self._fail(one.id, draft)
                continue
            if one.drafted < draft.size:  # the first nodes stay, whatever their tokens
                draft = Plan(draft.draft, draft.size, one.drafted)
            reading.append((one, draft, self._segment(one, draft)))
            if self.speculation.observes:
                wanted.append(one.count + draft.size)
            else:
                # The proposer may need the last hidden state of a chunk that draws nothing.
                wanted.append(draft.size + 1 if _draws(one) else int(self.speculation.reads_hidden))
        if not reading:
            return
        # In a static batch, the rows of ended requests are still computed.
        idle = [_IDLE] * self.plan.rests
        segments = [segment for _, _, segment in reading]
        logits, hidden = self.runner.run([*segments, *idle], [*wanted, *[0] * len(idle)])
        best = likeliest(logits)
        row = 0
        for (one, draft, segment), count in zip(reading, wanted, strict=True):
            lead, slots = 0, list(range(count))
            try:
                if _draws(one):
                    lead = count - draft.size - 1  # tokens before the newest
                    rows = logits[row + lead : row + count]
                    tokens = best[row + lead : row + count]
                    slots = self._draw(one.id, draft, segment, rows, tokens)
                else:
                    self.results[one.id] = StepResult()
            except Exception as problem:
                self._fail(one.id, problem)
            else:
                if self.speculation.reads_hidden and hidden is not None:
                    places = [*range(lead), *(lead + slot for slot in slots)]
                    states = hidden[row : row + count][places]
                    self.speculation.remember(self.entries[one.id], one.start, states)
            row += count

    def _segment(self, one: Chunk | Decode, draft: Plan) -> Segment:
        tokens = self.entries[one.id].row.context[one.start : one.start + one.count]
        parents = None if draft.parents is None else [-1, *(node + 1 for node in draft.parents)]
        return Segment(
            blocks=self.plan.blocks[one.id],
            start=one.start,
            tokens=[*tokens, *draft.tokens],
            parents=parents,
        )

    def _draw(
        self, id: str, draft: Plan, segment: Segment, logits: Tensor, best: Sequence[int]
    ) -> list[int]:
        """Add the next tokens to a request; return which of the tokens from the newest on stay.

        logits, best: as in `Plan.verify`. What can fail comes first, so a request that fails gets
        nothing.
        """
        entry, row = self.entries[id], self.entries[id].row
        verifier = self.verifier if row.sampling.temperature else greedy_match
        verdict = draft.verify(logits, best, row, verifier)
        settled = draft.settle(verdict, row, self.ends)
        slots, count = settled.slots, len(settled.tokens)
        entry.guessed += [place < len(verdict.path) for place in range(count)]
        if slots[-1] != len(slots) - 1:  # a path of a tree with gaps
            self.runner.cache.keep(segment, slots)
        if not row.finish and (news := entry.news()):
            self.news.append(news)
        self.results[id] = StepResult(tuple(settled.tokens), row.finish)
        self._verdicts[id] = settled.accepted
        return slots


def _draws(one: Chunk | Decode) -> bool:
    return isinstance(one, Decode) or one.last
