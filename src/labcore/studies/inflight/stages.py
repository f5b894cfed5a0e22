"""A scheduler in three stages: two small ones here, and the engine's own.

`static` runs batch after batch. `in_flight` plans each step anew: whoever ends makes room for the
head of the queue. The third stage is `Scheduler.schedule`, which adds what a server needs: a budget
of tokens with prompts in chunks, preemption, shared prefixes, priorities, deadlines and drafts.
With these switched off, it schedules as the stages here do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from labcore.checks import positive_int
from labcore.serving.engine.blocks import blocks_for

__all__ = ["Job", "in_flight", "static"]


@dataclass(frozen=True, slots=True)
class Job:
    """A request of `prompt` tokens that ends after `output` tokens, of `most` that it may write.

    id: different from every other job's. A scheduler doesn't know `output`. Each number of tokens
    is at least 1, and `output` at most `most`.
    """

    id: str
    prompt: int
    output: int
    most: int


def static(queue: deque[Job], rows: int) -> Iterator[dict[str, int]]:
    """Yield for each step how many tokens each request reads, in batches of at most `rows`.

    A batch takes up to `rows` requests from the queue and runs until its last one has ended. Each
    row has a slot of memory for the longest request. You may append to `queue` between two steps.
    """
    positive_int("rows", rows)
    while queue:
        batch = [queue.popleft() for _ in range(min(rows, len(queue)))]
        yield {job.id: job.prompt for job in batch}  # brings each output's first token
        for written in range(1, max(job.output for job in batch)):
            yield {job.id: 1 for job in batch if written < job.output}


def in_flight(
    queue: deque[Job], rows: int, num_blocks: int, block_size: int
) -> Iterator[dict[str, int]]:
    """Yield for each step how many tokens each request reads, with at most `rows` that run.

    Memory is a pool of `num_blocks` blocks of `block_size` tokens. The head of the queue comes in
    once its longest output fits beside those that are promised to the running. You may append to
    `queue` between two steps. Raises ValueError for a request that doesn't fit in the empty pool.
    """
    positive_int("rows", rows)
    written: dict[Job, int] = {}  # tokens of each that runs
    while queue or written:
        reads = {job.id: 1 for job in written}
        while queue and len(written) < rows:
            # The last token of an output is never read, so it needs no room.
            longest = [job.prompt + job.most - 1 for job in (*written, queue[0])]
            promised = sum(blocks_for(tokens, block_size) for tokens in longest)
            if promised > num_blocks and written:
                break  # nobody skips the queue
            if promised > num_blocks:
                raise ValueError(
                    f"a request may need at most the pool's {num_blocks} blocks, got {promised} "
                    f"for {queue[0].id!r}; enlarge the pool"
                )
            job = queue.popleft()
            written[job] = 0
            reads[job.id] = job.prompt
        yield reads
        written = {job: n + 1 for job, n in written.items() if n + 1 < job.output}
