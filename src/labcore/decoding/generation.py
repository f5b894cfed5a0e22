"""Generation in blocks: propose, read the draft in one forward, verify, roll back.

Letters: B rows, N nodes of a draft, T tokens of a forward, V vocabulary, C width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labcore.checks import one_of
from labcore.decoding.contract import Accepted, Draft, Proposer, SamplingConfig, Verifier
from labcore.decoding.decoders import as_decoder
from labcore.decoding.draft_model import DraftModel
from labcore.decoding.requests import Plan, Request, likeliest
from labcore.decoding.sampling import tree_probabilities
from labcore.decoding.stops import TextDecoder
from labcore.decoding.trace import Statistics, Trace, step_of
from labcore.decoding.verify import LOSSLESS, VERIFIERS, greedy_match
from labcore.models import pad_rows

__all__ = ["Generation", "generate", "stream"]

# Extra cache slots, because a tree may have more nodes than its depth.
_ROOM_FOR_TREES = 64
_EMPTY = Draft.chain([])
_FINISHED = Accepted((), -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The outputs of B prompts.

    tokens: of each row, including an EOS that ended it. finish: "eos", "stop" or "length" for each
    row. texts: of each row, ending before the stop text, which may begin inside the last token;
    None without a tokenizer. statistics: the sum of per_row. trace: None unless requested.
    """

    tokens: list[list[int]]
    finish: list[str]
    texts: list[str] | None
    statistics: Statistics
    per_row: list[Statistics]
    trace: Trace | None


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig | Sequence[SamplingConfig],
    *,
    proposer: Proposer | None = None,
    verifier: str | Verifier = "rejection",
    tokenizer: TextDecoder | None = None,
    trace: bool = False,
    capacity: int | None = None,
) -> Generation:
    """Continue each prompt until EOS, a stop text or max_tokens, several tokens per forward.

    model: anything that `as_decoder` accepts. prompts: B rows of any lengths, each with at least
    one token.
    sampling: one for all rows or one per row. Each row draws from its own generator with its own
    seed, so its output doesn't depend on the others (and equal rows need different seeds).
    proposer: None is plain decoding, one token per forward. verifier: a name from `VERIFIERS`, or a
    function; the lossless ones keep the output's distribution as it is without a proposer.
    tokenizer: needed for stop texts. trace: record every step in full. capacity: tokens that a
    cache row holds; None is what the longest row needs.
    Raises ValueError or TypeError for arguments that don't fit together, and ValueError for a draft
    that's too deep or a path that's invalid.
    Source: Leviathan, Kalman and Matias, 2023, arXiv 2211.17192; Chen et al., 2023, arXiv
    2302.01318.
    """
    run = _Run(model, prompts, sampling, proposer, verifier, tokenizer, capacity)
    run.trace = Trace() if trace else None
    run.say()
    while not run.done:
        run.step()
    per_row = [row.tally.statistics(row.kept) for row in run.rows]
    return Generation(
        tokens=[row.output() for row in run.rows],
        finish=[row.finish for row in run.rows],
        texts=None if tokenizer is None else [row.text(tokenizer) for row in run.rows],
        statistics=Statistics.total(per_row),
        per_row=per_row,
        trace=run.trace,
    )


def stream(
    model: Any,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    *,
    proposer: Proposer | None = None,
    verifier: str | Verifier = "rejection",
    tokenizer: TextDecoder | None = None,
    capacity: int | None = None,
) -> Iterator[list[int]]:
    """Yield the output of one prompt, one block of tokens per forward that settles any.

    The blocks add up to what `generate` returns. Tokens that may turn out to belong to a stop text
    are held back until that's known. Arguments and errors are those of `generate`, checked
    immediately.
    """
    run = _Run(model, [prompt], sampling, proposer, verifier, tokenizer, capacity)
    return _blocks(run)


def _blocks(run: _Run) -> Iterator[list[int]]:
    row, sent = run.rows[0], 0
    while not run.done:
        run.step()
        output = row.output()
        ready = row.stops.settled(output) if row.stops and not row.finish else len(output)
        if ready > sent:
            yield output[sent:ready]
            sent = ready


