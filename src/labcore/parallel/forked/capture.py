"""Capture a chunked product whose all-reduces run on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labcore.checks import positive_int

__all__ = ["capture_overlapped"]


@torch.no_grad()
def capture_overlapped(
    x: Tensor,
    weight: Tensor,
    chunks: int,
    group: dist.ProcessGroup | None = None,
    *,
    warmup: int = 3,
) -> tuple[Any, Tensor]:
    """Capture `overlap.chunked_linear` as one CUDA graph with a forked communication stream.

    x: [M, F / N], this rank's columns of the input; weight: [F / N, C], its rows of the weight;
    both on the current GPU. chunks: of x's rows, at most M. group: of the ranks, with NCCL.
    warmup: runs before the capture, at least one.
    Returns the graph and its output [M, C]. To run it on new numbers, copy them into x and call
    `replay()`; the output is overwritten. Keep x, weight and the output as long as the graph.
    Raises RuntimeError without a GPU, and ValueError for chunks or warmup below 1.
    Source: "CUDA semantics", docs.pytorch.org; cross-stream dependencies in NVIDIA's CUDA
    Programming Guide; the wire's priority as in TransformerEngine, pull request 1522.
    """
    chunks = min(positive_int("chunks", chunks), len(x))
    positive_int("warmup", warmup)
    if not torch.cuda.is_available():
        raise RuntimeError("a capture must have a GPU, got none; use chunked_linear on a CPU")
    here, main = torch.cuda.current_stream(), torch.cuda.Stream()
    wire = torch.cuda.Stream(priority=-1)  # high: a product must not keep its blocks waiting
    out = x.new_empty(len(x), weight.shape[1])  # static: every replay writes here

    def step() -> None:
        for rows, part in zip(x.tensor_split(chunks), out.tensor_split(chunks), strict=True):
            torch.mm(rows, weight, out=part)
            ready = torch.cuda.Event()
            ready.record(main)
            wire.wait_event(ready)  # fork: the wire waits for this product, and for no other
            with torch.cuda.stream(wire):
                dist.all_reduce(part, group=group)
        done = torch.cuda.Event()
        done.record(wire)
        main.wait_event(done)  # join: a capture must not end with a stream still forked

    main.wait_stream(here)
    with torch.cuda.stream(main):  # warm up beside the default stream, which can't be captured
        for _ in range(warmup):
            step()
    here.wait_stream(main)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
        step()
    return graph, out
