"""What a decode pays when a chunk of a prompt rides along in its forward."""

from __future__ import annotations

import time
from statistics import median

from labcore.checks import positive_int
from labcore.models import Llama
from labcore.serving.engine.blocks import blocks_for
from labcore.serving.engine.cache import PagedCache, Segment
from labcore.serving.engine.runner import Runner

__all__ = ["ride"]

_BLOCK = 16


def ride(
    llama: Llama, *, decodes: int, chunk: int, held: int = 0, context: int = 128, rounds: int = 15
) -> dict[str, float]:
    """Return median seconds of three forwards: "decodes", "chunk" and "together".

    decodes: requests that write a token after `context` others. chunk: tokens of a prompt of which
    `held` were read before. The three forwards run in turns, so that a change of the machine's
    speed reaches all of them.
    """
    each = blocks_for(context + 1, _BLOCK)
    own = blocks_for(held + positive_int("chunk", chunk), _BLOCK)
    cache = PagedCache.of(
        llama, num_blocks=positive_int("decodes", decodes) * each + own, block_size=_BLOCK,
        rows=decodes + 1, max_blocks=max(each, own),
    )  # fmt: skip
    rows = [
        Segment(blocks=range(at * each, (at + 1) * each), start=context, tokens=(at,))
        for at in range(decodes)
    ]
    prompt = Segment(
        blocks=range(decodes * each, decodes * each + own), start=held, tokens=range(chunk)
    )
    runner = Runner(llama, cache)
    steps = {"decodes": rows, "chunk": [prompt], "together": [*rows, prompt]}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, positive_int("rounds", rounds)):  # two turns warm up
        for name, segments in steps.items():
            begin = time.perf_counter()
            runner.run(segments, [1] * len(segments))
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: median(found) for name, found in seconds.items()}