class _Run:
    """The state of one generation; `step` advances every unfinished row by at least one token."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig | Sequence[SamplingConfig],
        proposer: Proposer | None,
        verifier: str | Verifier,
        tokenizer: TextDecoder | None,
        capacity: int | None,
    ) -> None:
        self.decoder = as_decoder(model)
        self.ends = frozenset(self.decoder.eos_token_ids)
        self.proposer = proposer
        self.trace: Trace | None = None
        chosen = verifier
        if isinstance(chosen, str):
            chosen = VERIFIERS[one_of("verifier", chosen, VERIFIERS)]
        rows = _checked_prompts(prompts, self.decoder.vocab_size)
        samplings = [sampling] * len(rows) if isinstance(sampling, SamplingConfig) else [*sampling]
        if len(samplings) != len(rows):
            raise ValueError(
                f"sampling must be one config or one for each of the {len(rows)} prompts, got "
                f"{len(samplings)}"
            )
        if tokenizer is None and any(one.stop for one in samplings):
            raise ValueError("stop texts need a tokenizer, got None; pass tokenizer=…")
        self.rows = [Request(*pair, tokenizer) for pair in zip(rows, samplings, strict=True)]
        self.verifiers = [_verifier_for(row.sampling, chosen) for row in self.rows]
        self.samplings = samplings
        self.contexts = [row.context for row in self.rows]
        self.generators = [row.generator for row in self.rows]
        self.capacity = _capacity(self.rows, capacity, proposer)
        self._cache: Any = None
        self._hidden: Tensor | None = None

    @property
    def done(self) -> bool:
        return all(row.finish for row in self.rows)

    @torch.inference_mode()
    def say(self) -> None:
        """Decode one row in one call: greedily, without proposer, trace, stop texts or penalty.

        The rest is left to `step`, and so is a row whose logits aren't finite.
        """
        greedy, row = getattr(self.decoder, "greedy", None), self.rows[0]
        if greedy is None or self.proposer is not None or self.trace is not None:
            return
        if len(self.rows) > 1 or row.stops is not None or row.sampling.repetition_penalty != 1:
            return
        if self.verifiers[0] is not greedy_match or row.sampling.temperature != 0:
            return
        self._read_prompts()
        for token in greedy(row.context[-1:], row.sampling.max_tokens, self._cache):
            row.tally.add(row.emitted, None, 0, ())
            row.take([token], self.ends)

    @torch.inference_mode()
    def step(self) -> None:
        """Propose, read, verify and roll back, once."""
        if self._cache is None:
            self._read_prompts()
        plans = self._propose()
        logits, hidden = self._read(plans)
        best = likeliest(logits)
        before = [len(context) for context in self.contexts]
        verdicts: list[Accepted] = []
        kept: list[list[int]] = []  # the forward's nodes that stay in the cache
        accepted: list[Accepted] = []
        for place, (row, plan) in enumerate(zip(self.rows, plans, strict=True)):
            if plan is None:
                verdicts.append(_FINISHED)
                kept.append([])
                accepted.append(_FINISHED)
                continue
            read = plan.size + 1
            verdict = plan.verify(
                logits[place, :read], best[place][:read], row, self.verifiers[place]
            )
            row.tally.add(row.emitted, plan.parents, plan.size, verdict.path)
            settled = plan.settle(verdict, row, self.ends)
            verdicts.append(verdict)
            kept.append(settled.slots)
            accepted.append(settled.accepted)
        self._roll_back(plans, kept)
        if self.proposer is not None:
            self._hidden = _last_of(hidden, kept)
            self._observe(hidden, [length - 1 for length in before], kept)
            self.proposer.commit(accepted)
        if self.trace is not None:
            self._note(self.trace, plans, logits, verdicts, before)

    def _read_prompts(self) -> None:
        """Read all tokens of the prompts except the last, which the first step reads."""
        reset = getattr(self.proposer, "reset", None)
        if callable(reset):
            reset()
        self._cache = self.decoder.new_cache(len(self.rows), self.capacity)
        heads = [context[:-1] for context in self.contexts]
        if not any(heads):
            return
        tokens, counts = pad_rows(heads, device=self.decoder.device)
        hidden = self.decoder(tokens, counts=counts, cache=self._cache).hidden
        if hidden is not None:
            last = (counts.long() - 1).clamp(min=0)
            picked = hidden[torch.arange(len(heads), device=hidden.device), last]
            # 0 where nothing was read yet, because values at padding are arbitrary.
            self._hidden = torch.where(counts[:, None] > 0, picked, torch.zeros_like(picked))
            self._observe(hidden, [0] * len(heads), [list(range(len(head))) for head in heads])

    def _observe(
        self, hidden: Tensor | None, starts: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> None:
        """Give a proposer that observes the states of the tokens that each row keeps."""
        observe = getattr(self.proposer, "observe", None)
        if hidden is None or not callable(observe):
            return
        for row, (start, slots) in enumerate(zip(starts, kept, strict=True)):
            if slots:
                chain = slots[-1] == len(slots) - 1
                observe(row, start, hidden[row, : len(slots)] if chain else hidden[row, slots])

    def _propose(self) -> list[Plan | None]:
        """Return the draft of each row, or None for a finished row."""
        drafts, limits = [_EMPTY] * len(self.rows), [0] * len(self.rows)
        rooms = [self.capacity - len(context) for context in self.contexts]
        if self.proposer is not None:
            for place, row in enumerate(self.rows):
                if not row.finish:
                    left = row.sampling.max_tokens - row.emitted - 1
                    limits[place] = min(left, rooms[place])
            drafts = self.proposer.propose(
                self.contexts, self.samplings, limits, self.generators, hidden=self._hidden
            )
            if len(drafts) != len(self.rows):
                raise ValueError(
                    f"propose must return a draft for each of the {len(self.rows)} rows, got "
                    f"{len(drafts)}"
                )
        return [
            None if row.finish else Plan(draft, limit, room)
            for row, draft, limit, room in zip(self.rows, drafts, limits, rooms, strict=True)
        ]

    def _read(self, plans: Sequence[Plan | None]) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, T, V] and hidden [B, T, C] of each row's last token and its draft."""
        device = self.decoder.device
        counts = [0 if plan is None else plan.size + 1 for plan in plans]
        width = max(counts)
        tokens, parents = [], []
        trees = any(plan is not None and plan.parents is not None for plan in plans)
        for context, plan, count in zip(self.contexts, plans, counts, strict=True):
            padding = width - count
            drafted = [] if plan is None else [context[-1], *plan.tokens]
            tokens.append(drafted + [0] * padding)
            if trees:
                chain = list(range(-1, count - 1))
                if plan is not None and plan.parents is not None:
                    chain = [-1, *(parent + 1 for parent in plan.parents)]
                parents.append(chain + [-2] * padding)
        out = self.decoder(
            torch.tensor(tokens, device=device),
            counts=torch.tensor(counts, dtype=torch.int32, device=device),
            cache=self._cache,
            tree=torch.tensor(parents, dtype=torch.int32, device=device) if trees else None,
        )
        return out.logits, out.hidden

    def _roll_back(self, plans: Sequence[Plan | None], kept: Sequence[Sequence[int]]) -> None:
        """Keep all tokens of each row except the last in the cache."""
        surplus = False
        for place, (plan, slots) in enumerate(zip(plans, kept, strict=True)):
            if plan is None or len(slots) == plan.size + 1:
                continue
            surplus = True
            if slots[-1] != len(slots) - 1:  # a path of a tree with gaps
                self._cache.keep(place, slots)
        if surplus:
            lengths = [len(context) - 1 for context in self.contexts]
            self._cache.truncate(
                torch.tensor(lengths, dtype=torch.int32, device=self._cache.lengths.device)
            )

    def _note(
        self,
        trace: Trace,
        plans: Sequence[Plan | None],
        logits: Tensor,
        verdicts: Sequence[Accepted],
        before: Sequence[int],
    ) -> None:
        """Add this step to the trace."""
        target = self._cache.lengths.tolist()
        drafts = _cache_lengths(self.proposer)
        for place, (plan, verdict) in enumerate(zip(plans, verdicts, strict=True)):
            if plan is None:
                continue
            context = self.contexts[place]
            prefix, tokens = context[: before[place]], context[before[place] :]
            step = step_of(
                tree_probabilities(
                    logits[place, : plan.size + 1], plan.draft, prefix, self.samplings[place]
                ),
                plan.draft,
                verdict,
                row=place,
                context=before[place],
                tokens=tokens,
                target_length=target[place],
                # Rejected tokens leave the draft's cache with the next draft at the latest.
                draft_length=None if drafts is None else min(drafts[place], target[place]),
            )
            trace.steps.append(step)


