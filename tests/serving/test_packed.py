"""A packed step computes what the model computes for each request alone, and reads no other's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from labcore import processes
from labcore.models import Llama
from labcore.models.fused import FusedLlama
from labcore.parallel import parallelize
from labcore.serving.engine import packed as module
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.packed import PackedStep
from tests.models.shapes import CONFIGS, model_of, tokens_of
from tests.parallel.small import CONFIG, made
from tests.serving.pool import CLOSE, SIZES, alone, forward, poisoned, scattered, stored

NEAR = {"rtol": 2e-4, "atol": 2e-4}  # of fp32, in logits of size 10
# Two branches after the last token, a chain, several children of the last token.
TREES = ([-1, 0, 1, 1, 0, 4], None, [-1, 0, 0, 0, 1, 2])


@pytest.fixture(params=["gathered", "paged"])
def group(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """How attention reads the blocks; on a CPU, the GPU's way runs the kernel's torch form."""
    if request.param == "paged":
        monkeypatch.setattr(module, "_GroupOnCpu", module._GroupOnGpu)
    return request.param


@pytest.fixture(params=["plain", "grouped", "one-key-head"])
def model(request, generator: torch.Generator) -> Llama:
    return model_of(CONFIGS[request.param], generator).double()


@pytest.fixture
def grouped(generator: torch.Generator) -> Llama:
    return model_of(CONFIGS["grouped"], generator).double()


@dataclass
class Held:
    """A request of random traffic: its tokens, how many the cache has, its blocks."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@pytest.mark.parametrize("block_size", SIZES)
def test_requests_that_come_and_go_read_only_their_own(
    block_size: int, group: str, model: Llama, generator: torch.Generator
) -> None:
    """Any order of requests, chunks and decodes mixed, drafts given back, freed blocks with NaN."""
    cache = poisoned(model, block_size)
    free = torch.randperm(cache.num_blocks, generator=generator).tolist()
    live: list[Held] = []

    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=generator))

    compared = 0
    for _ in range(30):
        if len(live) < 4:
            live.append(Held(tokens_of(model.config, (1, draw(17)), generator)[0].tolist()))
        order = torch.randperm(len(live), generator=generator).tolist()
        batch, segments = [live[place] for place in order[: draw(len(live))]], []
        for held in batch:
            count = min(draw(6), len(held.tokens) - held.computed)
            while len(held.blocks) * block_size < held.computed + count:
                held.blocks.append(free.pop())
            tokens = held.tokens[held.computed :][:count]
            segments.append(Segment(blocks=held.blocks, start=held.computed, tokens=tokens))
        idle = Segment(blocks=(), start=0, tokens=(0,))
        for held, segment, logits in zip(
            batch, segments, forward(model, cache, [*segments, idle]), strict=False
        ):
            wanted = alone(model, held.tokens[: segment.end])[segment.start :]
            torch.testing.assert_close(logits, wanted, **CLOSE)
            compared += len(wanted)
            dropped = min(draw(3), len(wanted)) - 1  # as a draft that isn't accepted
            held.computed = segment.end - dropped
            if held.computed < len(held.tokens):
                continue
            if draw(4) > 1 and len(held.tokens) < 24:
                held.tokens.append(draw(model.config.vocab_size) - 1)
                continue
            for blocks in stored(cache):
                blocks[held.blocks] = math.nan
            free += held.blocks
            live.remove(held)
    assert compared > 60


@pytest.mark.parametrize("block_size", SIZES)
def test_a_tree_sees_its_ancestors_and_its_kept_path_goes_on(
    block_size: int, group: str, model: Llama, generator: torch.Generator
) -> None:
    cache = poisoned(model, block_size)
    blocks, prompts = scattered(cache, 3, generator), [7, 1, 11]
    rows = [tokens_of(model.config, (1, n), generator)[0].tolist() for n in prompts]
    forward(
        model,
        cache,
        [Segment(blocks=b, start=0, tokens=r) for b, r in zip(blocks, rows, strict=True)],
    )
    drafts = tokens_of(model.config, (3, 6), generator).tolist()
    trees = [
        Segment(blocks=blocks[row], start=prompts[row], tokens=drafts[row], parents=TREES[row])
        for row in range(3)
    ]
    paths = [[0, 4, 5], [0, 1, 2], [0, 2, 5]]
    for row, logits in enumerate(forward(model, cache, trees)):
        path = paths[row]
        read = rows[row] + [drafts[row][node] for node in path]
        wanted = alone(model, read)[prompts[row] :]
        torch.testing.assert_close(logits[path], wanted, **CLOSE)
        cache.keep(trees[row], path)
        rows[row] = read
    after = tokens_of(model.config, (3, 2), generator).tolist()
    segments = [
        Segment(blocks=blocks[row], start=len(rows[row]), tokens=after[row]) for row in range(3)
    ]
    for row, logits in enumerate(forward(model, cache, segments)):
        wanted = alone(model, rows[row] + after[row])[len(rows[row]) :]
        torch.testing.assert_close(logits, wanted, **CLOSE)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_fused_form_gives_the_models_logits(kind: str, generator: torch.Generator) -> None:
    model = model_of(CONFIGS[kind], generator)
    fused, cache = FusedLlama(model), poisoned(model, 3)
    blocks, rows = scattered(cache, 4, generator), [[], [], [], []]
    for counts in ((5, 1, 9, 2), (2, 7, 1, 1), (1, 1, 1, 6)):
        segments = []
        for row, count in enumerate(counts):
            new = tokens_of(model.config, (1, count), generator)[0].tolist()
            segments.append(Segment(blocks=blocks[row], start=len(rows[row]), tokens=new))
            rows[row] += new
        for row, logits in enumerate(forward(fused, cache, segments)):
            torch.testing.assert_close(logits, alone(model, rows[row])[-counts[row] :], **NEAR)
    draft = tokens_of(model.config, (1, 6), generator)[0].tolist()
    tree = Segment(blocks=blocks[0], start=len(rows[0]), tokens=draft, parents=TREES[0])
    (logits,) = forward(fused, cache, [tree])
    for path in ([0, 1, 3], [0, 4, 5]):
        read = rows[0] + [draft[node] for node in path]
        torch.testing.assert_close(logits[path], alone(model, read)[len(rows[0]) :], **NEAR)


