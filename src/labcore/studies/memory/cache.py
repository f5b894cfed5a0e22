"""How many requests our engine runs at once in a given memory, and what a rounded KV cache costs.

Letters: n rows, T tokens.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from labcore.checks import positive_int
from labcore.memory.cache import kv_bytes
from labcore.models.cache import KV_DTYPES
from labcore.models.llama import Llama
from labcore.models.shipped import held_out, shipped_tokenizer
from labcore.serving.engine.blocks import blocks_for
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.engine import Engine
from labcore.serving.engine.packed import PackedStep
from labcore.serving.simulation.replay import replay
from labcore.serving.simulation.workload import Workload

__all__ = ["Crowd", "average_held", "crowd", "held_out_windows", "loss_through_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """How many requests ran at once while others waited, on average over the steps.

    blocks: of the pool. predicted: the pool's slots over `average_held`. measured: requests that a
    step of the engine read. wasted: the share of their slots that contained no token.
    preemptions: in all.
    """

    blocks: int
    predicted: float
    measured: float
    wasted: float
    preemptions: int


def average_held(workload: Workload, page: int = 1) -> float:
    """Return the mean number of slots that a running request holds, in pages of `page` tokens.

    In its j-th step (from 0) a request with a prompt of p tokens holds p + j tokens, rounded up to
    whole pages. Long outputs run for more steps, so they count more.
    """
    pairs = list(zip(workload.prompts, workload.outputs, strict=True))
    pages = sum(blocks_for(p + j, page) for p, o in pairs for j in range(o))
    return page * pages / sum(o for _, o in pairs)


def crowd(
    model: Llama,
    workload: Workload,
    *,
    budget: int,
    dtype: str,
    page: int,
    longest: int,
    warm_up: int = 0,
) -> Crowd:
    """Serve a workload from a pool of `budget` bytes for keys and values; count who runs at once.

    dtype: a key of KV_DTYPES. page: tokens per page; one page of `longest` tokens is a contiguous
    reservation. longest: the most tokens of a request. warm_up: steps left out at the start, when
    all requests are young. The engine admits a request if its prompt fits, and preempts the newest
    if the pool is full.
    Raises ValueError if the budget doesn't hold the longest request, or nothing waits after the
    warm-up.
    """
    blocks = budget // kv_bytes(model.config, page, dtype=dtype, page=page)
    if blocks * page < longest:
        raise ValueError(
            f"budget must hold one request of {longest} tokens, got {budget} bytes, which is "
            f"{blocks} pages of {page} tokens; make it larger"
        )
    with Engine(
        model, num_blocks=blocks, block_size=page, kv_dtype=dtype, max_length=longest,
        max_num_seqs=len(workload), max_num_batched_tokens=max(1024, len(workload)),
        policy="max_utilization", enable_prefix_caching=False, eos_token_ids=(),
    ) as engine:  # fmt: skip
        steps = [step for step in replay(engine, workload).steps if step.waiting][warm_up:]
        preemptions = engine.counters.preemptions
    if not steps:
        raise ValueError(f"requests must wait after {warm_up} steps, got none; serve more of them")
    shares, read = [], []
    for step in steps:
        counts = {one.id: one.count for one in (*step.chunks, *step.decodes)}  # type: ignore[attr-defined]
        lengths = [start + counts[id] for id, start in step.contexts.items()]
        held = sum(blocks_for(length, page) for length in lengths) * page
        shares.append(1 - sum(lengths) / held)
        read.append(len(lengths))
    return Crowd(
        blocks=blocks,
        predicted=blocks * page / average_held(workload, page),
        measured=statistics.fmean(read),
        wasted=statistics.fmean(shares),
        preemptions=preemptions,
    )


def held_out_windows(n: int, length: int, seed: int) -> Tensor:
    """Return windows of held-out Python code in the shipped models' tokens: int64 [n, length + 1].

    They start at random places, and may overlap.
    """
    tokens = torch.tensor(shipped_tokenizer().encode(held_out("code")))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - positive_int("length", length), (n,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length + 1)]


@torch.inference_mode()
def loss_through_cache(model: Llama, rows: Tensor, dtype: str) -> float:
    """Return the loss in nats per token if attention reads every key and value from the cache.

    rows: int64 [n, T + 1], T + 1 tokens each, of which the last T are predicted. dtype: of the
    cache, a key of KV_DTYPES.
    """
    n, length = rows.shape[0], rows.shape[1] - 1
    each = blocks_for(length, 16)
    cache = PagedCache.of(
        model, num_blocks=n * each, rows=1, max_blocks=each, dtype=KV_DTYPES[dtype]
    )
    segments = [
        Segment(blocks=range(row * each, (row + 1) * each), start=0, tokens=tokens)
        for row, tokens in enumerate(rows[:, :-1].tolist())
    ]
    step = PackedStep(cache, segments)
    logits = model(step.tokens[None], positions=step.positions[None], cache=step).logits[0]
    order = torch.tensor([place for span in step.spans for place in span])
    return F.cross_entropy(logits[order].float(), rows[:, 1:].flatten()).item()