def _checked_prompts(prompts: Sequence[Sequence[int]], vocab: int) -> list[list[int]]:
    if not len(prompts):
        raise ValueError("prompts must hold at least one row, got none")
    if any(isinstance(row, int | str) for row in prompts):
        raise TypeError("prompts must be rows of tokens; write [prompt] for a single one")
    rows = [[int(token) for token in row] for row in prompts]
    for place, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"a prompt must hold at least one token, got none in row {place}; begin with the "
                "model's BOS"
            )
        if not 0 <= min(row) <= max(row) < vocab:
            raise ValueError(
                f"tokens must lie between 0 and {vocab - 1}, got {min(row)} to {max(row)} in row "
                f"{place}"
            )
    return rows


def _verifier_for(sampling: SamplingConfig, chosen: Verifier) -> Verifier:
    """Return greedy match, which draws nothing, for lossless rules at temperature 0."""
    exact = any(chosen is VERIFIERS[name] for name in LOSSLESS)
    return greedy_match if sampling.temperature == 0 and exact else chosen


def _capacity(rows: Sequence[Request], asked: int | None, proposer: Proposer | None) -> int:
    # The last token of an output is never read.
    least = max(len(row.context) + row.sampling.max_tokens - 1 for row in rows)
    if asked is None:
        return least + (_ROOM_FOR_TREES if proposer is not None else 0)
    if asked < least:
        raise ValueError(
            f"capacity must be at least {least}, which the longest row needs, got {asked}"
        )
    return asked


def _last_of(hidden: Tensor | None, kept: Sequence[Sequence[int]]) -> Tensor | None:
    """Return hidden at the last token that each row keeps: [B, C] from [B, T, C]."""
    if hidden is None:
        return None
    slots = [row[-1] if row else 0 for row in kept]
    if len(slots) == 1:
        return hidden[:, slots[0]]
    return hidden[torch.arange(len(slots), device=hidden.device), slots]


def _cache_lengths(proposer: Any) -> list[int] | None:
    """Return the tokens in the drafting model's cache, even if a length rule wraps it."""
    while proposer is not None and not isinstance(proposer, DraftModel):
        if hasattr(proposer, "cache_lengths"):
            return [int(length) for length in proposer.cache_lengths]
        proposer = getattr(proposer, "proposer", None) or getattr(proposer, "drafter", None)
    return None if proposer is None else proposer.lengths