def test_a_step_writes_its_tokens_and_nothing_else(
    grouped: Llama, generator: torch.Generator
) -> None:
    size, starts, counts = 3, [4, 0, 9, 2], [3, 1, 1, 7]
    cache = poisoned(grouped, size)
    blocks = scattered(cache, 4, generator)
    for pages in stored(cache):
        pages.normal_(generator=generator)
    before = [pages.flatten(0, 1).clone() for pages in stored(cache)]
    tokens = tokens_of(grouped.config, (4, 7), generator).tolist()
    rows = zip(blocks, starts, counts, tokens, strict=True)
    forward(grouped, cache, [Segment(blocks=b, start=s, tokens=t[:n]) for b, s, n, t in rows])
    wanted = {
        blocks[row][place // size] * size + place % size
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
        for place in range(start, start + count)
    }
    for pages, old in zip(stored(cache), before, strict=True):
        changed = (pages.flatten(0, 1) != old).any(-1).any(-1)
        assert set(changed.nonzero().flatten().tolist()) == wanted


def test_a_shared_prefix_serves_two_requests(
    group: str, grouped: Llama, generator: torch.Generator
) -> None:
    cache = poisoned(grouped, 4)
    first, second, _, _ = scattered(cache, 4, generator)
    prompt = tokens_of(grouped.config, (1, 8), generator)[0].tolist()
    forward(grouped, cache, [Segment(blocks=first, start=0, tokens=prompt)])
    second[:2] = first[:2]
    after = tokens_of(grouped.config, (2, 5), generator).tolist()
    segments = [
        Segment(blocks=blocks, start=8, tokens=new)
        for blocks, new in zip((first, second), after, strict=True)
    ]
    for logits, new in zip(forward(grouped, cache, segments), after, strict=True):
        torch.testing.assert_close(logits, alone(grouped, prompt + new)[8:], **CLOSE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([([0], 1, 1), ([3], 2, 3)], "at most 4 tokens, got 5 in row 1"),
        ([([0, 1], 4, 2), ([2, 1], 4, 1)], "got block 1 in rows 0 and 1"),
    ],
)
def test_segments_that_do_not_fit_are_refused(rows: list, message: str) -> None:
    cache = PagedCache(CONFIGS["plain"], num_blocks=6, block_size=4, rows=3, max_blocks=2)
    segments = [Segment(blocks=b, start=s, tokens=[1] * n) for b, s, n in rows]
    with pytest.raises(ValueError, match=message):
        PackedStep(cache, segments)


def test_bf16_blocks_serve_a_float32_model(group: str, generator: torch.Generator) -> None:
    model = model_of(CONFIGS["grouped"], generator)
    tokens = tokens_of(model.config, (1, 9), generator)[0].tolist()
    cache = PagedCache.of(
        model, num_blocks=8, block_size=4, rows=2, max_blocks=4, dtype=torch.bfloat16
    )
    (found,) = forward(model, cache, [Segment(blocks=[5, 1, 2], start=0, tokens=tokens)])
    wanted = alone(model, tokens)
    assert found.dtype == torch.float32 and cache.keys[0].dtype == torch.bfloat16
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def divided(seed: int) -> float:
    """The largest difference between a divided model over local blocks and the whole one."""
    _, world = processes.rank_and_world()
    whole, generator = made(seed).double(), torch.Generator().manual_seed(seed)
    model = parallelize(made(seed).double())
    cache = poisoned(model, 3)
    assert cache.keys[0].shape[2] == CONFIG.kv_heads // world
    blocks, tokens = scattered(cache, 2, generator), tokens_of(CONFIG, (2, 9), generator).tolist()
    gap = 0.0
    for start, end in ((0, 6), (6, 7), (7, 9)):
        segments = [
            Segment(blocks=b, start=start, tokens=t[start:end])
            for b, t in zip(blocks, tokens, strict=True)
        ]
        for row, logits in zip(tokens, forward(model, cache, segments), strict=True):
            gap = max(gap, float((logits - alone(whole, row)[start:end]).abs().max()))
    return gap


def test_a_divided_model_keeps_its_own_heads(seed: int) -> None:
    assert max(processes.run(divided, 2, seed)) < 1e-9
