"""A radix tree holds each token of each beginning once; blocks find whole blocks of it."""

from __future__ import annotations

import random

from labcore.decoding import SamplingConfig
from labcore.serving.engine.blocks import BlockPool
from labcore.serving.engine.plan import StepResult
from labcore.serving.engine.request import Request
from labcore.serving.engine.scheduler import Scheduler
from labcore.studies.inflight.prefixes import found_in_blocks, radix_tree, tokenized


def some_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(2) for _ in range(chance.randint(1, 12))] for _ in range(8)]


def test_the_tree_has_every_beginning_once(seed: int) -> None:
    for prompts in (some_prompts(seed), tokenized()):
        edges = radix_tree(prompts)
        beginnings = {tuple(one[:end]) for one in prompts for end in range(1, len(one) + 1)}
        assert sum(edge.end - edge.begin for edge in edges) == len(beginnings)
        for number, edge in enumerate(edges):
            assert edge.parent < number
            same = {tuple(prompts[one][: edge.end]) for one in edge.prompts}
            assert len(same) == 1
            if edge.parent >= 0:
                assert edges[edge.parent].end == edge.begin
                assert set(edge.prompts) <= set(edges[edge.parent].prompts)


def test_blocks_find_what_the_scheduler_finds(seed: int) -> None:
    prompts = [*some_prompts(seed), *[[1, 0, 1, 1, 0, 0]] * 2]  # the last token is always read
    scheduler = Scheduler(BlockPool(200, 3))
    cached = []
    for number, prompt in enumerate(prompts):
        state = scheduler.add(Request(str(number), tuple(prompt), SamplingConfig(max_tokens=1)), 0)
        plan = scheduler.schedule(now=0.0)
        scheduler.commit(plan, {state.id: StepResult((7,))}, now=0.0)
        cached.append(state.matched)
    assert found_in_blocks(prompts, 3) == cached
