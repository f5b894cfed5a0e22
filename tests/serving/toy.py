"""A model without tensors: it decides tokens by a seed and remembers what stands in which block.

Reading checks that every block holds the prefix that it should; writing, that nobody else holds the
block and that no digest names it. So a scheduler that mixes up blocks is caught at once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from labcore.decoding import SamplingConfig
from labcore.serving.clock import ManualClock
from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.plan import StepPlan, StepResult
from labcore.serving.engine.request import Request, State
from labcore.serving.engine.scheduler import Scheduler
from tests.serving.invariants import check

EOS = 0


def request(
    id: str, prompt: Sequence[int] | int, max_tokens: int, **fields: int | float | None
) -> Request:
    """A request; a number stands for a prompt of so many tokens of its own."""
    if isinstance(prompt, int):
        own = random.Random(id)
        prompt = [own.randrange(1, 50) for _ in range(prompt)]
    return Request(id, tuple(prompt), SamplingConfig(max_tokens=max_tokens), **fields)


class Toy:
    """vocab: tokens 0 to vocab - 1; 0 ends an output where `ends`. luck: how often a draft holds.

    memory: of each block its slots, each the prefix that it was written for.
    """

    def __init__(
        self, seed: int, block_size: int, *, vocab: int = 7, ends: bool = True, luck: float = 0.6
    ) -> None:
        self.seed, self.block_size, self.vocab, self.ends, self.luck = (
            seed,
            block_size,
            vocab,
            ends,
            luck,
        )
        self.memory: dict[int, dict[int, int]] = {}
        self.random = random.Random(seed)
        self.read = 0

    def prefixes(self, tokens: Sequence[int]) -> list[int]:
        """A number for each prefix of `tokens`."""
        found, last = [], self.seed
        for token in tokens:
            last = hash((last, token))
            found.append(last)
        return found

    def next_token(self, tokens: Sequence[int]) -> int:
        """What follows `tokens`."""
        least = 0 if self.ends else 1
        return least + hash((self.prefixes(tokens)[-1], -7)) % (self.vocab - least)

    def alone(self, asked: Request) -> list[int]:
        """The output of a request that runs alone."""
        tokens = list(asked.prompt)
        while len(tokens) < len(asked.prompt) + asked.sampling.max_tokens:
            tokens.append(self.next_token(tokens))
            if self.ends and tokens[-1] == EOS:
                break
        return tokens[len(asked.prompt) :]

    def step(self, plan: StepPlan, scheduler: Scheduler) -> dict[str, StepResult]:
        """Carry a plan out."""
        results = {}
        for chunk in plan.chunks:
            state = scheduler.states[chunk.id]
            end = chunk.start + chunk.count
            assert chunk.start == state.computed and chunk.last == (end == len(state.tokens))
            self._visit(scheduler, plan, state.tokens[:end], chunk.id, chunk.start)
            if chunk.last:
                results[chunk.id] = self._said(state.tokens, 1)
        for decode in plan.decodes:
            state = scheduler.states[decode.id]
            assert decode.start == state.computed == len(state.tokens) - 1
            right = 0
            while right < decode.drafted and self.random.random() < self.luck:
                right += 1
            true = list(state.tokens)
            for _ in range(right):
                true.append(self.next_token(true))
            wrong = [self.vocab + 1] * (decode.drafted - right)
            self._visit(scheduler, plan, true + wrong, decode.id, decode.start)
            results[decode.id] = self._said(state.tokens, right + 1)
        return results

    def _said(self, tokens: Sequence[int], count: int) -> StepResult:
        said = list(tokens)
        for _ in range(count):
            said.append(self.next_token(said))
            if self.ends and said[-1] == EOS:
                return StepResult(tuple(said[len(tokens) :]), "eos")
        return StepResult(tuple(said[len(tokens) :]))

    def _visit(
        self, scheduler: Scheduler, plan: StepPlan, tokens: list[int], id: str, start: int
    ) -> None:
        """Read the prefix of `tokens` before `start`, write what is behind."""
        pool, blocks = scheduler.pool, plan.blocks[id]
        for place, prefix in enumerate(self.prefixes(tokens)):
            block, slot = blocks[place // self.block_size], place % self.block_size
            slots = self.memory.setdefault(block, {})
            if place < start:
                assert slots.get(slot) == prefix, f"{id} reads another's tokens at {place}"
            else:
                assert pool.references(block) == 1, f"{id} writes into a shared block at {place}"
                assert pool.digest(block) is None, f"{id} writes into a known block at {place}"
                slots[slot] = prefix
        self.read += len(tokens) - start


class Server:
    """A scheduler, a toy and a clock; every step is checked. One second a step."""

    def __init__(self, scheduler: Scheduler, toy: Toy) -> None:
        self.scheduler, self.toy, self.clock = scheduler, toy, ManualClock()
        self.states: dict[str, State] = {}
        self.plans: list[StepPlan] = []

    def add(self, asked: Request) -> State:
        state = self.scheduler.add(asked, self.clock.now())
        self.states[asked.id] = state
        return state

    def step(
        self,
        drafts: Mapping[str, int] | None = None,
        *,
        cancel: Sequence[str] = (),
        fail: Sequence[str] = (),
    ) -> StepPlan:
        """One step; `cancel` and `fail`: requests to which that happens while it is under way."""
        scheduler, now = self.scheduler, self.clock.now()
        decoding = {s.id for s in scheduler.running if s.decoding}
        plan = scheduler.schedule(now, drafts)
        check(scheduler)
        self._check_plan(plan, decoding, drafts or {})
        results = self.toy.step(plan, scheduler)
        results |= {
            id: StepResult((), "error", "it was planted") for id in fail if id in plan.blocks
        }
        for id in cancel:
            scheduler.cancel(id, now)
            check(scheduler)
        self.clock.advance(1.0)
        for state in scheduler.commit(plan, results, self.clock.now()):
            assert state.status == "finished" and state.finish
        check(scheduler)
        self.plans.append(plan)
        return plan

    def _check_plan(self, plan: StepPlan, decoding: set[str], drafts: Mapping[str, int]) -> None:
        scheduler = self.scheduler
        running = [state.id for state in scheduler.running]
        counts = [chunk.count for chunk in plan.chunks]
        read = [one.id for one in (*plan.chunks, *plan.decodes)]
        assert plan.tokens == sum(counts) + sum(d.drafted + 1 for d in plan.decodes)
        assert plan.tokens <= scheduler.max_num_batched_tokens
        assert all(1 <= count <= scheduler.chunk for count in counts)
        assert len(set(read)) == len(read) and set(read) <= set(running)
        assert set(plan.blocks) == set(read)
        # Whoever decodes gets its token in every step, however long the prompts beside it are.
        assert {d.id for d in plan.decodes} == decoding - set(plan.preempted) - set(plan.expired)
        assert all(decode.drafted <= drafts.get(decode.id, 0) for decode in plan.decodes)
        assert not (plan.preempted and plan.admitted)
        assert plan.tokens or not running, "somebody runs and nobody reads"
        assert running or not scheduler.waiting, "somebody waits and nobody runs"

    def drain(self, most: int = 10_000) -> int:
        """Step until nobody is left; how many steps."""
        for count in range(most):
            if self.scheduler.idle:
                self.check_end()
                return count
            self.step()
        raise AssertionError(f"requests are left after {most} steps")

    def check_end(self) -> None:
        """Nothing is held, and each output is that of the request alone, or begins it."""
        assert self.scheduler.pool.held == 0
        for state in self.states.values():
            said = state.output
            assert state.status == "finished" and not state.blocks
            if not said:
                assert state.finish not in ("eos", "length")
                continue
            whole = self.toy.alone(state.request)
            assert said == whole[: len(said)]
            if state.finish in ("eos", "length"):
                assert said == whole
                assert (state.finish == "eos") == (self.toy.ends and whole[-1] == EOS)


def server(
    seed: int,
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    toy: Mapping[str, float | int | bool] | None = None,
    **options: object,
) -> Server:
    """A server over a fresh pool of `num_blocks` blocks; options: of the scheduler."""
    scheduler = Scheduler(BlockPool(num_blocks, block_size), **options)
    return Server(scheduler, Toy(seed, block_size, **(toy or {})))
