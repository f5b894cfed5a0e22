"""Tensor parallelism: layers split across ranks, collectives and their costs, and CUDA graphs."""

from labcore.parallel.collectives import (
    ALL_REDUCES,
    expected,
    halving_doubling,
    one_shot,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    two_shot,
)
from labcore.parallel.cost import LINKS, Link, all_reduce_seconds
from labcore.parallel.graphs import GraphedDecoder
from labcore.parallel.greedy import decode
from labcore.parallel.layers import ColumnParallelLinear, RowParallelLinear, SequenceParallelNorm
from labcore.parallel.llama import ParallelLlama, local_cache, parallelize
from labcore.parallel.overlap import chunked_linear
from labcore.parallel.step import decode_step
from labcore.parallel.timeline import simulate_timeline
from labcore.parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ALL_REDUCES",
    "LINKS",
    "ColumnParallelLinear",
    "GraphedDecoder",
    "Link",
    "ParallelLlama",
    "RowParallelLinear",
    "SequenceParallelNorm",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_reduce_seconds",
    "chunked_linear",
    "decode",
    "decode_step",
    "expected",
    "halving_doubling",
    "local_cache",
    "one_shot",
    "parallelize",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "simulate_timeline",
    "two_shot",
    "vocab_parallel_cross_entropy",
]
